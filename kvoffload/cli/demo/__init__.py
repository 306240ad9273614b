"""`kvoffload demo`: the same conversations without and with offloading, compared token by token.

options         the options                  documents      the text
conversations   the messages of each turn, and how much of them a cache could hold
engines         the two engines              play           conversations on one engine
audit           are all laws kept            compare        are the outputs the same
results         the numbers, also as JSON    table          the numbers as a table
session         all of it, in order
restart         engines that are killed half-way, and what the next ones find on a disk
shared          engines that share a store, and what one of them finds there
processes       engines in processes of their own; engine_process is such a process, store the local store
"""
