from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn

from kvoffload.disk.slot_file import SlotShape

RANKS = 2


def shape_of(rank: int) -> SlotShape:
    return SlotShape(rank, RANKS, 6000, b"layout of a rank")  # 6000 bytes are no multiple of a disk's sector


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def fails_with(number: int) -> Callable[..., NoReturn]:
    """Return a function that raises this error of the operating system."""

    def call(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return call
