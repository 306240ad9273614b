"""`kvoffload demo`: the same conversations without and with offloading, compared token by token.

options         what was asked for           documents      the text
conversations   who says what, in which turn, and what of it a cache could know
engines         the two engines              play           conversations on one engine
audit           are all laws kept            compare        are the outputs the same
report          the numbers and plots, as a page
results         the numbers, also as JSON    table          the numbers, for people
session         all of it, in order
"""
