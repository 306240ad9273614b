"""Lets an environment variable enable a KV cache with blocks outermost on a CPU.

vLLM's CPU attention supports only one layout. The attention in this package uses strides, so an engine can
also run with the other layout, as on a GPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

# With "1", vLLM also offers the layout with blocks outermost. The variable is read whenever an engine is
# configured.
SWITCH = "VLLM_CPU_OPS_BLOCK_LAYOUTS"


def follow_the_switch() -> None:
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:  # vLLM before 0.29 does not have this module
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    stock = CPUAttentionBackend.supported_kv_cache_layouts.__func__

    def supported(cls: type[CPUAttentionBackend]) -> tuple[KVCacheLayout, ...]:
        lent = (KVCacheLayout.BLHNC,) if os.environ.get(SWITCH) == "1" else ()
        return (*stock(cls), *lent)

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(supported)
