"""Events: what the core decided or learnt, in the past tense; one per job, request or step, never one per block.

They hold ids, counts and enums: no token, no prompt text, no key. Counters, the journal and every observer read them.
"""

from __future__ import annotations

from typing import ClassVar

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
    TierOutcome,
)
from kvoffload.model.ids import JobId, Rank, RequestId, SlotId
from kvoffload.model.message import Message
from kvoffload.model.wire import Direction, Tier


class Event(Message, frozen=True, forbid_unknown_fields=True):
    """Base of all events. A line of a journal must have exactly an event's fields."""


class HitPinned(Event, frozen=True):
    """A lookup found blocks and pinned them."""

    request: RequestId
    blocks: int
    device_tokens: int
    hit_tokens: int


class HitDropped(Event, frozen=True):
    """Pinned blocks were released without a load."""

    request: RequestId
    blocks: int
    cause: PinDropCause


class LookupDeferred(Event, frozen=True):
    """A lookup answered "not yet": the prefix is on its way to the device, or to the host. Each wait is reported once.

    Args:
        request: which.
        owner: the other request that loads it; None where it is fetched from a lower tier.
    """

    request: RequestId
    owner: RequestId | None


class LookupAnswered(Event, frozen=True):
    """A request was admitted; only its last lookup is counted.

    Args:
        request: the request that was admitted.
        device_tokens: tokens that the device held already; their blocks are not counted.
        hit_blocks: block positions found on the host and accepted by the engine.
        miss_blocks: the other block positions; the first has `cause`, those behind it `behind_miss`.
        hit_tokens: tokens in the hit positions.
        miss_tokens: tokens in the missed positions.
        cause: why the first missing position missed; None when nothing missed.
        fetched_tokens: of the hit, what was fetched from a lower tier for this request; with several groups their blocks' share.
        fetched_from: the tier; of several the one that brought blocks last.
    """

    request: RequestId
    device_tokens: int
    hit_blocks: int
    miss_blocks: int
    hit_tokens: int
    miss_tokens: int
    cause: MissCause | None
    fetched_tokens: int = 0
    fetched_from: Tier = Tier.DISK


class BoundaryAsked(Event, frozen=True):
    """A request was admitted whose prefix lacks a recurrent state alone: the engine is asked for the one after `tokens`."""

    request: RequestId
    tokens: int


class BoundaryMade(Event, frozen=True):
    """The engine handed off the recurrent state that it was asked for."""

    request: RequestId
    tokens: int


class StatesCopied(Event, frozen=True):
    """A job ended well; `blocks` of its blocks are recurrent states."""

    direction: Direction
    blocks: int


class LoadScheduled(Event, frozen=True):
    """A load became binding; its slots are pinned and its device blocks leased until every rank has ended it.

    The job reads `slots`.
    """

    job: JobId
    request: RequestId
    blocks: int
    tokens: int
    slots: tuple[SlotId, ...] = ()


class LoadEnded(Event, frozen=True):
    """A load has ended: the request continues with its blocks, or recomputes them.

    `blocks` counts those with `outcome`. The intact blocks of a corrupt load follow in a second event, as failed.
    """

    job: JobId
    request: RequestId
    blocks: int
    outcome: LoadOutcome


class BlocksOffered(Event, frozen=True):
    """Computed blocks were offered to the host in this step."""

    blocks: int


class StoreScheduled(Event, frozen=True):
    """Blocks were leased, assigned slots and put into a job."""

    job: JobId
    blocks: int


class StoreEnded(Event, frozen=True):
    """Offers got their final outcome."""

    outcome: StoreOutcome
    blocks: int


class RankReported(Event, frozen=True):
    """One rank ended its part of a job: between device and host, or between host and a tier below it."""

    job: JobId
    rank: Rank
    direction: Direction
    outcome: CopyOutcome
    copied_bytes: int
    queue_s: float
    copy_s: float
    tier: Tier = Tier.HOST


