"""Records behaviour that a refactoring must not change. `make same` compares this behaviour with the files in
golden/.

* parts.py: the compared behaviour, one function per file
* __main__.py: compares and writes the files
* journeys.py: `make journeys` lists the functions that a store and a load run through, to compare two commits
"""
