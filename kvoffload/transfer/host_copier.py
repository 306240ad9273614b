"""Copies from host memory to host memory, for engines whose device is the CPU.

Copies compete with the engine's thread for the GIL. A thread that releases the GIL for each page may wait 5 ms to get
it back while the engine's thread runs Python, and delays that thread each time it holds the GIL. So there are two ways
to copy:

* The patient way calls the kernel for up to 1,024 pieces at a time (`process_vm_readv` or `process_vm_writev` on this
  process); the GIL is free during each call. It is slower, because the kernel copies page by page.
* The quick way takes the GIL more often. It calls `memmove` for each long piece. It copies short pieces by numpy
  indexing, 512 at a time, through a buffer that stays in the cache: for a short piece, the kernel's lookup takes longer
  than the copy.

The quick way is used until a drop in its speed shows that another thread wants the GIL. Pieces of 8 to 48 KiB, and
short pieces in small batches, are always copied the patient way. Pieces of a megabyte lose little by waiting for the
GIL, so `memmove` always copies them. If the kernel or a sandbox refuses the patient way's system call, `memmove` copies
everything.

Batches are cut into pieces, which several threads copy. Requests wait for loads, but not for stores. So every free
thread takes loads before stores, and only one thread at a time copies stores. A load that arrives while stores are
queued starts at once on another thread. The thread that copies stores joins in after its current piece.

    queue of loads    | a1 a2 a3 | b1 |        ◀── any thread
    queue of stores   | c1 c2 c3 c4 .. |       ◀── one thread, when there is no load

Nothing here blocks: the queues are changed only by single operations, which are atomic in Python.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvoffload.model.errors import CopyError
from kvoffload.model.wire import Direction
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns, pieces_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffload.transfer.ports import Clock, Fence, Threads

PIECE_BYTES = 4 * 2**20
"""Copying a piece takes about 1 ms, which is long compared with its overhead and short compared with a load.

