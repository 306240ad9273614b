"""The adapter's scheduler side with vLLM's block pool, but without an engine. Tests call the hooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.vllm.adapter.stand_ins import cache_config, full, group, vllm_config

BLOCKS = 100


@contextmanager
def adapter(
    block_tokens: int,
    hash_tokens: int | None = None,
    *,
    step_tokens: int = 512,
    report_every: int = 1,
    now: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> Iterator[tuple[Any, Any]]:
    """Yield the scheduler's side and the block pool, for one full-attention group.

    Args:
        block_tokens: the tokens of a block.
        hash_tokens: the tokens of a hash, by default as many as a block has.
        step_tokens: the maximum number of tokens in a step.
        report_every: the number of steps from one progress report to the next.
        now: the clock for the time between metric messages.
        settings: the connector's settings.
    """
    from vllm.v1.core.block_pool import BlockPool

    from kvoffload.model.config import parse_config
    from kvoffload.runtime.scheduler_side import SchedulerSide
    from kvoffload.telemetry.payload import Changes
    from kvoffload_vllm.groups import vllm_groups
    from kvoffload_vllm.pool_device import VllmDevice
    from kvoffload_vllm.scheduler import VllmScheduler
    from kvoffload_vllm.support import Features

    hash_tokens = hash_tokens or block_tokens
    groups = vllm_groups(
        vllm_config(world_size=1, max_num_batched_tokens=step_tokens),
        cache_config(group(full(block_tokens)), num_blocks=BLOCKS + 1),
        features=Features(),
        sizes=(block_tokens, hash_tokens),
    )
    device = VllmDevice(groups.partly_hashed)
    side = SchedulerSide(groups.shape, parse_config({"host_bytes": 1 << 20, **settings}), device)
    scheduler = VllmScheduler(side, device, groups, Changes(side, now), lambda: None, report_every)
    pool = BlockPool(BLOCKS + 1, True, hash_tokens)
    scheduler.bind_gpu_block_pool(pool)
    try:
        yield scheduler, pool
    finally:
        scheduler.close()
