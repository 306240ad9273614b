"""`kvoffload doctor`: what can be known before an engine starts, one line a check, with the remedy.

`check` has the words, `machine` the one door to everything that is read. The checks of a machine and of sizes are here,
those of an engine come with its adapter (`adapters`). `startup` runs the same checks where an engine starts.
"""
