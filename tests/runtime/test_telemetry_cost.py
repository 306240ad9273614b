"""The cost of counting, recording and estimating, which no observer can raise.

It is counted in calls, and compared with the same side without telemetry.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvoffload.bus.bus import Bus
from kvoffload.model.config import OffloadConfig
from kvoffload.runtime.benefit import NetBenefit
from kvoffload.runtime.step_times import FirstTokens
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.exporter import KVOffloadCollector
from kvoffload.telemetry.journal import Journal
from tests.operations import calls
from tests.runtime.parts import BLOCK, TIMEOUT_S, Side

BLOCKS = 8
TIMES = 210

Silence = Callable[[], pytest.MonkeyPatch]


@pytest.fixture
def silenced() -> Silence:
    """Disable all telemetry in sides that are made until this is undone."""

    def silence() -> pytest.MonkeyPatch:
        patch = pytest.MonkeyPatch()
        count = Bus.count

        def count_others(bus: Bus, cls: type, counter: Callable[[Any], object]) -> None:
            if not isinstance(getattr(counter, "__self__", None), (FirstTokens, NetBenefit)):
                count(bus, cls, counter)

        patch.setattr(Bus, "count", count_others)
        patch.setattr(NetBenefit, "_copy_ended", lambda *_: None)
        for watcher in (Counters, Journal):
            patch.setattr(watcher, "subscribe", lambda *_: None)
        patch.setattr(Counters, "hooks", lambda *_: None)
        return patch

    return silence


# -- calls in the hooks --------------------------------------------------------------------------------------------------


def serve(side: Side, number: int) -> None:
    """Look up one request, compute it in two steps, store and end it. Every seventh prompt is the same."""
    name = f"r{number}"
    request = side.seen(name, prefix=f"p{number % 7}-", blocks=BLOCKS)
    found = side.side.lookup(request, 0) or 0
    side.allocated(name, found, blocks=BLOCKS)
    for prefilled in (found, BLOCKS * BLOCK):
        side.done(side.step((name, prefilled), prefill=BLOCK, decode=20))
    side.ended(name)


def decode(side: Side, number: int) -> None:
    """Run a step in which no request completes a block, as in most steps."""
    side.step(decode=20)


# In CPython, calls dominate the cost. These numbers keep it from growing; the benchmarks time hooks with all telemetry.
@pytest.mark.parametrize(("work", "added"), [(serve, 60), (decode, 12)])
def test_calls_added_to_the_hooks(work: Callable[[Side, int], None], added: int, silenced: Silence) -> None:
    patch = silenced()
    bare = Side(slots=400)
    patch.undo()
    reported = Side(slots=400)
    assert not bare.side.observation.journal.tail(1)
    assert reported.side.observation.journal.tail(1)
    with_telemetry, without = (repeated(side, work) for side in (reported, bare))
    assert 0 < (with_telemetry - without) / TIMES <= added


def repeated(side: Side, work: Callable[[Side, int], None]) -> int:
    """Return the Python and C calls of running `work` several times, after a warm-up."""

    def run(first: int, count: int) -> None:
        for number in range(first, first + count):
            work(side, number)

    run(0, 30)
    return calls(lambda: run(30, TIMES))


# -- who watches --------------------------------------------------------------------------------------------------------


def calls_of(side: Side, steps: int) -> int:
    """Return the Python and C calls of this many steps."""

    def run() -> None:
        for _ in range(steps):
            side.step(decode=20)

    return calls(run)


def warm(side: Side) -> Side:
    """Run the work that only a first step does, and let the journal handle its first batches."""
    side.seen("d")
    for _ in range(100):
        side.step(decode=20)
    return side


def test_a_scraper_that_stands_still_costs_nothing() -> None:
    """The scraper has half a page, and does not read the rest."""
    side, free = warm(Side()), warm(Side())
    page = KVOffloadCollector(side.side).collect()
    assert len(list(islice(page, 5))) == 5
    assert calls_of(side, 100) == calls_of(free, 100)
    serve(side, 1)
    serve(free, 1)
    assert side.side.counters.snapshot().counts == free.side.counters.snapshot().counts
    assert len(list(page)) > 20


@pytest.mark.slow
def test_an_observer_that_stands_still_costs_nothing(tmp_path: Path) -> None:
    """Its feed fills up. From then on it costs no more than a fast observer, and the engine's answers are the same."""
    config = OffloadConfig(transfer_timeout_s=TIMEOUT_S, journal_path=tmp_path / "journal")
    side = warm(Side(portal=True, config=config))
    feed = side.side.bus.feeds["journal"]
    early = calls_of(side, 20)
    while not feed.dropped:
        side.step(decode=20)
    assert calls_of(side, 20) <= early
    free = Side()
    free.seen("d")  # `warm` does the same, so neither side is ever idle.
    for number in range(10):
        serve(side, number)
        serve(free, number)
    assert side.side.counters.snapshot().counts == free.side.counters.snapshot().counts
    side.close()
