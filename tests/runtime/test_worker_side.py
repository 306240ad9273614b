from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import pytest

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.config import OffloadConfig
from kvoffload.model.errors import ConfigError, CopyError, EngineContractError
from kvoffload.model.ids import Rank
from kvoffload.model.wire import NOTHING, Direction, TransferPlan
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.testing import FakeClock, FakeDevice, GatedCopier
from kvoffload.transfer.host_memory import RESERVE, slots_for
from tests.captured_logs import capture_logs
from tests.copy_jobs import device_job
from tests.operations import calls
from tests.runtime.manual_portal import ManualPortal
from tests.transfer.counts import statistics_of

TIMEOUT_S = 2.0
PATIENCE_S = 30
DEVICE = FakeDevice(8, pages=[64, 32])
SLOT_BYTES = DEVICE.layout.slot_bytes


class Worker:
    """A worker's side with ten slots, on a portal that the test advances."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.portal = ManualPortal(self.clock)
        self.copier = GatedCopier()
        self.device = FakeDevice(8, pages=[64, 32])
        config = OffloadConfig(host_bytes=22 * SLOT_BYTES - 2, transfer_timeout_s=TIMEOUT_S)
        self.side = WorkerSide(Rank(1), 2, config, self.portal, clock=self.clock, copier=self.copier)
        self._jobs = 0

    def plan(self, direction: Direction, slot: int = 0, block: int = 1) -> TransferPlan:
        self._jobs += 1
        job = device_job(self._jobs, direction, (slot,), (block,))
        return TransferPlan(loads=(job,)) if direction is Direction.LOAD else TransferPlan(stores=(job,))

    def outcomes(self) -> dict[int, CopyOutcome]:
        report = self.side.take_report()
        return {job.job: job.outcome for job in report.jobs} if report is not None else {}


@pytest.fixture
def fresh() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.copier.release()
    worker.side.close()
    worker.portal.close()


@pytest.fixture
def made(fresh: Worker) -> Worker:
    """Return a side whose host memory is ready."""
    assert fresh.side.register(fresh.device.layout) == 10  # half of the bytes are one too few for 11 slots
    fresh.portal.advance()
    return fresh


def test_the_start_logs_the_host_size_and_its_ratio_to_the_device(fresh: Worker) -> None:
    config = OffloadConfig(host_bytes=28 * SLOT_BYTES)
    with capture_logs() as logged:
        side = WorkerSide(Rank(1), 2, config, fresh.portal, copier=fresh.copier)
        side.register(DEVICE.layout)
        side.close()
    (line,) = [line for line in logged if line["event"] == "worker_registered"]
    # The bytes are those of both ranks. The device has 7 blocks, and this rank 14 slots.
    assert (line["host_bytes"], line["slots"], line["times_device"]) == ("2.6 KiB", 14, 2.0)


def test_host_memory_becomes_ready_in_the_background_and_is_reported(
    fresh: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fresh.side.register(fresh.device.layout)
    assert fresh.side.take_report() is None
    fresh.portal.advance()
    report = fresh.side.take_report()
    assert report is not None
    assert (report.rank, report.jobs, report.ready_slots) == (1, (), 10)
    assert (report.slot_bytes, report.wanted_slots) == (SLOT_BYTES, 10)
    assert fresh.side.take_report() is None
    assert "host_memory_ready rank=1 gib=0.0 blocks=10 seconds=0.0" in caplog.text


def test_a_block_in_several_pieces_is_refused_if_the_layout_must_be_contiguous(fresh: Worker) -> None:
    config = OffloadConfig(host_bytes=2**20, layout="blocks")
    side = WorkerSide(Rank(0), 1, config, fresh.portal, clock=fresh.clock, copier=fresh.copier)
    problem = r"layout is 'blocks', but the engine keeps a block .* in 2 pieces; set layout"
    with pytest.raises(ConfigError, match=problem):
        side.register(fresh.device.layout)
    assert side.register(FakeDevice(8, pages=[64]).layout) > 0
    side.close()


def test_a_plans_blocks_are_stored_and_loaded_back_without_a_warning(
    made: Worker, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    before = made.device.read(1)
    store = made.plan(Direction.STORE, slot=3, block=1)
    made.side.start_loads(store)
    made.side.start_stores(store)
    made.portal.advance()
    made.copier.release()
    assert made.outcomes() == {1: CopyOutcome.DONE}
    load = made.plan(Direction.LOAD, slot=3, block=5)
    made.side.start_stores(load)
    made.side.start_loads(load)
    assert made.outcomes() == {2: CopyOutcome.DONE}
    assert made.device.read(5) == before
    made.side.close()
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
    assert "".join(capsys.readouterr()) == ""


def test_r13_a_store_starts_after_the_forward_pass_was_launched_and_waits_for_it(made: Worker) -> None:
    plan = made.plan(Direction.STORE)
    made.side.begin_step(plan)
    made.side.start_loads(plan)
    made.portal.advance()
    assert not made.copier.tickets
    earlier = made.copier.fences
    made.side.start_stores(plan)
    made.portal.advance()
    (ticket,) = made.copier.tickets
    assert ticket.fences == (earlier + 1,)


def test_close_waits_for_the_copies_that_were_started(made: Worker) -> None:
    made.side.start_loads(made.plan(Direction.LOAD))
    [ticket] = made.copier.open_tickets

    async def end_it() -> None:
        await made.clock.sleep(1)
        assert not made.copier.is_closed
        ticket.finish()

    made.portal.spawn(end_it)
    made.side.close()
    assert made.copier.is_closed
    assert 1 <= made.clock.monotonic() < 1.5
    made.side.close()


def test_close_abandons_a_copy_that_never_ends_and_keeps_its_memory(made: Worker) -> None:
    made.side.start_loads(made.plan(Direction.LOAD))
    pump = made.side.pump
    made.side.close()
    assert made.clock.monotonic() < TIMEOUT_S + 5
    assert made.copier.is_closed
    assert statistics_of(pump).abandoned_batches == 1
    assert pump._arena.ready_slots == 10


@pytest.mark.parametrize("is_registered", [True, False])
def test_close_works_before_memory_is_ready(fresh: Worker, is_registered: bool) -> None:
    if is_registered:
        fresh.side.register(fresh.device.layout)
    fresh.side.close()
    assert fresh.copier.is_closed is is_registered
    fresh.portal.advance()
    assert all(task.cancelled() for task in fresh.side._tasks)


def test_close_survives_a_copier_that_cannot_close(
    made: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise RuntimeError("busy")

    monkeypatch.setattr(made.copier, "close", refuse)
    made.side.close()
    assert "worker_not_closed rank=1" in caplog.text


def end_later(made: Worker) -> None:
    """End all open copies when a second has passed."""

    async def end_them() -> None:
        await made.clock.sleep(1)
        made.copier.release()

    made.portal.spawn(end_them)


def test_unregistering_waits_for_copies_keeps_stores_and_fails_loads_whose_bytes_are_lost(
    made: Worker,
) -> None:
    made.side.start_loads(made.plan(Direction.LOAD))
    made.side.start_stores(made.plan(Direction.STORE, slot=3, block=2))
    before = made.device.read(2)
    end_later(made)
    made.side.unregister()
    made.side.unregister()
    assert 1 <= made.clock.monotonic() < 1.5
    assert not made.copier.open_tickets
    made.device.write(2, bytes(SLOT_BYTES))
    made.side.restore()
    made.side.restore()
    assert made.outcomes() == {1: CopyOutcome.FAILED, 2: CopyOutcome.DONE}
    made.side.start_loads(made.plan(Direction.LOAD, slot=3, block=2))
    assert made.outcomes() == {3: CopyOutcome.DONE}
    assert made.device.read(2) == before


def test_jobs_that_arrive_while_the_memory_is_away_fail_without_a_copy(made: Worker) -> None:
    made.side.unregister()
    batches = len(made.copier.tickets)
    made.side.start_loads(made.plan(Direction.LOAD))
    made.side.start_stores(made.plan(Direction.STORE))
    made.portal.advance()
    assert made.outcomes() == {1: CopyOutcome.FAILED, 2: CopyOutcome.FAILED}
    assert len(made.copier.tickets) == batches


def test_unregistering_fails_after_the_time_limit_and_copies_go_on(made: Worker) -> None:
    made.side.start_loads(made.plan(Direction.LOAD))
    with pytest.raises(CopyError, match="copies still use the KV cache after transfer_timeout_s = 2 s"):
        made.side.unregister()
    assert TIMEOUT_S <= made.clock.monotonic() < TIMEOUT_S + 0.5
    made.copier.release()
    made.clock.jump(TIMEOUT_S)
    made.side.start_stores(made.plan(Direction.STORE, slot=1))
    made.portal.advance()
    assert made.outcomes() == {1: CopyOutcome.DONE, 2: CopyOutcome.DONE}


def test_after_a_restore_with_other_tensors_copies_use_these(made: Worker) -> None:
    other = FakeDevice(8, pages=[64, 32], seed=1)
    before = made.device.read(2)
    made.copier.release()
    made.side.start_stores(made.plan(Direction.STORE, slot=3, block=2))
    made.portal.advance()
    made.side.restore(other.layout)
    made.side.start_loads(made.plan(Direction.LOAD, slot=3, block=5))
    assert made.outcomes() == {1: CopyOutcome.DONE, 2: CopyOutcome.DONE}
    assert other.read(5) == before
    with pytest.raises(EngineContractError, match="blocks of another kind"):
        made.side.restore(FakeDevice(9, pages=[64, 32]).layout)


def test_without_the_portal_unregistering_fails_queued_stores_and_waits_for_the_rest(made: Worker) -> None:
    made.side.start_loads(made.plan(Direction.LOAD))
    made.side.start_stores(made.plan(Direction.STORE, slot=1))
    made.copier.release()
    made.portal.is_dead = True
    made.side.take_report()
    made.side.unregister()
    assert statistics_of(made.side.pump).open_jobs == 0
    made.portal.is_dead = False


def test_before_registration_there_is_nothing_to_unregister(fresh: Worker) -> None:
    fresh.side.unregister()
    fresh.side.restore()


def test_the_end_of_the_portals_thread_is_noticed(made: Worker) -> None:
    made.side.start_loads(made.plan(Direction.LOAD))
    made.side.start_stores(made.plan(Direction.STORE, slot=1))
    made.portal.is_dead = True
    assert made.outcomes() == {2: CopyOutcome.FAILED}  # the copy of this job has not started, and never will
    made.copier.release()
    # The copy of this job had started, so the pump notices its end.
    assert made.outcomes() == {1: CopyOutcome.DONE}
    made.portal.is_dead = False


def test_copies_on_a_lost_portal_are_drained_on_another(made: Worker) -> None:
    made.side.start_loads(made.plan(Direction.LOAD))
    made.copier.release()
    made.portal.is_dead = True
    made.side.close()
    assert made.copier.is_closed
    made.portal.is_dead = False


def test_the_end_of_the_transfer_coroutine_is_noticed(made: Worker) -> None:
    pump = made.side.pump
    made.side._tasks[1].cancel()
    made.portal.advance()
    assert pump._gone
    made.side.start_stores(made.plan(Direction.STORE))
    assert made.outcomes() == {1: CopyOutcome.FAILED}


@pytest.mark.parametrize(("rank", "refused"), [(0, True), (1, False), (4, True), (7, False)])
def test_the_first_rank_of_each_machine_checks_the_memory_for_all_its_ranks(
    rank: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = f"MemAvailable: {(RESERVE + 3 * 4 * 2**20) // 1024} kB\n"
    on_machine = partial(slots_for, read={"/proc/meminfo": left}.get)
    monkeypatch.setattr("kvoffload.runtime.rank_memory.slots_for", on_machine)
    config, portal = OffloadConfig(host_bytes=8 * 4 * 2**20), Portal("test")
    side = WorkerSide(Rank(rank), 8, config, portal, local_ranks=4)
    with pytest.raises(ConfigError, match="all 4 ranks of this machine") if refused else nullcontext():
        assert side.register(DEVICE.layout) == 4 * 2**20 // SLOT_BYTES
    side.close()
    assert portal.close(PATIENCE_S)


def test_a_step_without_copies_makes_few_calls(made: Worker) -> None:
    def step() -> None:
        made.side.begin_step(NOTHING)
        made.side.start_loads(NOTHING)
        made.side.start_stores(NOTHING)
        assert made.side.take_report() is None

    made.side.take_report()
    assert calls(step) <= 18
