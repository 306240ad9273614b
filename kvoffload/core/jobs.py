"""Jobs: planned sets of copies. There is one kind for each direction between two tiers.

    Store   device ─▶ host            Spill   host ─▶ lower tier
    Load    host ─▶ device            Fetch   lower tier ─▶ host

A job's owner plans the job. The core then calls the owner's methods as the job proceeds:

    plan ─▶ submit ─▶ owner.reported, once for each rank ─▶ owner.ended ─▶ close
      │       └─ overdue, drop ─▶ owner.failed ─────────────────┘
      └─ drop ─▶ owner.failed ─▶ owner.ended ─▶ cancel

The *outcome* of a job is known (the job is `settled`) when every rank has copied, when one rank has failed, or when the
job timed out or was dropped. The job's *memory* is free only when every rank has ended its copy. Rules R4, R9 and R16
cover the time between these two moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import compress
from operator import not_
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from kvoffload.core.machine import JOB, JobEvent, JobState
from kvoffload.core.request import RequestRecord, from_fields
from kvoffload.core.slots import count, uncount
from kvoffload.model.causes import CopyOutcome, LoadOutcome, StoreOutcome, TierOutcome
from kvoffload.model.engine import BlockPool
from kvoffload.model.events import CopiesResumed, CopiesStalled, Event
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import BlockKey, DeviceBlockId, JobId, Rank, SlotId
from kvoffload.model.wire import LOWER_TIERS, AnyJob, CopyJob, Direction, JobReport, Tier, TransferPlan

_PLANNED, _SUBMITTED, _ABANDONED = JobState.PLANNED, JobState.SUBMITTED, JobState.ABANDONED
_SUBMIT, _FINISH, _FAIL = JobEvent.SUBMIT, JobEvent.FINISH, JobEvent.FAIL
_DONE = CopyOutcome.DONE

JobT_contra = TypeVar("JobT_contra", contravariant=True)


class Offer(NamedTuple):
    """Computed blocks of one block table that may be stored, heads first. Each block gets an outcome of its own.

    If the lazy planner found the blocks in the device's free queue, `record` is None and the fields after it are unused.
    """

    keys: Sequence[BlockKey]
    blocks: Sequence[DeviceBlockId]
    record: RequestRecord | None = None
    incarnation: int = 0
    places: Sequence[int] = ()  # of each block: its position times the number of groups, plus its group

    def one(self, number: int) -> Offer:
        """Return an offer of a single block."""
        key, block, places = self.keys[number], self.blocks[number], self.places[number : number + 1]
        return _offer(((key,), (block,), self.record, self.incarnation, places))

    def part(self, wanted: Sequence[bool]) -> Offer:
        """Return an offer of the blocks for which `wanted` is True."""
        keys, blocks = list(compress(self.keys, wanted)), list(compress(self.blocks, wanted))
        places = list(compress(self.places, wanted))
        return _offer((keys, blocks, self.record, self.incarnation, places))

    def split(self, wanted: Sequence[bool]) -> tuple[Offer, Offer]:
        """Return an offer of the blocks for which `wanted` is True, and one of the others."""
        count = wanted.count(True)
        if not all(wanted[:count]):
            return self.part(wanted), self.part(list(map(not_, wanted)))
        # Usually the wanted blocks are the head of a prefix.
        keys, blocks, *table, places = self
        head = _offer((keys[:count], blocks[:count], *table, places[:count]))
        return head, _offer((keys[count:], blocks[count:], *table, places[count:]))


_offer = from_fields(Offer)


def keys_of(offers: Sequence[Offer]) -> Sequence[BlockKey]:
    """Return the keys of all blocks in some offers, in the same order."""
    if not offers[1:]:
        return offers[0].keys
    return [key for offer in offers for key in offer.keys]


def blocks_of(offers: Sequence[Offer]) -> Sequence[DeviceBlockId]:
    """Return all blocks in some offers, in the same order."""
    if not offers[1:]:
        return offers[0].blocks
    return [block for offer in offers for block in offer.blocks]


def some(offers: Iterable[Offer]) -> list[Offer]:
    """Return the offers that have blocks."""
    return [offer for offer in offers if offer.keys]


def depth_of(place: int, groups: Sequence[GroupSpec]) -> int:
    """Return how many tokens of a request are before the block at a place of an offer."""
    position, group = divmod(place, len(groups))
    return position * groups[group].block_tokens


def singles(offers: Iterable[Offer]) -> list[Offer]:
    """Return an offer for each block."""
    return [offer.one(number) for offer in offers for number in range(len(offer.keys))]


def joined(offers: Iterable[Offer]) -> list[Offer]:
    """Return the blocks of some offers in one offer for each block table."""
    of_tables: dict[tuple[RequestRecord | None, int], list[Offer]] = {}
    for offer in offers:
        of_tables.setdefault((offer.record, offer.incarnation), []).append(offer)
    return [
        Offer(keys_of(run), blocks_of(run), *table, [place for one in run for place in one.places])
        for table, run in of_tables.items()
    ]


def owner(offer: Offer) -> RequestRecord | None:
    """Return the request that made an offer, or None if the request no longer has the offer's block table."""
    record = offer.record
    if record is None or record.incarnation != offer.incarnation or not record.is_live:
        return None
    return record


