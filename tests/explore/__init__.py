"""Explores every order of actions in small worlds, breadth first, and checks the core's rules in every state.

worlds.py       the worlds: a few blocks, slots, ranks and requests each, and a number of faults scene.py        one
state: a world and its remaining actions, with equal bytes for equal states programs.py     the possible next actions,
and how they are run invariants.py         checks beyond the world's own, one per rule, and checks of the end search.py
breadth-first over pickled scenes, so the first program found to break a rule is a shortest one report.py       prints a
violation as a test
"""
