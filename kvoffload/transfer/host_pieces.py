"""Batches of host copies, cut into pieces that threads take in turns, loads first.

A request waits for a load, none waits for a store. So every free thread takes loads before stores, and only one thread at a
time copies stores; it looks for loads after each piece. A load that arrives while stores are queued starts at once on
another thread, and behind at most one piece on this one.

    queue of loads    | a1 a2 a3 | b1 |        ◀── any thread
    queue of stores   | c1 c2 c3 c4 .. |       ◀── one thread, when there is no load

Nothing here blocks: the queues are changed by single operations that are atomic in Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.model.transfer import Direction
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from kvoffload.transfer.ports import Clock

PIECE_BYTES = 4 * 2**20
"""About 1 ms of copying: long beside what a piece costs, short beside a load. With twice as much a load is 4 % faster
alone, and 5 % slower behind stores."""

_STUCK_S = 1.0  # a thread that takes so long for a piece of a store may hang: another one takes over

Copy = Callable[[CopyRuns], None]


class HostTicket:
    """One batch; it has ended when all of its pieces have, well or not.

    Attributes:
        pieces: how many there are; set by the thread that cuts it, before it copies any.
    """

    def __init__(self) -> None:
        self.pieces = 1
        self._error: Exception | None = None
        self._begun: list[float] = []
        self._ended: list[float] = []

    def begin(self, now: float) -> None:
        """Note that a piece is being copied."""
        self._begun.append(now)

    def end(self, now: float, error: Exception | None = None) -> None:
        """Note that a piece no longer touches memory."""
        if error is not None:
            self._error = error
        self._ended.append(now)  # last: a thread that counts it must see the error

    def query(self) -> TicketState:
        """Return where the batch stands.

        Raises:
            Exception: what a copy raised; nothing runs any more.
        """
        if len(self._ended) < self.pieces:
            return TicketState.PENDING
        if self._error is not None:
            raise self._error
        return TicketState.DONE

    @property
    def copy_seconds(self) -> float | None:
        """From the first piece's start to the last one's end; None while pieces are left, and where none was begun."""
        if len(self._ended) < self.pieces or not self._begun:
            return None
        return max(self._ended) - min(self._begun)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    runs: CopyRuns
    ticket: HostTicket
    is_whole: bool  # a batch that has not been cut


class PieceQueue:
    """Copies batches on the threads of `executor`.

    Args:
        executor: runs what it is handed in order, on as many threads as it likes.
        clock: time.
        copies: what copies, for each direction.
        threads: most of them that one batch of loads is cut for.
        piece_bytes: about how much is copied at a time.
    """

    def __init__(
        self,
        executor: Executor,
        clock: Clock,
        copies: dict[Direction, Copy],
        *,
        threads: int,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._copies = copies
        self._threads = threads
        self._piece_bytes = piece_bytes
        self._loads: deque[_Piece] = deque()
        self._stores: deque[_Piece] = deque()
        self._storing = Lock()
        self._storing_since = 0.0

    def add(self, direction: Direction, runs: CopyRuns) -> HostTicket:
        """Queue a batch.

        Raises:
            RuntimeError: the executor was shut down; nothing was started.
        """
        piece = _Piece(runs, HostTicket(), is_whole=True)
        queue = self._loads if direction is Direction.LOAD else self._stores
        queue.append(piece)  # first: each call on the executor looks at the queue after this
        try:
            self._executor.submit(self._serve)
        except RuntimeError:
            with suppress(ValueError):  # a thread that is still at work has taken it, and copies all of it
                queue.remove(piece)
                raise
        return piece.ticket

    def _serve(self) -> None:
        """Copy until nothing is left that this thread may take."""
        while True:
            if piece := self._take(self._loads):
                self._copy(Direction.LOAD, piece)
            elif not self._store_one():
                return

    def _store_one(self) -> bool:
        """Copy a piece of a store; False if there is none, or if another thread copies stores, which then continues."""
        if not self._stores:
            return False
        turn, now = self._storing, self._clock.monotonic()
        if not turn.acquire(blocking=False):
            if now - self._storing_since < _STUCK_S:
                return False
            turn = self._storing = Lock()
            turn.acquire()
        self._storing_since = now
        try:
            if piece := self._take(self._stores):
                self._copy(Direction.STORE, piece)
        finally:
            turn.release()
        return True  # look again: a thread that found the lock taken has left

    def _copy(self, direction: Direction, piece: _Piece) -> None:
        piece.ticket.begin(self._clock.monotonic())
        error = None
        try:
            self._copies[direction](piece.runs)
        except Exception as raised:  # raised to the ticket's reader
            error = raised
        piece.ticket.end(self._clock.monotonic(), error)

    def _take(self, queue: deque[_Piece]) -> _Piece | None:
        """Take the first piece; a batch is cut, and what is left of it goes back for other threads."""
        try:
            piece = queue.popleft()
        except IndexError:
            return None
        if not piece.is_whole:
            return piece
        parts = [_Piece(part, piece.ticket, is_whole=False) for part in cut(piece.runs, self._piece_bytes)]
        piece.ticket.pieces = len(parts)
        queue.extendleft(reversed(parts[1:]))
        if queue is self._loads:
            with suppress(RuntimeError):  # shut down: this thread copies everything
                for _ in range(min(len(parts), self._threads) - 1):
                    self._executor.submit(self._serve)
        return parts[0]


def cut(runs: CopyRuns, limit: int) -> Iterator[CopyRuns]:
    """Cut copies into parts of about `limit` bytes, in order; less than twice that each."""
    if runs.total_bytes <= limit:
        yield runs
        return
    runs = no_longer_than(runs, limit)
    part = (np.cumsum(runs.size) - 1) // limit  # the one in which a run's last byte would lie
    starts = np.flatnonzero(np.diff(part, prepend=-1)).tolist()
    for start, end in pairwise([*starts, len(runs)]):
        yield runs.part(start, end)


def no_longer_than(runs: CopyRuns, limit: int) -> CopyRuns:
    """Cut every copy of over `limit` bytes."""
    counts = -(-runs.size // limit)
    if int(counts.max()) == 1:
        return runs
    which = np.repeat(np.arange(len(runs)), counts)
    first = np.cumsum(counts) - counts
    offset = (np.arange(len(which)) - first[which]) * limit
    size = np.minimum(runs.size[which] - offset, limit)
    return CopyRuns(runs.source[which] + offset, runs.target[which] + offset, size)
