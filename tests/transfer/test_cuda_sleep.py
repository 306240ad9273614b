"""The engine sleeps and wakes while copies are under way, on the emulated driver.

While the engine sleeps, its KV memory is away: a copy that touches it is a fault, and one that may still run when the
memory is taken away is a race. Afterwards the memory has other bytes, so a load that the sleep has overtaken must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.errors import CopyError, EngineContractError
from kvoffload.model.wire import Direction, TransferPlan
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.testing import FakeDevice
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.jobs import JobLedger
from kvoffload.transfer.pump import TransferPump
from tests.cuda_emulator import Emulator
from tests.cuda_emulator.life import Life
from tests.transfer.counts import statistics_of

Start: TypeAlias = Callable[..., Life]
Mutant: TypeAlias = Callable[[pytest.MonkeyPatch], None]

STEPS = 120
SEEDS = (1, 2, 3)


def open_jobs(life: Life, direction: Direction) -> set[int]:
    return {number for number, (job, _) in life.open.items() if job.direction is direction}


def fall_asleep(life: Life, patch: pytest.MonkeyPatch) -> None:
    """Unregister the memory, then take it away, in the order of vLLM's worker. The streams run meanwhile."""
    advance = life.portal.advance

    def advance_and_run(seconds: float = 0.02) -> None:
        advance(seconds)
        if life.is_stepped:
            life.emulator.step(3)

    life.engine.synchronize()
    with patch.context() as waiting:
        waiting.setattr(life.portal, "advance", advance_and_run)
        life.side.unregister()
    life.engine.release_memory()
    life.contents.clear()


def submit(life: Life) -> set[int]:
    """Submit a load and a store, as no engine does while it sleeps. Return their ids."""
    jobs = [life._job(direction, [0], [1], [0]) for direction in (Direction.LOAD, Direction.STORE)]
    load, store = [job for job in jobs if job is not None]
    plan = TransferPlan((load,), (store,))
    life.side.begin_step(plan)
    life.side.start_loads(plan)
    life.side.start_stores(plan)
    life.let_all_run()
    return {int(load.id), int(store.id)}


def nap(life: Life, patch: pytest.MonkeyPatch, *, moves: bool) -> set[int]:
    """Sleep and wake; return the jobs that must fail."""
    lost = open_jobs(life, Direction.LOAD)
    fall_asleep(life, patch)
    if life.draws.random() < 0.5:
        lost |= submit(life)
    if life.draws.random() < 0.3:
        life.side.unregister()
    if moves:
        life.engine.restore_memory()
        life.engine.replace_memory()
        life.side.restore(life.engine.layout)
    else:
        life.engine.restore_memory()
        life.side.restore()
    if life.draws.random() < 0.3:
        life.side.restore()
    return lost


def play(life: Life, patch: pytest.MonkeyPatch, *, moves: bool = False) -> str:
    """Run steps with naps between them; return the problems found."""
    emulator, lost, stored, overtaken = life.emulator, set[int](), 0, 0
    for _ in range(STEPS):
        life.step()
        if life.open and life.draws.random() < 0.15:
            stored += len(open_jobs(life, Direction.STORE))
            overtaken += len(open_jobs(life, Direction.LOAD))
            lost |= nap(life, patch, moves=moves)
        if emulator.races or emulator.faults:
            return emulator.report
    life.settle()
    found = f"{emulator.races} races, {emulator.wrong} wrong, {emulator.faults} faults, "
    found += f"failed {sorted(set(life.failed) ^ lost)}"
    if found != "0 races, 0 wrong, 0 faults, failed []":
        return f"{found}\n{emulator.report}"
    assert min(stored, overtaken) > 3
    return ""


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_naps_between_steps_cost_only_loads_under_way(
    emulator: Emulator, start: Start, monkeypatch: pytest.MonkeyPatch, seed: int, moves: bool
) -> None:
    emulator.reset(stepped=True, seed=seed)
    assert play(start(seed), monkeypatch, moves=moves) == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_naps_on_free_running_streams(
    emulator: Emulator, start: Start, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    emulator.reset(seed=seed, delay_us=3000)
    assert play(start(seed, is_stepped=False), monkeypatch) == ""


# -- without a part of the code, the checks find it ---------------------------------------------------------------


def unregistering_waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    async def pause(self: TransferPump) -> bool:
        return True

    patch.setattr(TransferPump, "pause", pause)


def jobs_are_accepted_asleep(patch: pytest.MonkeyPatch) -> None:
    pause = TransferPump.pause

    async def paused(self: TransferPump) -> bool:
        await pause(self)
        self.resume()
        return True

    patch.setattr(TransferPump, "pause", paused)


def loads_succeed_before_the_memory_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobLedger, "fail_ended_loads", lambda self: None)


def new_addresses_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arena, "move_device", lambda self, layout: None)


def waking_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerSide, "restore", lambda self, layout=None: None)


@pytest.mark.parametrize(
    ("mutant", "sign"),
    [
        (unregistering_waits_for_nothing, "fault: copy of operation"),
        (jobs_are_accepted_asleep, "a copy of memory that was taken away"),
        (loads_succeed_before_the_memory_is_taken, "wrong bytes"),
        (new_addresses_are_ignored, "failed ["),
        (waking_is_not_noticed, "failed ["),
    ],
)
def test_a_broken_promise_is_noticed(
    emulator: Emulator, start: Start, monkeypatch: pytest.MonkeyPatch, mutant: Mutant, sign: str
) -> None:
    emulator.reset(stepped=True, seed=1)
    life = start(1, timeout_s=5.0)
    with monkeypatch.context() as broken:
        mutant(broken)
        found = play(life, monkeypatch, moves=mutant is new_addresses_are_ignored)
    assert sign in found


# -- one promise each ---------------------------------------------------------------------------------------------


def under_way(life: Life) -> Life:
    while not all(open_jobs(life, direction) for direction in Direction):
        life.step()
    life.portal.advance()
    return life


def test_a_copy_that_hangs_keeps_the_engine_awake(
    emulator: Emulator, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = under_way(start(1, timeout_s=2.0))
    before = life.clock.monotonic()
    with pytest.raises(CopyError, match="after transfer_timeout_s = 2 s, so its memory cannot be released"):
        life.side.unregister()  # the streams stand still
    assert 2.0 <= life.clock.monotonic() - before < 2.5
    assert statistics_of(life.side.pump).abandoned_batches
    while life.open:
        life.let_all_run()
        life.take()
    for _ in range(5):
        life.step()
    life.settle()
    assert CopyOutcome.DONE in dict(life.outcomes[-5:]).values()
    fall_asleep(life, monkeypatch)
    life.engine.restore_memory()
    assert (emulator.races, emulator.wrong, emulator.faults) == (0, 0, 0), emulator.report


def test_memory_with_blocks_of_another_kind_is_refused_and_nothing_is_copied_there(start: Start) -> None:
    life = start(1)
    life.side.unregister()
    with pytest.raises(
        EngineContractError, match="registered its KV cache again, with blocks of another kind"
    ):
        life.side.restore(FakeDevice(8, pages=[64]).layout)
    lost = submit(life)
    life.take()
    assert set(life.failed) == lost


def test_queued_stores_are_copied_before_the_memory_goes(
    emulator: Emulator, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = under_way(start(2))
    stores = open_jobs(life, Direction.STORE)
    fall_asleep(life, monkeypatch)
    life.take()
    assert stores
    assert stores.isdisjoint(life.failed)
    life.engine.restore_memory()
    life.side.restore()
    assert (emulator.races, emulator.faults) == (0, 0), emulator.report
