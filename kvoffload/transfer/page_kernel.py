"""Copies of short pieces by a kernel, which reads and writes pinned host memory over the bus itself.

A copy engine takes pieces one after the other, and below some size each takes longer to begin than to move. A kernel has
many of them under way at once. It has few thread blocks, so that the engine's own kernels keep nearly all of the device:
they are enough to fill the bus, of which there is only one.

    program 0   | run 0 | run 32 | run 64 ..      each program takes every 32nd run, 4 KiB of it at a time, in pieces of
    program 1   | run 1 | run 33 | run 65 ..      16 bytes; byte by byte what is not aligned, and what is left at the end

Import this module only where triton is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton  # type: ignore[import-not-found]  # it comes with an engine
import triton.language as tl  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from kvoffload.transfer.runs import CopyRuns, Numbers

_PROGRAMS = 32  # 128 KiB under way: about twice what a bus of 50 GB/s and 1.2 us holds
_WORDS = 512  # of eight bytes, that a program has under way
_WARPS = 4


# `runs` is not specialized: another variant would be compiled in the middle of a step.
@triton.jit(do_not_specialize=["runs"])  # type: ignore[untyped-decorator]  # triton has no types
def _copy_runs(descriptors: tl.tensor, runs: tl.tensor, words: tl.constexpr) -> None:
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        target = tl.load(descriptors + run)
        source = tl.load(descriptors + runs + run)
        size = tl.load(descriptors + 2 * runs + run)
        is_aligned = (target | source) % 16 == 0
        body = size // 16 * is_aligned * 2  # in words, an even number of them
        # The hints hold for these two pointers alone: nothing says that the bytes further down are aligned.
        word_target = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        word_source = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        for turn in range(tl.cdiv(body, words)):
            at = turn * words + tl.arange(0, words)
            tl.store(word_target + at, tl.load(word_source + at, at < body), at < body)
        byte_target = target.to(tl.pointer_type(tl.uint8))
        byte_source = source.to(tl.pointer_type(tl.uint8))
        for start in range(body * 8, size, words):
            at = start + tl.arange(0, words)
            tl.store(byte_target + at, tl.load(byte_source + at, at < size), at < size)


def describe(runs: CopyRuns) -> Numbers:
    """Return what the kernel reads: [3, runs], addresses to write to, addresses to read from, bytes."""
    return np.stack((runs.target, runs.source, runs.size))


def launch(descriptors: torch.Tensor) -> None:
    """Start the kernel on the current stream; `descriptors` as `describe` makes them, where the kernel can read them."""
    runs = descriptors.shape[1]
    if runs:
        _copy_runs[(min(_PROGRAMS, runs),)](descriptors, runs, words=_WORDS, num_warps=_WARPS)


def enqueue(runs: CopyRuns, stream: torch.cuda.Stream) -> object:
    """Start copies on `stream`; return what has to live until they have ended."""
    staged = torch.from_numpy(describe(runs)).pin_memory()  # torch keeps such memory for the next time
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        descriptors = staged.to(stream.device, non_blocking=True)
        launch(descriptors)
    return staged, descriptors
