"""Facts: what an engine tells, in the past tense. The handlers that own state react to them in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvoffload.model.causes import DegradeCause
from kvoffload.model.ids import BlockKey, DeviceBlockId, JobId, RequestId
from kvoffload.model.transfer import TransferReport


@dataclass(frozen=True, slots=True)
class Fact:
    """Base of all facts."""


@dataclass(frozen=True, slots=True)
class RequestSeen(Fact):
    """The engine took a request in.

    Args:
        request: its name.
        prompt_tokens: tokens that must be computed or found before the first new one.
        keys: per group, the keys of the whole blocks known so far.
        reads_cache: False when the request asked not to read cached blocks.
    """

    request: RequestId
    prompt_tokens: int
    keys: tuple[tuple[BlockKey, ...], ...]
    reads_cache: bool = True


@dataclass(frozen=True, slots=True)
class BlocksAllocated(Fact):
    """The engine gave a request a new block table; the matching lookup is consumed.

    Args:
        request: whose.
        tables: per group, the block of each position, the null block where the engine holds none.
        device_tokens: tokens that the device's own prefix cache brings; the blocks behind them are newly handed out.
        external_tokens: tokens beyond those that the engine now expects from the host; 0 is common.
    """

    request: RequestId
    tables: tuple[tuple[DeviceBlockId, ...], ...]
    device_tokens: int
    external_tokens: int


class Progress(NamedTuple):
    """What one request has gained since it was last told of. Requests that gained nothing are left out.

    Args:
        request: whose.
        confirmed_tokens: tokens computed for certain, from the start of the prompt.
        new_blocks: per group, the blocks newly handed out, which continue its table.
        new_keys: per group, keys of whole blocks not told before.
    """

    request: RequestId
    confirmed_tokens: int
    new_blocks: tuple[tuple[DeviceBlockId, ...], ...] = ()
    new_keys: tuple[tuple[BlockKey, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class StepScheduled(Fact):
    """The engine scheduled a step; told exactly once a step, also for an empty one.

    Args:
        step: its number.
        progress: requests that gained something, and those that run for the first time since their allocation.
        preempted: requests whose blocks were taken back since the last step.
        handed_out: blocks newly handed out that no table names, such as copy-on-write targets.
        prefill_tokens: tokens that the step computes for requests that compute several in it.
        decode_tokens: tokens that it computes for the others, one each.
    """

    step: int
    progress: tuple[Progress, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    handed_out: tuple[DeviceBlockId, ...] = ()
    prefill_tokens: int = 0
    decode_tokens: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether the step tells nothing new."""
        return not (self.progress or self.preempted or self.handed_out)


@dataclass(frozen=True, slots=True)
class StatesHandedOff(Fact):
    """The engine holds these recurrent states still until they are stored (`Promises.hands_off_states`)."""

    states: tuple[tuple[BlockKey, DeviceBlockId], ...]


@dataclass(frozen=True, slots=True)
class RequestEnded(Fact):
    """A request finished or was aborted; told exactly once, before its blocks are freed.

    Args:
        request: which.
        confirmed_tokens: tokens computed for certain.
        new_keys: per group, keys of whole blocks not told before.
        holds_blocks: False where the engine took its blocks back already (a preempted request that is aborted).
    """

    request: RequestId
    confirmed_tokens: int = 0
    new_keys: tuple[tuple[BlockKey, ...], ...] = ()
    holds_blocks: bool = True


@dataclass(frozen=True, slots=True)
class TransferReported(Fact):
    """A rank told how its copies ended."""

    report: TransferReport


@dataclass(frozen=True, slots=True)
class JobOverdue(Fact):
    """A job did not end within `transfer_timeout_s` of its submission."""

    job: JobId


@dataclass(frozen=True, slots=True)
class CacheReset(Fact):
    """The operator asked that nothing computed so far be found again."""


@dataclass(frozen=True, slots=True)
class InvariantBroken(Fact):
    """A conservation law of ours does not hold, or a state handler raised."""

    cause: DegradeCause
    detail: str
