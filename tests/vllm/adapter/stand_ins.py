"""Objects with the attributes of vLLM's configurations, for tests without vLLM.

The specs have vLLM's class names, because the adapter recognizes a spec by its class's name.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from tests.vllm.engine_rig import MARKS

_Test = TypeVar("_Test", bound=Callable[..., object])
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
        "data_parallel_index": 0,
    }
    settings |= {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    settings |= {"max_num_batched_tokens": 512, "draft": None, **changes}

    def part(*names: str) -> Any:
        return SimpleNamespace(**{name: settings[name] for name in names})

    return SimpleNamespace(
        kv_transfer_config=part("kv_role"),
        cache_config=part("enable_prefix_caching"),
        scheduler_config=part("max_num_batched_tokens"),
        parallel_config=part(
            "world_size",
            "data_parallel_index",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ),
        speculative_config=settings["draft"],
    )


def on_vllm(test: _Test) -> _Test:
    """Mark a test that needs a stock vLLM, in a file whose other tests need none."""
    for mark in MARKS:
        test = mark(test)
    return test
