"""Checksums of a rank's host slots: taken when a store or a fetch has filled a slot, compared when a load or a spill has read it.

A load is compared after its copy, not before, so no byte can change unnoticed in between: what the host holds after the
copy it held during the copy (unless it was wrong and has become right again). The hook still starts loads at once. By
then a bad block's bytes lie on the device, which does no harm: its load is not reported yet, its blocks are leased
until it is, and a copy that failed leaves no better bytes.

Not noticed: bytes that were wrong when the store arrived, and bytes that change on their way to the device.

Reading must not make the engine's thread wait. A slot's bytes lie in as many pages as there are regions, and most pages are
small. The hash library keeps the interpreter's lock for pieces of up to 64 KiB, which it reads in microseconds from a cache
but not from memory. So:

    whole slots, long pages     hashed where they lie; the library releases the lock
    whole slots, small pages    gathered by the copier's own call, which needs no lock, and hashed in the cache
    samples                     one cache line of every 4 KiB of every page, gathered by numpy

A reader returns the pieces to be hashed; `digests_of` hashes them.

Which line of its 4 KiB is read differs from slot to slot, page to page and stretch to stretch, so that over many slots no
place is left out; in one slot it is always the same.

    page of 8 KiB    | . . # . . . . . | . . . . . # . . |      two stretches, one line of each

So a sample always detects that a page, or any 8 KiB of one, holds other bytes; it detects a single changed byte in one case of 64.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from xxhash import xxh3_64

from kvoffload.model.wire import Direction
from kvoffload.transfer.host_copier import choose_copy
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns, pieces_at

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor, Future

    from numpy.typing import NDArray

    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.ports import Ticket
    from kvoffload.transfer.runs import Numbers

    Positions = tuple[int, ...]

SlotReader: TypeAlias = "Callable[[Numbers], Iterable[Iterable[memoryview]]]"
"""Returns the bytes of each slot; each is valid until the next one is asked for. Several threads may call it at once."""


_LONG = 2**16  # bytes of a piece from which on the library releases the interpreter's lock
_SCRATCH = 2**20  # gathered bytes: what a core's cache holds, and many pages in a call
_LINE = 64
_STRETCH = 4096  # less than a page of memory is seldom lost or overwritten as a whole
_LINES = 4096  # gathered at once: some 100 us, during which numpy may keep the interpreter's lock


class CheckedTicket:
    """One batch that ends when its copies have ended and then its slots have been read.

    Args:
        copies: the copier's ticket.
        read: begins to read the slots.

    Attributes:
        corrupt: of an ended load, positions of slots whose bytes are not those that were stored.
    """

    def __init__(self, copies: Ticket, read: Callable[[], Future[Positions]]) -> None:
        self._copies = copies
        self._read = read
        self._work: Future[Positions] | None = None
        self.corrupt: Positions = ()

    @property
    def copy_seconds(self) -> float | None:
        """The copier's; the time of reading counts as waiting."""
        return self._copies.copy_seconds

    def query(self) -> TicketState:
        """Return where the batch stands, and begin to read the slots once the copies have ended well.

        Raises:
            Exception: what the copier or reading the slots raised; nothing runs any more.
        """
        if self._work is None:
            state = self._copies.query()
            if state is not TicketState.DONE:
                return state
            self._work = self._read()
        if not self._work.done():
            return TicketState.READING
        self.corrupt = self._work.result()
        return TicketState.DONE


class Checksums:
    """The checksums of one rank's slots, and the only writer of them.

    A slot's checksum is written before its store or fetch is reported and read after that, so two threads never access it at once.

    Args:
        reader: reads slots.
        slots: how many there will be.
        executor: its threads read; the caller never does.
    """

    def __init__(self, reader: SlotReader, slots: int, executor: Executor) -> None:
        self._reader = reader
        self._executor = executor
        self._known = np.zeros(slots, np.uint64)

    def start(self, direction: Direction, slots: Numbers) -> Future[Positions]:
        """Begin to take the checksums of slots that stores have filled, or to compare those of slots that loads read.

        Raises:
            Exception: nothing was started.
        """
        work = self._take if direction is Direction.STORE else self._compare
        return self._executor.submit(work, slots)

    def take(self, *slots: int) -> None:
        """Take the checksums of slots that a fetch has filled. The calling thread reads them."""
        self._take(np.array(slots))

    def changed(self, slots: Sequence[int]) -> Positions:
        """Return the positions in `slots` whose bytes are not those that arrived. The calling thread reads them."""
        return self._compare(np.array(slots))

    def _take(self, slots: Numbers) -> Positions:
        self._known[slots] = digests_of(self._reader, slots)
        return ()

    def _compare(self, slots: Numbers) -> Positions:
        """A slot that was never seen to be filled compares as unequal."""
        return tuple(np.flatnonzero(digests_of(self._reader, slots) != self._known[slots]).tolist())


