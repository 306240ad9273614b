"""Makes one call of a function raise, a different call in each trial."""

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

import kvoffload

_PACKAGE = Path(kvoffload.__file__).parent
CORE = (f"{_PACKAGE / 'core'}{os.sep}",)
"""The code of the core."""
OBSERVERS = (
    f"{_PACKAGE / 'telemetry'}{os.sep}",
    *(str(_PACKAGE / "runtime" / f"{module}.py") for module in ("observation", "benefit", "step_times")),
)
"""The code that only observes."""


class Place(NamedTuple):
    """One call of a function. The function's first call has number 1."""

    function: str
    call: int

    def __str__(self) -> str:
        return f"{self.function}, call {self.call}"


class Broken(Exception):
    """Raised in a trial."""


def places(act: Callable[[], object], code: tuple[str, ...] = CORE) -> list[Place]:
    """Return calls in `act` of functions of this code: the first two, the middle and the last of each function."""
    counts: Counter[str] = Counter()
    names = _Names(code)

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
def raising(place: Place, code: tuple[str, ...] = CORE) -> Iterator[Callable[[], bool]]:
    """Make this call raise when it begins. Yield a function that returns whether the call has raised."""
    left, names = place.call, _Names(code)

    def seen(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal left
        if event == "call" and left and names.of(frame.f_code) == place.function:
            left -= 1
            if not left:
                raise Broken(str(place))  # Python stops profiling when a profile function raises

    with _watched_by(seen):
        yield lambda: not left


def chosen(found: Sequence[Place], every: int) -> list[Place]:
    """Return every `every`-th place in a fixed order, or all places if KVOFFLOAD_SWEEP is "all"."""
    return sorted(found)[:: 1 if os.environ.get("KVOFFLOAD_SWEEP") == "all" else every]


class _Names:
    """Maps code objects to the names of this code's functions. Others and unnamed functions have the name None."""

    def __init__(self, code: tuple[str, ...]) -> None:
        self._code = code
        self._known: dict[CodeType, str | None] = {}

    def of(self, code: CodeType) -> str | None:
        if code not in self._known:
            is_one = code.co_filename.startswith(self._code) and not code.co_name.startswith("<")
            # Generators are left out: closing one enters its code, where an exception cannot be reported.
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
