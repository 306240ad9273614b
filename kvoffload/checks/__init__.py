"""Checks of a machine and settings, each with a finding and a remedy.

`check` has the types, and `machine` reads everything that the checks look at. The checks of an engine come with its
adapter. `kvoffload doctor` runs the checks before a start, and `startup` runs some of them at the start.
"""