def digests_of(reader: SlotReader, slots: Numbers) -> NDArray[np.uint64]:
    """Return a digest of each slot, equal for equal bytes in the same slot."""
    return np.fromiter(map(_digest, reader(slots)), np.uint64, len(slots))


def _digest(pieces: Iterable[memoryview]) -> int:
    state = xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def whole_slots(arena: Arena) -> SlotReader:
    """Return a reader of every byte of a slot, the one that suits the size of the pages."""
    is_long = arena.layout.slot_bytes > _LONG * len(arena.layout.regions)
    return slots_in_place(arena) if is_long else GatheredSlots(arena)


def slots_in_place(arena: Arena) -> SlotReader:
    """Return a reader of every byte where it lies."""
    return lambda slots: map(arena.pages, slots.tolist())


class _Scratch(threading.local):
    """Memory of each thread. New memory for each call would take as long to touch as to fill."""

    def __init__(self, size: int) -> None:
        self.memory = np.empty(size, np.uint8)


class GatheredSlots:
    """Copies slots beside each other and reads every byte there."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._copy = choose_copy()
        self._at_once = max(_SCRATCH // arena.layout.slot_bytes, 1)
        self._scratch = _Scratch(self._at_once * arena.layout.slot_bytes)

    def __call__(self, slots: Numbers) -> Iterator[tuple[memoryview]]:
        geometry, memory = self._arena.geometry, self._scratch.memory
        gathered = memory.reshape(self._at_once, -1)
        places = np.cumsum(geometry.page) - geometry.page  # of the pages in a gathered slot
        for start in range(0, len(slots), self._at_once):
            sources = geometry.page_addresses(slots[start : start + self._at_once])
            rows = gathered[: len(sources)]
            targets = memory.ctypes.data + np.arange(len(rows))[:, None] * rows.shape[1] + places
            self._copy(CopyRuns(sources.ravel(), targets.ravel(), np.tile(geometry.page, len(rows))))
            yield from ((row.data,) for row in rows)


class SampledSlots:
    """Reads one line of every stretch of every page; a page that is shorter than a line is one.

    Its arrays are [lines of a slot].
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        page = arena.geometry.page
        stretches = (page - np.minimum(page, _LINE)) // _STRETCH + 1
        self._region = region = np.repeat(np.arange(len(page)), stretches)
        stretch = np.arange(len(region)) - np.repeat(np.cumsum(stretches) - stretches, stretches)
        self._width = np.minimum(page, _LINE)[region]
        self._start = stretch * _STRETCH
        self._places = np.minimum(_STRETCH, page[region] - self._start) // self._width  # of the line
        self._turn = 29 * region + 11 * stretch
        self._at_once = max(_LINES // len(region), 1)

    def __call__(self, slots: Numbers) -> Iterator[list[memoryview]]:
        widths = np.unique(self._width).tolist()
        for first in range(0, len(slots), self._at_once):
            some = slots[first : first + self._at_once]
            pages = self._arena.geometry.page_addresses(some).take(self._region, axis=1)
            places = (some[:, None] + self._turn) % self._places
            lines = pages + self._start + places * self._width
            rows = [_gathered(lines.compress(self._width == width, axis=1), width) for width in widths]
            yield from ([row[place].data for row in rows] for place in range(len(some)))


def _gathered(addresses: Numbers, width: int) -> NDArray[np.uint8]:
    """Return the bytes of the lines at `addresses`, [slots, lines], as [slots, bytes]."""
    low = int(addresses.min())
    lines = pieces_at(low, int(addresses.max()) - low + 1, width)
    return lines[addresses.ravel() - low].view(np.uint8).reshape(len(addresses), -1)
