"""The connector's hooks on the scheduler side. They turn vLLM's calls into facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvoffload.model import facts
from kvoffload.model.causes import StoreOutcome
from kvoffload.model.groups import AttentionKind
from kvoffload.model.ids import NULL_BLOCK, BlockKey, DeviceBlockId, RequestId
from kvoffload.model.wire import NOTHING
from kvoffload.runtime.copies import NO_ANSWERS, LoadAnswers
from kvoffload_vllm.hints import NO_HINTS, HintReader, session_number
from kvoffload_vllm.kv_identity import persists
from kvoffload_vllm.limits import LimitReader
from kvoffload_vllm.metadata import NO_PLAN, KVOffloadMetadata, KVOffloadWorkerMetadata
from kvoffload_vllm.pool_device import find_pool
from kvoffload_vllm.progress import KeyMaker, ProgressReports, Tracked
from kvoffload_vllm.stats import KVOffloadStats

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvoffload.runtime.scheduler_side import SchedulerSide
    from kvoffload.telemetry.payload import Changes
    from kvoffload_vllm.events import TierEvents
    from kvoffload_vllm.groups import VllmGroups
    from kvoffload_vllm.kv_identity import Identification
    from kvoffload_vllm.pool_device import VllmDevice

_output_tokens = attrgetter("num_output_tokens")
_NOTHING_ALLOWED = facts.Limits(load_tokens=0, store_tokens=0, counts_as=StoreOutcome.UNSAFE_HASHES)


class VllmScheduler:
    """The connector hooks that vLLM's scheduler calls.

    Args:
        offload: the runtime's scheduler side.
        device: vLLM's block pool.
        groups: the groups that are offloaded.
        changes: collects changes of the counters for vLLM's own metrics.
        closed: a function that `close` calls at its end.
        report_every: the number of steps between two progress reports of decoding requests.
        tier_events: makes vLLM's KV cache events; None if vLLM publishes none.
        identification: determines the KV identity; None without a tier below the host.
        stages: the number of pipeline stages.
        keeps_replaced_hashes: whether the hashes of sessions with streaming inputs may be wrong; nothing of such sessions
            is stored or loaded then.
    """

    _changes: Changes | None = None  # a connector on a worker has no metrics of its own

    def __init__(
        self,
        offload: SchedulerSide,
        device: VllmDevice,
        groups: VllmGroups,
        changes: Changes,
        closed: Callable[[], object],
        report_every: int = 1,
        tier_events: TierEvents | None = None,
        identification: Identification | None = None,
        stages: int = 1,
        *,
        keeps_replaced_hashes: bool = False,
    ) -> None:
        self.offload = offload
        self._device = device
        self._keys = KeyMaker(groups.hash_ratios, groups.ids)
        self._groups = groups.ids
        self._shape = groups.shape
        self._changes = changes
        self._closed = closed
        self.tier_events = tier_events
        self._identification = identification
        self._state_tokens = {
            number: (group.group, group.block_tokens)
            for number, group in zip(groups.ids, groups.shape.groups, strict=True)
            if group.kind is AttentionKind.RECURRENT
        }
        """The recurrent groups by vLLM's number: kvoffload's number, and the number of tokens in a block."""
        self._tail_tokens = self._shape.tail_tokens
        self._limits = LimitReader()
        self._keeps_replaced_hashes = keeps_replaced_hashes
        self._hints = HintReader()
        self._tracked: dict[str, Tracked] = {}
        self._progress = ProgressReports(
            groups.shape, groups.ids, self._keys, device, self._tracked, report_every, tier_events, stages
        )

    def set_report_every(self, steps: int) -> None:
        """Set the number of steps between two progress reports of decoding requests."""
        self._progress.set_every(steps)

    # -- before a step ------------------------------------------------------------------------------------------

    # vLLM passes its block pool by one of these hooks (`support.POOL_HOOKS`), before the first request.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._device.bind(gpu_block_pool)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self._device.bind(find_pool(kv_cache_manager))

    def bind_scheduler_context(self, context: object) -> None:
        self._device.bind(find_pool(context))

    def on_new_request(self, request: Request) -> Tracked:
        hashes, reads = request.block_hashes, not request.skip_reading_prefix_cache
        tracked = Tracked(request, len(hashes), hashes[-1] if hashes else None)
        self._tracked[request.request_id] = tracked
        known = self._keys.keys(hashes, 0)
        lasts = self._identification is None or persists(request)
        parent = tracked.trace_parent if self.offload.observation.spans is not None else None
        params = request.kv_transfer_params
        limits = self._limits.read(params) if params else facts.NO_LIMITS
        if self._keeps_replaced_hashes and request.resumable:
            limits = _NOTHING_ALLOWED
        session, is_last = self._hints.read(params) if params else NO_HINTS
        if session is None:
            session = request.session_id or (request.request_id if is_last else None)
        parts = tuple(hashes) if self._tail_tokens else ()
        fact = facts.RequestSeen(
            request.request_id,
            request.num_tokens,
            known,
            reads,
            lasts,
            limits,
            parent,
            parts,
            0 if session is None else session_number(session),
            is_last,
        )
        self.offload.seen(fact, partial(_output_tokens, request))
        return tracked

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.is_rewritten:
            tracked = self._start_anew(request, tracked)
        tracked.found_tokens = num_computed_tokens
        name: RequestId = request.request_id
        new_keys = tracked.new_keys(self._keys) if tracked.hashes != len(request.block_hashes) else ()
        if not self._state_tokens:
            found = self.offload.lookup(name, num_computed_tokens, request.num_tokens, new_keys)
            return found, bool(found)
        # vLLM ends a prefill chunk at the shared prefix boundary and keeps the recurrent state there. Before each
        # lookup, vLLM sets the boundary to the end of the prefix whose attention blocks, but not recurrent state, are
        # on the device. Setting a later boundary has an effect, because vLLM reads the boundary after the lookup.
        kept = getattr(request, "shared_prefix_boundary", None)
        found = self.offload.lookup(name, num_computed_tokens, request.num_tokens, new_keys, kept or 0)
        if kept is not None and found is not None:
            request.shared_prefix_boundary = max(kept, self.offload.prefix_boundary(name))
        return found, bool(found)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.is_rewritten:
            tracked = self._start_anew(request, tracked)
        # All blocks after the first `known` tokens are newly allocated.
        known = max(tracked.found_tokens, request.num_computed_tokens)
        tracked.noted = 0
        self._progress.allocated(tracked, known)
        block_ids = blocks.get_block_ids()
        table = tuple([block_ids[group] for group in self._groups])
        tracked.to_load = (table, known) if num_external_tokens else None
        self.offload.allocated(facts.BlocksAllocated(request.request_id, table, known, num_external_tokens))

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return vLLM's numbers of the groups that a load fills. vLLM may zero the blocks of all others.

        vLLM versions before 0.32 do not call this method.
        """
        return self._groups

    # -- a step -------------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVOffloadMetadata:
        output = scheduler_output
        preempted: tuple[RequestId, ...] = tuple(output.preempted_req_ids or ())
        for name in preempted:
            self._progress.forget(name)
        on_device = _copies_on_device(output) if output.kv_cache_block_copies else ()
        copied = tuple([copy.target for copy in on_device]) if on_device else ()
        states, tails = self._states(output) if self._state_tokens else ((), ())
        scheduled, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        prefill, decoding = 0, len(scheduled)
        if total > decoding and output.scheduled_spec_decode_tokens:
            prefill, decoding = _count_prefill(output)
        elif total > decoding:
            decoding = list(scheduled.values()).count(1)
            prefill = total - decoding
        progress, late = self._progress.step(output, (*states, *tails) if tails else states)
        reallocated = copied
        if late and self.offload.watches_blocks:
            reallocated = (*copied, *chain.from_iterable(chain.from_iterable(late)))
        fact = facts.StepScheduled(
            self._progress.steps,
            progress,
            preempted,
            reallocated,
            prefill,
            decoding,
            states,
            tails,
            on_device,
        )
        plan = self.offload.step(fact)
        # The answers go to the workers, because vLLM accepts the end of a load only from workers.
        copies, answers = self.offload.copies, NO_ANSWERS
        if copies.awaited or copies.answers is not NO_ANSWERS or self.offload.faults.cause is not None:
            answers = self.offload.take_answers()
        disk = None if self._identification is None else self._identification.step(self.offload)
        if plan is NOTHING and not (answers.without_copy or answers.abandoned) and disk is None:
            return NO_PLAN
        if not answers.without_copy:
            return KVOffloadMetadata(plan, answers, disk)
        return KVOffloadMetadata(plan, answers, disk, self._not_filled(answers))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        reported = connector_output.kv_connector_worker_meta
        if type(reported) is KVOffloadWorkerMetadata:  # `isinstance` would ask the abstract base class
            self.offload.reported(reported.reports)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._request_ended(request, holds_blocks=any(block_ids))
        # vLLM may free the blocks immediately, because blocks that are being copied stay leased.
        return False, None

    def _request_ended(self, request: Request, *, holds_blocks: bool) -> None:
        """Report to the core that a request finished or was aborted.

        If vLLM has rewritten the request's hashes, the unreported blocks are not stored, because the blocks may contain
        the old tokens.
        """
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        confirmed = 0
        new_keys: tuple[tuple[BlockKey, ...], ...] = ()
        late = self._progress.forget(request.request_id)
        if tracked.is_rewritten:
            late = ()
        else:
            confirmed = min(request.num_computed_tokens - request.num_output_placeholders, request.num_tokens)
            if self.tier_events is not None:
                self.tier_events.note(request, tracked.noted, confirmed)
            if tracked.hashes != len(request.block_hashes):
                new_keys = tracked.new_keys(self._keys)
        self.offload.ended(facts.RequestEnded(request.request_id, confirmed, new_keys, holds_blocks, late))

    def get_kv_connector_stats(self) -> KVOffloadStats | None:
        """Return the changes of the metrics since the last call; None without changes.

        While requests or copies exist, a step returns the changes of a few metrics, and of each metric at most once a second.
        """
        changes = self._changes
        if changes is None:
            return None
        is_busy = bool(self._tracked) or self.has_pending_push_work()
        if is_busy and changes.now() < changes.next_s:
            return None
        try:
            taken = changes.take(is_busy=is_busy)
        except Exception as error:
            self._changes = None
            self.offload.observation.removed("Changes", error)
            return None
        return KVOffloadStats(taken) if taken is not None else None

    def close(self) -> None:
        """Stop the observers and close the lower tiers."""
        if self._identification is not None:
            self._identification.close()
        self.offload.close()
        self._closed()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.tier_events.take() if self.tier_events is not None else ()

    def reset_cache(self) -> bool:
        return self.offload.reset()

    def has_pending_push_work(self) -> bool:
        return self.offload.has_work

    # -- private ------------------------------------------------------------------------------------------------

    def _start_anew(self, request: Request, tracked: Tracked | None) -> Tracked:
        """Report a request to the core as new.

        Call this method if vLLM never called `on_new_request`, or has since rewritten the request's hashes.
        """
        if tracked is not None:
            self._request_ended(request, holds_blocks=request.num_computed_tokens > 0)
        return self.on_new_request(request)

    def _not_filled(self, answers: LoadAnswers) -> frozenset[DeviceBlockId]:
        """Return the device blocks that loads should have filled which failed without a copy."""
        bad: list[DeviceBlockId] = []
        for name in set(answers.failed).intersection(answers.without_copy):
            tracked = self._tracked.get(name)
            if tracked is not None and tracked.to_load is not None:
                table, tokens = tracked.to_load
                for blocks, group in zip(table, self._shape.groups, strict=True):
                    bad += blocks[tokens // group.block_tokens :]
        return frozenset(bad).difference((NULL_BLOCK,))

    def _states(
        self, output: SchedulerOutput
    ) -> tuple[tuple[facts.StateHandedOff, ...], tuple[facts.TailHandedOff, ...]]:
        """Return the recurrent states that vLLM hands off in this step: those at the ends of blocks, and those of tails.

        vLLM copies the state of a tail to a block of its own, because the request overwrites it in the same step.
        """
        offered = getattr(output, "kv_connector_block_state", None)
        if offered is None:
            return (), ()
        states: list[facts.StateHandedOff] = []
        tails: list[facts.TailHandedOff] = []
        for request, ends in offered.boundary_state_offloads.items():
            for number, block, tokens in ends:
                group, size = self._state_tokens.get(number, (None, 1))
                key = self._device.keys_of((block,))[0]
                if group is None or key is None:
                    continue
                if tokens % size == 0:
                    place = RequestId(request), group, tokens // size - 1
                    states.append(facts.StateHandedOff(*place, key, DeviceBlockId(block)))
                elif self._tail_tokens:
                    of_tail = RequestId(request), group, tokens
                    tails.append(facts.TailHandedOff(*of_tail, key, DeviceBlockId(block)))
        return tuple(states), tuple(tails)


def _copies_on_device(output: SchedulerOutput) -> tuple[facts.DeviceCopy, ...]:
    copies = output.kv_cache_block_copies or ()
    return tuple([facts.DeviceCopy(copy.src_block_id, copy.dst_block_id) for copy in copies])


def _count_prefill(output: SchedulerOutput) -> tuple[int, int]:
    """Return how many tokens a step with drafts prefills, and how many requests only decode in it.

    A request that only decodes computes one token and its drafts.
    """
    scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    prefills = [tokens for name, tokens in scheduled.items() if tokens > 1 + len(drafts.get(name, ()))]
    return sum(prefills), len(scheduled) - len(prefills)