With pieces twice as large, a load is 4 % faster on an idle copier, and 5 % slower behind stores.
"""

_LOAD_THREADS = 2  # the number of threads that copy one batch of loads; a single thread copies stores

Copy = Callable[[CopyRuns], None]

_PIECES = 1024  # the maximum number of pieces that the kernel copies in one call
# Limits on the mean piece size, in bytes:
_LONG = 2**20  # above, memmove is faster than the kernel even while the engine is busy
_MIDDLE = 48 * 2**10  # above, memmove is faster than the kernel while the GIL is free
_SHORT = 2**13  # below, indexing is faster than the kernel while the GIL is free
_UNIT = 2**12  # the largest unit, in bytes, that is copied by array indexing
_LEAST_UNIT = 2**9
_ROWS = 512  # the number of units that one indexing operation copies; numpy keeps the GIL for up to 500
# Size in bytes; the speed of smaller copies is ignored, because their source may be in a cache.
_MEASURABLE = 2**21
_SLOWER = 2.5  # a copy this many times slower than the best is assumed to have waited for the GIL
# The best speed decays by this factor with each copy, so that one copy from a cache does not count forever.
_FORGET = 0.98


class HostTicket:
    """One batch. The batch has ended when all of its pieces have ended, successfully or not.

    Attributes:
        pieces: the number of pieces; 0 until a thread has cut the batch, which happens before the first piece is
            copied.
    """

    is_started = True

    def __init__(self) -> None:
        self.pieces = 0
        self._error: Exception | None = None
        self._begun: list[float] = []
        self._ended: list[float] = []

    def end(self, begun: float, now: float, error: Exception | None = None) -> None:
        """Record that the copy of a piece has ended. The copy began at `begun`."""
        if error is not None:
            self._error = error
        self._begun.append(begun)
        self._ended.append(now)  # Append to `_ended` last, because `query` counts its entries.

    def query(self) -> TicketState:
        """Return the batch's state.

        Raises:
            Exception: a copy raised it; the batch has stopped running.
        """
        if not self._has_ended:
            return TicketState.PENDING
        if self._error is not None:
            raise self._error
        return TicketState.DONE

    @property
    def copy_seconds(self) -> float | None:
        """Return the seconds from the first piece's start to the last piece's end; None until all pieces have ended."""
        return max(self._ended) - min(self._begun) if self._has_ended else None

    @property
    def _has_ended(self) -> bool:
        return 0 < self.pieces == len(self._ended)


class _Piece(NamedTuple):
    runs: CopyRuns
    ticket: HostTicket


class HostCopier:
    """Copies on `threads`, loads first.

    Args:
        threads: any number of threads.
        clock: measures the copies.
        copy: the copy function for both directions; by default the fastest one for each direction.
        piece_bytes: approximate size of a piece, in bytes.
    """

    slices = 0

    def __init__(
        self, threads: Threads, clock: Clock, copy: Copy | None = None, *, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._threads = threads
        self._clock = clock
        self._copies = {way: copy or choose_copy(arena_is_target=way is Direction.STORE) for way in Direction}
        self._piece_bytes = piece_bytes
        self._loads: deque[_Piece] = deque()
        self._stores: deque[_Piece] = deque()
        self._storing = Lock()

    def fence(self) -> Fence:
        """Return None. On a CPU, the forward pass has ended when the engine's hook runs."""
        return None

    def submit(self, direction: Direction, runs: CopyRuns, fences: Sequence[Fence]) -> HostTicket:
        """Queue a batch.

        Raises:
            RuntimeError: the threads were shut down, or none could be started; no copy was started.
        """
        piece = _Piece(runs, HostTicket())
        queue = self._loads if direction is Direction.LOAD else self._stores
        queue.append(piece)  # Queue the piece before `_serve` is queued, so that `_serve` finds it.
        try:
            self._threads.start(self._serve)
        except RuntimeError:
            with suppress(ValueError):  # A running thread has taken the batch, and copies all of it.
                queue.remove(piece)
                raise
        return piece.ticket

    def close(self) -> None:
        """Do nothing: the threads belong to the caller."""

    def _serve(self) -> None:
        """Copy pieces until none is left that this thread may take."""
        while True:
            if piece := self._take(self._loads):
                self._copy(Direction.LOAD, piece)
            elif not self._store_one():
                return

    def _store_one(self) -> bool:
        """Copy a piece of a store; return False if there is none or another thread is copying stores."""
        if not self._stores or not self._storing.acquire(blocking=False):
            return False
        try:
            if piece := self._take(self._stores):
                self._copy(Direction.STORE, piece)
        finally:
            self._storing.release()
        # While this thread held the lock, another thread may have skipped a queued store, so the caller checks again.
        return True

    def _copy(self, direction: Direction, piece: _Piece) -> None:
        error, begun = None, self._clock.monotonic()
        try:
            self._copies[direction](piece.runs)
        except Exception as raised:  # The ticket's `query` raises the error.
            error = raised
        piece.ticket.end(begun, self._clock.monotonic(), error)

    def _take(self, queue: deque[_Piece]) -> _Piece | None:
        """Take the first piece.

        If this piece is a whole batch, cut it, and queue the other pieces for other threads.
        """
        try:
            piece = queue.popleft()
        except IndexError:
            return None
        if piece.ticket.pieces:  # The batch is already cut.
            return piece
        parts = [_Piece(part, piece.ticket) for part in cut(piece.runs, self._piece_bytes)]
        piece.ticket.pieces = len(parts)
        queue.extendleft(reversed(parts[1:]))
        if queue is self._loads:
            with suppress(RuntimeError):  # After a shutdown, the calling thread copies all pieces.
                for _ in range(min(len(parts), _LOAD_THREADS) - 1):
                    self._threads.start(self._serve)
        return parts[0]


def choose_copy(*, arena_is_target: bool = False) -> Copy:
    """Return the fastest copy function that this system allows, found by copying a few bytes.

    Args:
        arena_is_target: True if the function copies into the arena, which has huge pages; False if it copies out
            of the arena.
    """
    vector = _vector_copy(far_is_target=arena_is_target)
    if vector is None:
        return copy_by_memmove

    by_index = WatchfulCopy(lambda runs: copy_by_index(runs, vector), vector)
    by_memmove = WatchfulCopy(copy_by_memmove, vector)

    def copy(runs: CopyRuns) -> None:
        size, pieces = runs.total_bytes, len(runs)
        if size >= _LONG * pieces:
            copy_by_memmove(runs)
        elif size >= _MIDDLE * pieces:
            by_memmove(runs)
        elif size <= _SHORT * pieces and size >= _ROWS * _UNIT:
            by_index(runs)
        else:
            vector(runs)

    return copy


@dataclass
class WatchfulCopy:
    """Copies the quick way, or the patient way while another thread seems to want the GIL.

    Another thread is assumed to want the GIL when a copy takes several times as long as the best one so far. A wrong
    guess costs a few percent of a copy's time.

    Args:
        quick, patient: two ways to copy.
        now: returns the time in seconds.
        best: the best speed so far in bytes per second, slowly decaying.
        is_contended: whether another thread seems to want the GIL.
    """

    quick: Copy
    patient: Copy
    now: Callable[[], float] = time.perf_counter
    best: float = 0.0
    is_contended: bool = False

    def __call__(self, runs: CopyRuns) -> None:
        begun = self.now()
        copy = self.patient if self.is_contended else self.quick
        copy(runs)
        if runs.total_bytes >= _MEASURABLE:
            speed = runs.total_bytes / max(self.now() - begun, 1e-9)
            self.best = max(speed, _FORGET * self.best)
            self.is_contended = speed * _SLOWER < self.best


