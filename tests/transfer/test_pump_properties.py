from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.model.errors import CopyError
from kvoffload.model.ids import Rank
from kvoffload.model.wire import DeviceJob, Direction
from kvoffload.runtime.portal import Portal
from kvoffload.testing import FakeDevice, GatedTicket, wait_all_blocked
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.factory import make_checksums
from kvoffload.transfer.host_copier import HostCopier
from kvoffload.transfer.host_memory import MmapAllocator
from kvoffload.transfer.ports import Clocks
from kvoffload.transfer.pump import TransferPump
from tests.captured_logs import capture_logs
from tests.transfer.counts import statistics_of
from tests.transfer.rig import CORRUPT, DONE, TIMEOUT_S, Rig, load, running, store

BLOCK = 96

moves = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["store", "load"]), st.integers(1, 6)),
        st.tuples(st.sampled_from(["finish", "fail", "raise"]), st.integers(0, 5)),
        st.tuples(st.sampled_from(["bad store", "refuse submit", "refuse fence", "look"]), st.just(1)),
        st.tuples(st.sampled_from(["read", "lose reading", "refuse reading"]), st.just(1)),
        st.tuples(st.just("rot"), st.integers(0, 15)),
        st.tuples(st.just("pass time"), st.sampled_from([0.001, 0.02, TIMEOUT_S * 1.1])),
    ),
    max_size=30,
)


class Life:
    """A pump with jobs. If checksums are on, the test also decides when they are computed."""

    def __init__(self, verify: str) -> None:
        self.rig = Rig(blocks_in_flight=3, verify=verify)
        self.asked: dict[int, DeviceJob] = {}
        self.reported: Counter[int] = Counter()

    async def play(self, move: str, argument: float) -> None:
        rig, number = self.rig, int(argument)
        if move in ("store", "load", "bad store"):
            self.hand_in(move, number)
        elif move in ("finish", "fail", "raise") and rig.copier.open_tickets:
            self.end(rig.copier.open_tickets[number % len(rig.copier.open_tickets)], move)
        elif move == "refuse submit":
            rig.copier.refuse_submit(CopyError("refused"))
        elif move == "refuse fence":
            rig.copier.refuse_fence(CopyError("refused"))
        elif move == "pass time":
            await rig.clock.advance(argument)
        else:
            self.read(move, number)
        await wait_all_blocked()
        self.look()

    def hand_in(self, move: str, count: int) -> None:
        number = len(self.asked)
        slots = [99] if move == "bad store" else [(number + place) % 16 for place in range(count)]
        blocks = [(3 * number + place) % 8 for place in range(count)]
        job = (load if move == "load" else store)(number, slots, blocks)
        self.asked[number] = job
        (self.rig.pump.submit_loads if move == "load" else self.rig.pump.submit_stores)([job])

    def end(self, ticket: GatedTicket, how: str) -> None:
        if how == "raise":
            ticket.fail()
            ticket.query_error = CopyError("lost")
        else:
            ticket.finish() if how == "finish" else ticket.fail()

    def read(self, move: str, slot: int) -> None:
        reader = self.rig.reader
        if move == "refuse reading":
            reader.refuse(RuntimeError("shut down"))
        elif move == "rot":
            self.rig.rot(slot)
        elif move == "lose reading" and reader.waiting:
            reader.lose_next(RuntimeError("lost"))
        elif move == "read" and reader.waiting:
            reader.run_next()

    def look(self) -> None:
        for report in self.rig.reports():
            self.reported[report.job] += 1
            job = self.asked[report.job]
            assert report.direction is job.direction
            assert report.copied_bytes == (len(job.slots) * BLOCK if report.outcome is DONE else 0)
            assert report.queue_s >= 0
            assert bool(report.corrupt) == (report.outcome is CORRUPT)
            assert job.direction is Direction.LOAD or not report.corrupt
            assert set(report.corrupt) <= set(range(len(job.slots)))
        now = self.rig.counts
        assert now.store_bytes_in_flight <= 3 * BLOCK
        assert now.open_jobs == len(self.asked) - len(self.reported)


verify_modes = st.sampled_from(["off", "sample", "full"])


