from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.engine import Engine, SamplingParams
from kvoffload.model.causes import RejectionCause
from kvoffload.model.events import FactRejected
from kvoffload.runtime.portal import Portal
from kvoffload.telemetry.logging import LogObserver
from kvoffload.telemetry.records import read_journal
from kvoffload.testing import FakeClock
from kvoffload.transfer.ports import Clocks
from kvoffload_reference.plugin import ReferencePlugin
from tests.core.audit import audit_side
from tests.engine.tiny import assert_same, taken
from tests.gates import ThreadGate
from tests.reference.rig import TIMEOUT_S, TOLERANCE, config_of, on_host_only, open_stores, plain, rig, text

if TYPE_CHECKING:
    import pytest


def run(engine: Engine, prompt: tuple[int, ...], tokens: int = 3) -> int:
    """Serve one request and check its tokens; return how many of them came from the host."""
    stream = engine.submit(prompt, SamplingParams(tokens))
    while stream.request_id in engine._open:
        engine.step()
    assert_same(taken(stream), plain("full", prompt, tokens), TOLERANCE)
    return stream.stats.external_tokens


def test_an_observer_that_blocks_the_event_loop_only_delays_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The observer blocks the thread that also starts stores, so stores time out. Loads work, because
    the engine's own thread starts them.
    """
    gate = ThreadGate()

    async def block(self: LogObserver, event: object) -> None:
        if isinstance(event, FactRejected):
            gate.arrive()

    monkeypatch.setattr(LogObserver, "__call__", block)
    clock = FakeClock()
    plugin = ReferencePlugin(portal=Portal("blocked"), clocks=Clocks(clock.monotonic, clock.monotonic))
    engine = Engine(config_of("full", num_blocks=100), plugin, clock=clock.monotonic)
    assert plugin.offload is not None
    counts = plugin.offload.counters
    while plugin.offload.gauges()["kvoffload_capacity_slots"]["host",] == 0:
        engine.step()
    run(engine, text(1, 30), 6)
    while engine.has_work:
        engine.step()
    assert engine.pool.reset_prefix_cache()
    plugin.offload.bus.publish(FactRejected(RejectionCause.UNKNOWN_JOB))
    gate.wait_for_arrivals(1)

    assert run(engine, text(1, 30)) > 0
    for number in range(5):
        run(engine, text(10 + number, 60))
    assert engine.has_work  # stores are still open, because the blocked thread cannot start them
    for _ in range(20):  # each store is abandoned, tried once more, and abandoned again
        clock.jump(TIMEOUT_S / 4)
        engine.step()
    assert not engine.has_work
    lost = engine.statistics().leased_blocks
    assert 0 < lost <= plugin.offload.shape.lease_limit
    assert counts.snapshot().count("kvoffload_store_blocks_total", "abandoned") >= lost

    gate.open()
    while engine.statistics().leased_blocks:
        engine.step()
    assert engine.audit() == audit_side(plugin.offload) == []
    assert plugin.offload.degraded is None
    engine.close()


def test_after_a_clock_jump_all_copies_are_abandoned_and_every_request_is_served() -> None:
    """All open copies become overdue together and end later, as when a machine is suspended or a debugger
    stops the process.
    """
    with rig(num_blocks=150) as made:
        on_host_only(made, text(1, 30))
        made.hold()
        streams = [
            made.submit(text(1, 30), 3),
            made.submit(text(2, 30), 6),
            made.submit((*text(1, 28), 9), 2),
        ]
        for _ in range(4):
            made.step()
        assert open_stores(made)
        made.clock.jump(1e7)
        for copier in made.copiers:
            copier._held = False  # let later copies run at once
        made.drain()
        assert all(stream.stats.finished_s is not None for stream in streams)
        assert made.engine.pool.leased_blocks
        made.assert_outputs()
        made.release()
        for _ in range(3):
            made.step(TIMEOUT_S / 4)
        assert made.engine.pool.leased_blocks == 0
        made.run(text(3, 30), 6)
        made.forget_device()
        made.run(text(3, 30), 6)
        assert made.count("load_blocks", "loaded") > 0
        made.assert_clean()


def test_setting_the_wall_clock_changes_only_reported_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Set the wall clock back by a year, then ahead by two, while copies are open. No copy may time out."""
    wall = FakeClock(2e9)
    monkeypatch.setattr(
        "tests.reference.rig.Clocks", lambda now, _, sleep: Clocks(now, wall.monotonic, sleep)
    )
    path = tmp_path / "journal"
    with rig(extra={"journal_path": str(path)}) as made:
        on_host_only(made, text(1, 30))
        made.hold()
        made.submit(text(1, 30), 3)
        made.submit(text(2, 30), 6)
        made.step()
        for years in (-1, 2):
            wall.jump(years * 3.15e7)
            for _ in range(3):
                made.step()
        now = made.offload.gauges()
        for what in ("pin", "job"):
            began = now[f"kvoffload_oldest_{what}_timestamp_seconds"][()]
            assert 0 <= wall.monotonic() - began < TIMEOUT_S  # the reported age uses the new wall clock
        made.release()
        made.drain()
        assert made.count("abandoned_jobs", "load") == made.count("abandoned_jobs", "store") == 0
        made.assert_outputs()
        made.assert_clean()
    times = [record.time for record in read_journal(path)]
    assert min(times) < 2e9 < max(times)
