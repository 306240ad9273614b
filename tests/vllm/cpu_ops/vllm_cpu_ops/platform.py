"""Lets the CPU platform run engines as a GPU does: two steps in flight, blocks outermost, pipeline stages.

Two environment variables, read whenever an engine is configured, enable what a CPU would not choose.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

ASYNC_SCHEDULING = "VLLM_CPU_OPS_ASYNC_SCHEDULING"
BLOCK_LAYOUTS = "VLLM_CPU_OPS_BLOCK_LAYOUTS"


def allow_async_scheduling() -> None:
    """With the variable, two steps may be in flight. vLLM's CPU platform gains nothing from it and switches it off.

    The scheduler, the batch queue and the runner are the same code as on a GPU.
    """
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def update_and_overlap(cls: type[CpuPlatform], config: VllmConfig) -> None:
        stock(cls, config)
        if os.environ.get(ASYNC_SCHEDULING) == "1":
            config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(update_and_overlap)


def allow_block_layouts() -> None:
    """With the variable, a KV cache may have blocks outermost, because this package's attention uses strides."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:  # vLLM before 0.29 does not have this module
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    stock = CPUAttentionBackend.supported_kv_cache_layouts.__func__

    def supported(cls: type[CPUAttentionBackend]) -> tuple[KVCacheLayout, ...]:
        lent = (KVCacheLayout.BLHNC,) if os.environ.get(BLOCK_LAYOUTS) == "1" else ()
        return (*stock(cls), *lent)

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(supported)


def allow_pipelines() -> None:
    """Make every V1 runner allocate the buffer for a later stage's input in its first step.

    vLLM allocates this buffer in its warm-up. If graphs are off and the cache's size is given, the CPU worker skips the
    warm-up, and the runner would fail in its first step.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def gather_into_buffer(self: GPUModelRunner, *arguments: Any, **named: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *arguments, **named)

    GPUModelRunner.sync_and_gather_intermediate_tensors = gather_into_buffer


def replace_kernels_once() -> None:
    """Make vLLM replace its Triton kernels for a process's first engine only.

    To replace a kernel, vLLM looks at every name of every imported module, and fails at llvmlite's. numba imports
    llvmlite when an engine first finds drafts by n-grams.
    """
    from vllm.platforms.cpu import CpuPlatform

    # vLLM before 0.32 replaces no kernels.
    if stock := getattr(CpuPlatform, "register_triton_kernel_overrides", None):
        CpuPlatform.register_triton_kernel_overrides = staticmethod(functools.cache(stock))
