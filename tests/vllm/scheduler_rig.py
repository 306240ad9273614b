"""The adapter's scheduler side with vLLM's own requests and block pool, but without an engine. Tests call the hooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from tests.vllm.adapter.stand_ins import cache_config, full, group, vllm_config, window

BLOCK = 32
"""The tokens of a block."""
BLOCKS = 100


@contextmanager
def adapter(
    block_tokens: int,
    hash_tokens: int | None = None,
    *,
    step_tokens: int = 512,
    report_every: int = 1,
    now: Callable[[], float] = time.monotonic,
    windows: Sequence[int] = (),
    groups: Sequence[Any] | None = None,
    draft: Any = None,
    keeps_replaced_hashes: bool = False,
    **settings: Any,
) -> Iterator[tuple[Any, Any]]:
    """Yield the scheduler's side and the block pool, for one full-attention group and groups with sliding windows.

    Args:
        block_tokens: the tokens of a block.
        hash_tokens: the tokens of a hash, by default as many as a block has.
        step_tokens: the maximum number of tokens in a step.
        report_every: the number of steps from one progress report to the next.
        now: the clock for the time between metric messages.
        windows: the tokens of the window of each further group.
        groups: other groups, in place of all these.
        draft: vLLM's configuration of speculative decoding, if any.
        keeps_replaced_hashes: whether nothing of sessions with streaming inputs is stored or loaded.
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
    if groups is None:
        groups = [
            group(full(block_tokens)),
            *[group(window(tokens, block_tokens)) for tokens in windows],
        ]
    translated = vllm_groups(
        vllm_config(world_size=1, max_num_batched_tokens=step_tokens, draft=draft),
        cache_config(*groups, num_blocks=BLOCKS + 1),
        features=Features(hands_off_states=True),
        sizes=(block_tokens, hash_tokens),
    )
    device = VllmDevice(translated.partly_hashed)
    side = SchedulerSide(translated.shape, parse_config({"host_bytes": 1 << 20, **settings}), device)
    scheduler = VllmScheduler(
        side,
        device,
        translated,
        Changes(side, now),
        lambda: None,
        report_every,
        keeps_replaced_hashes=keeps_replaced_hashes,
    )
    pool = BlockPool(BLOCKS + 1, True, hash_tokens)
    scheduler.bind_gpu_block_pool(pool)
    try:
        yield scheduler, pool
    finally:
        scheduler.close()


def full_spec() -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(**_attention())


def window_spec(tokens: int) -> Any:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(sliding_window=tokens, **_attention())


def chunked_spec(tokens: int) -> Any:
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    return ChunkedLocalAttentionSpec(attention_chunk_size=tokens, **_attention())


def _attention() -> dict[str, Any]:
    import torch

    return {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def make_request(name: str, prompt: Sequence[int], hash_tokens: int = BLOCK, **fields: Any) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    _seed_hashes()
    hasher = get_request_block_hasher(hash_tokens, sha256)
    return Request(name, list(prompt), SamplingParams(max_tokens=100), None, block_hasher=hasher, **fields)


@cache
def _seed_hashes() -> None:
    """Seed vLLM's hashes once, because vLLM before 0.30 draws a seed at each call."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)


def table(blocks: Sequence[int]) -> Any:
    """Return a block table in the form in which vLLM reports an allocation."""
    return SimpleNamespace(get_block_ids=lambda: (list(blocks),))


def step_output(
    request: Any,
    tokens: int,
    *,
    is_new: bool = False,
    is_preempted: bool = False,
    new_blocks: Any = None,
    drafts: int = 0,
) -> Any:
    """Return a step with only this request: new, running or preempted. If `request` is None, the step has none.

    The last `drafts` of its tokens are drafts.
    """
    names = [] if request is None else [request.request_id]
    runs = [] if is_preempted else names
    old = [] if is_new else runs
    return SimpleNamespace(
        preempted_req_ids=set(names) if is_preempted else set(),
        num_scheduled_tokens=dict.fromkeys(runs, tokens),
        total_num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens=dict.fromkeys(runs, [-1] * drafts) if drafts else {},
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=old, new_block_ids=[new_blocks] * len(old), resumed_req_ids=set()
        ),
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in runs] if is_new else [],
        kv_cache_block_copies=(),
    )
