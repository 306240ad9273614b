"""Every interleaving of small worlds: the real core, driven breadth-first, its rules checked in every state.

worlds.py       what is explored: a few blocks, slots, ranks and requests each, and how often things go wrong
scene.py        one state: a world, what may still happen to it, and the form in which equal states are equal bytes
programs.py     what can happen next, and doing it
invariants.py         what the world's own checks leave out, a rule each; and what must hold once all has ended
search.py       breadth-first over pickled scenes, so the first program found to break a rule is a shortest one
report.py       a violation as a test to be pasted
"""
