from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.bus.feed import Feed
from kvoffload.model import facts
from kvoffload.telemetry.logging import LogObserver
from kvoffload.telemetry.records import read_journal
from tests.operations import calls
from tests.runtime.parts import Side


def test_an_observer_that_raises_is_removed_counted_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: LogObserver, event: object) -> None:
        raise ValueError("no disk")

    monkeypatch.setattr(LogObserver, "__call__", fail)
    side = Side(portal=True)
    assert side.portal is not None
    side.portal.advance()
    side.side.reset()
    side.close()
    assert caplog.text.count("observer_removed name=log error=\"ValueError('no disk')\"") == 1
    assert side.counts.count("kvoffload_bus_removed_total", "log") == 1


def test_a_raising_counter_is_logged_even_without_a_portal(caplog: pytest.LogCaptureFixture) -> None:
    side = Side()

    def fail(fact: facts.CacheReset) -> None:
        raise ValueError

    side.side.bus.count(facts.CacheReset, fail)
    side.side.reset()
    side.side.reset()
    assert caplog.text.count("observer_removed") == 1
    assert side.counts.count("kvoffload_bus_removed_total", "other") == 1


def test_a_metric_that_cannot_be_read_is_left_out_logged_once_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side()
    whole = side.side.gauges()

    def fail(*_: object) -> None:
        raise ValueError("no count")

    monkeypatch.setattr(side.side.core.state.pool, "count", fail)
    for _ in range(2):
        missing = whole.keys() - side.side.gauges().keys()
        assert {"kvoffload_slots", "kvoffload_host_bytes"} <= missing
    assert len(missing) == 4  # two more metrics count slots
    assert caplog.text.count("observer_removed name=gauges.kvoffload_slots") == 1
    assert side.counts.count("kvoffload_bus_removed_total", "gauges") == 4
    side.step()
    assert side.side.degraded is None


def test_messages_dropped_by_unknown_observers_share_one_series() -> None:
    side = Side()
    for name in ("someone", "someone else"):
        feed: Feed[None] = side.side.bus.observe(name, capacity=1)
        for _ in range(2):
            feed.offer(None)
    dropped = side.side.gauges()["kvoffload_bus_dropped_total"]
    assert {labels[0]: number for labels, number in dropped.items() if number} == {"other": 2}


def test_the_journals_file_is_complete_and_closed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for _ in range(2):  # only one side at a time can lock the file
        side = Side(portal=True, journal_path=path)
        side.stored()
        side.close()
    assert not any(side.side.gauges()["kvoffload_bus_dropped_total"].values())
    sequences = [record.sequence for record in read_journal(path)]
    second = sequences.index(1, 1)  # the number of messages depends on how fast memory becomes ready
    assert sequences == [*range(1, second + 1), *range(1, len(sequences) - second + 1)]
    assert path.stat().st_mode & 0o077 == 0


def test_a_journal_that_can_no_longer_be_written_is_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side(portal=True, journal_path=tmp_path / "journal")
    assert side.side.observation.journal._file is not None
    side.side.observation.journal._file.close()
    side.side.reset()
    side.close()
    assert "journal_stopped" in caplog.text
    assert side.counts.total("kvoffload_journal_write_errors_total") == 1


def test_close_does_not_wait_for_observers_whose_loop_has_ended() -> None:
    side = Side(portal=True)
    assert side.portal is not None
    side.portal.is_dead = True
    now = side.clock.monotonic()
    side.side.close()
    assert side.clock.monotonic() == now
    side.portal.is_dead = False
    side.portal.close()


def test_close_waits_only_briefly_for_an_observer_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(portal=True)
    assert side.portal is not None
    clock = side.clock

    async def stay(self: LogObserver, event: object) -> None:
        await clock.sleep(1e6)

    monkeypatch.setattr(LogObserver, "__call__", stay)
    side.side.reset()
    side.portal.advance()
    before = clock.monotonic()
    side.close()
    assert 5 <= clock.monotonic() - before < 6


@pytest.mark.slow
def test_a_stopped_observer_costs_the_hooks_no_extra_calls(tmp_path: Path) -> None:
    side = Side(portal=True, journal_path=tmp_path / "journal")
    side.seen("d")

    def steps() -> None:
        for _ in range(20):
            side.step(decode=20)

    for _ in range(5):  # this runs the work that the journal does once for many events
        steps()
    early = calls(steps)
    while not side.side.bus.feeds["journal"].dropped:
        steps()
    assert calls(steps) <= early
    side.close()
