"""`kvoffload report`, and `kvoffload demo --report`: a run as one page that needs nothing but itself.

account     what a journal's lines add up to, over time      recorder   the same lines, taken from a running demo
plots       shapes of SVG from numbers                       figures    an account's plots, each with its numbers
colours     one colour a thing                               page       the page around them, and its style
output      a file that is complete or not there             command    the subcommand
"""
