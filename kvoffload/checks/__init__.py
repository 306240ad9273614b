"""What can be known before an engine starts: checks, each with its finding and a remedy.

`check` has the words, `machine` the one door to everything that is read. The checks of a machine and of sizes are here,
those of an engine come with its adapter. `startup` runs them where an engine starts, `kvoffload doctor` before that.
"""
