"""Lends a stock SGLang what its wheel lacks on a CPU, in plain torch. For development and tests only.

The wheel that a package index offers is the one for CUDA. With `SGLANG_USE_CPU_ENGINE=1` its Python side runs, up to the
copies between device and host of HiCache. SGLang loads this package in every process of the engine through the entry
point group `sglang.srt.plugins`. Beside it lie two packages that SGLang's imports want and whose functions it does not
call for a dense model: `sgl_kernel` and `torchvision`. Does nothing where SGLang runs on a GPU.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Defines in this process what is missing. Called by SGLang, once."""
    import torch

    if torch.version.cuda is not None:
        return
    from sglang_cpu_ops import copies, streams

    streams.complete()
    copies.define()
