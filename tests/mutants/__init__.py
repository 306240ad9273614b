"""Measures which changes to the code the tests notice: small generated changes, and disabled rules.

For each change, `make mutants` runs the tests that cover the changed line.
"""
