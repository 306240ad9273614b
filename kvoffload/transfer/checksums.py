"""Checksums of a rank's host slots: taken when a store or a fetch has filled a slot, compared when a load or a spill has read it.

A load is compared after its copy, not before, so no byte can change unnoticed in between: what the host holds after the
copy it held during the copy (unless it was wrong and has become right again). The hook still starts loads at once. By
then a bad block's bytes lie on the device, which does no harm: its load is not reported yet, its blocks are leased
until it is, and a failed copy leaves no better bytes.

Not noticed: bytes that were wrong when the store arrived, and bytes that change on their way to the device.

Reading must not make the engine's thread wait. A slot's bytes lie in as many pages as there are regions, and most pages are
small. The hash library keeps the interpreter's lock for pieces of up to 64 KiB, which it reads in microseconds from a cache
but not from memory. So:

    whole slots, long pages     hashed where they lie; the library releases the lock
    whole slots, small pages    gathered by the copier's own call, which needs no lock, and hashed in the cache
    samples                     one cache line of every 4 KiB of every page, gathered by numpy

Which line of its 4 KiB is read differs from slot to slot, page to page and stretch to stretch, so that over many slots no
place is left out; in one slot it is always the same.

    page of 8 KiB    | . . # . . . . . | . . . . . # . . |      two stretches, one line of each

So a sample always detects that a page, or any 8 KiB of one, holds other bytes; it detects a single changed byte in one case of 64.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from xxhash import xxh3_64

from kvoffload.model.transfer import Direction
from kvoffload.transfer.host_copier import choose_copy
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns, pieces_at

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor, Future

    from numpy.typing import NDArray

    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.runs import Numbers

    Positions = tuple[int, ...]
    Digests = NDArray[np.uint64]

SlotDigests: TypeAlias = "Callable[[Numbers], Digests]"
"""Reads slots, which are ready, and returns a digest of each; equal for equal bytes in the same slot. For several threads at once."""


_LONG = 2**16  # bytes of a piece from which on the library releases the interpreter's lock
_SCRATCH = 2**20  # gathered bytes: what a core's cache holds, and many pages in a call
_LINE = 64
_STRETCH = 4096  # what is lost, replaced or written over as a whole is seldom less than a page of memory
_LINES = 4096  # gathered at once: some 100 us, during which numpy may keep the interpreter's lock


class ChecksumTicket:
    """One batch whose slots are being read.

    Args:
        work: the reading.
    """

    copy_seconds = 0.0
    """The time of reading counts as waiting."""

    def __init__(self, work: Future[Positions]) -> None:
        self._work = work
        self.corrupt: Positions = ()
        """Of an ended load: positions of slots whose bytes are not those that were stored."""

    def query(self) -> TicketState:
        """Return whether the slots have been read.

        Raises:
            Exception: what reading them raised; nothing runs any more.
        """
        if not self._work.done():
            return TicketState.PENDING
        try:
            self.corrupt = self._work.result()
        except CancelledError:
            return TicketState.FAILED
        return TicketState.DONE


class Checksums:
    """The checksums of one rank's slots, and the only writer of them.

    A slot's checksum is written before its store or fetch is reported and read after that, so two threads never access it at once.

    Args:
        digests: reads slots.
        slots: how many there will be.
        executor: its threads read; the caller never does.
    """

    def __init__(self, digests: SlotDigests, slots: int, executor: Executor) -> None:
        self._digests = digests
        self._executor = executor
        self._known = np.zeros(slots, np.uint64)
        self._work = {Direction.STORE: self._take, Direction.LOAD: self._compare}

    def start(self, direction: Direction, slots: Numbers) -> ChecksumTicket:
        """Begin to take the checksums of slots that stores have filled, or to compare those of slots that loads read.

        Raises:
            Exception: nothing was started.
        """
        return ChecksumTicket(self._executor.submit(self._work[direction], slots))

    def take(self, *slots: int) -> None:
        """Take the checksums of slots that a fetch has filled. The calling thread reads them."""
        self._take(np.array(slots))

    def is_as_stored(self, slot: int) -> bool:
        """Whether a slot still holds the bytes that arrived. The calling thread reads them."""
        return not self.changed((slot,))

    def changed(self, slots: Sequence[int]) -> Positions:
        """Return the positions in `slots` of those that no longer hold the bytes that arrived. The calling thread reads them."""
        return self._compare(np.array(slots))

    def _take(self, slots: Numbers) -> Positions:
        self._known[slots] = self._digests(slots)
        return ()

    def _compare(self, slots: Numbers) -> Positions:
        """A slot that was never seen to be filled compares as unequal."""
        return tuple(np.flatnonzero(self._digests(slots) != self._known[slots]).tolist())


def whole_digests(arena: Arena) -> SlotDigests:
    """Return what reads every byte of a slot, in the way that suits the size of the pages."""
    layout = arena.layout
    is_long = layout.slot_bytes > _LONG * len(layout.regions)
    return InPlaceDigests(arena) if is_long else GatheredDigests(arena)


class InPlaceDigests:
    """Reads every byte where it lies."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def __call__(self, slots: Numbers) -> Digests:
        return np.fromiter(map(self._digest, slots.tolist()), np.uint64, len(slots))

    def _digest(self, slot: int) -> int:
        state = xxh3_64()
        for page in self._arena.pages(slot):
            state.update(page)
        return state.intdigest()


