"""Keeps the KV cache that an LLM engine would throw away: in host memory, found again by its prefix, copied back.

Where to start: `kvoffload.model` has the words, `kvoffload.core` the decisions, `ARCHITECTURE.md` beside this file the
picture, and `tests/test_one_block_journey.py` follows one block through it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> str:
    """Look the version up when it is asked for: reading metadata takes longer than all else here."""
    if name != "__version__":
        raise AttributeError(name)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvoffload")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0"
