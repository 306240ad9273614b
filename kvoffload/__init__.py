"""Keeps the KV cache that an LLM engine would throw away: in host memory, found again by its prefix, copied back.

Where to start: `kvoffload.model` has the words, `kvoffload.core` the decisions, `ARCHITECTURE.md` beside this file the
picture, and `tests/test_one_block_journey.py` follows one block through it.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvoffload")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0"
