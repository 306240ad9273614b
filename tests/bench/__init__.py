"""Measures kvoffload's speed on this machine. Each module named in `__main__.py` is one bench."""
