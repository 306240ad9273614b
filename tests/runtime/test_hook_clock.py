"""A hook reads the clock at its start, and at its end for its own duration.

Code in between gets the time as an argument.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvoffload.transfer.ports import Clocks
from tests.runtime.parts import Side
from tests.runtime.test_hook_calls import hooks


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record each reading of a clock for state or durations, without the journal's time of a batch."""
    found: list[str] = []

    def counted(clock: Callable[[], float]) -> Callable[[], float]:
        def read() -> float:
            found.append("read")
            return clock()

        return read

    monkeypatch.setattr(
        "tests.runtime.parts.Clocks", lambda now, unix, sleep: Clocks(counted(now), unix, sleep)
    )
    return found


def test_a_hook_reads_the_clock_twice(readings: list[str]) -> None:
    side, counts = Side(), dict[str, int]()
    for what, act in hooks(side).items():
        readings.clear()
        act()
        counts[what] = len(readings)
    assert counts == dict.fromkeys(counts, 2)
