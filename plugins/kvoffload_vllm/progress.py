"""Decides when to report the progress of vLLM's requests to the core.

The progress of a prefill is reported in the next step. A decoding batch completes only a few blocks in each step, and
each report leads to a store job. So the progress of a decoding request is reported only every 16th step, and one job
stores the new blocks of many requests. A large batch is reported in parts, in consecutive steps, so that no hook takes
long. With lazy stores, progress is reported in every step. Newly allocated blocks are reported in the same step (R7,
R10). All progress is reported immediately while the device has so few free blocks that vLLM may preempt requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress, islice
from operator import add
from typing import TYPE_CHECKING

from msgspec import Struct

from kvoffload.model import facts
from kvoffload.model.engine import EngineShape
from kvoffload.model.ids import BlockKey, DeviceBlockId, RequestId
from kvoffload_vllm.pool_device import VllmDevice, group_suffix

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvoffload_vllm.events import TierEvents


_Table = tuple[tuple[DeviceBlockId, ...], ...]
_Keys = tuple[tuple[BlockKey, ...], ...]
_make_progress: Callable[[tuple[RequestId, int, _Table, _Keys]], facts.Progress] = partial(
    tuple.__new__, facts.Progress
)
"""Creates a `facts.Progress` in a third of the constructor's time. A step creates many of them."""

_LEAST_PART = 64
"""A batch with more decoding requests than this is reported in parts."""


