"""Counts the function calls or lines that an operation runs. These counts are the same on every machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from kvoffload.core.offload_core import _HANDLERS, OffloadCore

TraceFunction = Callable[[FrameType, str, object], object]


def calls(act: Callable[[], object]) -> int:
    """Return how many functions `act` calls, including C functions."""
    count = 0

    def seen(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(seen)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def lines(act: Callable[[], object]) -> int:
    """Return how many lines of Python `act` runs. Unlike `calls`, this also counts loops without calls."""
    count = 0

    def seen(_frame: FrameType, event: str, _argument: object) -> TraceFunction:
        nonlocal count
        count += event == "line"
        return seen

    before = sys.gettrace()
    sys.settrace(seen)  # type: ignore[arg-type]  # wants a type of its own for what `seen` returns
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def replace_handler(core: OffloadCore, fact: type, handler: Callable[[Any], object]) -> None:
    """Replace the core's method for facts of a class that hooks call by its name."""
    setattr(core, _HANDLERS[fact].__name__, handler)
