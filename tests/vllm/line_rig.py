"""vLLM's own scheduler with the connector's scheduler side, but without an engine. The rig plays the worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.ids import JobId, Rank
from kvoffload.model.wire import DeviceJob, JobReport, TransferReport
from tests.vllm.engine_rig import transfer_config
from tests.vllm.scheduler_rig import BLOCK, make_request
from tests.vllm.stock import checkpoints, engines

STEP_TOKENS = 512
_HOST_BLOCKS = 4096


@contextmanager
def scheduling(folder: Path, specs: Sequence[Any], device_blocks: int, **options: Any) -> Iterator[Line]:
    """Yield a scheduler with one KV cache group for each of the specs, and with `device_blocks` usable blocks."""
    line = Line(make_scheduler(folder, specs, device_blocks, **options))
    try:
        yield line
    finally:
        line.scheduler.connector.shutdown()


def make_scheduler(folder: Path, specs: Sequence[Any], device_blocks: int, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.structured_output import StructuredOutputManager

    options = {"max_model_len": 2048, "max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 64, **options}
    config = EngineArgs(
        model=str(checkpoints.make("qwen3", folder / "qwen3")),
        **{**engines.OPTIONS, "skip_tokenizer_init": True, "async_scheduling": False, **options},
        kv_transfer_config=_transfer_config(),
    ).create_engine_config()
    blocks = config.cache_config.num_gpu_blocks = device_blocks + 1  # vLLM also counts the null block
    config.cache_config.block_size = BLOCK
    names = [f"layer {number}" for number in range(len(specs))]
    page = specs[0].page_size_bytes
    tensor = KVCacheTensor(size=page * blocks, layers=tuple(names), layer_stride=0, block_stride=page)
    groups = [KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)]
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups)
    whole, hashed = resolve_kv_cache_block_sizes(cache, config)
    return Scheduler(config, cache, StructuredOutputManager(config), block_size=whole, hash_block_size=hashed)


def _transfer_config() -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**transfer_config(_HOST_BLOCKS, min_load_tokens=0))


@dataclass
class Line:
    """A scheduler whose stores end in the step in which they start, and whose loads succeed unless the test holds them."""

    scheduler: Any
    holds_loads: bool = False
    stores_end: CopyOutcome = CopyOutcome.DONE
    loads: dict[JobId, DeviceJob] = field(default_factory=dict)
    preempted: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    """How many tokens each request did not compute."""

    @property
    def core(self) -> Any:
        return self.scheduler.connector.offload.core

    @property
    def waits_for_room(self) -> int:
        counts = self.scheduler.connector.offload.counters.snapshot()
        return int(counts.count("kvoffload_lookups_deferred_total", "room"))

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def waiting_with_blocks(self) -> dict[str, int]:
        """How many device blocks each request holds that does not run."""
        running = {request.request_id for request in self.scheduler.running}
        tables = {
            name: self.scheduler.kv_cache_manager.get_blocks(name).blocks
            for name in self.scheduler.requests
            if name not in running
        }
        held = {
            name: sum(not block.is_null for group in table for block in group)
            for name, table in tables.items()
        }
        return {name: blocks for name, blocks in held.items() if blocks}

    def ask(self, name: str, prompt: Sequence[int], count: int = 1, priority: int = 0) -> None:
        hash_tokens = self.scheduler.kv_cache_manager.block_pool.hash_block_size
        request = make_request(name, prompt, hash_tokens, priority=priority)
        request.max_tokens = count
        self.scheduler.add_request(request)

    def put_on_host_only(self, *prompts: Sequence[int]) -> None:
        """Compute prompts until the host has all their blocks, then empty the device's cache."""
        index = self.core.state.pool.index
        for number, prompt in enumerate(prompts):
            before = -1
            while len(index) > before:  # a small device stores few blocks at a time
                before = len(index)
                self.ask(f"w{number}", prompt)
                assert self.finish()
                assert self.scheduler.reset_prefix_cache()

    def finish(self) -> bool:
        """Step until all requests have ended; return False as soon as no later step can change anything."""
        idle = 0
        while self.scheduler.has_requests() and idle < 4:
            idle = 0 if self.step() or self.loads else idle + 1
        return not self.scheduler.has_requests()

    def step(self) -> int:
        """Run one step; return how many tokens were scheduled."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        self.preempted += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            self.cached[new.req_id] = new.num_computed_tokens
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: number for number, name in enumerate(names)},
                sampled_token_ids=[
                    [7] if one.num_computed_tokens >= one.num_tokens else [] for one in requests
                ],
                kv_connector_output=self._run(output),
            ),
        )
        return int(output.total_num_scheduled_tokens)

    def _run(self, output: Any) -> Any:
        """Start a plan's copies, end copies, and return the worker's report."""
        from vllm.v1.outputs import KVConnectorOutput

        from kvoffload_vllm.metadata import KVOffloadWorkerMetadata

        plan, answers = output.kv_connector_metadata.plan, output.kv_connector_metadata.answers
        self.loads |= {job.id: job for job in plan.loads}
        loaded = [] if self.holds_loads else list(self.loads.values())
        for job in loaded:
            del self.loads[job.id]
        ended = [JobReport(job.id, job.direction, self.stores_end, 0, 0.0, 0.0) for job in plan.stores]
        ended += [JobReport(job.id, job.direction, CopyOutcome.DONE, 0, 0.0, 0.0) for job in loaded]
        report = TransferReport(Rank(0), tuple(ended), _HOST_BLOCKS)
        received = {job.extra for job in loaded} | {*answers.without_copy}
        return KVConnectorOutput(
            finished_recving=received,
            failed_recving=received & {*answers.failed},
            kv_connector_worker_meta=KVOffloadWorkerMetadata((report,)),
        )