class GatheredDigests:
    """Copies slots beside each other and reads every byte there."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._copy = choose_copy()
        self._size = arena.layout.slot_bytes
        self._at_once = max(_SCRATCH // self._size, 1)
        self._scratch: deque[NDArray[np.uint8]] = deque()  # one for each thread that was ever in here at once

    def __call__(self, slots: Numbers) -> Digests:
        try:
            scratch = self._scratch.popleft()
        except IndexError:
            scratch = np.empty(self._at_once * self._size, np.uint8)
        try:
            digests = self._digests(slots, scratch)
            return np.fromiter(digests, np.uint64, len(slots))
        finally:
            self._scratch.append(scratch)

    def _digests(self, slots: Numbers, scratch: NDArray[np.uint8]) -> Iterator[int]:
        geometry, size, seen = self._arena.geometry, self._size, scratch.data
        places = np.cumsum(geometry.page) - geometry.page  # of the pages in a gathered slot
        for start in range(0, len(slots), self._at_once):
            sources = geometry.page_addresses(slots[start : start + self._at_once])
            count = len(sources)
            targets = scratch.ctypes.data + np.arange(count)[:, None] * size + places
            self._copy(CopyRuns(sources.ravel(), targets.ravel(), np.tile(geometry.page, count)))
            for place in range(count):
                state = xxh3_64()
                state.update(seen[place * size : (place + 1) * size])
                yield state.intdigest()


@dataclass(frozen=True, slots=True, eq=False)
class _Lines:
    """Where the lines lie in the pages of some regions, all of one size.

    Args:
        regions: which, [regions].
        width: bytes of a line.
        starts: of the stretches in a page, [stretches].
        steps: how many places there are for a line in a stretch, [stretches].
    """

    regions: Numbers
    width: int
    starts: Numbers
    steps: Numbers

    @classmethod
    def of(cls, regions: Numbers, page_bytes: int) -> _Lines:
        width = min(_LINE, page_bytes)
        starts = np.arange(0, page_bytes - width + 1, _STRETCH, dtype=np.int64)
        room = np.minimum(_STRETCH, page_bytes - starts)
        return cls(regions, width, starts, room // width)

    def addresses(self, pages: Numbers, slots: Numbers) -> Numbers:
        """Return the address of each line of pages at `pages`, [slots, all regions], as [slots, lines]."""
        turns = slots[:, None, None] + 29 * self.regions[:, None] + 11 * np.arange(len(self.starts))
        offsets = self.starts + turns % self.steps * self.width
        return (pages[:, self.regions, None] + offsets).reshape(len(slots), -1)


class SampledDigests:
    """Reads one line of every stretch of every page."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        sizes = arena.geometry.page
        self._lines = [_Lines.of(np.flatnonzero(sizes == size), int(size)) for size in np.unique(sizes)]
        lines = sum(len(some.regions) * len(some.starts) for some in self._lines)
        self._at_once = max(_LINES // lines, 1)

    def __call__(self, slots: Numbers) -> Digests:
        return np.fromiter(self._digests(slots), np.uint64, len(slots))

    def _digests(self, slots: Numbers) -> Iterator[int]:
        for start in range(0, len(slots), self._at_once):
            part = slots[start : start + self._at_once]
            pages = self._arena.geometry.page_addresses(part)
            rows = [_gathered(some.addresses(pages, part), some.width) for some in self._lines]
            for place in range(len(part)):
                state = xxh3_64()
                for row in rows:
                    state.update(row[place].data)
                yield state.intdigest()


def _gathered(addresses: Numbers, width: int) -> NDArray[np.uint8]:
    """Return the bytes of the lines at `addresses`, [slots, lines], as [slots, bytes]."""
    low = int(addresses.min())
    lines = pieces_at(low, int(addresses.max()) - low + 1, width)
    return lines[addresses.ravel() - low].view(np.uint8).reshape(len(addresses), -1)
