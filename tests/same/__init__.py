"""Behaviour that a restructuring must not change. `make same` compares it with the files in golden/.

parts.py     the compared behaviour, a function for each file __main__.py  comparing and writing the files journeys.py
`make journeys`: the functions that a store and a load run through, to compare two commits
"""
