"""Events: what the core decided or found out. Event names are in the past tense.

There is one event per job, request or step, never one per block. Events hold ids, counts and enums, but no tokens,
prompt text or keys. Counters, the journal and every observer read them.
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
    """Base of all events. A journal line must have exactly the fields of its event."""


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
    """A lookup answered "not yet" because the prefix is being copied to device or host. Reported once per wait.

    Args:
        request: the request that must wait.
        owner: the other request that loads the prefix; None if the prefix is fetched from a lower tier.
    """

    request: RequestId
    owner: RequestId | None


class LookupAnswered(Event, frozen=True):
    """A request was admitted. Only its last lookup is counted.

    Args:
        request: the request that was admitted.
        device_tokens: tokens found on the device; their blocks are not counted.
        hit_blocks: block positions found on the host and accepted by the engine.
        miss_blocks: the other block positions; the first missed for `cause`, all later positions for `behind_miss`.
        hit_tokens: tokens in the hit positions.
        miss_tokens: tokens in the missed positions.
        cause: why the first missing position missed; None when nothing missed.
        fetched_tokens: tokens of the hit that were fetched from a lower tier for this request; computed from the share
            of the hit's blocks that were fetched.
        fetched_from: the tier that the `fetched_tokens` came from, or the last of several such tiers; None without
            fetched tokens.
    """

    request: RequestId
    device_tokens: int
    hit_blocks: int
    miss_blocks: int
    hit_tokens: int
    miss_tokens: int
    cause: MissCause | None
    fetched_tokens: int = 0
    fetched_from: Tier | None = None


class BoundaryAsked(Event, frozen=True):
    """An admitted request lacks only the recurrent state after `tokens` tokens.

    The engine is asked to keep this state.
    """

    request: RequestId
    tokens: int


class BoundaryMade(Event, frozen=True):
    """The engine handed off the recurrent state after `tokens` tokens, as requested."""

    request: RequestId
    tokens: int


class StatesCopied(Event, frozen=True):
    """A job succeeded, and `blocks` of its blocks are recurrent states."""

    direction: Direction
    blocks: int


class LoadScheduled(Event, frozen=True):
    """A load was scheduled.

    The load's `slots` stay pinned and its device blocks stay leased until every rank has ended the copy.
    """

    job: JobId
    request: RequestId
    blocks: int
    tokens: int
    slots: tuple[SlotId, ...] = ()


class LoadEnded(Event, frozen=True):
    """A load has ended: the request continues with the loaded blocks, or recomputes them.

    `blocks` is how many blocks had this `outcome`. If a load was corrupt, a second event reports its intact blocks as
    failed.
    """

    job: JobId
    request: RequestId
    blocks: int
    outcome: LoadOutcome


class BlocksOffered(Event, frozen=True):
    """Computed blocks were offered to the host in this step."""

    blocks: int


class StoreScheduled(Event, frozen=True):
    """Blocks were leased and assigned slots, and their job was planned."""

    job: JobId
    blocks: int


class StoreEnded(Event, frozen=True):
    """The final outcome of `blocks` offers is known."""

    outcome: StoreOutcome
    blocks: int


class RankReported(Event, frozen=True):
    """One rank ended its part of a job. The job copies between device and host, or between host and a lower tier."""

    job: JobId
    rank: Rank
    direction: Direction
    outcome: CopyOutcome
    copied_bytes: int
    queue_s: float
    copy_s: float
    tier: Tier = Tier.HOST


class TierCopyScheduled(Event, frozen=True):
    """Blocks were scheduled for a copy between host and a lower tier.

    Args:
        job: the job.
        direction: STORE to the lower tier, LOAD from it.
        blocks: how many blocks.
        request: for a fetch, the request that needs the blocks; None for a warm start.
        tokens: for a fetch, how many tokens it adds to the request's hit.
        tier: the lower tier.
    """

    job: JobId
    direction: Direction
    blocks: int
    request: RequestId | None = None
    tokens: int = 0
    tier: Tier = Tier.DISK


class TierCopyEnded(Event, frozen=True):
    """The outcome of a copy between host and a lower tier is known; `copy_s` is the time of the slowest rank so far."""

    job: JobId
    direction: Direction
    blocks: int
    outcome: TierOutcome
    copy_s: float = 0.0
    tier: Tier = Tier.DISK


class JobAbandoned(Event, frozen=True):
    """A copy did not end in time.

    The copy's device blocks stay leased until the copy ends; its slots are never used again.
    """

    job: JobId
    direction: Direction
    blocks: int


class CopiesStalled(Event, frozen=True):
    """Too many copies were abandoned, so no new copy starts.

    Args:
        blocks: device blocks that abandoned copies still lease.
        limit_blocks: the maximum number of device blocks that abandoned copies may lease.
        jobs_in_a_row: jobs abandoned since a job last ended.
    """

    blocks: int
    limit_blocks: int
    jobs_in_a_row: int


class CopiesResumed(Event, frozen=True):
    """Enough abandoned copies have ended, so new copies start again.

    The remaining abandoned copies lease `blocks` device blocks.
    """

    blocks: int


class BlocksEvicted(Event, frozen=True):
    """Blocks left the host.

    `age_s` is the time in seconds since the latest use of any of these blocks; 0 unless they were evicted for space.
    """

    tier: ClassVar[Tier] = Tier.HOST
    blocks: int
    cause: EvictionCause
    age_s: float = 0.0


class DiskBlocksEvicted(Event, frozen=True):
    """Blocks left the disk."""

    tier: ClassVar[Tier] = Tier.DISK
    blocks: int
    cause: EvictionCause


class BlocksZeroed(Event, frozen=True):
    """Entries in requests' block tables were cleared, because the engine reused their blocks."""

    blocks: int


