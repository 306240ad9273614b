"""Events: what the core decided or learnt, in the past tense, one per job, request or step and never one per block.

Ids, counts and enums only: no token, no prompt text, no key. A slot's id says where bytes lay, not what they were. Counters, the journal and every observer read these.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.model.causes import (
    CopyOutcome,
    DegradeCause,
    EvictionCause,
    Found,
    LoadOutcome,
    MissCause,
    PinDropCause,
    RejectionCause,
    StoreOutcome,
)
from kvoffload.model.ids import JobId, Rank, RequestId, SlotId
from kvoffload.model.transfer import Direction


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True)
class HitPinned(Event):
    """A lookup found blocks and pinned them."""

    request: RequestId
    blocks: int
    device_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class HitDropped(Event):
    """Pinned blocks were let go without a load."""

    request: RequestId
    blocks: int
    cause: PinDropCause


@dataclass(frozen=True, slots=True)
class LookupDeferred(Event):
    """A lookup answered "not yet": another request, `owner`, is loading the same prefix."""

    request: RequestId
    owner: RequestId


@dataclass(frozen=True, slots=True)
class LookupAnswered(Event):
    """A request was admitted; its last lookup counts.

    Args:
        request: which.
        device_tokens: tokens that the device held already; their blocks are not counted.
        hit_blocks: block positions found on the host, as far as the engine accepted them.
        miss_blocks: the other block positions; the first has `cause`, those behind it `behind_miss`.
        hit_tokens: tokens in the hit positions.
        miss_tokens: tokens in the missed positions.
        cause: why the first missing position missed; None when nothing missed.
    """

    request: RequestId
    device_tokens: int
    hit_blocks: int
    miss_blocks: int
    hit_tokens: int
    miss_tokens: int
    cause: MissCause | None


@dataclass(frozen=True, slots=True)
class LoadScheduled(Event):
    """A load became binding; its slots are pinned and its device blocks leased until every rank has ended it.

    `slots` are those it reads: what the last store into each of them brought.
    """

    job: JobId
    request: RequestId
    blocks: int
    tokens: int
    slots: tuple[SlotId, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadEnded(Event):
    """The engine can go on: the load arrived, or must be recomputed.

    `blocks` counts those with `outcome`; of a corrupt load, the others are told in a second event as failed.
    """

    job: JobId
    request: RequestId
    blocks: int
    outcome: LoadOutcome


@dataclass(frozen=True, slots=True)
class BlocksOffered(Event):
    """Computed blocks were offered to the host in this step."""

    blocks: int


@dataclass(frozen=True, slots=True)
class StoreScheduled(Event):
    """Blocks were given slots, leased, and put into a job."""

    job: JobId
    blocks: int
    slots: tuple[SlotId, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreEnded(Event):
    """Offers got their final outcome."""

    outcome: StoreOutcome
    blocks: int


@dataclass(frozen=True, slots=True)
class RankReported(Event):
    """One rank ended its part of a job."""

    job: JobId
    rank: Rank
    direction: Direction
    outcome: CopyOutcome
    copied_bytes: int
    queue_s: float
    copy_s: float


@dataclass(frozen=True, slots=True)
class JobAbandoned(Event):
    """A copy did not end in time; its slots and device blocks are written off until it does, the slots for good."""

    job: JobId
    direction: Direction
    blocks: int


@dataclass(frozen=True, slots=True)
class CopiesStalled(Event):
    """Too many copies were abandoned: no new one is begun.

    Args:
        blocks: device blocks under copies that were abandoned.
        limit_blocks: how many there may be.
        jobs_in_a_row: jobs abandoned since one last ended.
    """

    blocks: int
    limit_blocks: int
    jobs_in_a_row: int


@dataclass(frozen=True, slots=True)
class CopiesResumed(Event):
    """Copies that were abandoned have ended after all: new ones are begun again; `blocks` are still under such copies."""

    blocks: int


@dataclass(frozen=True, slots=True)
class BlocksEvicted(Event):
    """Blocks left the host."""

    blocks: int
    cause: EvictionCause


@dataclass(frozen=True, slots=True)
class BlocksZeroed(Event):
    """Positions were struck from requests' records because the engine handed their blocks out again."""

    blocks: int


@dataclass(frozen=True, slots=True)
class CapacityGrown(Event):
    """All ranks have this many slots ready."""

    slots: int


@dataclass(frozen=True, slots=True)
class ResetStarted(Event):
    """Nothing computed so far can be found any more.

    Args:
        generation: how many resets there have been.
        dropped_blocks: blocks that were found until now.
        draining_blocks: slots still under a running copy.
        open_jobs: jobs that still run and were not abandoned; the call that reset answered false if there are any.
    """

    generation: int
    dropped_blocks: int
    draining_blocks: int
    open_jobs: int


@dataclass(frozen=True, slots=True)
class ResetEnded(Event):
    """The last job that was under way at a reset has ended, or was abandoned; one event for resets that follow closely.

    Args:
        generation: of the last reset.
        abandoned_jobs: those whose copies did not end in time; their memory stays written off.
    """

    generation: int
    abandoned_jobs: int


@dataclass(frozen=True, slots=True)
class FactRejected(Event):
    """The engine did what the contract does not foresee; survived."""

    cause: RejectionCause
    request: RequestId | None = None


@dataclass(frozen=True, slots=True)
class OffloadingDegraded(Event):
    """Offloading is off for good; open jobs drain and the engine goes on without it."""

    cause: DegradeCause
    detail: str


@dataclass(frozen=True, slots=True)
class FirstTokenReached(Event):
    """A request's first token is there, as far as the engine's next step shows.

    Args:
        request: which.
        found: by its last lookup.
        seconds: since the engine told of it.
    """

    request: RequestId
    found: Found
    seconds: float


@dataclass(frozen=True, slots=True)
class NetBenefitTurned(Event):
    """The sign of what offloading brings has turned.

    Args:
        is_negative: it costs more seconds than it saves from now on.
        net_s: seconds saved less seconds lost in the period that showed it.
        period_s: how long that was.
    """

    is_negative: bool
    net_s: float
    period_s: float
