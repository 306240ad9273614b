"""Whether the tests would notice: lines of real code removed or swapped, at least one for every rule.

`make mutants` breaks one line at a time in a copy of the sources and runs the tests that must fail then.
"""
