"""The scheduler's side of the connector: vLLM's hooks as facts, and the core's answers as vLLM wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING

from kvoffload.core.state import LoadResults
from kvoffload.model import facts
from kvoffload.model.causes import LoadOutcome
from kvoffload.model.events import LoadEnded, LoadScheduled, OffloadingDegraded
from kvoffload.model.ids import BlockKey, DeviceBlockId, JobId, RequestId
from kvoffload.model.transfer import TransferPlan
from kvoffload_vllm.metadata import KVOffloadMetadata, KVOffloadWorkerMetadata
from kvoffload_vllm.tracked import DueSteps, KeyMaker, Tracked

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvoffload.runtime.scheduler_side import SchedulerSide
    from kvoffload_vllm.host_news import HostNews
    from kvoffload_vllm.pool_device import VllmDevice
    from kvoffload_vllm.stats import KVOffloadStats, StatsSender

_Table = tuple[tuple[DeviceBlockId, ...], ...]


class VllmScheduler:
    """Offloading on vLLM's scheduler.

    Args:
        offload: the runtime's scheduler side.
        device: what vLLM lends.
        keys: makes keys of block hashes.
        groups: vLLM's numbers of the groups that are offloaded.
        stats: makes of the counters what vLLM carries to its own metrics.
        closed: called when vLLM has stopped, after all else.
        news: makes vLLM's KV cache events, None where nobody publishes them.
    """

    def __init__(
        self,
        offload: SchedulerSide,
        device: VllmDevice,
        keys: KeyMaker,
        groups: tuple[int, ...],
        stats: StatsSender,
        closed: Callable[[], object],
        news: HostNews | None = None,
    ) -> None:
        self.offload = offload
        self._device = device
        self._keys = keys
        self._groups = groups
        self._stats = stats
        self._closed = closed
        self._news = news
        self._least_block = min(group.block_tokens for group in offload.shape.groups)
        self._tracked: dict[str, Tracked] = {}
        self._due = DueSteps()
        self._submitted: dict[str, JobId] = {}
        self._given_up: list[JobId] = []
        self._request_of: dict[JobId, str] = {}
        self._loaded: list[str] = []
        self._failed: list[str] = []
        self._step = 0
        offload.bus.count(LoadScheduled, self._load_scheduled)
        offload.bus.count(LoadEnded, self._load_ended)
        offload.bus.count(OffloadingDegraded, self._degraded)

    # -- before a step ------------------------------------------------------------------------------------------

    def bind(self, pool: BlockPool) -> None:
        """Take vLLM's block pool."""
        self._device.bind(pool)

    def new_request(self, request: Request) -> Tracked:
        """The engine took a request in."""
        tracked = Tracked(request)
        self._tracked[request.request_id] = tracked
        reads = not request.skip_reading_prefix_cache
        known = tracked.new_keys(self._keys)
        fact = facts.RequestSeen(RequestId(request.request_id), request.num_tokens, known, reads)
        self.offload.seen(fact, tracked.has_token, tracked.trace_parent)
        return tracked

    def lookup(self, request: Request, device_tokens: int) -> int | None:
        """Return the tokens that the host adds, None for "ask again"."""
        tracked = self._tracked.get(request.request_id) or self.new_request(request)
        tracked.found_tokens = device_tokens
        name = RequestId(request.request_id)
        return self.offload.lookup(name, device_tokens, request.num_tokens, self._new_keys(tracked))

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine gave a request blocks: for the first time, or again after a load, for the rest of its prompt."""
        tracked = self._tracked.get(request.request_id) or self.new_request(request)
        tracked.boundary = 0
        self._due.drop(tracked)  # it is told of when it runs
        # Behind these, the table's blocks were handed out for this allocation.
        known = max(tracked.found_tokens, request.num_computed_tokens)
        table = self._table(blocks.get_block_ids())
        fact = facts.BlocksAllocated(RequestId(request.request_id), table, known, external_tokens)
        self.offload.allocated(fact)
        self._hear_results()
        if self._news is not None:
            self._news.note(request)

    # -- a step -------------------------------------------------------------------------------------------------

    def build_metadata(self, output: SchedulerOutput) -> KVOffloadMetadata:
        """Return the step's plan for the workers."""
        preempted = tuple(map(RequestId, output.preempted_req_ids or ()))
        for request in preempted:
            if (tracked := self._tracked.get(request)) is not None:
                self._due.drop(tracked)
        copies = getattr(output, "kv_cache_block_copies", None)  # older versions have no such copies
        copied = tuple(DeviceBlockId(copy.dst_block_id) for copy in copies) if copies else ()
        fact = facts.StepScheduled(self._step, self._progress(output), preempted, copied, *_tokens(output))
        self._step += 1
        plan = self.offload.step(fact)
        self._hear_results()
        loading = self._loading(plan) if plan.loads else {}
        # A load is planned in the step that made it binding, or (offloading went off meanwhile) never.
        self._request_of.clear()
        ended = tuple(self._loaded), tuple(self._failed), tuple(self._given_up)
        for told in (self._loaded, self._failed, self._given_up):
            told.clear()
        return KVOffloadMetadata(plan, loading, *ended)

    def update(self, output: KVConnectorOutput) -> None:
        """The workers told what ended."""
        told = output.kv_connector_worker_meta
        if isinstance(told, KVOffloadWorkerMetadata):
            self._note(self.offload.reported(told.reports))

    def ended(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """A request finished or was aborted; its blocks are about to be freed."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self._due.drop(tracked)
        confirmed = min(tracked.confirmed_tokens, request.num_tokens)
        fact = facts.RequestEnded(
            RequestId(request.request_id), confirmed, tracked.new_keys(self._keys), any(block_ids)
        )
        self.offload.ended(fact)
        self._hear_results()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return what came to the host and what left it."""
        return self._news.take() if self._news is not None else ()

    def take_stats(self) -> KVOffloadStats | None:
        """Return what the counters gained, None without news. A step that is followed by another may leave it to that."""
        return self._stats.take(is_last=not (self._tracked or self.has_work))

    def close(self) -> None:
        """The engine stops."""
        self.offload.close()
        self._closed()

    @property
    def has_work(self) -> bool:
        """Whether vLLM must keep stepping for something to end."""
        return self.offload.has_work or bool(self._loaded or self._failed or self._given_up)

    # -- inside -------------------------------------------------------------------------------------------------

    def _progress(self, output: SchedulerOutput) -> tuple[facts.Progress, ...]:
        """Only of requests that completed a block, got one, or run for the first time since their allocation."""
        scheduled, news = output.num_scheduled_tokens, self._news_of(output)
        for tracked in self._due.take():
            request_id = tracked.request.request_id
            if request_id in news:
                continue
            lacking = tracked.boundary - tracked.confirmed_tokens
            if lacking <= 0 and request_id in scheduled:
                news[request_id] = ()
            else:
                self._due.put(tracked, max(lacking, 1))
        progress: tuple[facts.Progress, ...] = ()
        if news:
            known = self._tracked
            progress = tuple(
                [
                    self._progress_of(known[request], blocks)
                    for request, blocks in news.items()
                    if request in known
                ]
            )
        if output.total_num_scheduled_tokens > len(scheduled):
            self._look_next_step(request_id for request_id, tokens in scheduled.items() if tokens > 1)
        return progress

    def _news_of(self, output: SchedulerOutput) -> dict[str, _Table]:
        """Return the requests of which vLLM itself tells something new, with the blocks that continue their tables."""
        cached = output.scheduled_cached_reqs
        ids, tables = cached.req_ids, cached.new_block_ids
        # Most have no new block, so Python's own loops find those that do.
        news: dict[str, _Table] = {}
        for request_id, blocks in compress(zip(ids, tables, strict=True), tables):
            news[request_id] = self._table(blocks)
        # Of these the whole table is given here, and was told when it was allocated.
        for request_id in cached.resumed_req_ids:
            news[request_id] = ()
        for new in output.scheduled_new_reqs:
            news[new.req_id] = ()
        return news

    def _look_next_step(self, request_ids: Iterable[str]) -> None:
        """These get more than one token in this step, so that no count of steps tells when they complete a block."""
        for request_id in request_ids:
            if (tracked := self._tracked.get(request_id)) is not None:
                self._due.put(tracked, 1)

    def _progress_of(self, tracked: Tracked, new_blocks: _Table) -> facts.Progress:
        confirmed = tracked.confirmed_tokens
        tracked.boundary = confirmed - confirmed % self._least_block + self._least_block
        self._due.put(tracked, tracked.boundary - confirmed)
        request = RequestId(tracked.request.request_id)
        return facts.Progress(request, confirmed, new_blocks, self._new_keys(tracked))

    def _new_keys(self, tracked: Tracked) -> tuple[tuple[BlockKey, ...], ...]:
        """Return the keys not told yet; routers that follow our events hear of their tokens when they arrive."""
        known, new_keys = tracked.hashes, tracked.new_keys(self._keys)
        if self._news is not None and tracked.hashes > known:
            self._news.note(tracked.request, known)
        return new_keys

    def _loading(self, plan: TransferPlan) -> dict[JobId, tuple[str, tuple[DeviceBlockId, ...]]]:
        loading = {job.job: (self._request_of.pop(job.job), job.blocks) for job in plan.loads}
        self._submitted.update((request, job) for job, (request, _) in loading.items())
        return loading

    def _hear_results(self) -> None:
        if self.offload.has_results:
            self._note(self.offload.take_results())

    def _note(self, results: LoadResults) -> None:
        """Workers report the loads that they copied. What ended without them, they are told to report."""
        for request in results.loaded:
            if not self._is_workers_own(request):
                self._loaded.append(request)
        for request in results.failed:
            if not self._is_workers_own(request):
                self._failed.append(request)

    def _is_workers_own(self, request: RequestId) -> bool:
        """Whether every worker reports, or has reported, the end of this request's load by itself."""
        return self._submitted.pop(request, None) is not None

    def _table(self, block_ids: Sequence[Sequence[int]]) -> _Table:
        return tuple([block_ids[group] for group in self._groups])  # type: ignore[misc]  # vLLM's numbers are our ids

    def _load_scheduled(self, event: LoadScheduled) -> None:
        self._request_of[event.job] = event.request

    def _load_ended(self, event: LoadEnded) -> None:
        if event.outcome is LoadOutcome.ABANDONED:
            self._given_up.append(event.job)
        elif event.outcome is LoadOutcome.CANCELLED:
            self._request_of.pop(event.job, None)

    def _degraded(self, event: OffloadingDegraded) -> None:
        # What is being loaded was planned by what is broken.
        self._given_up += self._submitted.values()


def _tokens(output: SchedulerOutput) -> tuple[int, int]:
    """Return how many tokens the step prefills, and how many it decodes. A draft's tokens count as prefilled."""
    scheduled, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
    decoding = len(scheduled)
    if total > decoding:
        decoding = list(scheduled.values()).count(1)
    return total - decoding, decoding
