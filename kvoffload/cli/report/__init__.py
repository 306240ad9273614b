"""`kvoffload report`, and `kvoffload demo --report`: a run as one page.

account    adds up a journal's lines, or a running demo's    figures    plots of an account
journal    a journal's page                                  page       HTML and style around the figures
command    the subcommand
"""
