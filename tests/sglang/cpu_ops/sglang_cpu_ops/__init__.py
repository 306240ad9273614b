"""Implements in plain torch the functions that SGLang's wheel lacks on a CPU. For development and tests only.

SGLang's wheel is built for CUDA. With `SGLANG_USE_CPU_ENGINE=1` its Python code runs on a CPU, except for
HiCache's copies between device and host. SGLang loads this package in every process of the engine, through
the entry point group `sglang.srt.plugins`. SGLang also imports the packages `sgl_kernel` and `torchvision`,
but calls none of their functions for a dense model; the folders with these names replace them. On a GPU this
package changes nothing.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Add the missing functions to this process. SGLang calls this function once per process."""
    import torch

    if torch.version.cuda is not None:
        return
    from sglang_cpu_ops import copies, streams

    streams.complete()
    copies.define()