class Failure(Enum):
    """Why a job failed.

    Each value lists the outcomes reported for the blocks of a store, of a load, and of a fetch or spill.
    """

    # A rank's copy failed.
    FAILED = StoreOutcome.FAILED, LoadOutcome.FAILED, TierOutcome.FAILED
    # A rank found corrupt bytes.
    CORRUPT = StoreOutcome.FAILED, LoadOutcome.CORRUPT, TierOutcome.CORRUPT
    # A rank did not report in time. It may still be copying, so the slots that it may write are quarantined.
    TIMED_OUT = StoreOutcome.ABANDONED, LoadOutcome.ABANDONED, TierOutcome.ABANDONED
    # The job was dropped before it was sent to the workers.
    CANCELLED = StoreOutcome.CANCELLED, LoadOutcome.CANCELLED, TierOutcome.CANCELLED
    # The job was dropped after it was sent to the workers. While offloading is on, only a reset drops such a store.
    DROPPED = StoreOutcome.BEFORE_RESET, LoadOutcome.FAILED, TierOutcome.CANCELLED

    def __init__(self, of_store: StoreOutcome, of_load: LoadOutcome, of_tier: TierOutcome) -> None:
        self.of_store = of_store
        self.of_load = of_load
        self.of_tier = of_tier


class Owner(Protocol[JobT_contra]):
    """The part of the core that plans jobs of one kind. Only a job's owner settles the job and releases its memory."""

    def reported(self, job: JobT_contra, rank: Rank, report: JobReport, /) -> None:
        """Handle the end of one rank's copy."""

    def failed(self, job: JobT_contra, why: Failure, /) -> None:
        """Settle a job that will not succeed. A job that times out may have been settled before."""

    def ended(self, job: JobT_contra, /) -> None:
        """Release a job's memory after every rank has ended its copy. Settle the job if it is not settled yet."""


class Job(Struct, eq=False):
    """The fields that all jobs share.

    Args:
        owner: the part of the core that planned the job.
        slots: host slots.
        targets: the other end of each copy, in the order of `slots`: a device block, a disk slot, or a key in the
            remote tier.
        extra: further data for the workers, as listed by `CopyJob`.
        tier: the lower of the two tiers; HOST for copies between device and host.
        id: the job's id, assigned by `Jobs.plan`.
        waiting: the ranks that are still copying.
        copy_s: the longest copy time that a rank has reported so far, in seconds.
        failed: the outcome that the first failing rank reported; None if no rank has failed.
        settled: True when the outcome is known, even if copies still run.
    """

    direction: ClassVar[Direction]
    owner: Owner[Any]
    slots: list[SlotId]
    targets: list[Any]
    extra: Any = None
    tier: Tier = Tier.HOST
    id: JobId = JobId(-1)
    waiting: set[Rank] = set()
    copy_s: float = 0.0
    state: JobState = JobState.PLANNED
    failed: CopyOutcome | None = None
    settled: bool = False

    def reported(self, rank: Rank, outcome: CopyOutcome, copy_s: float) -> bool:
        """Record that a rank's copy has ended. Return False and change nothing if the report is a duplicate."""
        if rank not in self.waiting:
            return False
        self.waiting.discard(rank)
        if copy_s > self.copy_s:
            self.copy_s = copy_s
        if outcome is not _DONE and self.failed is None:
            self.failed = outcome
        return True


