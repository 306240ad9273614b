"""Gives a stock SGLang, in plain torch, the functions that its wheel lacks on a CPU. For development and tests only.

The package index has SGLang's wheel for CUDA. With `SGLANG_USE_CPU_ENGINE=1` its Python code runs on a CPU, except for
HiCache's copies between device and host. SGLang loads this package in every process of the engine, through the entry
point group `sglang.srt.plugins`. SGLang also imports two packages, `sgl_kernel` and `torchvision`, but calls none of their
functions for a dense model; the folders of these names replace them. On a GPU this package changes nothing.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Add the missing functions to this process. SGLang calls this once."""
    import torch

    if torch.version.cuda is not None:
        return
    from sglang_cpu_ops import copies, streams

    streams.complete()
    copies.define()
