"""`kvoffload demo`: the same conversations without and with offloading, compared token by token.

command   what is run, and the folder and the store below the host    options   the options
play      conversations on one engine                                 engines   the two engines, and their audit
results   numbers, comparison and table                               session   one demo, from start to exit code
"""