class CapacityGrown(Event, frozen=True):
    """Every rank has `slots` host slots ready."""

    slots: int


class DiskOpened(Event, frozen=True):
    """The disk's whole index was read, and the disk can be used.

    Args:
        slots: slots in each rank's file.
        blocks: how many of the slots contain a block that can hit.
    """

    slots: int
    blocks: int


class DiskClosed(Event, frozen=True):
    """The disk's index can no longer be read or written. The disk tier is off until the next start."""


class ResetStarted(Event, frozen=True):
    """The cache was reset. Lookups no longer find anything computed before the reset.

    Args:
        epoch: number of resets so far.
        dropped_blocks: blocks removed from the index.
        draining_blocks: slots still under a running copy.
        open_jobs: running jobs that were not abandoned; if there are any, the reset call returned False.
    """

    epoch: int
    dropped_blocks: int
    draining_blocks: int
    open_jobs: int


class ResetEnded(Event, frozen=True):
    """All jobs that were running at a reset have ended or were abandoned. Resets in quick succession share one event.

    Args:
        epoch: the number of the last reset.
        abandoned_jobs: jobs whose copies did not end in time; their memory stays quarantined.
    """

    epoch: int
    abandoned_jobs: int


class FactRejected(Event, frozen=True):
    """The engine reported something that its contract does not allow; the report was ignored."""

    cause: RejectionCause
    request: RequestId | None = None


class OffloadingDegraded(Event, frozen=True):
    """Offloading is off until the engine restarts. Open jobs run to their end; the engine continues."""

    cause: DegradeCause
    detail: str


class FirstTokenReached(Event, frozen=True):
    """A request has its first token. This is noticed in the engine's next step.

    The four token counts add up to the length of the request's prompt.

    Args:
        request: the request.
        found: where the request's last lookup found blocks.
        seconds: time since the engine reported the request.
        device_tokens: prompt tokens that the device held.
        host_tokens: prompt tokens loaded from the host, not counting fetched tokens.
        fetched_tokens: prompt tokens loaded after a fetch from a lower tier for this request.
        computed_tokens: all other prompt tokens, including the tokens of a failed load.
        fetched_from: the tier of `fetched_tokens`; None if there are none.
    """

    request: RequestId
    found: Found
    seconds: float
    device_tokens: int = 0
    host_tokens: int = 0
    fetched_tokens: int = 0
    computed_tokens: int = 0
    fetched_from: Tier | None = None


class NetBenefitTurned(Event, frozen=True):
    """The net benefit of offloading changed from gain to loss or back.

    Args:
        is_negative: whether offloading now costs more seconds than it saves.
        net_s: seconds saved minus seconds lost in the period.
        period_s: the period's length.
    """

    is_negative: bool
    net_s: float
    period_s: float
