"""Adds to a stock vLLM, in plain torch, the ops that its CPU platform lacks. For development, tests and the demo.

vLLM's published wheel has no CPU extension. With `VLLM_TARGET_DEVICE=cpu` its Python code runs, but the
few compiled ops that the CPU worker calls are missing. vLLM loads this package in every process of the
engine, through the entry point group `vllm.general_plugins`. The package then defines these ops, which are
correct but slow. The package is not in the kvoffload wheel, and does nothing if vLLM runs on a GPU.
"""

from __future__ import annotations

__all__ = ["register"]

HYBRID_MODELS = ("GraniteMoeHybridForCausalLM", "Qwen3NextForCausalLM")


def register() -> None:
    """Define the missing ops in this process. vLLM calls this function once per process."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm_cpu_ops import interpreter, ops, platform, slot_mapping

    ops.define_missing()
    _replace_hybrid_models()
    slot_mapping.replace_kernel()
    platform.allow_async_scheduling()
    platform.allow_block_layouts()
    platform.allow_pipelines()
    platform.replace_kernels_once()
    interpreter.match_the_compiler()


def _replace_hybrid_models() -> None:
    from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel

    for name in HYBRID_MODELS:
        if name in ModelRegistry.models:
            ModelRegistry.models[name] = _LazyRegisteredModel("vllm_cpu_ops.hybrid_models", name)
