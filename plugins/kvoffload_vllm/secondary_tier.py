"""A disk and a remote tier below vLLM's own `OffloadingConnector`, for its setting `secondary_tiers`.

    {"type": "KVOffloadTier", "module_path": "kvoffload_vllm.secondary_tier", "disk_path": ..., "disk_bytes": ...}

vLLM calls the tier in the scheduler's process, one call at a time. Only `drain_jobs` and `shutdown` wait; all other
calls return at once, because threads run the jobs. The threads call `TierCache`, whose calls have time limits. One of
vLLM's chunks, with the bytes of all ranks, is one of `TierCache`'s pages.

An exception of a thread fails its job only; in vLLM's scheduler it would end the engine. vLLM cannot evict a chunk from
its host memory while a store of the chunk is open. So the bytes of open stores have a bound, and further stores are
refused.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvoffload.disk.tier_key import read_tier_key
from kvoffload.logs import get_logger
from kvoffload.model.engine import EngineIdentity
from kvoffload.model.errors import ConfigError, reason_of
from kvoffload.runtime.portal import DaemonExecutor
from kvoffload.telemetry.catalogue import BY_NAME, Kind
from kvoffload.telemetry.logging import log_removed
from kvoffload.telemetry.payload import Changes, split_labels
from kvoffload.tier_cache import METRICS, Page, TierCache, tier_config
from kvoffload_vllm.assembly import join_logging
from kvoffload_vllm.kv_identity import find_identity, find_problems

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from kvoffload.disk.identity import KVIdentity
    from kvoffload.model.config import OffloadConfig

Copy = Callable[[Sequence[bytes], Sequence[Page]], list[bool]]

_THREADS = 2  # the number of threads for loads, and the same number for stores
_SHARE = 4  # open stores have at most a quarter of vLLM's host memory
_LEAST_BYTES = 64 * 2**20  # a bound that is smaller would refuse what a disk writes in a fraction of a second
_CLOSING_S = 5.0

log = get_logger("tiers")


class KVOffloadTier(SecondaryTierManager):  # type: ignore[misc]  # the type checker runs without vLLM
    """Makes kvoffload's disk tier and remote tier a secondary tier of vLLM.

    Args:
        offloading_spec: vLLM's description of the offloaded KV cache.
        primary_kv_view: vLLM's host memory, of shape [chunks, bytes of a chunk].
        tier_type: the tier's name in vLLM's metrics.
        enable_kv_events: whether to publish events about blocks on the disk. vLLM's own events must be on as well.
        options: kvoffload's settings, as in `tier_config`, and further arguments of the base class.

    Raises:
        ConfigError: the settings or this vLLM version cannot be used; the message lists every problem.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        enable_kv_events: bool = False,
        **options: Any,  # noqa: ANN401  # settings of several types
    ) -> None:
        known = inspect.signature(SecondaryTierManager.__init__).parameters
        further = {name: options.pop(name) for name in list(options) if name in known}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **further)
        join_logging()
        config = tier_config(options)
        vllm_config = _config_of_caller()
        _check(vllm_config, config)
        self._config = config
        self._bytes = primary_kv_view.strides[0] if primary_kv_view.strides else 0
        self._memory = primary_kv_view.cast("B")
        self._stepped = threading.Event()
        self._is_closed = False
        self._idles_until: float | None = None
        self._cache = TierCache(
            lambda: self._identify(vllm_config),
            [self._bytes],
            config,
            replica=offloading_spec.config.parallel.data_parallel_index,
            engine=EngineIdentity("vllm", version("vllm"), str(vllm_config.model_config.model)),
        )
        self._lookups = None if config.remote_url is None else _Lookups(tier_type, self._cache)
        self._loads = DaemonExecutor("kvoffload-tier-load", _THREADS)
        self._stores = DaemonExecutor("kvoffload-tier-store", _THREADS)
        self._open: dict[int, tuple[TransferJob, Future[tuple[list[bool], float]]]] = {}
        self._logged: set[str] = set()  # the events that are logged once
        # For each live request, the blocks whose load failed. Lookups miss these blocks, so vLLM does not retry.
        self._failed: dict[str, set[OffloadKey]] = {}
        self._counted: Changes | None = Changes(self._cache)
        events = offloading_spec.kv_events_config
        self._has_events = enable_kv_events and events.enable_kv_cache_events
        if self._has_events:
            self._cache.take_changes()

    # -- requests -----------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._failed[req_context.req_id] = set()
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if key in self._failed.get(req_context.req_id, ()):
            return LookupResult.MISS
        if self._cache.exists([key], 0) == [True]:
            return LookupResult.HIT
        if self._cache.is_forked:
            return LookupResult.MISS  # no thread would ever look
        found = False if self._lookups is None else self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._failed.pop(req_context.req_id, None)
        if self._lookups is not None:
            self._lookups.cleanup(req_context.req_id)

    # -- jobs ---------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        open_bytes = (
            sum(len(job.keys) for job, _ in self._open.values() if not job.is_promotion) * self._bytes
        )
        most = max(self._memory.nbytes // _SHARE, _LEAST_BYTES)
        if open_bytes and open_bytes + len(job_metadata.keys) * self._bytes > most:
            reason = f"stores of {open_bytes} bytes are open, and the bound is {most}: the tiers are slower than vLLM"
            self._refuse(job_metadata, reason)
        else:
            self._start(job_metadata, self._stores, self._cache.put)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._start(job_metadata, self._loads, self._cache.get)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        ended = [number for number, (_, future) in self._open.items() if future.done()]
        return [self._result(*self._open.pop(number)) for number in ended]

    def drain_jobs(self) -> None:
        """Wait for every job, and invalidate all blocks (R10), because vLLM drains the jobs only to reset its cache."""
        if not self._cache.is_forked:
            wait([future for _, future in self._open.values()])
        if not self._cache.reset():
            log.warning("reset_incomplete", note="a process that starts now may find blocks from before")

    def _start(self, job: TransferJob, executor: DaemonExecutor, copy: Copy) -> None:
        if self._cache.is_forked:
            self._refuse(job, "a forked child has none of the tier's threads")
        else:
            self._open[job.job_id] = job, executor.submit(self._run, copy, job)

    def _refuse(self, job: TransferJob, reason: str) -> None:
        """End a job at once, without a copied block."""
        ended = Future[tuple[list[bool], float]]()
        ended.set_result(([False] * len(job.keys), 0.0))
        self._open[job.job_id] = job, ended
        self._log_once("tier_call_refused", reason, "vLLM counts further jobs that are refused as failed")

    def _run(self, copy: Copy, job: TransferJob) -> tuple[list[bool], float]:
        began = time.perf_counter()
        done = copy(list(job.keys), [self._page(int(chunk)) for chunk in job.chunk_ids])
        return done, time.perf_counter() - began

    def _page(self, chunk: int) -> Page:
        """Return a chunk's memory. If vLLM has no such chunk, it is too short, and `TierCache` refuses it."""
        start = chunk * self._bytes
        return (self._memory[start : start + self._bytes],) if start >= 0 else ()

    def _result(self, job: TransferJob, future: Future[tuple[list[bool], float]]) -> JobResult:
        try:
            answers, seconds = future.result()
        except Exception as error:
            answers = [False] * len(job.keys)
            seconds = 0.0
            self._log_once(
                "tier_copy_failed", reason_of(error), "vLLM counts further jobs that raise as failed"
            )
        done = [key for key, is_done in zip(job.keys, answers, strict=True) if is_done]
        failed = self._failed.get(job.req_context.req_id)
        if job.is_promotion and failed is not None:
            failed.update(set(job.keys).difference(done))
        some = tuple(done) if job.is_promotion and 0 < len(done) < len(answers) else None
        size = len(done) * self._bytes
        return JobResult(job.job_id, len(done) == len(answers), some, seconds, size)

    def _log_once(self, event: str, reason: str, note: str) -> None:
        if event not in self._logged:
            self._logged.add(event)
            log.warning(event, reason=reason, note=note)

    # -- steps --------------------------------------------------------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._stepped.set()
        if self._lookups is not None:
            self._lookups.flush()

    def has_pending_work(self) -> bool:
        """Return whether an idle engine must keep stepping because the tiers are still opening.

        After `disk_drain_s` seconds, return False even if the tiers are not open.
        """
        now = time.monotonic()
        if self._idles_until is None:
            self._idles_until = now + self._config.disk_drain_s
        if now < self._idles_until and self._cache.wait_open(0):
            self._idles_until = now
        return now < self._idles_until

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._has_events:
            for is_stored, some in groupby(self._cache.take_changes(), key=itemgetter(1)):
                keys = [key for key, _ in some]
                yield OffloadingEvent(keys, self.medium, removed=not is_stored, locality=Locality.LOCAL)

    # -- metrics ------------------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        kinds = {Kind.COUNTER: OffloadingCounterMetadata, Kind.GAUGE: OffloadingGaugeMetadata}
        return {
            metric.name: OffloadingHistogramMetadata(metric.help, metric.label_names, metric.buckets)
            if metric.kind is Kind.HISTOGRAM
            else kinds[metric.kind](metric.help, metric.label_names)
            for metric in METRICS
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats, names = OffloadingConnectorStats(), {metric.name for metric in METRICS}
        add = {Kind.COUNTER: stats.increase_counter, Kind.GAUGE: stats.set_gauge}
        counted, is_busy, payload = self._counted, bool(self._failed), None
        try:
            if counted is not None and not (is_busy and counted.now() < counted.next_s):
                payload = counted.take(is_busy=is_busy)
        except Exception as error:  # it would end vLLM's engine
            self._counted = None
            log_removed("Changes", error)
        for name, series in (payload or {}).items():
            for joined, value in series.items() if name in names else ():
                labels, kind = split_labels(joined), BY_NAME[name].kind
                for number in value if kind is Kind.HISTOGRAM else (value,):
                    add.get(kind, stats.observe_histogram)(name, number, labels)
        return stats

    # -- start and end ------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._cache.is_forked:
            return
        self._is_closed = True
        self._stepped.set()
        self._cache.close()  # ends the calls in which the threads wait
        if self._lookups is not None:
            self._lookups.shutdown()
        for executor in (self._loads, self._stores):
            executor.shutdown()
        wait([future for _, future in self._open.values()], _CLOSING_S)
        self._memory.release()

    def _identify(self, vllm_config: VllmConfig) -> KVIdentity:
        """Return the KV identity. vLLM seeds its block hashes before the first step, so wait for that step."""
        from vllm import envs

        self._stepped.wait()
        if self._is_closed:
            raise CancelledError
        config, offloaded = self._config, self._offloading_spec.config
        root = config.disk_path or Path(envs.VLLM_CACHE_ROOT, "kvoffload")
        key = read_tier_key(config.tier_key_file)
        tokens = offloaded.cache.tokens_per_hash
        identity = find_identity(vllm_config, (), tokens, root, config.weights_id, key)
        sizes = {name: size for name, size in asdict(offloaded.parallel).items() if name.endswith("p_size")}
        layout = offloaded.cache, offloaded.worker_kv_bytes_per_block, offloaded.groups
        form = offloaded.replicated_layout, offloaded.canonical_layout, offloaded.kv_cache_layout
        settings = {**identity.settings, "offloaded": repr((layout, form))}
        return replace(identity, parallel={**identity.parallel, **sizes}, settings=settings)


class _Lookups(AsyncLookupManager):  # type: ignore[misc]  # as above
    """Looks up blocks in the remote tier on a separate thread."""

    def __init__(self, tier_type: str, cache: TierCache) -> None:
        self._cache = cache
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._cache.exists(keys)


def _check(vllm_config: VllmConfig, config: OffloadConfig) -> None:
    problems = find_problems(vllm_config, has_identity=config.weights_id is not None)
    problems += lora_problems(vllm_config)
    if problems:
        raise ConfigError(problems)


def lora_problems(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield a problem if LoRA is on. The doctor also calls this function."""
    if vllm_config.lora_config is not None:
        yield (
            "vLLM does not report to a tier which requests use LoRA, and its hashes do not distinguish an adapter from a "
            "later one of the same name; use KVOffloadConnector"
        )


def _config_of_caller() -> VllmConfig:
    """Return the configuration of the engine that vLLM is creating, from a local variable of a calling function.

    vLLM does not pass its configuration to tiers.

    Raises:
        ConfigError: no calling function has the configuration in a local variable.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("vllm_config"), VllmConfig):
            return found
        frame = frame.f_back
    raise ConfigError(["this vLLM makes its tiers where the engine's configuration cannot be found"])
