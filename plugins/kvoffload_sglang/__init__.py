"""kvoffload's lower tiers for SGLang: a dynamic storage backend below HiCache's host memory.

This package translates and decides nothing.
"""
