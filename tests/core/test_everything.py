"""Compares the core with a simple model, under random sequences of facts.

After every fact, the world checks bytes and leases, and audits the core. The model also checks which keys the
host may have, which answers a lookup may give, and that all counts add up. `WithDisk` adds a disk and restarts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvoffload.bus.bus import Bus
from kvoffload.core.machine import SlotState
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.engine import Promises
from kvoffload.model.events import LoadEnded, LoadScheduled, LookupAnswered
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import BlockKey, JobId, SlotId
from kvoffload.model.wire import Direction, Tier, TransferPlan
from kvoffload.telemetry.counters import Counters
from tests.conservation import conservation
from tests.core.audit import by_key
from tests.core.disk_world import DiskWorld
from tests.core.world import (
    CORRUPT,
    DONE,
    FAILED,
    Req,
    World,
    chunked,
    full,
    key_at,
    left_behind,
    recurrent,
    window,
)

SHAPES: Sequence[tuple[GroupSpec, ...]] = (
    (full(),),
    (window(6),),
    (full(), window(6, group=1)),
    (window(5), full(group=1)),
    (full(4), window(9, 2, group=1)),
    (full(2), chunked(8, 4, group=1)),
    (full(has_lookahead=True), window(6, group=1, has_lookahead=True)),
)
TEXTS = (
    "the quick brown fox",
    "the quick brown fox jumps over",
    "the quick brown dog",
    "the quick",
    "a slow one",
    "a slow one and then some more",
    "short",
)
RARELY = st.sampled_from([False, False, False, True])
VERY_RARELY = st.sampled_from([False] * 9 + [True])


class Everything(RuleBasedStateMachine):
    ENGINES: ClassVar = {
        "ranks": st.integers(1, 2),
        "device": st.integers(24, 40),
        "host": st.integers(1, 20),
        "policy": st.sampled_from(["eager", "lazy", "twice", "auto"]),
        "least": st.sampled_from([0, 0, 8]),
        "step_tokens": st.sampled_from([4, 8]),
        "report_every": st.sampled_from([1, 1, 3]),
    }

    @initialize(groups=st.sampled_from(SHAPES), data=st.data())
    def start(self, groups: tuple[GroupSpec, ...], data: st.DataObject) -> None:
        self.world = self._make_world(groups, data.draw(st.fixed_dictionaries(self.ENGINES)))
        self.may_have: set[BlockKey] = set()
        self.arriving: dict[JobId, tuple[set[int], list[BlockKey], int]] = {}
        self.names = 0
        self.live: list[Req] = []

    # -- what an engine does ------------------------------------------------------------------------------------

    @rule(text=st.sampled_from(TEXTS), reads=st.sampled_from([True, True, True, False]))
    def add(self, text: str, reads: bool) -> None:
        self.names += 1
        self.live.append(self.world.add(f"r{self.names}", text, reads_cache=reads))

    @precondition(lambda self: self.those("waiting"))
    @rule(
        data=st.data(),
        may_wait=st.booleans(),
        takes=st.sampled_from(["all", "all", "less", "nothing", "later"]),
    )
    def admit(self, data: st.DataObject, may_wait: bool, takes: str) -> None:
        request = data.draw(st.sampled_from(self.those("waiting")))
        answer = self._lookup(request, may_wait)
        if answer is None or takes == "later":
            return
        less = max(answer - self.world.shape.alignment, 0)
        self.world.allocate(request, {"all": answer, "less": less, "nothing": 0}[takes])

    @rule(data=st.data(), tokens=st.sampled_from([1, 4, 8]))
    def step(self, data: st.DataObject, tokens: int) -> None:
        chosen = [each for each in self.those("running") if data.draw(st.booleans())]
        tokens = min(tokens, self.world.shape.step_tokens)
        self._note(self.world.step(*chosen, tokens=tokens) if chosen else self.world.idle_step())

    @precondition(lambda self: self.those("running"))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.world.preempt(data.draw(st.sampled_from(self.those("running"))))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        self.world.end(request)

    @rule(really=RARELY)
    def forget_device(self, really: bool) -> None:
        if really:
            self.world.device.forget_keys()

    # -- what ranks do ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.copies)
    @rule(data=st.data(), outcome=st.sampled_from([DONE, DONE, DONE, DONE, FAILED, CORRUPT]))
    def report(self, data: st.DataObject, outcome: CopyOutcome) -> None:
        job = data.draw(st.sampled_from(sorted(self.world.copies)))
        copy = self.world.copies[job]
        rank = data.draw(st.sampled_from(sorted(copy.running)))
        places: set[int] = set()
        if outcome is CORRUPT and copy.job.direction is Direction.STORE:
            outcome = FAILED
        elif outcome is CORRUPT:
            places = data.draw(st.sets(st.integers(0, len(copy.job.slots) - 1)))
        if outcome is DONE:
            self._arrive(job, rank)
        self.world.report(rank, job, outcome, tuple(places))

    @precondition(lambda self: self.world.last_reports)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.world.repeat_report(data.draw(st.sampled_from(sorted(self.world.last_reports))))

    @precondition(lambda self: self.world.copies)
    @rule(data=st.data(), really=RARELY)
    def overdue(self, data: st.DataObject, really: bool) -> None:
        if really:
            job = data.draw(st.sampled_from(sorted(self.world.copies)))
            self.arriving.pop(job, None)
            self.world.overdue(job)

    @precondition(lambda self: self.world.pool.index)
    @rule(data=st.data(), really=RARELY)
    def rot(self, data: st.DataObject, really: bool) -> None:
        if really:
            slots = sorted(self.world.pool.index.values())
            self.world.rot(data.draw(st.sampled_from(self.world.ranks)), data.draw(st.sampled_from(slots)))

    @rule(more=st.integers(1, 4), really=RARELY)
    def grow(self, more: int, really: bool) -> None:
        if really:
            self.world.ready_up_to(self.world.ready + more)

    # -- what operators do --------------------------------------------------------------------------------------

    @rule(really=RARELY)
    def reset(self, really: bool) -> None:
        if really:
            self.may_have.clear()
            self.world.reset()
            assert not self.world.pool.index

    @rule(policy=st.sampled_from(["eager", "lazy", "twice"]), really=RARELY)
    def choose(self, policy: str, really: bool) -> None:
        if really:
            self.world.choose(policy)

    @rule(really=VERY_RARELY)
    def degrade(self, really: bool) -> None:
        if really:
            self.arriving.clear()
            self.world.degrade()

    # -- many of these at once, to reach deep states ------------------------------------------------------------

    @rule(text=st.sampled_from(TEXTS), steps=st.integers(0, 5))
    def serve(self, text: str, steps: int) -> None:
        self.add(text, reads=True)
        answer = self._lookup(self.live[-1], may_wait=False)
        assert answer is not None
        self.world.allocate(self.live[-1], answer)
        self.go_on(steps)

    @rule(steps=st.integers(1, 6))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self._note(self.world.step())
            for job, copy in sorted(self.world.copies.items()):
                for rank in sorted(copy.running):
                    self._arrive(job, rank)
                    self.world.report(rank, job)

    # -- what must hold -----------------------------------------------------------------------------------------

    @invariant()
    def the_host_has_only_what_was_stored(self) -> None:
        assert set(self.world.pool.index) <= self.may_have

    @invariant()
    def numbers_add_up(self) -> None:
        world = self.world
        assert world.offered() - sum(world.stores().values()) == world.core.state.tally.open_offers >= 0
        for event in world.reported(LookupAnswered)[-3:]:
            assert (event.miss_blocks > 0) == (event.cause is not None or event.opted_out)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for request in self.live:
            self.world.end(request)
        self.world.drain()
        assert not self.world.core.state.jobs.pending
        self.world.finish(*self.world.copies)
        self._nothing_is_left()

    def _nothing_is_left(self) -> None:
        world, state = self.world, self.world.core.state
        assert world.device.held.total() == world.device.leased.total() == 0
        assert not world.requests
        assert world.offered() == sum(world.stores().values())
        assert sum(each.blocks for each in world.reported(LoadScheduled)) == sum(world.loads().values())
        assert {each.job for each in world.reported(LoadScheduled)} == {
            each.job for each in world.reported(LoadEnded)
        }
        for pool in (state.pool, *(tier.pool for tier in state.tiers)):
            rest = [pool.count(each) for each in (SlotState.EMPTY, SlotState.READY, SlotState.QUARANTINED)]
            assert sum(rest) == pool.capacity
        assert left_behind(world.core) == {}
        self._the_metrics_add_up()

    def _the_metrics_add_up(self) -> None:
        """Check that the metrics are consistent with each other and with the reported lookups."""
        bus, counters, removed = Bus(), Counters(), list[str]()
        bus.on_removed = lambda name, _: removed.append(name)
        counters.subscribe(bus)
        for event in self.world.log:
            bus.publish(event)
        assert not removed
        counted = counters.snapshot()
        assert conservation(counted, drained=True) == []
        settled = self.world.reported(LookupAnswered)
        looked_up = sum(each.hit_blocks + each.miss_blocks for each in settled)
        assert counted.total("kvoffload_lookup_blocks_total") == looked_up

    # -- inside -------------------------------------------------------------------------------------------------

    def _make_world(self, groups: tuple[GroupSpec, ...], settings: dict[str, Any]) -> World:
        return World(*groups, **settings)

    def those(self, state: str) -> list[Req]:
        return [each for each in self.live if each.state == state]

    def _note(self, plan: TransferPlan) -> None:
        for job in plan.stores:
            keys = [self.world.pool.key(slot) for slot in job.slots]
            self.arriving[job.id] = (set(), [key for key in keys if key is not None], self.world.resets)

    def _arrive(self, job: JobId, rank: int) -> None:
        """Expect a job's keys on the host after every rank has copied, unless a reset came first."""
        done, keys, resets = self.arriving.get(job, (set(), [], -1))
        done.add(rank)
        if len(done) == len(self.world.ranks) and resets == self.world.resets:
            self.may_have.update(keys)

    def _lookup(self, request: Req, may_wait: bool) -> int | None:
        """Check a lookup's answer against the model; return the answer."""
        world, state = self.world, self.world.core.state
        record = state.requests.live.get(request.name)
        assert record is not None
        expected = self._naive(request, world.device_hit(request))
        is_barred = not record.reads_cache or record.load_failed or state.degraded is not None
        if is_barred or expected < state.policy.min_load_tokens:
            expected = 0
        answer = world.lookup(request, may_wait=may_wait)
        hit = record.hit
        others = {slot for slot, owners in by_key(state.requests.loading).items() if set(owners) - {record}}
        if answer is None:
            assert may_wait
            assert expected
            assert others
            assert hit is None
            return None
        has_no_room = not may_wait and state.requests.is_full  # R19: the request computes what it found
        assert answer == (0 if has_no_room else expected)
        pinned = hit.slots if hit is not None else ()
        assert bool(pinned) == bool(answer)
        assert not may_wait or others.isdisjoint(pinned)
        return answer

    def _naive(self, request: Req, device: int) -> int:
        world, index = self.world, self.world.pool.index
        step = world.shape.alignment
        for length in range((len(request.text) - 1) // step * step, device, -step):
            if all(_has(index, request.text, group, device, length) for group in world.groups):
                return length - device
        return 0


def _has(index: Mapping[BlockKey, SlotId], text: str, group: GroupSpec, device: int, length: int) -> bool:
    """Return whether the index has all blocks of a group that a hit of `length` tokens needs, including the
    draft model's lookahead block.
    """
    size = group.block_tokens
    ahead = size if group.has_lookahead else 0
    return all(
        (position + 1) * size <= len(text) and key_at(text, (position + 1) * size, group.group) in index
        for position in range((length + ahead) // size)
        if (position + 1) * size > max(group.first_needed_token(length), device)
    )


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

    @rule(
        data=st.data(), really=VERY_RARELY, disk=st.integers(-4, 8), host=st.sampled_from([None, 1, 2, 3, 5])
    )
    def restart(self, data: st.DataObject, really: bool, disk: int, host: int | None) -> None:
        """Kill the engine, and start another one on the same disk. Prefixes there may be longer than the new host."""
        if not really:
            return
        before = self.world
        self.live, self.arriving = [], {}
        settings = {**self.settings, "disk": max(before.disk_size + disk, 1)}
        settings["host"] = host or settings["host"]
        self.world = DiskWorld(*before.groups, before=before, **settings)
        self.may_have = {put.key for put in self.world.index.values()}

    # -- what must hold -----------------------------------------------------------------------------------------

    def _the_metrics_add_up(self) -> None:
        """Do nothing: the tests of telemetry check the disk's metrics."""

    # -- inside -------------------------------------------------------------------------------------------------

    def disk_jobs(self) -> list[JobId]:
        copies = self.world.copies.items()
        return sorted(number for number, copy in copies if copy.job.tier is Tier.DISK)

    def _lookup(self, request: Req, may_wait: bool) -> int | None:
        """Return the answer of a lookup, which may wait for a fetch. Compare the answer with the host's blocks."""
        world, state = self.world, self.world.core.state
        record = state.requests.live[request.name]
        answer = world.lookup(request, may_wait=may_wait)
        if answer is None:
            assert may_wait
            loading = by_key(state.requests.loading).values()
            assert world.disk.fetching or any(set(each) - {record} for each in loading)
            return None
        is_barred = not record.reads_cache or record.load_failed or state.degraded is not None
        is_barred |= not may_wait and state.requests.is_full  # R19: the request computes what it found
        rest = record.hit.rest_tokens if record.hit is not None else 0
        expected = 0 if is_barred else self._naive(request, world.device_hit(request))
        # More of the rest may be on the host by now than when a kept answer was made.
        assert answer == expected if not rest else answer - rest <= expected <= answer
        return answer


class WithLongPrefixes(WithDisk):
    """An engine with fewer host slots than prefixes on the disk have blocks."""

    ENGINES: ClassVar = {**WithDisk.ENGINES, "host": st.integers(1, 5), "disk": st.integers(16, 32)}

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        super().start((full(),), data)
        self.may_have = {put.key for put in self.world.index.values()}

    @rule(text=st.sampled_from([text for text in TEXTS if len(text) > 20]))
    def load_long(self, text: str) -> None:
        """Let a request that no other request delays fetch what fits the host, and begin its load."""
        self.world.device.forget_keys()
        self.add(text, reads=True)
        for _ in range(8):
            answer = self._lookup(self.live[-1], may_wait=True)
            if answer is not None:
                self.world.allocate(self.live[-1], answer)
                return
            self._note(self.world.idle_step())
            for job in self.world.submitted():
                for rank in sorted(self.world.copies[job].running):
                    self._arrive(job, rank)
                    self.world.report(rank, job)

    def _make_world(self, groups: tuple[GroupSpec, ...], settings: dict[str, Any]) -> DiskWorld:
        self.settings = settings
        before = DiskWorld(*groups, **{**settings, "host": 64, "min_hits": 0})
        for text in TEXTS:
            before.serve_again(text, text)
        return DiskWorld(*groups, before=before, **settings)


class WithTails(Everything):
    """An engine whose hits may end inside a block, at a recurrent state."""

    ENGINES: ClassVar = {
        **Everything.ENGINES,
        "host": st.integers(8, 40),
        "step_tokens": st.sampled_from([2, 4, 8]),
        "tail_tokens": st.sampled_from([1, 2]),
        "promises": st.just(Promises(hands_off_states=True)),
    }

    @rule(text=st.sampled_from(TEXTS))
    def take_turn(self, text: str) -> None:
        self.serve(text, steps=8)
        self.world.end(self.live.pop())
        self.world.device.forget_keys()

    def _make_world(self, groups: tuple[GroupSpec, ...], settings: dict[str, Any]) -> World:
        return World(recurrent(), full(group=1), **settings)

    def _naive(self, request: Req, device: int) -> int:
        world, text = self.world, request.text
        whole = super()._naive(request, device)
        for length in reversed(world.ends_of_hashes(request.prompt[:-1])):
            if length <= device + whole:
                break
            if length % world.shape.alignment and self._has_tail(text, device, length):
                return length - device
        return whole

    def _has_tail(self, text: str, device: int, length: int) -> bool:
        index, size = self.world.pool.index, self.world.shape.alignment
        start = length - length % size
        whole, part = text[: start + size], text[:length]
        attention = [key_at(text, end, 1) in index for end in range(size, start + 1, size) if end > device]
        is_whole = len(whole) == start + size and key_at(whole, len(whole), 1) in index
        return (
            all(attention)
            and (is_whole or key_at(part, length, 1) in index)
            and key_at(part, length) in index
        )


# The time limit is in seconds. The deep profile runs many examples.
TestEverything = pytest.mark.timeout(3600)(Everything.TestCase)
TestWithTails = pytest.mark.timeout(3600)(WithTails.TestCase)
TestWithDisk = pytest.mark.timeout(3600)(WithDisk.TestCase)
TestWithLongPrefixes = pytest.mark.timeout(3600)(WithLongPrefixes.TestCase)
