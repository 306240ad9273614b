"""Copies from host memory to host memory, for engines whose device is the CPU.

What costs is not the copy but the interpreter's lock: a thread that gives it up for each page may wait 5 ms to get it
back while the engine's thread is busy in Python, and a job has thousands of pages. So copies go to the kernel in calls
of up to 1,024 pieces (`process_vm_readv` on this very process), during each of which the lock is free. Long pieces go
through `memmove`, which is faster a byte and loses little to the lock; so does everything where the kernel or a
sandbox refuses the call.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.model.errors import CopyError
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor, Future

    from kvoffload.model.transfer import Direction
    from kvoffload.transfer.ports import Clock, Fence
    from kvoffload.transfer.runs import Numbers

_PIECES = 1024  # the kernel's limit for one call
_LONG = 2**20  # mean bytes of a piece from which memmove wins also while the engine is busy
_CALL_BYTES = 2**30  # the kernel moves no more than 2 GiB in one call


class HostTicket:
    """One batch on an executor."""

    def __init__(self, work: Future[float]) -> None:
        self._work = work
        self._seconds: float | None = None

    def query(self) -> TicketState:
        """Return where the batch stands.

        Raises:
            Exception: what the copy raised; nothing runs any more.
        """
        if not self._work.done():
            return TicketState.PENDING
        try:
            self._seconds = self._work.result()
        except CancelledError:
            return TicketState.FAILED
        return TicketState.DONE

    @property
    def copy_seconds(self) -> float | None:
        return self._seconds


class HostCopier:
    """Copies on the threads of `executor`; a batch is one piece of work.

    The fence is empty: on a CPU the forward pass has ended when the engine's hook runs.
    """

    def __init__(
        self, executor: Executor, clock: Clock, copy: Callable[[CopyRuns], None] | None = None
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._copy = copy or choose_copy()

    def fence(self) -> Fence:
        return None

    def submit(self, direction: Direction, runs: CopyRuns, fences: Sequence[Fence]) -> HostTicket:
        return HostTicket(self._executor.submit(self._timed, runs))

    def close(self) -> None:
        """Do nothing: the executor belongs to whoever handed it in."""

    def _timed(self, runs: CopyRuns) -> float:
        start = self._clock.monotonic()
        self._copy(runs)
        return self._clock.monotonic() - start


def choose_copy() -> Callable[[CopyRuns], None]:
    """Return the fastest copy that this system allows, tried out on a few bytes."""
    vector = _VectorCopy.load()
    if vector is None:
        return copy_by_memmove

    def copy(runs: CopyRuns) -> None:
        if runs.total_bytes >= _LONG * len(runs):
            copy_by_memmove(runs)
        else:
            vector(runs)

    return copy


def copy_by_memmove(runs: CopyRuns) -> None:
    """Copy piece by piece; works everywhere."""
    move = ctypes.memmove
    for source, target, size in zip(
        runs.source.tolist(), runs.target.tolist(), runs.size.tolist(), strict=True
    ):
        move(target, source, size)


class _VectorCopy:
    """The kernel's scattered copy within one process."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call

    @classmethod
    def load(cls) -> _VectorCopy | None:
        try:
            call = ctypes.CDLL(None, use_errno=True).process_vm_readv
        except (OSError, AttributeError):
            return None
        call.restype = ctypes.c_ssize_t
        words, pointer = ctypes.c_ulong, ctypes.c_void_p
        call.argtypes = [ctypes.c_int, pointer, words, pointer, words, words]
        copy = cls(call)
        return copy if copy._is_allowed() else None

    def __call__(self, runs: CopyRuns) -> None:
        targets = np.column_stack((runs.target, runs.size))  # rows of C's struct iovec
        sources = np.column_stack((runs.source, runs.size))
        for start in range(0, len(runs), _PIECES):
            part = slice(start, start + _PIECES)
            size = int(runs.size[part].sum())
            if size > _CALL_BYTES:
                copy_by_memmove(CopyRuns(runs.source[part], runs.target[part], runs.size[part]))
            else:
                self._move(targets[part], sources[part], size)

    def _move(self, targets: Numbers, sources: Numbers, size: int) -> None:
        """Copy rows of (address, bytes), as many on both sides, `size` bytes in all."""
        count = len(targets)
        moved = self._call(os.getpid(), targets.ctypes.data, count, sources.ctypes.data, count, 0)
        if moved != size:
            reason = os.strerror(ctypes.get_errno()) if moved < 0 else f"{moved} of {size} bytes moved"
            raise CopyError(f"the kernel did not copy host memory: {reason}")

    def _is_allowed(self) -> bool:
        probe = np.arange(4, dtype=np.int64)
        target = np.zeros_like(probe)
        try:
            rows = [np.array([[array.ctypes.data, array.nbytes]], np.int64) for array in (target, probe)]
            self._move(rows[0], rows[1], probe.nbytes)
        except CopyError:
            return False
        return bool((target == probe).all())
