"""Runs the comparison of `test_everything` with a disk tier and restarts.

After every fact, the world checks that the disk's index agrees with the pool, that every rank has the block
of each slot that can hit, and that no block was computed before a reset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvoffload.core.machine import SlotState
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import JobId
from kvoffload.model.wire import Direction, Tier
from tests.core.disk_world import DiskWorld
from tests.core.test_everything import RARELY, Everything
from tests.core.world import CORRUPT, DONE, FAILED, Req


class WithDisk(Everything):
    world: DiskWorld

    ENGINES: ClassVar = {
        "ranks": st.integers(1, 2),
        "device": st.integers(24, 40),
        "host": st.integers(4, 24),
        "disk": st.integers(1, 16),
        "min_hits": st.integers(0, 2),
        "step_tokens": st.sampled_from([4, 8]),
    }

    def _make_world(self, groups: tuple[GroupSpec, ...], settings: dict[str, Any]) -> DiskWorld:
        self.settings = settings
        return DiskWorld(*groups, **settings)

    # -- what ranks do ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.disk_jobs())
    @rule(data=st.data(), outcome=st.sampled_from([DONE, DONE, FAILED, CORRUPT]), hangs=RARELY)
    def report_disk(self, data: st.DataObject, outcome: CopyOutcome, hangs: bool) -> None:
        number = data.draw(st.sampled_from(self.disk_jobs()))
        copy = self.world.copies[number]
        rank = data.draw(st.sampled_from(sorted(copy.running)))
        if copy.job.direction is Direction.STORE:
            outcome = FAILED if outcome is CORRUPT else outcome
        stuck = (0,) if outcome is FAILED and hangs else ()
        places = data.draw(st.sets(st.integers(0, len(copy.job.slots) - 1))) if outcome is CORRUPT else set()
        outcome = DONE if outcome is CORRUPT else outcome
        self.world.report(rank, number, outcome, tuple(sorted(places)), stuck=stuck)

    @precondition(lambda self: self.world.disk.pool.index)
    @rule(data=st.data(), really=RARELY)
    def spoil_place(self, data: st.DataObject, really: bool) -> None:
        if really:
            place = data.draw(st.sampled_from(sorted(self.world.disk.pool.index.values())))
            self.world.spoil_place(data.draw(st.sampled_from(self.world.ranks)), place)

    @rule(data=st.data(), really=RARELY, works=st.booleans())
    def disk_fails(self, data: st.DataObject, really: bool, works: bool) -> None:
        if really:
            self.world.fails(data.draw(st.sampled_from(self.world.ranks)), works=works)

    @rule(data=st.data(), really=st.sampled_from([False] * 9 + [True]), disk=st.integers(-4, 8))
    def restart(self, data: st.DataObject, really: bool, disk: int) -> None:
        """Kill the engine, and start another one on the same disk."""
        if not really:
            return
        before = self.world
        self.live, self.arriving = [], {}
        settings = {**self.settings, "disk": max(before.disk_size + disk, 1)}
        self.world = DiskWorld(*before.groups, before=before, **settings)
        self.may_have = {put.key for put in self.world.index.values()}

    # -- what must hold -----------------------------------------------------------------------------------------

    def _nothing_is_left(self) -> None:
        super()._nothing_is_left()
        disk = self.world.disk
        assert (disk.in_flight.keys, disk.fetching) == ({}, 0)
        counts = [disk.pool.count(each) for each in (SlotState.EMPTY, SlotState.READY, SlotState.QUARANTINED)]
        assert sum(counts) == disk.pool.capacity

    def _the_metrics_add_up(self) -> None:
        """Do nothing: the tests of telemetry check the disk's metrics."""

    # -- inside -------------------------------------------------------------------------------------------------

    def disk_jobs(self) -> list[JobId]:
        copies: Mapping = self.world.copies
        return sorted(number for number, copy in copies.items() if copy.job.tier is Tier.DISK)

    def _lookup(self, request: Req, may_wait: bool) -> int | None:
        """Return the answer of a lookup, which may wait for a fetch. Compare the answer with the host's blocks."""
        world, state = self.world, self.world.core.state
        record = state.requests.live[request.name]
        answer = world.lookup(request, may_wait=may_wait)
        if answer is None:
            assert may_wait
            assert world.disk.fetching or any(
                set(each) - {record} for each in state.requests.loading.values()
            )
            return None
        is_barred = not record.reads_cache or record.load_failed or state.degraded is not None
        assert answer == (0 if is_barred else self._naive(request, world.device_hit(request)))
        return answer


TestWithDisk = pytest.mark.timeout(3600)(WithDisk.TestCase)
