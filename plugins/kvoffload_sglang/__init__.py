"""Adapter for SGLang: offers kvoffload's disk and remote tier as a storage backend below HiCache's host memory.

The package only translates SGLang's calls.
"""