def copy_by_memmove(runs: CopyRuns) -> None:
    """Copy each run by a call of `memmove`, which works on every system."""
    moves = map(ctypes.memmove, runs.target.tolist(), runs.source.tolist(), runs.size.tolist())
    deque(moves, 0)  # `deque` makes the calls without keeping their results.


def copy_by_index(runs: CopyRuns, rest: Copy) -> None:
    """Copy units of one size, `_ROWS` at a time. `rest` copies the remainder, or everything if units are too small."""
    unit = math.gcd(_UNIT, int(np.gcd.reduce(runs.size)))
    if unit < _LEAST_UNIT:
        rest(runs)
        return
    units = no_longer_than(runs, unit)
    start = int(min(units.source.min(), units.target.min()))
    span = int(max(units.source.max(), units.target.max())) - start + 1
    memory = pieces_at(start, span, unit)
    sources, targets = units.source - start, units.target - start
    whole = len(units) // _ROWS * _ROWS
    for first in range(0, whole, _ROWS):
        rows = slice(first, first + _ROWS)
        memory[targets[rows]] = memory[sources[rows]]
    if whole < len(units):
        rest(units[whole:])


def _vector_copy(*, far_is_target: bool) -> Copy | None:
    """Return the kernel's scattered copy within one process, or None if the system refuses it.

    The kernel looks up the far (remote) side's memory page by page. So the arena should be the far side, because it has
    huge pages if the system supports them, and an engine's tensors mostly have none. One call moves at most 2 GiB.
    """
    try:
        library = ctypes.CDLL(None, use_errno=True)
        call = library.process_vm_writev if far_is_target else library.process_vm_readv
    except (OSError, AttributeError):
        return None
    call.restype = ctypes.c_ssize_t
    words, pointer = ctypes.c_ulong, ctypes.c_void_p
    call.argtypes = [ctypes.c_int, pointer, words, pointer, words, words]

    def copy(runs: CopyRuns) -> None:
        near, far = (runs.source, runs.target) if far_is_target else (runs.target, runs.source)
        near_rows = np.column_stack((near, runs.size))  # each row is a C struct iovec
        far_rows = np.column_stack((far, runs.size))
        for start in range(0, len(runs), _PIECES):
            rows = slice(start, start + _PIECES)
            size, count = int(runs.size[rows].sum()), len(runs.size[rows])
            sides = near_rows[rows].ctypes.data, count, far_rows[rows].ctypes.data, count
            if (moved := call(os.getpid(), *sides, 0)) != size:
                reason = os.strerror(ctypes.get_errno()) if moved < 0 else f"{moved} of {size} bytes moved"
                raise CopyError(f"the kernel did not copy host memory: {reason}")

    return copy if _works(copy) else None


def _works(copy: Copy) -> bool:
    source, target = np.arange(4, dtype=np.int64), np.zeros(4, np.int64)
    numbers = source.ctypes.data, target.ctypes.data, source.nbytes
    try:
        copy(CopyRuns(*(np.array([number], np.int64) for number in numbers)))
    except CopyError:
        return False
    return bool((target == source).all())


def cut(runs: CopyRuns, limit: int) -> Iterator[CopyRuns]:
    """Cut copies, in order, into parts of about `limit` bytes each, and always less than twice `limit`."""
    if runs.total_bytes <= limit:
        yield runs
        return
    runs = no_longer_than(runs, limit)
    # For each run, the number of the part that contains the run's last byte.
    part = (np.cumsum(runs.size) - 1) // limit
    starts = np.flatnonzero(np.diff(part, prepend=-1)).tolist()
    for start, end in pairwise([*starts, len(runs)]):
        yield runs[start:end]


def no_longer_than(runs: CopyRuns, limit: int) -> CopyRuns:
    """Split every copy of more than `limit` bytes."""
    counts = -(-runs.size // limit)
    if int(counts.max()) == 1:
        return runs
    which = np.repeat(np.arange(len(runs)), counts)
    first = np.cumsum(counts) - counts
    offset = (np.arange(len(which)) - first[which]) * limit
    size = np.minimum(runs.size[which] - offset, limit)
    return CopyRuns(runs.source[which] + offset, runs.target[which] + offset, size)
