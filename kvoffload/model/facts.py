"""Facts: what an engine reports, in the past tense. Each fact class has one handler in the core."""

from __future__ import annotations

from typing import NamedTuple

from kvoffload.model.causes import DegradeCause
from kvoffload.model.ids import BlockKey, DeviceBlockId, GroupId, JobId, RequestId, SlotId
from kvoffload.model.message import Message
from kvoffload.model.wire import Put, TransferReport


class Fact(Message, frozen=True):
    """Base of all facts."""


class RequestSeen(Fact, frozen=True):
    """The engine received a request.

    Args:
        request: its id.
        prompt_tokens: tokens that must be computed or found before the first new one.
        keys: per group, the keys of the whole blocks known so far.
        reads_cache: False when the request asked not to read cached blocks.
        persists: its keys and the engine's fingerprint cover all that its KV depends on, so that it may outlive the engine.
    """

    request: RequestId
    prompt_tokens: int
    keys: tuple[tuple[BlockKey, ...], ...]
    reads_cache: bool = True
    persists: bool = True


class BlocksAllocated(Fact, frozen=True):
    """The engine gave a request a new block table; the matching lookup is consumed.

    Args:
        request: the request.
        tables: per group, the block of each position, the null block where the engine holds none.
        device_tokens: tokens found in the device's own prefix cache; the blocks after them are new.
        external_tokens: further tokens that the engine now expects from the host; often 0.
    """

    request: RequestId
    tables: tuple[tuple[DeviceBlockId, ...], ...]
    device_tokens: int
    external_tokens: int


class Progress(NamedTuple):
    """What one request gained since its last report. Requests that gained nothing are left out.

    A report may come late, but before the request has computed as many tokens as its smallest block has. What it offers is
    stored later then; the step in which the request got blocks has them in `handed_out`.

    Args:
        request: the request.
        confirmed_tokens: tokens computed for certain, from the start of the prompt.
        new_blocks: per group, the new blocks at the end of its table.
        new_keys: per group, keys of whole blocks not reported before.
    """

    request: RequestId
    confirmed_tokens: int
    new_blocks: tuple[tuple[DeviceBlockId, ...], ...] = ()
    new_keys: tuple[tuple[BlockKey, ...], ...] = ()


class StateHandedOff(NamedTuple):
    """A recurrent state that the step's forward pass completes, and that no later one rewrites.

    Args:
        request: whose.
        group: its group.
        position: of the block in which the state lies; the state covers all tokens up to the block's end.
        key: the block's.
        block: where it lies on the device.
    """

    request: RequestId
    group: GroupId
    position: int
    key: BlockKey
    block: DeviceBlockId


class StepScheduled(Fact, frozen=True):
    """The engine scheduled a step. Reported exactly once a step, empty steps included.

    Args:
        step: its number.
        progress: requests that gained something, and those that run for the first time since a load without being allocated
            again.
        preempted: requests that lost their blocks since the last step.
        handed_out: blocks handed out that `progress` does not have: those in no table, such as copy-on-write targets, and those
            of requests that are reported later.
        prefill_tokens: tokens that the step computes for requests that compute several in it.
        decode_tokens: tokens computed for the others, one each.
        states: recurrent states that the step completes, each reported once (`Promises.hands_off_states`). `progress` has
            the new keys of their requests.
    """

    step: int
    progress: tuple[Progress, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    handed_out: tuple[DeviceBlockId, ...] = ()
    prefill_tokens: int = 0
    decode_tokens: int = 0
    states: tuple[StateHandedOff, ...] = ()

    @property
    def is_idle(self) -> bool:
        """Whether the step reports nothing new."""
        return not (self.progress or self.preempted or self.handed_out or self.states)


class RequestEnded(Fact, frozen=True):
    """A request finished or was aborted. Reported exactly once, before its blocks are freed.

    Args:
        request: the request.
        confirmed_tokens: tokens computed for certain.
        new_keys: per group, keys of whole blocks not reported before.
        holds_blocks: False if the engine has already freed its blocks (a preempted request that is aborted).
        new_blocks: per group, blocks at the end of its table that were not reported before.
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
    """A job did not end within `transfer_timeout_s` of its submission."""

    job: JobId


class DiskRestored(Fact, frozen=True):
    """A part of the disk's index was read; all parts together name each slot once.

    Args:
        slots: slots of each rank's file, as far as they are known so far.
        puts: blocks that slots hold, the least recently used first.
        free: slots that hold nothing.
        is_last: the tier is whole, and can be used.
    """

    slots: int
    puts: tuple[Put, ...] = ()
    free: tuple[SlotId, ...] = ()
    is_last: bool = False


class DiskClosed(Fact, frozen=True):
    """The disk's index cannot be read or written any more."""


class RemoteOpened(Fact, frozen=True):
    """A remote store can be asked.

    Args:
        namespace: under which this engine's blocks are found there and written from now on.
    """

    namespace: str


class RemoteLost(Fact, frozen=True):
    """The remote store does not answer the scheduler."""


class RemoteAnswered(Fact, frozen=True):
    """A remote store was asked for a request's blocks, or could not be.

    Args:
        request: which.
        namespace: that was asked in.
        found: what it says it has: a hint.
        missing: what it says it lacks.
        unanswered: blocks of which it said nothing, as the call failed or was not made.
        seconds: that the call took.
    """

    request: RequestId
    namespace: str
    found: tuple[BlockKey, ...] = ()
    missing: tuple[BlockKey, ...] = ()
    unanswered: int = 0
    seconds: float = 0.0


class CacheReset(Fact, frozen=True):
    """The operator asked to invalidate everything computed so far."""


class InvariantBroken(Fact, frozen=True):
    """An invariant does not hold, or a state handler raised."""

    cause: DegradeCause
    detail: str
