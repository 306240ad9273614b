"""Runs the worker's side together with an engine on emulated devices. Checks that there are no races and no
wrong bytes, and that broken rules are detected.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import pytest

from kvoffload.checks.gpus import find_gpus
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.errors import HostMemoryBusy
from kvoffload.model.wire import Direction, TransferPlan
from kvoffload.runtime import worker_side
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.transfer.cuda import driver as driver_module
from kvoffload.transfer.cuda.copier import CudaCopier, CudaTicket
from kvoffload.transfer.cuda.driver import CudaPin, NvidiaDriver
from kvoffload.transfer.pump import TransferPump
from tests.captured_logs import capture_logs
from tests.cuda_emulator import Emulator
from tests.cuda_emulator.life import SLOTS, Life
from tests.transfer.counts import statistics_of

pytestmark = pytest.mark.timeout(300)

JOBS, SEEDS = 10_000, (1, 2, 3, 4)
Start: TypeAlias = Callable[..., Life]
Mutant: TypeAlias = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_no_race_and_no_wrong_byte_on_two_devices_with_free_running_streams(
    emulator: Emulator, start: Start, seed: int
) -> None:
    emulator.reset(seed=seed)
    lives = [start(seed, device, is_stepped=False) for device in (0, 1)]
    while sum(life.jobs for life in lives) < JOBS / len(SEEDS):
        for life in lives:
            life.step()
    for life in lives:
        life.settle()
    for life in lives:
        assert not life.problems, life.problems
        assert len(life.outcomes) == life.jobs
        life.close()
    assert (emulator.races, emulator.registrations) == (0, 0)


def play(emulator: Emulator, start: Start, seed: int, steps: int = 60, **options: object) -> str:
    """Run two devices alternately, with a random order of operations; return the problems found."""
    emulator.reset(stepped=True, seed=seed)
    lives = [start(seed, device, **options) for device in (0, 1)]
    for _ in range(steps):
        for life in lives:
            life.step()
    for life in lives:
        life.settle()
    found = "".join(life.problems for life in lives)
    for life in lives:
        life.close()
    return found or emulator.report


@pytest.mark.parametrize("slice_copies", [2048, 1])
@pytest.mark.parametrize("seed", range(3))
def test_r13_r5_r9_overlapping_steps_do_not_race_with_copies(
    emulator: Emulator, start: Start, monkeypatch: pytest.MonkeyPatch, seed: int, slice_copies: int
) -> None:
    monkeypatch.setattr(driver_module, "_SLICE", slice_copies)
    assert play(emulator, start, seed) == ""


@pytest.mark.parametrize("seed", range(3))
def test_r13_an_engine_on_the_default_stream_does_not_race_with_copies(
    emulator: Emulator, start: Start, seed: int
) -> None:
    assert play(emulator, start, seed, on_default_stream=True) == ""
    assert emulator.waits_with_lock == 0


def test_a_seed_repeats(emulator: Emulator, start: Start) -> None:
    counts = []
    for _ in range(2):
        assert play(emulator, start, 7) == ""
        counts.append((emulator.executed, emulator.advance()))
    assert counts[0] == counts[1]


# -- mutants ----------------------------------------------------------------------------------------------------------


def no_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NvidiaDriver, "wait", lambda *_: None)


def loads_wait_for_nothing(patch: pytest.MonkeyPatch) -> None:
    real = CudaCopier.submit

    def submit(self: CudaCopier, way: Direction, runs: Any, fences: Sequence[object]) -> Any:  # noqa: ANN401
        return real(self, way, runs, () if way is Direction.LOAD else fences)

    patch.setattr(CudaCopier, "submit", submit)


def stores_wait_for_what_came_before_the_forward_pass(patch: pytest.MonkeyPatch) -> None:
    fence, begin = CudaCopier.fence, WorkerSide.begin_step
    early: dict[object, object] = {}

    def begin_step(self: WorkerSide, plan: TransferPlan) -> None:
        copier = self.pump._copier
        early.pop(copier, None)
        early[copier] = fence(copier)  # type: ignore[arg-type]
        begin(self, plan)

    patch.setattr(WorkerSide, "begin_step", begin_step)
    patch.setattr(CudaCopier, "fence", lambda self: early[self])


def stores_are_read_at_any_time(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(driver_module._ACCESS_ORDER, Direction.STORE, driver_module._ANY_TIME)


def no_end_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaTicket, "end", lambda self: setattr(self, "_has_end", True))


def an_end_event_before_the_last_slice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(driver_module, "_SLICE", 1)
    end = CudaTicket.end
    patch.setattr(CudaTicket, "_mark", end)
    patch.setattr(CudaTicket, "end", lambda self: None if self._has_end else end(self))


@pytest.mark.parametrize(
    "mutant",
    [
        no_fence,
        loads_wait_for_nothing,
        stores_wait_for_what_came_before_the_forward_pass,
        stores_are_read_at_any_time,
        no_end_event,
        an_end_event_before_the_last_slice,
    ],
)
def test_a_broken_rule_is_reported_as_a_race_with_both_accesses(
    emulator: Emulator, start: Start, monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    mutant(monkeypatch)
    found = play(emulator, start, 1, steps=30)
    assert emulator.races
    line = next(line for line in found.splitlines() if line.startswith("race: "))
    assert "copy of operation" in line
    assert "writes [" in line


@pytest.mark.parametrize("binds", [True, False])
def test_the_coroutines_thread_uses_the_devices_context_or_fails(
    emulator: Emulator, start: Start, monkeypatch: pytest.MonkeyPatch, binds: bool
) -> None:
    if not binds:
        monkeypatch.setattr(NvidiaDriver, "enter", lambda self: None)
    life = start(1, device=1)
    advance = life.portal.advance
    with ThreadPoolExecutor(1) as coroutine:
        monkeypatch.setattr(life.portal, "advance", lambda *words: coroutine.submit(advance, *words).result())
        for _ in range(10):
            life.step()
        life.settle()
    assert emulator.contexts == 0b10
    assert bool(life.failed) is not binds
    monkeypatch.undo()


def test_memory_unregistered_during_a_copy_is_reported(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_drain(self: TransferPump) -> int:
        return 0

    life = start()
    emulator = life.emulator
    while not any(job.direction is Direction.STORE for job, _ in life.open.values()):
        life.step()
    life.portal.advance()
    life.portal.advance()
    monkeypatch.setattr(TransferPump, "drain", no_drain)
    life.close()
    emulator.step()
    assert emulator.races or emulator.faults
    assert "copy" in emulator.report


# -- rules ------------------------------------------------------------------------------------------------------------


def test_r4_r5_r9_partly_refused_jobs_end_after_their_copies(emulator: Emulator, start: Start) -> None:
    life = start(3)
    for number in range(80):
        emulator.limit_batches(1 if number % 3 == 0 else -1)
        life.step()
    emulator.limit_batches(-1)
    life.settle()
    assert life.failed
    assert (emulator.races, emulator.wrong) == (0, 0), emulator.report


def test_r16_memory_of_a_copy_that_does_not_end_stays_registered(emulator: Emulator, start: Start) -> None:
    life = start(4, timeout_s=1.0)
    while not life.open:
        life.step()
        life.portal.advance()
    for _ in range(4):
        life.portal.advance(1.0)
        life.take()
    assert statistics_of(life.side.pump).abandoned_batches
    life.close()
    assert emulator.registrations
    emulator.step()
    assert (emulator.races, emulator.faults) == (0, 0), emulator.report


def test_a_lost_device_is_reported_once_and_every_job_ends(emulator: Emulator, start: Start) -> None:
    life = start(6)
    while not life.open:
        life.step()
    emulator.lose(0)
    life.portal.advance()
    report = life.side.take_report()
    assert report is not None
    assert report.lost is not None
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in report.lost
    assert {job.outcome for job in report.jobs} == {CopyOutcome.FAILED}
    assert not statistics_of(life.side.pump).open_jobs
    assert life.side.take_report() is None


# -- a start in vLLM's order --------------------------------------------------------------------------------------------


def test_no_memory_is_pinned_between_registration_and_the_first_step(
    emulator: Emulator, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_side, "_PINNING_S", 0.0)  # No memory is pinned at the start.
    life = start()
    before = emulator.registrations
    life.engine.capture()
    life.portal.advance(5)
    assert emulator.registrations == before
    assert life.engine.end_capture() == 0
    assert life.side.take_report() is None  # as at the start, the rank has no slot yet, and more will follow
    life.side.begin_step(TransferPlan())
    life.portal.advance(5)
    report = life.side.take_report()
    assert report is not None
    assert (report.ready_slots, report.is_growing) == (SLOTS, False)


def test_the_start_fails_if_the_device_can_pin_no_host_memory(emulator: Emulator, start: Start) -> None:
    emulator.refuse_pinning()
    with capture_logs() as logs:
        start()
    (entry,) = [entry for entry in logs if entry["event"] == "host_memory_refused"]
    assert (entry["log_level"], entry["ready_slots"]) == ("error", 0)
    assert "CUDA_ERROR_NOT_SUPPORTED (801)" in entry["reason"]
    assert "run the engine without confidential computing, or without kvoffload" in entry["reason"]
    assert not find_gpus.__wrapped__().can_register


@pytest.mark.parametrize("is_coroutine_alive", [True, False])
def test_a_hooks_calls_into_the_driver_do_not_grow_with_a_load(
    emulator: Emulator, start: Start, is_coroutine_alive: bool
) -> None:
    blocks, page, calls_of_a_hook = 100_000, 64, 20
    life = start(blocks=blocks, slots=blocks, pages=(page,))
    life.portal.is_dead = not is_coroutine_alive
    (chunk,) = life.side.pump._arena._chunks
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * (blocks * page)).from_address(chunk.address))
    memory[:] = np.random.default_rng(2).integers(0, 256, len(memory), np.uint8)
    on_host = memory.reshape(blocks, page).copy()
    order = np.random.default_rng(1).permutation(blocks)
    life.take()
    job = life._job(Direction.LOAD, list(range(blocks)), order.tolist(), [0] * blocks)
    assert job is not None
    plan = TransferPlan(loads=(job,))
    before = emulator.calls()
    life.side.begin_step(plan)
    life.side.start_loads(plan)
    assert emulator.calls() - before <= calls_of_a_hook
    with ThreadPoolExecutor(1) as coroutine:
        while not life.outcomes:
            before = emulator.calls()
            life.take()
            assert emulator.calls() - before <= calls_of_a_hook
            if is_coroutine_alive:
                coroutine.submit(life.portal.advance).result()
            emulator.step(10_000)
    assert not life.failed
    assert emulator.calls("cuMemcpyBatchAsync") == 196
    assert np.array_equal(life.engine.device_bytes().reshape(blocks, page)[order], on_host)
    assert (emulator.races, emulator.faults) == (0, 0), emulator.report


@pytest.mark.parametrize("is_relaxed", [True, False])
def test_pinning_does_not_break_a_capture_if_the_pinning_thread_is_in_relaxed_mode(
    emulator: Emulator, start: Start, monkeypatch: pytest.MonkeyPatch, is_relaxed: bool
) -> None:
    life = start()
    if not is_relaxed:
        monkeypatch.setattr(NvidiaDriver, "_exchange_capture_mode", lambda self, mode: mode)
    pin = CudaPin(NvidiaDriver("cuda:0"))
    memory = np.zeros(4096, np.uint8)
    life.engine.capture()
    with ThreadPoolExecutor(1) as other:
        pinned = other.submit(pin.register, memory.ctypes.data, 4096)
        if is_relaxed:
            pinned.result()
            assert life.engine.end_capture() == 0
        else:
            with pytest.raises(HostMemoryBusy, match="CAPTURE_UNSUPPORTED"):
                pinned.result()
            assert life.engine.end_capture() == 901


def wait_of_loads(emulator: Emulator, start: Start, *, takes_fence: bool) -> float:
    """Return the median seconds from a step's start to its load's end. Forward passes take 10 ms each."""
    emulator.reset(stepped=True)
    life = start()
    life.contents[0] = 5
    life.engine.write(0, 5)
    store = life._store()
    assert store is not None
    life.side.start_stores(TransferPlan(stores=(store,)))
    life.settle()
    waits = []
    for _ in range(20):
        begun = emulator.advance()
        load = life._load()
        assert load is not None
        plan = TransferPlan(loads=(load,))
        if takes_fence:
            life.side.begin_step(plan)
        for _ in range(10):
            life.engine.write(40, 1, cost_s=5e-4)
        life.side.start_loads(plan)
        while life.open:
            emulator.step(1)
            life.take()
        waits.append(emulator.advance() - begun)
        life.engine.synchronize()
        life.contents = {0: 5}
    assert emulator.races == 0, emulator.report
    life.close()
    return median(waits)


def test_a_load_does_not_wait_for_the_forward_pass_of_its_step(emulator: Emulator, start: Start) -> None:
    early, late = (wait_of_loads(emulator, start, takes_fence=early) for early in (True, False))
    assert early <= 0.5 * late
