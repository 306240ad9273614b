"""Shows what the tests notice: small changes of the code, which a program makes, and rules left out.

`make mutants` runs on each change the tests that run the changed line.
"""