@pytest.mark.parametrize("is_cancelled", [False, True])
@given(moves, st.integers(0, 3), verify_modes)
def test_property_every_job_ends_once_and_no_memory_stays_held(
    is_cancelled: bool, script: list[tuple[str, float]], cancels: int, verify: str
) -> None:
    async def live() -> None:
        life = Life(verify)
        async with running(life.rig):
            for move, argument in script:
                await life.play(move, argument)
            if is_cancelled:
                for _ in range(cancels):
                    life.rig.task.cancel()
                    await wait_all_blocked()
                life.rig.task.cancel()
            life.rig.copier.release()
            life.rig.reader.release()
            await life.rig.clock.advance(3 * TIMEOUT_S)
            life.look()
            life.look()  # this also counts checksums of abandoned copies, which the previous poll started
            assert life.rig.task.done() is is_cancelled
            assert dict(life.reported) == dict.fromkeys(life.asked, 1)

    with capture_logs():
        asyncio.run(live())


@given(
    st.sets(st.integers(0, 15), max_size=5),
    st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True), min_size=1, max_size=4),
    st.sampled_from(["sample", "full"]),
)
def test_property_a_load_succeeds_exactly_if_its_bytes_are_the_stored_ones(
    rotten: set[int], loads: list[list[int]], verify: str
) -> None:
    async def live() -> None:
        rig = Rig(verify=verify)
        async with running(rig):
            rig.reader.release()
            rig.copier.release()
            rig.pump.submit_stores([store(100, range(8), range(8)), store(101, range(8, 16), range(8))])
            await rig.clock.advance(0.05)
            assert rig.outcomes() == {100: DONE, 101: DONE}
            original = [rig.device.read(block) for block in range(8)]
            for slot in rotten:
                rig.rot(slot)
            for number, slots in enumerate(loads):
                rig.pump.submit_loads([load(number, slots, range(len(slots)))])
                await rig.clock.advance(0.01)
                (report,) = rig.reports()
                assert report.corrupt == tuple(place for place, slot in enumerate(slots) if slot in rotten)
                assert report.outcome is (CORRUPT if rotten.intersection(slots) else DONE)
                if report.outcome is DONE:
                    assert [rig.device.read(b) for b in range(len(slots))] == [original[s % 8] for s in slots]

    with capture_logs():
        asyncio.run(live())


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Let the interpreter switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("verify", ["off", "sample", "full"])
def test_with_real_threads_every_byte_arrives(verify: str) -> None:
    device, portal, random = FakeDevice(40, [4096, 100]), Portal("threads"), np.random.default_rng(0)
    arena = Arena(device.layout, 40, MmapAllocator(portal.executor), chunk_bytes=7 * device.layout.slot_bytes)
    portal.spawn(arena.prepare).result(30)
    pump = TransferPump(
        Rank(0),
        arena,
        HostCopier(portal.executor, Clocks()),
        Clocks(),
        store_bytes_in_flight=16 * device.layout.slot_bytes,
        timeout_s=30.0,
        checksums=make_checksums(verify, arena, executor=portal.executor),
    )
    run = portal.spawn(pump.run)
    original = [device.read(block) for block in range(40)]
    for turn in range(20):
        order = random.permutation(40).tolist()
        for part in range(5):
            pump.submit_stores([store(100 * turn + part, order[part::5], order[part::5])])
        await_reports(pump, 5)
        for block in range(40):
            device.write(block, bytes(device.layout.slot_bytes))
        pump.submit_loads([load(100 * turn + 50 + part, order[part::5], order[part::5]) for part in range(5)])
        await_reports(pump, 5)
        assert [device.read(block) for block in range(40)] == original
    run.cancel()
    assert portal.spawn(pump.drain).result(30) == 0
    assert statistics_of(pump).open_jobs == 0
    assert portal.close(30)
    arena.close()


def await_reports(pump: TransferPump, count: int) -> None:
    """Poll, take reports and continue, as the steps of an engine do, until the test's time limit."""
    while count > 0:
        pump.poll()
        report = pump.take_report()
        if report is not None:
            assert all(job.outcome is DONE for job in report.jobs)
            count -= len(report.jobs)