class DeviceJob(Job, eq=False):
    """A job between device and host. The job's device blocks stay leased until the last rank has ended its copy.

    Args:
        concerns: the requests whose blocks the job copies.
    """

    concerns: dict[RequestRecord, None] = {}


class Store(DeviceJob, eq=False):
    """A job that copies blocks from the device to the host.

    Args:
        offers: the accepted offers, in the order of `slots`.
        keys: the keys of their blocks, in the same order.
    """

    direction = Direction.STORE
    offers: list[Offer] = []
    keys: list[BlockKey] = []


class Load(DeviceJob, kw_only=True, eq=False):
    """A job that copies blocks from the host to the device for one request.

    `extra` is the request's id; None if other parts of the same load follow.

    Args:
        record: the request.
        incarnation: the request's incarnation when the load was planned.
        corrupt: positions in the job that a rank found corrupt.
    """

    direction = Direction.LOAD
    record: RequestRecord
    incarnation: int
    corrupt: set[int] = set()


class TierJob(Job, kw_only=True, eq=False):
    """A job that copies blocks between the host and a lower tier.

    Args:
        keys: the blocks' keys, in the order of `slots`, heads first.
        tier_slots: the blocks' slots in the tier's pool, in the same order.
        missing: positions in the job whose blocks the remote tier does not have.
        stuck: positions in the job whose destination slots a hanging call may still write.
    """

    keys: list[BlockKey]
    tier_slots: list[SlotId]
    missing: set[int] = set()
    stuck: set[int] = set()

    @property
    def read(self) -> list[SlotId]:
        """Return the source slots: the tier's for a fetch, the host's for a spill."""
        return self.tier_slots if self.direction is Direction.LOAD else self.slots

    @property
    def written(self) -> list[SlotId]:
        """Return the destination slots: the host's for a fetch, the tier's for a spill."""
        return self.slots if self.direction is Direction.LOAD else self.tier_slots


class Fetch(TierJob, eq=False):
    """A job that copies blocks from a lower tier to the host.

    Args:
        wanted: the requests that wait for this fetch.
        corrupt: positions in the job that a rank found corrupt.
    """

    direction = Direction.LOAD
    wanted: dict[RequestRecord, None] = {}
    corrupt: set[int] = set()


class Spill(TierJob, eq=False):
    """A job that copies blocks from the host to a lower tier.

    Args:
        sums: for each rank that has reported, the checksum of its shard of each block.
    """

    direction = Direction.STORE
    sums: dict[Rank, tuple[int, ...]] = {}


