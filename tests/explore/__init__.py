"""Explores every order of actions in small worlds, breadth first, and checks the core's rules in every state.

* worlds.py: the worlds, each with a few blocks, slots, ranks, requests and faults
* scene.py: one state, which is a world and its remaining actions; equal states have equal bytes
* programs.py: the possible next actions, and how they are run
* invariants.py: one check per rule in addition to the checks of `World`, and the checks at the end
* search.py: breadth-first search over pickled scenes; the first program that breaks a rule is a shortest one
"""