class KeyMaker:
    """Turns a request's block hashes into the keys of each group.

    Args:
        ratios: for each group, the number of block hashes in a block. A block's last hash identifies the block.
        group_ids: for each group, vLLM's group number, which is the end of all keys of the group.
    """

    def __init__(self, ratios: Sequence[int], group_ids: Sequence[int]) -> None:
        self._suffixes = list(map(group_suffix, group_ids))
        self._groups = list(zip(ratios, self._suffixes, strict=True))
        self._has_one_hash_a_block = set(ratios) == {1}

    def keys(self, hashes: Sequence[bytes], first: int) -> tuple[tuple[BlockKey, ...], ...]:
        """Return, for each group, the keys of the blocks whose last hash is in `hashes[first:]`."""
        # A fast path for decoding requests, which usually complete one block at a time.
        if self._has_one_hash_a_block and len(hashes) - first == 1:
            only = hashes[first]
            keys: list[tuple[bytes, ...]] = [(only + suffix,) for suffix in self._suffixes]
            return tuple(keys)  # type: ignore[arg-type]  # `BlockKey()` would cost one call per key
        keys = []
        for ratio, suffix in self._groups:
            ends = hashes[first:] if ratio == 1 else hashes[(first // ratio + 1) * ratio - 1 :: ratio]
            keys.append(tuple([end + suffix for end in ends]))
        return tuple(keys)  # type: ignore[arg-type]  # `BlockKey()` would cost one call per key


class Tracked(Struct, eq=False):
    """One of vLLM's requests, with the progress that the core already has.

    Args:
        request: vLLM's request.
        hashes: the number of block hashes reported to the core.
        last_hash: the last reported hash. If vLLM rewrites any earlier hash, the last hash changes as well.
        noted: the number of block hashes that have notes for events. A new block table resets the number to 0.
        found_tokens: the number of the request's tokens that were on the device at the last lookup.
        boundary: the number of confirmed tokens from which `ProgressReports` has progress to report.
        to_load: the request's block table if its last load fills blocks of the table, with the number of tokens before
            these blocks; else None.
    """

    request: Request
    hashes: int = 0
    last_hash: bytes | None = None
    noted: int = 0
    found_tokens: int = 0
    boundary: int = 0
    to_load: tuple[Sequence[Sequence[DeviceBlockId]], int] | None = None

    @property
    def trace_parent(self) -> str | None:
        """The client's W3C `traceparent`; None if the client sent none, or if vLLM's tracing is off."""
        headers = getattr(self.request, "trace_headers", None)
        return headers.get("traceparent") if headers else None

    @property
    def is_rewritten(self) -> bool:
        """Whether vLLM replaced hashes that were already reported.

        vLLM does so if a streaming session's next input replaces tokens that vLLM has not computed yet.
        """
        hashes, sent = self.request.block_hashes, self.hashes
        return sent > 0 and (len(hashes) < sent or hashes[sent - 1] != self.last_hash)

    def new_keys(self, maker: KeyMaker) -> tuple[tuple[BlockKey, ...], ...]:
        """Return the unreported keys, and mark them as reported."""
        hashes = self.request.block_hashes
        keys = maker.keys(hashes, self.hashes)
        self.hashes = len(hashes)
        self.last_hash = hashes[-1] if hashes else None
        return keys


class ProgressReports:
    """Decides in each step for which requests to report progress to the core.

    A request that computes several tokens in a step is checked in the next step that schedules the request. All
    scheduled requests are checked in every step whose number is a multiple of `every`. If there are many, the later ones
    are checked in the steps after it. With pipeline parallelism, vLLM schedules a decoding request only once in as many
    steps as there are stages, so as many steps, from that one on, add the requests that they schedule.

    Args:
        shape: the description of the engine that the core uses.
        groups: vLLM's numbers for the groups that are offloaded.
        keys: turns block hashes into keys.
        device: vLLM's block pool.
        tracked: the requests, by name.
        every: the number of steps between two reports of decoding requests, a power of two. If requests fill a block
            in fewer steps, they are reported more often, so that a block is reported before it leaves a sliding window.
        tier_events: makes vLLM's KV cache events; None if vLLM publishes none.
        stages: the number of pipeline stages.
    """

    def __init__(
        self,
        shape: EngineShape,
        groups: tuple[int, ...],
        keys: KeyMaker,
        device: VllmDevice,
        tracked: Mapping[str, Tracked],
        every: int,
        tier_events: TierEvents | None,
        stages: int = 1,
    ) -> None:
        self._groups = groups
        self._keys = keys
        self._device = device
        self._tracked = tracked
        self._tier_events = tier_events
        self._least_block = min(group.block_tokens for group in shape.groups)
        self._scarce = 2 * shape.turnover_blocks
        self._stages = stages
        self.set_every(every)
        self.steps = 0
        self._due: dict[str, int] = {}
        """The requests that wait for their regular check, those that wait longest first. Only the keys count."""
        self._soon: dict[str, int] = {}
        """The requests that computed several tokens in a step and are not yet checked, with the number of tokens."""
        self._late: dict[str, _Table] = {}
        """For each request, the newly allocated blocks that are not yet part of a progress report."""

    def set_every(self, every: int) -> None:
        """Report decoding requests in every step whose number is a multiple of `every`."""
        self._most = every
        self._every = self._reports_every(1)

    def allocated(self, tracked: Tracked, known: int) -> None:
        """Record that vLLM allocated a request's block table. The caller must report the table to the core.

        Args:
            tracked: the request.
            known: the number of tokens whose blocks were already computed.
        """
        name = tracked.request.request_id
        self._soon.pop(name, None)
        self._late.pop(name, None)
        tracked.boundary = known + 1
        if tracked.hashes != len(tracked.request.block_hashes):
            # The next input of a session brings new keys, which the first step must report even without new tokens.
            tracked.boundary = known
            self._soon[name] = self._least_block

    def forget(self, name: str) -> _Table:
        """Forget the block table of a request that vLLM preempts or ends. Return the unreported blocks."""
        self._due.pop(name, None)
        self._soon.pop(name, None)
        return self._late.pop(name, ())

    def step(
        self, output: SchedulerOutput, states: Sequence[facts.StateHandedOff | facts.TailHandedOff]
    ) -> tuple[tuple[facts.Progress, ...], list[_Table]]:
        """Return the progress to report in this step, and each request's newly allocated blocks.

        The list is empty if the progress contains all of these blocks.
        """
        scheduled, cached, late = output.num_scheduled_tokens, output.scheduled_cached_reqs, self._late
        resumed, groups, tables = cached.resumed_req_ids, self._groups, cached.new_block_ids
        self.steps += 1
        allocated: list[_Table] = []
        # Most requests have no new block, and `compress` skips these requests quickly. For a resumed request, vLLM
        # passes the whole block table, which the core already has from `update_state_after_alloc`.
        for number in compress(range(len(tables)), tables):
            name, blocks = cached.req_ids[number], tables[number]
            if name not in resumed and name in self._tracked:
                table: _Table = tuple([tuple(blocks[group]) for group in groups])
                late[name] = tuple(map(add, late[name], table)) if name in late else table
                allocated.append(table)
        looks = self._take_soon(scheduled) if self._soon else []
        due = self._due
        if self.steps % self._every < self._stages:
            due |= scheduled
        if due:
            # As many that all requests of the step are checked before the next turn.
            most = max(_LEAST_PART, -(-len(scheduled) // max(self._every // self._stages, 1)))
            part = [*islice(filter(scheduled.__contains__, due), most)]
            for name in part:
                del due[name]
            looks += part
        if late and self._device.free_blocks() < self._scarce:
            looks += late
        if output.total_num_scheduled_tokens > len(scheduled):
            self._soon |= {name: tokens for name, tokens in scheduled.items() if tokens > 1}
        complete = [state.request for state in states]
        progress = self._progress(looks, scheduled, complete) if looks or complete else ()
        return progress, allocated if late else []

    def _take_soon(self, scheduled: Mapping[str, int]) -> list[str]:
        """Return the scheduled requests to check in this step, and remove them from `_soon`.

        vLLM may have preempted a request that is not scheduled, and reports the preemption only in a later step.
        """
        found = [
            name
            for name, tokens in self._soon.items()
            if name in scheduled
            and (tokens >= self._least_block or self.steps % self._reports_every(tokens) < self._stages)
        ]
        for name in found:
            del self._soon[name]
        return found

    def _progress(
        self, looks: Iterable[str], scheduled: Mapping[str, int], complete: Sequence[str]
    ) -> tuple[facts.Progress, ...]:
        """Return the progress of each request that has a new block, a computed block or a complete recurrent state."""
        progress: list[facts.Progress] = []
        for name in dict.fromkeys((*complete, *looks)) if complete else looks:
            tracked = self._tracked.get(name)
            if tracked is None or name not in scheduled:
                continue
            request = tracked.request
            confirmed = request.num_computed_tokens - request.num_output_placeholders
            if confirmed >= tracked.boundary or name in self._late or name in complete:
                progress.append(self._progress_of(tracked, confirmed))
        return tuple(progress)

    def _progress_of(self, tracked: Tracked, confirmed: int) -> facts.Progress:
        request = tracked.request
        tracked.boundary = confirmed + self._least_block - confirmed % self._least_block
        if self._tier_events is not None:
            tracked.noted = self._tier_events.note(request, tracked.noted, confirmed)
        new_keys = tracked.new_keys(self._keys) if tracked.hashes != len(request.block_hashes) else ()
        name = request.request_id
        return _make_progress((name, confirmed, self._late.pop(name, ()), new_keys))

    def _reports_every(self, tokens: int) -> int:
        """Return the number of steps between two reports of a request that computes `tokens` tokens in each step."""
        every = self._most
        while every > 1 and every * tokens > self._least_block:
            every //= 2
        return every