class Jobs:
    """The open jobs: planned jobs, submitted jobs, and timed-out jobs whose copies may still run."""

    def __init__(self, ranks: int) -> None:
        self._ranks = frozenset(map(Rank, range(ranks)))
        self.last = JobId(-1)
        """The id of the most recently planned job; -1 before the first job is planned."""
        self.by_state = {
            (tier, direction): [0] * len(JobState)
            for tier in (Tier.HOST, *LOWER_TIERS)
            for direction in Direction
        }
        """The number of open jobs in each state, for each tier and direction."""
        self.open: dict[JobId, Job] = {}
        """The open jobs by id, the oldest first."""
        self.planned: list[Job] = []
        """The jobs of the next plan, in the order in which they were planned."""
        self.cancelled: list[JobId] = []
        """Submitted fetches that no request needs.

        The next plan tells the workers to skip copies that have not started.
        """
        self.open_on_tiers = 0
        """The number of open jobs between the host and a lower tier."""
        self.pending = 0
        """How many jobs are planned or submitted and have not timed out."""

    def plan(self, job: Job) -> None:
        """Give a job the next id, and add it to the next plan."""
        job.id = self.last = self.last + 1  # type: ignore[assignment]  # calling `JobId` would take time
        job.waiting = set(self._ranks)
        self.open[job.id] = job
        self.planned.append(job)
        self.pending += 1
        self.open_on_tiers += job.tier is not Tier.HOST
        self.by_state[job.tier, job.direction][job.state] += 1

    def count(self, direction: Direction, state: JobState, tier: Tier = Tier.HOST) -> int:
        """Return how many open jobs have this direction, state and lower tier (HOST between device and host)."""
        return self.by_state[tier, direction][state]

    def on_tiers(self) -> list[JobId]:
        """Return the ids of the open jobs between the host and a lower tier."""
        return [job.id for job in self.open.values() if job.tier is not Tier.HOST]

    @property
    def is_loading(self) -> bool:
        """Return whether a load is planned or submitted."""
        counts = self.by_state[Tier.HOST, Direction.LOAD]
        return bool(counts[_PLANNED] or counts[_SUBMITTED])

    @property
    def pending_on_tiers(self) -> int:
        """Return how many jobs between the host and lower tiers are planned or submitted."""
        counts = [self.by_state[tier, direction] for tier in LOWER_TIERS for direction in Direction]
        return sum([each[_PLANNED] + each[_SUBMITTED] for each in counts])

    def submit(self) -> TransferPlan:
        """Return the step's plan, and mark its jobs as submitted.

        If this method raises, no job has changed its state (R12).
        """
        loads: list[AnyJob] = []
        stores: list[AnyJob] = []
        below: list[AnyJob] = []
        for job in self.planned:
            slots, targets = tuple(job.slots), tuple(job.targets)
            copy = CopyJob(job.id, job.direction, job.tier, slots, targets, job.extra)
            if job.tier is not Tier.HOST:
                below.append(copy)
            elif job.direction is Direction.LOAD:
                loads.append(copy)
            else:
                stores.append(copy)
        plan = TransferPlan(tuple(loads), tuple(stores), tuple(below), tuple(self.cancelled))
        moved = JOB.steps[_SUBMIT][_PLANNED]
        for job in self.planned:
            counts = self.by_state[job.tier, job.direction]
            counts[_PLANNED] -= 1
            counts[moved] += 1
            job.state = moved
        self.planned.clear()
        if self.cancelled:
            self.cancelled.clear()
        return plan

    def time_out(self, job: Job) -> None:
        """Mark a submitted job as timed out. Its copies may still run."""
        was = job.state
        job.state = JOB.steps[JobEvent.ABANDON][was]
        counts = self.by_state[job.tier, job.direction]
        counts[was] -= 1
        counts[job.state] += 1
        self.pending -= 1

    def drop(self, job: Job) -> None:
        """Cancel a planned job, or discard the result of a submitted job, whose copies run to their end."""
        if job.state is _PLANNED:
            job.owner.failed(job, Failure.CANCELLED)
            job.owner.ended(job)
            self.planned.remove(job)
            self.close(job, JobEvent.CANCEL)
        elif not job.settled:
            job.owner.failed(job, Failure.DROPPED)

    def cancel(self, job: Fetch) -> None:
        """Drop a fetch. Workers skip the copies of the fetch that have not started."""
        self.drop(job)
        if job.state is _SUBMITTED:
            self.cancelled.append(job.id)

    def cancel_nothing(self) -> None:
        """Discard cancellations that were not sent to the workers yet."""
        self.cancelled.clear()

    def close(self, job: Job, event: JobEvent = _FINISH) -> None:
        """Remove a job that was cancelled, or whose last rank has ended its copy."""
        was = job.state
        job.state = JOB.steps[event if job.failed is None else _FAIL][was]
        self.by_state[job.tier, job.direction][was] -= 1
        self.pending -= was is not _ABANDONED
        del self.open[job.id]
        self.open_on_tiers -= job.tier is not Tier.HOST