class TierCopyScheduled(Event, frozen=True):
    """Blocks are to be copied between host and a lower tier.

    Args:
        job: the job.
        direction: STORE to the tier, LOAD from it.
        blocks: how many.
        request: of a fetch, the request that looked for them; None for a warm start.
        tokens: of a fetch, what it makes that request's hit longer by.
        tier: which.
    """

    job: JobId
    direction: Direction
    blocks: int
    request: RequestId | None = None
    tokens: int = 0
    tier: Tier = Tier.DISK


class TierCopyEnded(Event, frozen=True):
    """The outcome of a copy between host and a lower tier is known; `copy_s` are the seconds of the slowest rank that has reported."""

    job: JobId
    direction: Direction
    blocks: int
    outcome: TierOutcome
    copy_s: float = 0.0
    tier: Tier = Tier.DISK


class JobAbandoned(Event, frozen=True):
    """A copy did not end in time. Its device blocks stay leased until it ends; its slots are never used again."""

    job: JobId
    direction: Direction
    blocks: int


class CopiesStalled(Event, frozen=True):
    """Too many copies were abandoned, so no new copy starts.

    Args:
        blocks: device blocks under abandoned copies.
        limit_blocks: the most allowed.
        jobs_in_a_row: jobs abandoned since a job last ended.
    """

    blocks: int
    limit_blocks: int
    jobs_in_a_row: int


class CopiesResumed(Event, frozen=True):
    """Enough abandoned copies have ended, so new copies start again. `blocks` device blocks are still under the others."""

    blocks: int


class BlocksEvicted(Event, frozen=True):
    """Blocks left the host."""

    tier: ClassVar[Tier] = Tier.HOST
    blocks: int
    cause: EvictionCause


class DiskBlocksEvicted(Event, frozen=True):
    """Blocks left the disk."""

    tier: ClassVar[Tier] = Tier.DISK
    blocks: int
    cause: EvictionCause


class BlocksZeroed(Event, frozen=True):
    """Positions were cleared in requests' records because the engine reused their blocks."""

    blocks: int


class CapacityGrown(Event, frozen=True):
    """All ranks have this many slots ready."""

    slots: int


class DiskOpened(Event, frozen=True):
    """All of the disk's index was read, and the disk can be used.

    Args:
        slots: slots of every rank's file.
        blocks: blocks that can be found in them.
    """

    slots: int
    blocks: int


class DiskClosed(Event, frozen=True):
    """The disk's index cannot be read or written any more: the disk is left alone until the next start."""


class ResetStarted(Event, frozen=True):
    """Nothing computed so far can be found any more.

    Args:
        epoch: number of resets so far.
        dropped_blocks: blocks removed from the index.
        draining_blocks: slots still under a running copy.
        open_jobs: jobs that still run and were not abandoned; if there are any, the reset call returned False.
    """

    epoch: int
    dropped_blocks: int
    draining_blocks: int
    open_jobs: int


class ResetEnded(Event, frozen=True):
    """The last job that ran at a reset has ended or was abandoned. Resets in quick succession share one event.

    Args:
        epoch: that of the last reset.
        abandoned_jobs: jobs whose copies did not end in time; their memory stays written off.
    """

    epoch: int
    abandoned_jobs: int


class FactRejected(Event, frozen=True):
    """The engine reported something its contract does not allow; the report was ignored."""

    cause: RejectionCause
    request: RequestId | None = None


class OffloadingDegraded(Event, frozen=True):
    """Offloading is off for good. Open jobs drain; the engine continues without it."""

    cause: DegradeCause
    detail: str


class FirstTokenReached(Event, frozen=True):
    """A request's first token was computed, seen at the engine's next step.

    Args:
        request: the request.
        found: what its last lookup found.
        seconds: time since the engine reported the request.
    """

    request: RequestId
    found: Found
    seconds: float


class NetBenefitTurned(Event, frozen=True):
    """The net benefit of offloading changed its sign.

    Args:
        is_negative: offloading now costs more seconds than it saves.
        net_s: seconds saved minus seconds lost in the period.
        period_s: the period's length.
    """

    is_negative: bool
    net_s: float
    period_s: float
