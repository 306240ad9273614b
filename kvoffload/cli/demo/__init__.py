"""`kvoffload demo`: plays the same conversations without and with offloading, and compares them token by token.

command   prepares the lower tier and runs a session
options   the command's options
session   one demo, from start to exit code
engines   the two engines, and their audit
play      plays conversations on one engine
results   the numbers, the comparison and the table
"""