class InFlight:
    """The keys that are being copied to a tier, and the offers that wait for the outcomes of these copies.

    A key is removed as soon as its job has an outcome. After a failure, another block with this key can then be stored,
    while the failed job's block stays leased until its last copy has ended.
    """

    def __init__(self) -> None:
        self.keys: dict[BlockKey, Job | None] = {}
        """For each key, the job that copies it: a store or fetch to the host, or a spill to a lower tier.

        None if the caller of `TierStore.reserve` copies it.
        """
        self.duplicates: dict[BlockKey, list[Offer]] = {}
        """For each key, the waiting offers of other device blocks with the same content, each of a single block."""

    def began(self, keys: Iterable[BlockKey], job: Job | None) -> None:
        """Record that a job is copying these keys to the tier."""
        self.keys.update(dict.fromkeys(keys, job))

    def wait(self, duplicate: Offer) -> None:
        """Defer an offer of a single block until the job that copies the block's key has an outcome."""
        self.duplicates.setdefault(duplicate.keys[0], []).append(duplicate)

    def ended(self, keys: Sequence[BlockKey]) -> list[Offer]:
        """Remove keys after their job's outcome. Return the offers that waited for these keys."""
        in_flight, duplicates = self.keys, self.duplicates
        for key in keys:
            del in_flight[key]
        if not duplicates:
            return []
        return [offer for key in keys if key in duplicates for offer in duplicates.pop(key)]


class Leases:
    """Leases device blocks, which keeps the engine from reusing a block while an open job copies it (R5).

    The only caller of the block pool's `lease` and `release`.
    """

    def __init__(self, device: BlockPool) -> None:
        self._device = device
        self.counts: dict[DeviceBlockId, int] = {}
        """The number of leases of each block."""

    def take(self, blocks: Sequence[DeviceBlockId]) -> None:
        """Lease blocks. Changes the engine's reference counts."""
        count(self.counts, blocks)
        self._device.lease(blocks)

    def release(self, blocks: Sequence[DeviceBlockId]) -> None:
        """Release blocks in reverse order, the deepest first. Changes the engine's reference counts.

        Raises:
            KeyError: a block is not leased; nothing has changed.
        """
        uncount(self.counts, blocks)
        self._device.release(blocks[::-1])


_MOST_IN_A_ROW = 2


class Stall:
    """Counts jobs that timed out, and stops new copies before such jobs lease the whole device pool (R5, R16).

    Args:
        limit: how many device blocks timed-out jobs may lease together before new copies stop. A single job may exceed
            the limit.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._largest = 0
        self.blocks = 0
        """The number of device blocks that jobs still lease after they timed out."""
        self.jobs_in_a_row = 0
        """The number of timeouts since a job last ended."""
        self.is_on = False
        """True while no new copy may start."""

    @property
    def limit(self) -> int:
        """Return the number of leased device blocks above which new copies stop."""
        return max(self._limit, self._largest)

    def timed_out(self, job: DeviceJob) -> list[Event]:
        """Count a job that timed out. Return an event if new copies stop because of this timeout."""
        self.blocks += len(job.slots)
        self._largest = max(self._largest, len(job.slots))
        self.jobs_in_a_row += 1
        return self._turned()

    def ended(self, job: DeviceJob) -> list[Event]:
        """Record that a job's last copy has ended. Return an event if new copies may start again."""
        if job.state is _ABANDONED:
            self.blocks -= len(job.slots)
        self.jobs_in_a_row = 0
        return self._turned()

    def _turned(self) -> list[Event]:
        was_on = self.is_on
        self.is_on = self.blocks > self.limit or self.jobs_in_a_row > _MOST_IN_A_ROW
        if self.is_on is was_on:
            return []
        if self.is_on:
            return [CopiesStalled(self.blocks, self.limit, self.jobs_in_a_row)]
        return [CopiesResumed(self.blocks)]
