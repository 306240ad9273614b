"""Replaces SGLang's CUDA kernels, which its modules import. A dense model on a CPU calls none of them."""

from sglang_cpu_ops.absent import stand_in

stand_in(__name__)
