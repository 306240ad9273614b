"""Measures which changes of the code the tests notice. A change is a small generated one, or disables a whole
rule.

For each change, `make mutants` runs the tests that cover the changed line.
"""
