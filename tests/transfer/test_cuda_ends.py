from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier

import pytest

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import Rank
from kvoffload.model.wire import Direction, TransferPlan
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.transfer import factory
from tests.copy_jobs import device_job
from tests.cuda_emulator import Emulator, Engine
from tests.cuda_emulator.life import Life
from tests.transfer.counts import statistics_of

RELEASES = ("cuMemHostUnregister", "cuMemFreeAsync", "cuStreamDestroy_v2", "cuEventDestroy_v2")


def under_way(life: Life) -> Life:
    """Run steps until loads and stores are pending. Leave the device's streams stopped."""
    while not life.stored:
        life.step()
        life.portal.advance()
    while {job.direction for job, _ in life.open.values()} != set(Direction):
        life.step()
    life.portal.advance()
    life.portal.advance()
    assert statistics_of(life.side.pump).pending_batches
    return life


def test_closing_releases_no_memory_before_the_last_copy_has_ended(
    emulator: Emulator, start: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = under_way(start(1))
    pump, registered, advance = life.side.pump, emulator.registrations, life.portal.advance
    released, looks = [emulator.calls(name) for name in RELEASES], list[bool]()

    def advance_and_run(seconds: float = 0.02) -> None:
        advance(seconds)
        if statistics_of(pump).pending_batches:
            looks.append(emulator.registrations == registered)
            assert [emulator.calls(name) for name in RELEASES] == released
        emulator.step(1)

    monkeypatch.setattr(life.portal, "advance", advance_and_run)
    life.side.close()
    assert len(looks) > 3
    assert all(looks)
    assert emulator.registrations == 0
    report, after = pump.take_report(), statistics_of(pump)
    assert report is not None
    assert sorted(part.job for part in report.jobs) == sorted(life.open)
    assert (after.open_jobs, after.pending_batches, after.abandoned_batches) == (0, 0, 0)
    assert CopyOutcome.DONE in {part.outcome for part in report.jobs}
    assert (emulator.races, emulator.faults) == (0, 0), emulator.report


def test_after_the_coroutines_end_hooks_wait_for_its_copies_and_no_memory_is_released(
    emulator: Emulator, start: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = under_way(start(2))
    pump, registered = life.side.pump, emulator.registrations
    with monkeypatch.context() as broken:
        broken.setattr(life.clock, "sleep", lambda seconds: 1 / 0)
        life.portal.advance()
    assert pump._gone
    assert emulator.registrations == registered
    life.step()
    assert statistics_of(pump).pending_batches
    life.outcomes.clear()
    while life.open:
        emulator.step(5)
        assert emulator.registrations == registered
        life.take()
    after = statistics_of(pump)
    assert CopyOutcome.DONE in dict(life.outcomes).values()
    assert (after.open_jobs, after.pending_batches, after.queued_stores) == (0, 0, 0)
    life.side.close()
    assert emulator.registrations == 0
    assert (emulator.races, emulator.faults) == (0, 0), emulator.report


BLOCKS, PAGE = 512, 4096


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_fork_during_copies_leaves_the_parents_memory_alone_and_both_processes_end(
    cuda_library_path: Path, monkeypatch: pytest.MonkeyPatch, is_locked: bool
) -> None:
    emulator = Emulator(cuda_library_path)
    emulator.reset(delay_us=3000)
    engine = Engine(emulator, blocks=BLOCKS, pages=(PAGE,))
    portal = Portal("kvoffload-fork")
    monkeypatch.setattr(factory, "current_stream", lambda device: lambda: engine.stream)
    config = OffloadConfig(host_bytes=BLOCKS * PAGE, transfer_timeout_s=100.0)
    side = WorkerSide(Rank(0), 1, config, portal)
    side.register(engine.layout)
    numbers = range(BLOCKS)
    load = device_job(1, Direction.LOAD, numbers, numbers[::-1])
    side.begin_step(TransferPlan(loads=(load,)))
    side.start_loads(TransferPlan(loads=(load,)))
    # The child inherits a locked lock, which no thread of the child releases.
    with side.pump._reaping if is_locked else nullcontext():
        child = os.fork()
        if not child:
            signal.alarm(50)  # so that no child outlives a failing test
            os._exit(_child(emulator, side))
    outcomes: list[CopyOutcome] = []
    while not outcomes:
        report = side.take_report()
        outcomes = [job.outcome for job in report.jobs] if report is not None else []
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert outcomes == [CopyOutcome.DONE]
    side.close()
    both = Barrier(2)  # Unpinning has ended when both copy threads of the portal have reached the barrier.
    wait([portal.executor.submit(both.wait) for _ in range(2)])
    portal.close()
    assert (emulator.registrations, emulator.races, emulator.faults) == (0, 0, 0), emulator.report
    emulator.reset(stepped=True)


def _child(emulator: Emulator, side: WorkerSide) -> int:
    """Return 0 if the child has released no memory and reported no load as done."""
    registered = emulator.registrations
    copies = emulator.calls("cuMemcpyBatchAsync")
    report = side.take_report()
    side.close()
    is_done = report is not None and any(job.outcome is CopyOutcome.DONE for job in report.jobs)
    kept = emulator.registrations == registered and emulator.calls("cuMemcpyBatchAsync") == copies
    return int(is_done or not kept)
