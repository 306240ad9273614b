"""Computes the sizes of pages and blocks with a stock vLLM, for a model without weights.

The model's layers are on torch's meta device.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tests.vllm.stock.engines  # noqa: F401  # sets vLLM's environment before it is imported


def stock_sizes(folder: Path, block_size: int, cache_dtype: str, dtype: str) -> tuple[int, int]:
    """Return the size of a page and the size of a block, both in bytes."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.parallel_state import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.core.kv_cache_utils import _get_kv_cache_bytes_per_block, get_kv_cache_groups

    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        block_size=block_size,
        kv_cache_dtype=cache_dtype,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=1024,
    )
    config: Any = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, (folder / "rendezvous").as_uri(), 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        try:
            with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
                initialize_model(config)
            layers = config.compilation_config.static_forward_context
            specs = {
                name: spec
                for name, layer in layers.items()
                if (spec := layer.get_kv_cache_spec(config)) is not None
            }
        finally:
            cleanup_dist_env_and_memory()
    config.cache_config.kv_cache_layout = "LBNHC"  # an engine would receive this layout from its workers
    groups = get_kv_cache_groups(config, specs)
    (page,) = {spec.page_size_bytes for spec in specs.values()}
    return page, _get_kv_cache_bytes_per_block(groups, config.cache_config.get_resolved_kv_cache_layout())


def stock_kv_heads(folder: Path, ranks: int) -> int:
    from vllm.engine.arg_utils import EngineArgs

    config: Any = EngineArgs(model=str(folder), skip_tokenizer_init=True).create_model_config()
    return int(config.get_num_kv_heads(SimpleNamespace(tensor_parallel_size=ranks)))
