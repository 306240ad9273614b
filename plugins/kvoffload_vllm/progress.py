"""What requests gained since they were last reported: at once while they compute their prompts, in batches while they decode.

A decoding batch completes a few blocks in each step, and a report, with the job that it leads to, costs more than these. So what
decoding requests gain is reported every 16th step, and one job stores it. What must not be late is not: blocks that were handed
out again (R7, R10), and anything while the device is so full that running requests may lose their blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from operator import add
from typing import TYPE_CHECKING

from kvoffload.model import facts
from kvoffload.model.engine import EngineShape
from kvoffload.model.ids import BlockKey, DeviceBlockId, RequestId
from kvoffload_vllm.tracked import KeyMaker, Tracked

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvoffload_vllm.pool_device import VllmDevice
    from kvoffload_vllm.tier_events import TierEvents

_Table = tuple[tuple[DeviceBlockId, ...], ...]
_Keys = tuple[tuple[BlockKey, ...], ...]
_make_progress: Callable[[tuple[RequestId, int, _Table, _Keys]], facts.Progress] = partial(
    tuple.__new__, facts.Progress
)
"""Often in a step: a named tuple's own call takes three times as long."""


class DueSteps:
    """When to look at a request again: not before it can have completed a block.

    A request that computes one token a step and lacks 20 to its next block is put aside for 20 steps, and until the next
    step that reports. So a step looks at the requests that are due in it and not at all that run.

    Args:
        every: steps that report have numbers that are multiples of this power of two.
        least_block: tokens of the smallest block. What a request gained is reported before it has computed as many, and so
            before a window can have passed it.
    """

    def __init__(self, every: int, least_block: int) -> None:
        self._most = every
        self._least_block = least_block
        self._every = self.every(1)
        self.step = 0
        """Steps so far."""
        self._due: dict[int, dict[RequestId, Tracked]] = {}

    def put(self, tracked: Tracked, steps: int, tokens: int) -> None:
        """Set a request aside for `steps` steps, at least one, in which it computes `tokens` tokens each; replaces the time before."""
        due = self.step + steps
        if tokens < self._least_block:
            due += -due % (self._every if tokens == 1 else self.every(tokens))
        if tracked.due == due:
            return
        if tracked.due > self.step:
            self.drop(tracked)
        tracked.due = due
        self._due.setdefault(due, {})[tracked.request.request_id] = tracked

    def every(self, tokens: int) -> int:
        """Return in every how many steps a request is looked at that computes so many tokens in each."""
        every = self._most
        while every > 1 and every * tokens > self._least_block:
            every //= 2
        return every

    def drop(self, tracked: Tracked) -> None:
        """Do not look at a request again. Harmless for one that is not put aside."""
        waiting = self._due.get(tracked.due)
        if waiting is not None:
            waiting.pop(tracked.request.request_id, None)
        tracked.due = 0

    def take(self) -> Collection[Tracked]:
        """A step has come: hand over who is due in it."""
        self.step += 1
        return self._due.pop(self.step, {}).values()


