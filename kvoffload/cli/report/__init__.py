"""`kvoffload report`: a journal as one page.

account    adds up a journal's lines      figures    draws them with matplotlib
page       HTML around the figures        command    the subcommand
"""
