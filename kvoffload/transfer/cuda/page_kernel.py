"""Copies short pieces with a kernel, which reads and writes pinned host memory directly over the bus.

A copy engine copies one piece at a time, and starting a short piece takes longer than moving it. A kernel keeps
many pieces in flight at once. A few thread blocks are enough to saturate the bus, and they leave nearly all of the
device to the engine's own kernels.

    program 0   | run 0 | run 32 | run 64 ..    with 32 programs each takes every 32nd run, 4 KiB at a time, in
    program 1   | run 1 | run 33 | run 65 ..    16-byte pieces; unaligned runs and the remainder byte by byte

Importing this module requires triton.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import triton  # type: ignore[import-not-found]  # triton comes with the engine
import triton.language as tl  # type: ignore[import-not-found]

from kvoffload.transfer.cuda.driver import KERNEL_COPIES
from kvoffload.transfer.cuda.library import CudaError

if TYPE_CHECKING:
    from kvoffload.transfer.cuda.driver import Event, NvidiaDriver
    from kvoffload.transfer.runs import CopyRuns, Numbers

_WORDS = 512  # eight-byte words that a program has in flight
_WARPS = 4
_BUFFERS = 8  # the maximum number of launches in flight on one stream
_ROW_BYTES = 24


# If `runs` were specialized, triton might compile another variant in the middle of a step.
@triton.jit(do_not_specialize=["runs"])  # type: ignore[untyped-decorator]  # triton has no types
def _copy_runs(descriptors: tl.tensor, runs: tl.tensor, words: tl.constexpr) -> None:
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        target = tl.load(descriptors + run)
        source = tl.load(descriptors + runs + run)
        size = tl.load(descriptors + 2 * runs + run)
        is_aligned = (target | source) % 16 == 0
        body = size // 16 * is_aligned * 2  # a number of eight-byte words, always even
        # Only the two word pointers get alignment hints, because `byte_target` and `byte_source` may be unaligned.
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
    """The kernel on one stream. The constructor allocates all memory, and compiles and loads the kernel.

    Each launch in flight has a buffer for its descriptors, which are written to pinned memory and copied from there to
    device memory. Two threads may launch at the same time.

    Args:
        driver: the device's driver, with its context current on the calling thread.
        stream: handle of the stream.
        programs: the maximum number of thread blocks per launch.

    Raises:
        Exception: the kernel does not compile or load, or an allocation fails.
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
        """Enqueue copies as one launch.

        Args:
            runs: the copies, at most `KERNEL_COPIES`.

        Raises:
            BufferError: too many launches are in flight; nothing was enqueued.
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
        # After an error the buffer is not returned, because the device may still read it.
        self._buffers.append(buffer)

    def _free_buffer(self) -> _Buffer:
        """Remove and return the oldest buffer. Raise `BufferError` if its launch has not ended, or if there is none."""
        # No buffer is left if other threads use all of them, or if failed launches have dropped them.
        with suppress(IndexError):
            buffer = self._buffers.popleft()
            with suppress(CudaError):  # If the query is refused, a later call repeats it.
                if self._driver.has_passed(buffer.end):
                    return buffer
            self._buffers.appendleft(buffer)
        raise BufferError("every buffer for descriptors is in use")


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Memory for the descriptors of one launch.

    Args:
        rows: pinned host memory.
        target: device memory of the same size.
        end: the event that is recorded behind the launch.
    """

    rows: Numbers
    target: Int64Pointer
    end: Event


class Int64Pointer:
    """An address that Triton accepts as a tensor."""

    dtype = tl.int64

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address
