"""Lets the V1 runner use pipeline parallelism on a CPU without a warm-up.

Each stage after the first copies its input to a buffer that vLLM allocates in its warm-up. If graphs are off
and the cache's size is given, the CPU worker skips the warm-up, and the runner would fail in its first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def make_buffers() -> None:
    """Make every V1 runner allocate its buffer in its first step."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def gather_into_buffer(self: GPUModelRunner, *arguments: Any, **named: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *arguments, **named)

    GPUModelRunner.sync_and_gather_intermediate_tensors = gather_into_buffer