class ProgressReports:
    """Says in each step what the core must learn of which requests.

    Args:
        shape: the engine's fixed facts.
        groups: vLLM's numbers of the groups that are offloaded.
        keys: makes keys of block hashes.
        device: what vLLM lends.
        tracked: the requests, by name.
        every: what decoding requests gain is reported in each step whose number is a multiple of this power of two.
        tier_events: makes vLLM's KV cache events, None where they are not published.
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
    ) -> None:
        self._groups = groups
        self._keys = keys
        self._device = device
        self._tracked = tracked
        self._tier_events = tier_events
        self._least_block = min(group.block_tokens for group in shape.groups)
        self._scarce = 2 * shape.turnover_blocks
        self._due = DueSteps(every, self._least_block)
        self._every = self._due.every(1)
        self._late: dict[str, _Table] = {}
        """Blocks that requests got and that were not reported."""
        self._new: set[str] = set()
        """Requests that were allocated since the last step."""

    def allocated(self, tracked: Tracked, tokens: int) -> None:
        """A request got a block table, which the caller reports, and computes up to `tokens` tokens in the next step."""
        name = tracked.request.request_id
        self._new.add(name)
        if self._late:
            self._late.pop(name, None)
        # Its first step confirms nothing, so only the keys of a session's next input are reported with it.
        has_all_keys = tracked.hashes == len(tracked.request.block_hashes)
        self._due.put(tracked, 2 if has_all_keys else 1, tokens)

    def preempted(self, names: Iterable[RequestId]) -> None:
        """These requests lost their block tables since the last step, some of which have another one by now."""
        for name in names:
            if name not in self._new and (tracked := self._tracked.get(name)) is not None:
                self.forget(tracked)

    def forget(self, tracked: Tracked) -> _Table:
        """Report a request no more until it has another table; return the blocks that were not reported."""
        if tracked.due:
            self._due.drop(tracked)
        return self._late.pop(tracked.request.request_id, ()) if self._late else ()

    def step(
        self, output: SchedulerOutput, states: Sequence[facts.StateHandedOff]
    ) -> tuple[tuple[facts.Progress, ...], list[DeviceBlockId]]:
        """Return the progress that is reported in this step, and the blocks that were handed out but are in none of it."""
        scheduled, cached, late = output.num_scheduled_tokens, output.scheduled_cached_reqs, self._late
        resumed, groups, tables = cached.resumed_req_ids, self._groups, cached.new_block_ids
        self._new.clear()
        due, handed_out = self._due.take(), list[DeviceBlockId]()
        # Most have no new block, so Python's own loops find those that do. Of a resumed request vLLM gives the whole table,
        # which was reported when it was allocated.
        for name, blocks in compress(zip(cached.req_ids, tables, strict=True), tables):
            if name not in resumed and name in self._tracked:
                table: _Table = tuple([tuple(blocks[group]) for group in groups])
                late[name] = tuple(map(add, late[name], table)) if name in late else table
                handed_out += chain.from_iterable(table)
        reported: dict[str, _Table] = {}
        if self._due.step % self._every == 0 or (late and self._device.free_blocks() < self._scarce):
            # One that is not scheduled may have been preempted, which vLLM says later.
            reported = {name: late.pop(name) for name in tuple(late) if name in scheduled}
            handed_out = []
        for state in states:
            if state.request not in reported and state.request in self._tracked:
                reported[state.request] = self._late.pop(state.request, ())
        if due:
            self._look_at(due, scheduled, reported)
        if output.total_num_scheduled_tokens > len(scheduled):
            self._look_again_at_prefills(scheduled, reported)
        known = self._tracked
        progress = [
            self._progress_of(known[name], blocks, scheduled.get(name, 1))
            for name, blocks in reported.items()
        ]
        return tuple(progress), handed_out

    def _look_at(
        self, due: Iterable[Tracked], scheduled: Mapping[str, int], reported: dict[str, _Table]
    ) -> None:
        """Report the requests that may have completed a block; put the others aside again."""
        for tracked in due:
            request = tracked.request
            name = request.request_id
            if name in reported:
                continue
            lacking = tracked.boundary - request.num_computed_tokens + request.num_output_placeholders
            if (lacking <= 0 or name in self._late) and name in scheduled:
                reported[name] = self._late.pop(name, ())
            else:
                self._due.put(tracked, max(lacking, 1), scheduled.get(name, 1))

    def _look_again_at_prefills(self, scheduled: Mapping[str, int], reported: Mapping[str, _Table]) -> None:
        """Look soon at requests that compute several tokens: a count of steps does not show when they complete a block.

        Those that were allocated for this step have been put aside.
        """
        for name, tokens in scheduled.items():
            if tokens > 1 and name not in reported:
                tracked = self._tracked.get(name)
                if tracked is not None and tracked.boundary:
                    self._due.put(tracked, 1, tokens)

    def _progress_of(self, tracked: Tracked, new_blocks: _Table, tokens: int) -> facts.Progress:
        request = tracked.request
        confirmed = request.num_computed_tokens - request.num_output_placeholders
        lacking = self._least_block - confirmed % self._least_block
        tracked.boundary = confirmed + lacking
        self._due.put(tracked, -(-lacking // max(tokens, 1)), tokens)
        if self._tier_events is not None:
            tracked.noted = self._tier_events.note(request, tracked.noted, confirmed)
        new_keys = tracked.new_keys(self._keys) if tracked.hashes != len(request.block_hashes) else ()
        return _make_progress((request.request_id, confirmed, new_blocks, new_keys))
