"""Facts: reports of an engine, its workers and its tiers. Each fact class has one handler in the core."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from kvoffload.model.causes import DegradeCause, StoreOutcome
from kvoffload.model.ids import BlockKey, DeviceBlockId, GroupId, JobId, RequestId, SlotId
from kvoffload.model.message import Message
from kvoffload.model.wire import Put, Tier, TransferReport


class Fact(Message, frozen=True):
    """Base of all facts."""


class Limits(Message, frozen=True):
    """What one request allows kvoffload to do with its blocks.

    Args:
        load_tokens: how many tokens may be loaded beyond those that the device holds at the lookup; None for any number.
        store_tokens: only blocks of this many first tokens may be stored; None for all.
        tiers: the lower tiers from which blocks may be fetched; None for all. The host is always searched.
        counts_as: what excluded blocks count as; an adapter that sets limits itself gives its own reason.
    """

    load_tokens: int | None = None
    store_tokens: int | None = None
    tiers: tuple[Tier, ...] | None = None
    counts_as: StoreOutcome = StoreOutcome.LIMITED


NO_LIMITS = Limits()


class RequestSeen(Fact, frozen=True):
    """The engine received a request.

    Args:
        request: the request's id.
        prompt_tokens: tokens that must be computed or found before the first new token.
        keys: per group, the keys of the request's whole blocks so far.
        reads_cache: False if the request asked not to read cached blocks.
        persists: True if lower tiers may store the request's KV, because it depends only on its keys and the engine's
            fingerprint.
        limits: what the client allows for this request.
        trace_parent: the W3C `traceparent` of the request's span, unchecked; None without a span.
        hashes: if hits may end inside a block, one hash for each `EngineShape.tail_tokens` tokens of the prompt. It
            identifies all tokens up to its end. With a group's `key_end` it is the key of the group's block in a tail.
        session: a 32-bit number for the session, such as a conversation, of which the request is a turn; 0 if unknown.
            If two sessions have the same number, the end of one may let blocks of the other leave early.
        is_last_turn: True if the client says that the session ends with this request.
    """

    request: RequestId
    prompt_tokens: int
    keys: tuple[tuple[BlockKey, ...], ...]
    reads_cache: bool = True
    persists: bool = True
    limits: Limits = NO_LIMITS
    trace_parent: str | None = None
    hashes: tuple[bytes, ...] = ()
    session: int = 0
    is_last_turn: bool = False


class BlocksAllocated(Fact, frozen=True):
    """The engine gave a request a new block table. The request's pending hit is loaded or dropped.

    Args:
        request: the request.
        tables: per group, the block of each position, or the null block for a position without a block. The lists may be
            the engine's own, so the core copies what it keeps.
        device_tokens: tokens found in the device's own prefix cache. The blocks after these tokens are new.
        external_tokens: tokens after `device_tokens` that the engine expects from the host; often 0.
    """

    request: RequestId
    tables: tuple[Sequence[DeviceBlockId], ...]
    device_tokens: int
    external_tokens: int


class Progress(NamedTuple):
    """The tokens, blocks and keys that one request gained since its last report.

    A report may be delayed for several steps if the request gains fewer tokens than the smallest block has. Blocks that
    are reported late are stored late. The step that allocated them lists them in `reallocated`.

    Args:
        request: the request.
        confirmed_tokens: tokens known to have been computed, from the start of the prompt.
        new_blocks: per group, the new blocks at the end of the request's table.
        new_keys: per group, keys of whole blocks not reported before.
    """

    request: RequestId
    confirmed_tokens: int
    new_blocks: tuple[tuple[DeviceBlockId, ...], ...] = ()
    new_keys: tuple[tuple[BlockKey, ...], ...] = ()


class StateHandedOff(NamedTuple):
    """A recurrent state that a step's forward pass completes and that no later pass rewrites.

    Args:
        request: the request.
        group: the number of the recurrent group.
        position: the position of the state's block. The state covers all tokens up to the end of this position.
        key: the key of the state's block.
        block: the device block that contains the state.
    """

    request: RequestId
    group: GroupId
    position: int
    key: BlockKey
    block: DeviceBlockId


class TailHandedOff(NamedTuple):
    """A recurrent state after a length inside a block, which an earlier step completed and no later one rewrites.

    Args:
        request: the request. Its full-attention blocks at this length belong to the tail, too.
        group: the number of the recurrent group.
        tokens: the number of the request's tokens that the state covers.
        key: the key of the state.
        block: the device block that contains the state. It is in no block table.
    """

    request: RequestId
    group: GroupId
    tokens: int
    key: BlockKey
    block: DeviceBlockId


class DeviceCopy(NamedTuple):
    """A copy of a block that the engine makes on the device, before a step's forward pass."""

    source: DeviceBlockId
    target: DeviceBlockId


