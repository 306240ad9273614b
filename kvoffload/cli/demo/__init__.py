"""`kvoffload demo`: plays the same conversations without and with offloading, and compares every generated token.

command   prepares the lower tier and runs a session
options   defines the command's options
session   runs one demo and returns its exit code
engines   makes the two engines and audits them at the end
play      plays conversations on one engine
results   computes the numbers, compares the answers and prints the table
"""
