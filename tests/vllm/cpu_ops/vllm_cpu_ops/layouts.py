"""Enables a KV cache with blocks outermost on a CPU, by an environment variable.

vLLM's CPU attention supports only one layout. Our attention uses strides, so an engine can also run with the
other layout, as on a GPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

SWITCH = "VLLM_CPU_OPS_BLOCK_LAYOUTS"  # "1" offers this layout too; read whenever an engine is configured


def follow_the_switch() -> None:
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:  # vLLM before 0.29 lacks this module.
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    stock = CPUAttentionBackend.supported_kv_cache_layouts.__func__

    def supported(cls: type[CPUAttentionBackend]) -> tuple[KVCacheLayout, ...]:
        lent = (KVCacheLayout.BLHNC,) if os.environ.get(SWITCH) == "1" else ()
        return (*stock(cls), *lent)

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(supported)
