"""Events: the core's decisions and findings, which counters, the journal and other observers read.

There is one event per job, request or step, never one per block. Events contain ids, counts and enums, but no tokens,
prompt text or keys.
"""

from __future__ import annotations

from typing import ClassVar

from kvoffload.model.causes import (
    Adoption,
    CopyOutcome,
    Deferral,
    DegradeCause,
    EvictionCause,
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
    """Base of all events. A journal line has exactly its event's fields, and the reader rejects other lines."""


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
    """A lookup answered "not yet". Reported once per wait.

    Args:
        request: the request that must wait.
        reason: what the request waits for.
        owner: the request that loads the prefix, if `reason` is OTHERS_LOAD.
    """

    request: RequestId
    reason: Deferral
    owner: RequestId | None = None


class LookupAnswered(Event, frozen=True):
    """A request was admitted. Only its last lookup is counted.

    Args:
        request: the request that was admitted.
        device_tokens: tokens found on the device; their blocks are not counted.
        hit_blocks: block positions found on the host and accepted by the engine.
        miss_blocks: block positions after the hit. The first missed because of `cause`, the others are behind a miss.
        hit_tokens: tokens in the hit positions.
        miss_tokens: tokens in the missed positions.
        cause: why the first missed position missed; None if no position missed, or if the request opted out.
        fetched: lower tiers, and how many tokens of the hit were fetched from each for this request. All other tokens
            of the hit were on the host.
        opted_out: True if the request asked not to read cached blocks. The positions in `miss_blocks` were then not
            looked up, and are not misses.
    """

    request: RequestId
    device_tokens: int
    hit_blocks: int
    miss_blocks: int
    hit_tokens: int
    miss_tokens: int
    cause: MissCause | None
    fetched: tuple[tuple[Tier, int], ...] = ()
    opted_out: bool = False


class BoundaryAsked(Event, frozen=True):
    """The engine was asked for the recurrent state after `tokens` tokens: a longer hit lacks only this state."""

    request: RequestId
    tokens: int


class BoundaryMade(Event, frozen=True):
    """The engine handed off the recurrent state after `tokens` tokens, for which it was asked (`BoundaryAsked`)."""

    request: RequestId
    tokens: int


class StatesCopied(Event, frozen=True):
    """A job has copied recurrent states; `blocks` is the number of states."""

    direction: Direction
    blocks: int


class LoadScheduled(Event, frozen=True):
    """A load was scheduled. Its slots are pinned and its device blocks leased until every rank has ended its copy."""

    job: JobId
    request: RequestId
    blocks: int
    tokens: int
    slots: tuple[SlotId, ...] = ()


class LoadEnded(Event, frozen=True):
    """A load has ended: the request continues with the loaded blocks, or recomputes them.

    `blocks` is the number of blocks with this `outcome`. A corrupt load has two events: one counts its corrupt blocks,
    and one counts its other blocks as failed. A load in parts whose next part cannot be fetched has one more event, without
    blocks. `copy_s` is the slowest reporting rank's time.
    """

    job: JobId
    request: RequestId
    blocks: int
    outcome: LoadOutcome
    copy_s: float = 0.0


class BlocksOffered(Event, frozen=True):
    """Computed blocks were offered to the host."""

    blocks: int


class StoreScheduled(Event, frozen=True):
    """A store was planned: its device blocks are leased, and host slots are reserved."""

    job: JobId
    blocks: int


class StoreEnded(Event, frozen=True):
    """Offers got their final outcome; `blocks` is the number of these offers."""

    outcome: StoreOutcome
    blocks: int


class RankReported(Event, frozen=True):
    """One rank ended its part of a job; `tier` is the lower of the two tiers between which the job copies."""

    job: JobId
    rank: Rank
    direction: Direction
    outcome: CopyOutcome
    copied_bytes: int
    queue_s: float
    copy_s: float
    tier: Tier = Tier.HOST


class TierCopyScheduled(Event, frozen=True):
    """A copy between the host and a lower tier was scheduled.

    Args:
        job: the job.
        direction: STORE to the lower tier, or LOAD from the lower tier.
        blocks: how many blocks the job copies.
        request: the request that needs the fetched blocks; None for a warm start or a spill.
        tokens: how many tokens the fetched blocks add to the request's hit; 0 without a request.
        tier: the lower tier.
    """

    job: JobId
    tier: Tier
    direction: Direction
    blocks: int
    request: RequestId | None = None
    tokens: int = 0


class TierCopyEnded(Event, frozen=True):
    """A copy between the host and a lower tier has an outcome; `copy_s` is the slowest reporting rank's time."""

    job: JobId
    tier: Tier
    direction: Direction
    blocks: int
    outcome: TierOutcome
    copy_s: float = 0.0


class PrefixExceedsHost(Event, frozen=True):
    """A prefix on the lower tiers has more blocks than the host has slots, and only its head can be loaded.

    Only the first such prefix is reported.

    Args:
        request: the request.
        blocks: how many of the prefix's blocks the device lacks.
        slots: how many slots the host has.
    """

    request: RequestId
    blocks: int
    slots: int


class JobAbandoned(Event, frozen=True):
    """A copy did not end in time. Until the copy ends, its device blocks stay leased. Its slots are not used again."""

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
    """New copies start again, because abandoned copies have ended.

    `blocks` is the number of device blocks that the remaining abandoned copies lease.
    """

    blocks: int


class BlocksEvicted(Event, frozen=True):
    """Blocks left the host.

    `age_s` is the number of seconds since the most recent use of any of the blocks; 0 unless evicted for space.
    """

    tier: ClassVar[Tier] = Tier.HOST
    blocks: int
    cause: EvictionCause
    age_s: float = 0.0


class TierBlocksEvicted(Event, frozen=True):
    """Blocks left a lower tier whose slots the engine manages."""

    tier: Tier
    blocks: int
    cause: EvictionCause


class SessionEnded(Event, frozen=True):
    """A session ended, says its client: `blocks` host blocks that no other session has used now age faster."""

    request: RequestId
    blocks: int


class BlocksZeroed(Event, frozen=True):
    """Entries of requests' block tables were zeroed, because the engine has reallocated the blocks they named."""

    blocks: int


class CapacityGrown(Event, frozen=True):
    """Every rank has `slots` host slots ready."""

    slots: int


class HostMemoryOpened(Event, frozen=True):
    """It is known what happens to the blocks that an earlier engine left in host memory.

    Args:
        adoption: what happens to them.
        blocks: how many of them are adopted, as their slots become ready.
    """

    adoption: Adoption
    blocks: int


class BlocksAdopted(Event, frozen=True):
    """Host slots were found to have blocks of an earlier process, which lookups can find now."""

    blocks: int


class AdoptedBlocksHit(Event, frozen=True):
    """A load reads adopted blocks, which no load of this process has read before."""

    blocks: int


class TierReady(Event, frozen=True):
    """The index of a tier's slots was read completely, and the tier can be used.

    Args:
        tier: the tier.
        slots: the number of each rank's slots.
        blocks: how many of the slots contain a block that can hit.
    """

    tier: Tier
    slots: int
    blocks: int


class TierClosed(Event, frozen=True):
    """The index of a tier's slots can no longer be read or written. The tier is off until the next start."""

    tier: Tier


class ResetStarted(Event, frozen=True):
    """The cache was reset. Lookups no longer find anything computed before the reset.

    Args:
        epoch: how many resets there have been, including this one.
        dropped_blocks: how many blocks were removed from the host's index.
        draining_blocks: how many of the host's slots running copies still use.
        open_jobs: how many jobs were running and not abandoned; if not 0, the reset call returned False.
    """

    epoch: int
    dropped_blocks: int
    draining_blocks: int
    open_jobs: int


class ResetEnded(Event, frozen=True):
    """All jobs that were running at a reset have ended or were abandoned. Resets in quick succession share one event.

    Args:
        epoch: the number of the last reset, counted from 1.
        abandoned_jobs: how many jobs did not end in time; their slots stay quarantined.
    """

    epoch: int
    abandoned_jobs: int


class FactRejected(Event, frozen=True):
    """A report of the engine was ignored, because it broke the adapter contract."""

    cause: RejectionCause
    request: RequestId | None = None


class OffloadingDegraded(Event, frozen=True):
    """Offloading is off until the engine restarts. Open jobs run to their end; the engine continues."""

    cause: DegradeCause
    detail: str


class WaitEnded(Event, frozen=True):
    """A lookup that was answered "not yet" got another answer, or its request ended; `seconds` is how long it took."""

    request: RequestId
    seconds: float


class LoadOrphaned(Event, frozen=True):
    """A request ended before its load."""

    request: RequestId


class RequestsEnded(Event, frozen=True):
    """The last request has ended, so the engine is idle."""


class FirstTokenReached(Event, frozen=True):
    """A request has its first token. The event comes with the engine's next step.

    The token counts add up to the length of the request's prompt.

    Args:
        request: the request.
        found: the lowest tier in which the request's last lookup found tokens; None if it found none.
        seconds: time to first token, from the engine's report of the request.
        device_tokens: prompt tokens that the device held.
        host_tokens: prompt tokens loaded from the host, not counting fetched tokens.
        fetched: lower tiers, and how many prompt tokens were loaded after a fetch from each for this request.
        computed_tokens: all other prompt tokens, including the tokens of a failed load.
    """

    request: RequestId
    found: Tier | None
    seconds: float
    device_tokens: int = 0
    host_tokens: int = 0
    fetched: tuple[tuple[Tier, int], ...] = ()
    computed_tokens: int = 0


class NetBenefitTurned(Event, frozen=True):
    """The net benefit of offloading changed from gain to loss or back.

    Args:
        is_negative: True if offloading cost more seconds than it saved in the last period.
        net_s: seconds saved minus seconds lost in the period.
        period_s: the period's length in seconds.
    """

    is_negative: bool
    net_s: float
    period_s: float


class BreakEvenMoved(Event, frozen=True):
    """With `min_load_tokens: auto`: the break-even length of loads, while no other load is open, has changed by far.

    Args:
        was: the length before, in tokens.
        tokens: the length from now on; 1000000 if no hit is worth a load.
        fixed_s: seconds that a load of any length takes.
        load_s: further seconds of a load for each token.
        compute_s: seconds to compute a token.
        delayed: how many requests computing delays on average, besides those that wait at a given moment.
    """

    was: int
    tokens: int
    fixed_s: float
    load_s: float
    compute_s: float
    delayed: float


class StorePolicyMoved(Event, frozen=True):
    """The store policy `auto` stores by another policy from now on.

    Args:
        was: the policy before.
        policy: the policy from now on.
        found: for each policy, the share of the recent prompts' blocks that it would have found.
    """

    was: str
    policy: str
    found: dict[str, float]


class MetricsSampled(Event, frozen=True):
    """The values of some metrics that no event increases, for `kvoffload advise` and reports, which read the journal.

    The key is the metric's name, and after a space its label values, joined by commas.
    """

    values: dict[str, float]
