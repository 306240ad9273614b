"""`kvoffload demo`: plays the same conversations without and with kvoffload, and compares every generated token.

command   prepares the lower tier and runs a session
options   defines the command's options
session   runs one demo and returns its exit code
engines   starts the two engines and audits both at the end
play      plays conversations on one engine
screen    prints results, messages and progress
results   computes the numbers, compares the answers and prints the table
"""
