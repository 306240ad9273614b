"""Copies of short pieces by a kernel, which reads and writes pinned host memory over the bus itself.

A copy engine takes pieces one after the other, and below some size each takes longer to begin than to move. A kernel has
many of them under way at once. It has few thread blocks, so that the engine's own kernels keep nearly all of the device:
they are enough to fill the bus, of which there is only one.

    program 0   | run 0 | run 32 | run 64 ..      with 32 programs each takes every 32nd run, 4 KiB at a time, in pieces of
    program 1   | run 1 | run 33 | run 65 ..      16 bytes; byte by byte what is not aligned, and what is left at the end

Import this module only where triton is installed.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import triton  # type: ignore[import-not-found]  # it comes with an engine
import triton.language as tl  # type: ignore[import-not-found]

from kvoffload.transfer.cuda.driver import KERNEL_COPIES
from kvoffload.transfer.cuda.library import CudaError

if TYPE_CHECKING:
    from kvoffload.transfer.cuda.driver import Event, NvidiaDriver
    from kvoffload.transfer.runs import CopyRuns, Numbers

_WORDS = 512  # of eight bytes, that a program has under way
_WARPS = 4
_BUFFERS = 8  # launches under way on one stream
_ROW_BYTES = 24


# `runs` is not specialized: another variant would be compiled in the middle of a step.
@triton.jit(do_not_specialize=["runs"])  # type: ignore[untyped-decorator]  # triton has no types
def _copy_runs(descriptors: tl.tensor, runs: tl.tensor, words: tl.constexpr) -> None:
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        target = tl.load(descriptors + run)
        source = tl.load(descriptors + runs + run)
        size = tl.load(descriptors + 2 * runs + run)
        is_aligned = (target | source) % 16 == 0
        body = size // 16 * is_aligned * 2  # in words, an even number of them
        # The hints hold for these two pointers only: nothing says that the bytes further down are aligned.
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


class PageKernel:
    """The kernel on one stream. All memory is taken here, and the kernel is compiled and loaded here; `enqueue` does neither.

    Each launch under way has a buffer for its descriptors: pinned memory, from which they are copied to the device's. Two
    threads may launch at once.

    Args:
        driver: the device's, in use by the calling thread.
        stream: handle of the stream.
        programs: thread blocks of a launch.

    Raises:
        Exception: the kernel does not compile or load, or memory cannot be had.
    """

    def __init__(self, driver: NvidiaDriver, stream: int, programs: int) -> None:
        self._driver = driver
        self._stream = stream
        with driver.relaxed():
            memory = driver.pinned(_BUFFERS * KERNEL_COPIES * _ROW_BYTES).view(np.int64)
            address = driver.allocate(memory.nbytes, stream)
            self._buffers = deque(
                _Buffer(rows, Int64Pointer(address + number * rows.nbytes), driver.event(timed=False))
                for number, rows in enumerate(memory.reshape(_BUFFERS, 3 * KERNEL_COPIES))
            )
            target = self._buffers[0].target
            kernel = _copy_runs.warmup(target, KERNEL_COPIES, words=_WORDS, num_warps=_WARPS, grid=(1,))
            self._launchers = [kernel[(number, 1, 1)] for number in range(1, programs + 1)]

    def enqueue(self, runs: CopyRuns) -> None:
        """Start copies.

        Args:
            runs: `KERNEL_COPIES` at most.

        Raises:
            BufferError: too many launches are under way; nothing was started.
        """
        buffer, count = self._free_buffer(), len(runs)
        rows = buffer.rows[: 3 * count].reshape(3, count)
        rows[0], rows[1], rows[2] = runs.target, runs.source, runs.size
        self._driver.library.cuMemcpyAsync(
            buffer.target.address, buffer.rows.ctypes.data, rows.nbytes, self._stream
        )
        launch = self._launchers[min(len(self._launchers), count) - 1]
        launch(buffer.target, count, _WORDS, stream=self._stream)
        self._driver.record(buffer.end, self._stream)
        self._buffers.append(buffer)  # not after an error: the device may still read it

    def _free_buffer(self) -> _Buffer:
        """Remove and return the buffer that has been in use for longest."""
        with suppress(IndexError):  # another thread may hold one
            buffer = self._buffers.popleft()
            with suppress(CudaError):  # a refused question is asked again
                if self._driver.has_passed(buffer.end):
                    return buffer
            self._buffers.appendleft(buffer)
        raise BufferError("every buffer for descriptors is in use")


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Memory for the descriptors of one launch.

    Args:
        rows: pinned memory.
        target: as much of the device's.
        end: recorded behind the launch.
    """

    rows: Numbers
    target: Int64Pointer
    end: Event


class Int64Pointer:
    """What Triton takes for a tensor."""

    dtype = tl.int64

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address
