"""The plugin's scheduler side: translates hooks into facts, and gives the core access to the engine's block pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvoffload.engine.block_pool import BlockPool
from kvoffload.engine.plugin import BlockTables, LoadResults, Progress, SchedulerPlugin, StateMade, StepFacts
from kvoffload.engine.request import Request
from kvoffload.model import facts
from kvoffload.model.ids import BlockKey, DeviceBlockId, GroupId, RequestId
from kvoffload.model.wire import TransferReport
from kvoffload.runtime.scheduler_side import SchedulerSide


class PoolDevice:
    """Adapts the engine's block pool to the core's interface. A lease is a reference to the block."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def lease(self, blocks: Sequence[DeviceBlockId]) -> None:
        self._pool.touch(blocks)

    def release(self, blocks: Sequence[DeviceBlockId]) -> None:
        self._pool.free(blocks)

    def next_evictable(self, count: int) -> Iterable[DeviceBlockId]:
        return map(DeviceBlockId, self._pool.next_evictable(count))

    def free_blocks(self) -> int:
        return self._pool.free_blocks

    def keys_of(self, blocks: Sequence[DeviceBlockId]) -> list[BlockKey | None]:
        key_of = self._pool.key_of
        return [None if (key := key_of(block)) is None else BlockKey(key) for block in blocks]

    def block_of(self, key: BlockKey) -> DeviceBlockId | None:
        block = self._pool.cached_block(key)
        return DeviceBlockId(block) if block is not None else None

    def lease_problems(self, leases: Mapping[DeviceBlockId, int]) -> list[str]:
        """Return a message for each block whose number of leases differs from the number of references in the pool."""
        counted = self._pool.leases()
        return [
            f"block {block} is leased {leases.get(DeviceBlockId(block), 0)} times, the engine counts {counted.get(block, 0)}"
            for block in sorted(leases.keys() | counted.keys())
            if leases.get(DeviceBlockId(block), 0) != counted.get(block, 0)
        ]


@dataclass(slots=True)
class _Sent:
    """The part of a request that the core already has. Later facts contain only what is new."""

    view: Request
    keys: list[int]  # the number of reported keys in each group
    blocks: tuple[int, ...] = ()  # the number of whole blocks reported as confirmed in each group
    runs: bool = False

    def has_token(self) -> bool:
        return self.view.num_tokens > self.view.num_prompt_tokens


class ReferenceScheduler(SchedulerPlugin):
    """The hooks that the engine's scheduler calls.

    Args:
        offload: the runtime's scheduler side.
        closed: a function that `shutdown` calls at its end.
    """

    def __init__(self, offload: SchedulerSide, closed: Callable[[], object]) -> None:
        self._offload = offload
        self._closed = closed
        self._sent: dict[str, _Sent] = {}
        self._groups = offload.shape.groups

    def request_added(self, request: Request) -> None:
        known = tuple(_keys(request.keys(group.group)) for group in self._groups)
        self._sent[request.request_id] = _Sent(request, [len(each) for each in known])
        name = RequestId(request.request_id)
        parent = request.trace_parent
        fact = facts.RequestSeen(name, request.num_tokens, known, trace_parent=parent)
        self._offload.seen(fact, self._sent[request.request_id].has_token)

    def lookup(self, request: Request, device_tokens: int) -> int | None:
        new_keys = self._new_keys(self._sent[request.request_id])
        name = RequestId(request.request_id)
        return self._offload.lookup(name, device_tokens, request.num_tokens, new_keys, request.shared_tokens)

    def prefix_boundary(self, request: Request) -> int:
        return self._offload.prefix_boundary(RequestId(request.request_id))

    def allocated(
        self, request: Request, tables: BlockTables, device_tokens: int, external_tokens: int
    ) -> None:
        sent = self._sent[request.request_id]
        sent.blocks = ()
        sent.runs = False
        tables_of = tuple(map(_blocks, tables))
        self._offload.allocated(
            facts.BlocksAllocated(RequestId(request.request_id), tables_of, device_tokens, external_tokens)
        )

    def plan(self, step: StepFacts) -> object:
        progress = tuple(self._progress(step))
        preempted = tuple(map(RequestId, step.preempted))
        total = sum(each.tokens for each in step.progress)
        decode = sum(each.tokens == 1 for each in step.progress)
        return self._offload.step(
            facts.StepScheduled(
                step.step,
                progress,
                preempted,
                prefill_tokens=total - decode,
                decode_tokens=decode,
                states=tuple(map(_handed_off, step.states)),
            )
        )

    def request_ended(self, request: Request, aborted: bool) -> None:
        sent = self._sent.pop(request.request_id)
        confirmed = request.confirmed_tokens
        self._offload.ended(
            facts.RequestEnded(RequestId(request.request_id), confirmed, self._new_keys(sent), confirmed > 0)
        )

    def update(self, outputs: Sequence[object]) -> LoadResults:
        reports = [output for output in outputs if isinstance(output, TransferReport)]
        if reports:
            self._offload.reported(reports)
        answers = self._offload.take_answers()
        return LoadResults(tuple(answers.loaded), tuple(answers.failed))

    def has_pending_work(self) -> bool:
        return self._offload.has_work

    def reset(self) -> bool:
        return self._offload.reset()

    def shutdown(self) -> None:
        self._offload.close()
        self._closed()

    def _progress(self, step: StepFacts) -> Iterator[facts.Progress]:
        """Yield the progress of each request that starts to run, or has a new block, confirmed block or state."""
        complete = {state.request_id for state in step.states}
        for progress in step.progress:
            sent = self._sent[progress.request_id]
            confirmed = tuple(progress.confirmed_tokens // group.block_tokens for group in self._groups)
            is_known = sent.runs and confirmed == sent.blocks and not any(progress.new_blocks)
            if is_known and progress.request_id not in complete:
                continue
            sent.runs = True
            sent.blocks = confirmed
            yield facts.Progress(
                RequestId(progress.request_id),
                progress.confirmed_tokens,
                _appended(progress),
                self._new_keys(sent),
            )

    def _new_keys(self, sent: _Sent) -> tuple[tuple[BlockKey, ...], ...]:
        new = []
        for group in self._groups:
            known = sent.view.keys(group.group)
            new.append(_keys(known[sent.keys[group.group] :]))
            sent.keys[group.group] = len(known)
        return tuple(new)


def _handed_off(state: StateMade) -> facts.StateHandedOff:
    return facts.StateHandedOff(
        RequestId(state.request_id),
        GroupId(state.group),
        state.position,
        BlockKey(state.key),
        DeviceBlockId(state.block),
    )


def _appended(progress: Progress) -> tuple[tuple[DeviceBlockId, ...], ...]:
    """Return each group's new blocks. They need no positions, because the engine appends them to the block table."""
    return tuple(_blocks([block for _, block in pairs]) for pairs in progress.new_blocks)


def _blocks(table: Sequence[int]) -> tuple[DeviceBlockId, ...]:
    """Convert a group's block table. The null block's id is 0 both in the engine and in kvoffload."""
    return tuple(map(DeviceBlockId, table))


def _keys(known: Sequence[bytes]) -> tuple[BlockKey, ...]:
    return tuple(map(BlockKey, known))
