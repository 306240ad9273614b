"""Measures which changes of the code the tests notice: small generated changes, and rules left out.

For each change, `make mutants` runs the tests that run the changed line.
"""
