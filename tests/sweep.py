"""Injects faults: in each trial, one call of a function of the core raises."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import kvoffload.core

_CORE = tuple(f"{Path(path)}{os.sep}" for path in kvoffload.core.__path__)


class Place(NamedTuple):
    """One call of a function, identified by its number. The first call has number 1."""

    function: str
    call: int

    def __str__(self) -> str:
        return f"{self.function}, call {self.call}"


class Broken(Exception):
    """Raised by the core in a trial."""


def places(act: Callable[[], object]) -> list[Place]:
    """Return calls of the core's functions that `act` makes: of each function the first two, the middle and
    the last call.
    """
    counts: Counter[str] = Counter()
    names = _Names()

    def seen(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and (name := names.of(frame.f_code)) is not None:
            counts[name] += 1

    with _watched_by(seen):
        act()
    return [
        Place(name, call)
        for name, count in counts.items()
        for call in sorted({1, min(2, count), (count + 1) // 2, count})
    ]


@contextmanager
def raising(place: Place) -> Iterator[Callable[[], bool]]:
    """Make one call of the core raise when the call begins. Yield a function that returns whether it has raised."""
    left, names = place.call, _Names()

    def seen(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal left
        if event == "call" and left and names.of(frame.f_code) == place.function:
            left -= 1
            if not left:
                raise Broken(str(place))  # raising also ends the profiling

    with _watched_by(seen):
        yield lambda: not left


def chosen(found: Sequence[Place], every: int) -> list[Place]:
    """Return every `every`-th place in a fixed order, or all places if KVOFFLOAD_SWEEP is "all"."""
    return sorted(found)[:: 1 if os.environ.get("KVOFFLOAD_SWEEP") == "all" else every]


class _Names:
    """The names of the core's functions by their code; None for other code and for unnamed functions."""

    def __init__(self) -> None:
        self._known: dict[CodeType, str | None] = {}

    def of(self, code: CodeType) -> str | None:
        if code not in self._known:
            is_one = code.co_filename.startswith(_CORE) and not code.co_name.startswith("<")
            # Closing a generator also enters its code, where an exception could not be reported.
            is_one &= not code.co_flags & CO_GENERATOR
            self._known[code] = f"{Path(code.co_filename).stem}.{code.co_qualname}" if is_one else None
        return self._known[code]


@contextmanager
def _watched_by(seen: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(before)
