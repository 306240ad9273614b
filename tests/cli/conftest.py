from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from tests.one_thread import one_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["one_thread"]

# Three turns of four conversations. The device's cache holds about a third of their blocks.
SMALL = (
    "demo --model tiny --conversations 4 --turns 3 --first-tokens 100 --turn-tokens 30 --answer-tokens 5 "
    "--device-blocks {blocks} --host-bytes 16MiB"
)


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    logger = logging.getLogger("kvoffload")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture
def small() -> list[str]:
    """Return the arguments of a small demo with full attention."""
    return SMALL.format(blocks=26).split()
