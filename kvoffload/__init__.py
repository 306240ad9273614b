"""Copies KV-cache blocks to host memory before an LLM engine evicts them, finds them by prefix and copies them back.

Where to start: `ARCHITECTURE.md` in this folder gives an overview, `kvoffload.model` defines the terms,
`kvoffload.core` makes the decisions, and `tests/test_one_block_journey.py` follows one block through the system.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> str:
    """Return `__version__`. It is read on demand, because reading it takes longer than importing this package."""
    if name != "__version__":
        raise AttributeError(name)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvoffload")
    except PackageNotFoundError:  # a source tree that was not installed
        return "0"
