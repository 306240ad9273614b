"""Checks every state of an exploration in addition to `World.check`, and checks the end of each exploration.

`World.check` runs the audit (R4, R5, R11), and checks the bytes and ages of all blocks that can hit (R4, R7,
R10), the leases (R5), and the contents of every block that is read (R9). R6 concerns the engine, and R13 the
pump; neither rule is checked here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.core.jobs import Load, Spill, Store, TierJob
from kvoffload.core.machine import JobState, SlotState
from kvoffload.model import facts
from kvoffload.model.groups import AttentionKind
from kvoffload.model.ids import NULL_BLOCK, BlockKey, JobId, Rank, RequestId, SlotId
from kvoffload.model.wire import NOTHING, Direction, Tier, TransferPlan
from tests.core.world import key_of, left_behind

if TYPE_CHECKING:
    from kvoffload.core.tiers import LowerTier
    from tests.core.disk_world import DiskWorld
    from tests.core.remote_world import RemoteWorld
    from tests.explore.scene import Scene

_MOST_FETCHES = 3
"""the largest number of fetches that a request may wait for"""
_OPEN_LOAD = (JobState.PLANNED, JobState.SUBMITTED)


@dataclass(frozen=True)
class Before:
    """The state before an action, for comparison."""

    evictable: dict[SlotId, BlockKey]  # slots that may be evicted, with their keys
    pinned: dict[SlotId, BlockKey]  # keys of slots that a lookup or a load has pinned
    resets: int  # the number of resets so far
    unusable: dict[Tier, set[JobId]]  # lower tiers on which no job can start, and the jobs open on them

    @classmethod
    def of(cls, scene: Scene) -> Before:
        state = scene.world.core.state
        pool = state.pool
        evictable = {slot: key for slot in pool.order if (key := pool.key(slot)) is not None}
        pinned = {slot: key for slot in pool.pins if (key := pool.key(slot)) is not None}
        unusable = {
            tier.tier: _open_on(scene, tier.tier) for tier in state.tiers if not _answers(scene, tier)
        }
        return cls(evictable, pinned, scene.world.resets, unusable)


def check(scene: Scene, before: Before) -> None:
    scene.world.check()
    _check_pins(scene, before)
    _check_blocks_in_flight(scene)
    _check_tables(scene)
    _check_eviction_order(scene, before)
    _check_abandoned(scene)
    _check_tiers(scene, before)
    if scene.disk_world is not None:
        _check_disk(scene, scene.disk_world)
    if scene.remote_world is not None:
        _check_store(scene.remote_world)


def _check_pins(scene: Scene, before: Before) -> None:
    """R1, R5: check that a slot that stays pinned keeps its contents or can never hit again."""
    pool = scene.world.core.state.pool
    for slot, key in before.pinned.items():
        if slot in pool.pins and pool.state(slot) in (SlotState.READY, SlotState.PINNED):
            assert pool.key(slot) == key, f"R1: pinned slot {slot} changed its key"
        assert slot not in pool.pins or pool.state(slot) not in (SlotState.EMPTY, SlotState.FILLING)


def _check_blocks_in_flight(scene: Scene) -> None:
    """R3: check that no block is read by two open stores, and no key is stored by two, unless one has failed."""
    stores = [job for job in scene.world.core.state.jobs.open.values() if isinstance(job, Store)]
    blocks = Counter(block for job in stores for block in job.targets)
    assert max(blocks.values(), default=1) == 1, f"R3: a block is being stored twice: {blocks}"
    keys = Counter(key for job in stores if not job.settled for key in job.keys)
    assert max(keys.values(), default=1) == 1, f"R3: a key is being stored twice: {keys}"


def _check_tables(scene: Scene) -> None:
    """R7: check that the blocks of a running request have the contents that the core assumes."""
    world = scene.world
    for request in world.running():
        record = world.core.state.requests.live.get(request.name)
        if record is None or record.table is None:
            continue
        for group, blocks in zip(world.groups, record.table, strict=True):
            for place, block in enumerate(blocks[: record.confirmed_tokens // group.block_tokens]):
                if block != NULL_BLOCK and block in world.device.held:
                    holds = world.device.bytes[0][block]
                    key = key_of(request.text, group, place)
                    assert holds == key, f"R7: block {block} is recorded for {key!r} but holds {holds!r}"


def _check_eviction_order(scene: Scene, before: Before) -> None:
    """R15: check that a prefix's head is evicted last in a full group, unless the head's bytes were corrupt."""
    if scene.world.resets != before.resets:
        return
    pool = scene.world.core.state.pool
    index = pool.index
    lost = {slot: key for slot, key in before.evictable.items() if pool.key(slot) != key}
    gone = [key for slot, key in lost.items() if pool.state(slot) is not SlotState.QUARANTINED]
    stayed = [key for slot, key in before.evictable.items() if index.get(key) == slot and slot in pool.order]
    for head in gone:
        text, group = head[:-4], int.from_bytes(head[-4:], "big")
        if scene.world.groups[group].kind is AttentionKind.FULL:
            deeper = [key for key in stayed if key[-4:] == head[-4:] and key.startswith(text)]
            assert not deeper, f"R15: {head!r} was evicted before {deeper!r}"


def _check_abandoned(scene: Scene) -> None:
    """R16: check that the memory of abandoned copies is never allocated again."""
    pool = scene.world.core.state.pool
    for slot in scene.abandoned:
        assert pool.state(slot) is SlotState.QUARANTINED, f"R16: slot {slot} is {pool.state(slot).name} again"


_KEPT = {SlotState.PINNED, SlotState.DRAINING, SlotState.QUARANTINED}


def _open_on(scene: Scene, tier: Tier) -> set[JobId]:
    return {job.id for job in scene.world.core.state.jobs.open.values() if job.tier is tier}


def _answers(scene: Scene, tier: LowerTier) -> bool:
    opened = scene.world.core.state.jobs.open.values()
    has_timed_out = any(job.tier is tier.tier and job.state is JobState.ABANDONED for job in opened)
    return tier.is_open and not (tier.is_closed or tier.failing or has_timed_out)


def _check_tiers(scene: Scene, before: Before) -> None:
    state = scene.world.core.state
    jobs = [job for job in state.jobs.open.values() if isinstance(job, TierJob) and not job.settled]
    ways = Counter(
        (key, job.tier if job.direction is Direction.STORE else None) for job in jobs for key in job.keys
    )
    assert max(ways.values(), default=1) == 1, f"R14: a key is being copied twice: {ways}"
    spills = [job for job in state.jobs.open.values() if isinstance(job, Spill)]
    read = {state.pool.state(slot) for job in spills for slot in job.slots}
    assert read <= _KEPT, f"R4, R10: host slots that a spill may still read are {read}"
    fetched, budget = sum(tier.fetching for tier in state.tiers), max(state.pool.capacity // 4, 1)
    assert fetched <= budget, f"{fetched} blocks are fetched, {budget} may be"
    for tier in state.tiers:
        if tier.tier in before.unusable and not _answers(scene, tier):
            began = len(_open_on(scene, tier.tier)) - len(before.unusable[tier.tier])
            assert began <= 0, f"R17: a copy was begun with {tier.tier.value}, which cannot be used"


def _check_store(world: RemoteWorld) -> None:
    state, remote = world.core.state, world.remote
    for job in state.jobs.open.values():
        is_there = job.tier is not Tier.REMOTE or job.settled or job.extra == remote.namespace != ""
        assert is_there, f"R18: job {job.id} is of the generation {job.extra!r}, not {remote.namespace!r}"
    assert not remote.pool.index or remote.namespace, "R18: blocks are known without a generation"
    assert not remote.for_catalog, "queries for the remote tier were not taken"


def _check_disk(scene: Scene, world: DiskWorld) -> None:
    state, disk = world.core.state, world.disk
    jobs = [job for job in state.jobs.open.values() if isinstance(job, Spill) and job.tier is Tier.DISK]
    written = {place for job in jobs for place in job.tier_slots}
    assert written.isdisjoint(world.index), f"places {written} are written, and in the index {world.index}"
    for place in scene.places_abandoned:
        is_off = disk.pool.state(place) in (SlotState.DRAINING, SlotState.QUARANTINED)
        assert is_off, f"R16: place {place} is allocated again"
    for put in world.index.values():
        assert len(put.sums) == len(world.ranks), f"R4: {put} lacks a rank's checksum"


def check_lookup(scene: Scene, name: str, answer: int | None, *, is_patient: bool) -> None:
    state = scene.world.core.state
    record = state.requests.live.get(scene.world.requests[name].name)
    assert record is not None, f"{name} is unknown"
    assert answer is not None or is_patient, "R14: 'not yet' to a request that may not wait"
    assert not (record.load_failed and answer), "R9: a hit for a request whose load failed"
    assert not (state.degraded and answer), "R12: a hit while offloading is off"
    others = {
        slot
        for job in state.jobs.open.values()
        if isinstance(job, Load) and job.state in _OPEN_LOAD and not job.settled
        if job.record is not record and job.record.is_live
        for slot in job.slots
    }
    pinned = set(record.hit.slots) if record.hit is not None else set()
    assert bool(pinned) == bool(answer), f"R1: answered {answer}, pinned {pinned}"
    assert not is_patient or others.isdisjoint(pinned), "R14: loads what another request is loading"
    beside = [other for other in state.requests.live.values() if other.reserved]
    needed = sum([state.shape.request_blocks(other.prompt_tokens) for other in (record, *beside)])
    fits = needed <= state.shape.device_blocks - state.stall.blocks
    assert not answer or fits or not beside, f"R19: a load beside others, which need {needed} blocks"
    below = record.awaits_answer or any(tier.fetching for tier in state.tiers)
    has_reason = others or state.requests.reserved or below
    assert answer is not None or has_reason, "R14: 'not yet' with nothing to wait for"


def check_reset(scene: Scene) -> None:
    state = scene.world.core.state
    assert not state.pool.index, "R10: something can hit right after a reset"
    for tier in state.tiers:
        assert not tier.pool.index, f"R10: something is found in {tier.tier.value} right after a reset"


def check_repeated(scene: Scene, rank: Rank) -> None:
    """R4: check that a duplicate report causes no event."""
    world = scene.world
    events = len(world.log)
    world.tell(facts.TransferReported(world.last_reports[rank]))
    assert len(world.log) == events, "R4: a duplicate report gave an event"


def note_plan(scene: Scene, plan: TransferPlan, known: set[JobId]) -> None:
    state = scene.world.core.state
    assert plan == NOTHING or state.degraded is None, "R12: a plan while offloading is off"
    for job in state.jobs.open.values():
        if isinstance(job, Store) and job.id in scene.world.copies and job.id not in known:
            for offer in job.offers:
                if offer.record is not None:
                    for key in offer.keys:
                        _note_store(scene, (offer.record.request, offer.incarnation, key))
    for entry in [entry for entry in scene.stored if entry[0] not in state.requests.live]:
        del scene.stored[entry]


def _note_store(scene: Scene, entry: tuple[RequestId, int, BlockKey]) -> None:
    scene.stored[entry] += 1
    failures = sum(
        scene.kind.often.get(kind, 0) - scene.left.get(kind, 0) for kind in ("fail", "late", "reset")
    )
    assert scene.stored[entry] <= 2 + failures, f"R8: {entry} is stored again and again"


def check_end(scene: Scene) -> None:
    """End all copies; check that no request waits forever and nothing is left. This uses up the scene.

    R9, R14: without open copies, every lookup has an answer, and no request is loading. R16: abandoned copies
    do not count as pending work. R11: after the last copy has ended, everything is released.
    """
    world, core = scene.world, scene.world.core
    if scene.remote_world is not None:
        scene.remote_world.answer()
    world.drain()
    for request in world.running():
        world.preempt(request)
    world.drain()
    world.idle_step()
    for name, request in list(world.requests.items()):
        assert request.state != "loading", f"R9: {name} waits for a load that is over"
        if request.state == "waiting":
            fetches = 0
            while world.lookup(request) is None:
                fetches += 1
                assert fetches <= _MOST_FETCHES, f"R14: {name} waits for nothing"
                world.drain()
    for request in list(world.requests.values()):
        if request.state != "ended":
            world.end(request)
    world.drain()
    assert not core.state.jobs.pending
    world.finish(*world.copies)  # this also ends abandoned copies
    assert not world.requests, f"R9: the load of {list(world.requests)} was never answered"
    assert not world.device.held, f"R5: blocks {dict(world.device.held)} are held"
    assert not world.device.leased, f"R5: blocks {dict(world.device.leased)} are leased"
    world.check()
    _check_nothing_is_left(scene)


def _check_nothing_is_left(scene: Scene) -> None:
    core = scene.world.core
    pool = core.state.pool
    for each in [pool, *(tier.pool for tier in core.state.tiers)]:
        rest = sum(each.count(at) for at in (SlotState.EMPTY, SlotState.READY, SlotState.QUARANTINED))
        assert rest == each.capacity, "R11: slots are missing"
    assert not core.state.tally.open_offers, "R11: an offer has no outcome"
    left = left_behind(core)
    assert not left, f"R11: left behind: {left}"
