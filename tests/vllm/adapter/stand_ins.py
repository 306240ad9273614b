"""Objects with the attributes of vLLM's configurations, for tests without vLLM.

The specs have vLLM's class names, because the adapter recognizes a spec by its class's name.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_CLASSES: dict[str, type] = {}


def spec(name: str, block_size: int = 16, **fields: object) -> Any:
    cls = _CLASSES.setdefault(name, type(name, (SimpleNamespace,), {}))
    return cls(block_size=block_size, **fields)


def full(block_size: int = 16) -> Any:
    return spec("FullAttentionSpec", block_size)


def window(tokens: int, block_size: int = 16, **fields: object) -> Any:
    return spec("SlidingWindowSpec", block_size, sliding_window=tokens, **fields)


def group(spec_: Any, **fields: object) -> Any:
    return SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec_, **fields)


def cache_config(*groups: Any, num_blocks: int = 100, **fields: object) -> Any:
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=list(groups), **fields)


def vllm_config(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "kv_role": "kv_both",
        "enable_prefix_caching": True,
        "world_size": 4,
        "max_num_batched_tokens": 512,
        "decode_context_parallel_size": 1,
        "draft": None,
        **changes,
    }
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=settings["kv_role"]),
        cache_config=SimpleNamespace(enable_prefix_caching=settings["enable_prefix_caching"]),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=settings["max_num_batched_tokens"]),
        parallel_config=SimpleNamespace(
            world_size=settings["world_size"],
            decode_context_parallel_size=settings["decode_context_parallel_size"],
        ),
        speculative_config=settings["draft"],
    )