class StepScheduled(Fact, frozen=True):
    """The engine scheduled a step. Reported exactly once per step, including empty steps.

    Args:
        step: the step's number.
        progress: requests with new tokens, blocks or keys, and requests that run for the first time after a load, even
            if they got no new blocks.
        preempted: requests that lost their blocks since the last step.
        reallocated: blocks that the step allocated and `progress` lacks: blocks in no table, such as copy-on-write
            targets, and blocks of requests whose progress is reported later.
        prefill_tokens: tokens computed for requests that compute more than one token, and its drafts, in the step.
        decode_tokens: the number of requests that compute a single token, and its drafts, in the step.
        states: recurrent states that the step completes, each reported once (`Promises.hands_off_states`). `progress`
            has the new keys of the states' requests.
        tails: recurrent states inside blocks, each reported once, with `EngineShape.tail_tokens` only. `progress` has
            the new blocks of their requests.
        copies: the copies of blocks that the step makes on the device. `reallocated` has their targets.
    """

    step: int
    progress: tuple[Progress, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    reallocated: tuple[DeviceBlockId, ...] = ()
    prefill_tokens: int = 0
    decode_tokens: int = 0
    states: tuple[StateHandedOff, ...] = ()
    tails: tuple[TailHandedOff, ...] = ()
    copies: tuple[DeviceCopy, ...] = ()

    @property
    def is_idle(self) -> bool:
        """Return whether the step reports nothing new."""
        return not any(_NEWS(self))


_NEWS = attrgetter("progress", "preempted", "reallocated", "states", "tails")


class RequestEnded(Fact, frozen=True):
    """A request finished or was aborted. Reported exactly once, before its blocks are freed.

    Args:
        request: the request.
        confirmed_tokens: tokens known to have been computed, from the start of the prompt.
        new_keys: per group, keys of whole blocks not reported before.
        holds_blocks: False if the engine has already freed the request's blocks, as when a preempted request is
            aborted.
        new_blocks: per group, the blocks at the end of the request's table that were not reported before.
    """

    request: RequestId
    confirmed_tokens: int = 0
    new_keys: tuple[tuple[BlockKey, ...], ...] = ()
    holds_blocks: bool = True
    new_blocks: tuple[tuple[DeviceBlockId, ...], ...] = ()


class TransferReported(Fact, frozen=True):
    """A rank reported how its copies ended."""

    report: TransferReport


class JobOverdue(Fact, frozen=True):
    """A job did not end within `transfer_timeout_s` seconds after its submission."""

    job: JobId


class TierRestored(Fact, frozen=True):
    """A part of the index of a tier's slots was read. Together, the parts list each slot once.

    Args:
        tier: the tier.
        slots: the number of slots of each rank that the parts so far, including this one, cover.
        puts: blocks with their slots, the least recently used first.
        free: empty slots.
        is_last: True for the last part, after which the tier can be used.
    """

    tier: Tier
    slots: int
    puts: tuple[Put, ...] = ()
    free: tuple[SlotId, ...] = ()
    is_last: bool = False


class HostGrown(Fact, frozen=True):
    """Host slots became ready, all of them empty. Only a host with a catalog gets this fact.

    Args:
        slots: how many slots are ready on every rank.
        is_last: whether no more slots will become ready.
    """

    slots: int
    is_last: bool = False


class TierOpened(Fact, frozen=True):
    """A tier that manages its blocks itself can be used, or its namespace has changed.

    Args:
        tier: the tier.
        namespace: the namespace in which this engine reads and writes blocks from now on.
    """

    tier: Tier
    namespace: str


class TierLost(Fact, frozen=True):
    """A tier cannot be used: its index can no longer be read or written, or it does not answer the scheduler.

    A tier whose slots the engine manages stays lost.
    """

    tier: Tier


class TierAnswered(Fact, frozen=True):
    """A query of a tier for a request's blocks has ended, with or without an answer.

    Args:
        tier: the tier.
        request: the request.
        namespace: the namespace in which the blocks were looked up.
        found: blocks that the tier reports as present. This is a hint: a read may still fail.
        missing: blocks that the tier reports as absent.
        unanswered: how many blocks have no answer, because the call failed or was not made.
        seconds: how long the call took, in seconds.
    """

    tier: Tier
    request: RequestId
    namespace: str
    found: tuple[BlockKey, ...] = ()
    missing: tuple[BlockKey, ...] = ()
    unanswered: int = 0
    seconds: float = 0.0


class CacheReset(Fact, frozen=True):
    """The operator reset the cache: lookups must find nothing computed before."""


class StorePolicyChosen(Fact, frozen=True):
    """With the store policy `auto`: another policy would have found more of the recent prompts.

    Args:
        policy: the policy that would have found most.
        found: for each policy, the share of the recent prompts' blocks that it would have found.
    """

    policy: str
    found: dict[str, float]


class InvariantBroken(Fact, frozen=True):
    """An audit found a broken invariant, a state handler raised, or a worker cannot copy any more."""

    cause: DegradeCause
    detail: str
