"""Checksums of a rank's host slots: computed after a store or fetch has filled them, compared after a load or spill.

A load's slots are compared after the copy, not before, so that a byte that changes before or during the copy is
detected, and the hook can start a load without waiting for the comparison. When a corrupt block is found, its bytes are
already on the device. This does no harm: the load has not been reported, its device blocks are still leased, and a load
that fails may leave any bytes in them.

The checksums do not detect bytes that were already wrong when the store ended, or bytes that change on the way to the
device.

Reading slots must not make the engine's thread wait for the GIL. A slot has one page for each region, and most pages
are small. The hash library keeps the GIL for pieces of up to 64 KiB; hashing such a piece takes microseconds if it is
in a cache, but longer otherwise. So slots are read in one of three ways:

    whole slots, long pages     hashed in place; the library releases the GIL
    whole slots, small pages    gathered by the host copier's function, which releases the GIL, and hashed in the cache
    samples                     one cache line of every 4 KiB of every page, gathered by numpy

A reader returns the pieces to hash; `digests_of` hashes them.

The position of the sampled line differs between slots, pages and stretches of 4 KiB, so that many slots together cover
every position. In a given slot the position never changes.

    page of 8 KiB    | . . # . . . . . | . . . . . # . . |      two stretches, one line of each

So a sample always detects that a page, or any 8 KiB of it, was overwritten. A sample detects a single changed byte with
a probability of 1 in 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from xxhash import xxh3_64

from kvoffload.model.wire import Direction
from kvoffload.transfer.host_copier import choose_copy
from kvoffload.transfer.per_thread import PerThread
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


class SlotReader(Protocol):
    """Reads slots. Callable from several threads at once."""

    def __call__(self, slots: Numbers, numbered: Numbers | None = None, /) -> Iterable[Iterable[memoryview]]:
        """Return the pieces of each slot, valid until the pieces of the next slot are requested.

        Args:
            slots: the slots to read.
            numbered: if the reader samples, the numbers of the slots whose samples to take; by default their own.
        """


_LONG = 2**16  # size in bytes; for longer pieces the hash library releases the GIL
# Size in bytes of the buffer for gathered pages: large enough for many pages, small enough for a core's cache.
_SCRATCH = 2**20
_LINE = 64
_STRETCH = 4096  # in bytes; memory is seldom overwritten or lost in smaller pieces
_LINES = 4096  # lines gathered in one call, which takes about 100 us; numpy may keep the GIL during the call


class CheckedTicket:
    """A batch's ticket; the batch ends only after its host slots have been read for the checksums.

    Args:
        copies: the copier's ticket.
        read: starts reading the slots; the future's result is the positions of corrupt slots.

    Attributes:
        corrupt: after a load has ended, the positions of slots whose bytes differ from the stored ones.
    """

    def __init__(self, copies: Ticket, read: Callable[[], Future[Positions]]) -> None:
        self._copies = copies
        self._read = read
        self._work: Future[Positions] | None = None
        self.corrupt: Positions = ()

    @property
    def copy_seconds(self) -> float | None:
        """Return the copier's measurement. The time spent on checksums counts as waiting."""
        return self._copies.copy_seconds

    @property
    def is_started(self) -> bool:
        """Return whether the copies have ended and reading has started, which a query does."""
        return self._work is not None

    def query(self) -> TicketState:
        """Return the batch's state. Once its copies have succeeded, start reading the slots.

        Raises:
            Exception: the copier or the reader raised it; the batch has stopped running.
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
    """Computes, keeps and compares the checksums of one rank's host slots.

    A slot's checksum is written before its store or fetch is reported and read only later, so two threads never access
    it at once.

    Args:
        reader: reads slots.
        slots: number of slots in the arena.
        executor: its threads read the slots for `start`.
        known: where the checksums are kept; by default in a new array.
    """

    def __init__(
        self,
        reader: SlotReader,
        slots: int,
        executor: Executor,
        known: NDArray[np.uint64] | None = None,
    ) -> None:
        self._reader = reader
        self._executor = executor
        self._known = np.zeros(slots, np.uint64) if known is None else known

    def start(self, direction: Direction, slots: Numbers) -> Future[Positions]:
        """Start computing the checksums of slots filled by stores, or comparing those of slots read by loads.

        Returns:
            A future whose result is the positions in `slots` whose bytes have changed; empty for a store.

        Raises:
            Exception: nothing was started.
        """
        work = self._take if direction is Direction.STORE else self._compare
        return self._executor.submit(work, slots)

    def take(self, *slots: int) -> None:
        """Compute the checksums of slots that a fetch has filled. The calling thread reads the slots."""
        self._take(np.array(slots))

    def changed(self, slots: Sequence[int]) -> Positions:
        """Return the positions in `slots` whose bytes have changed since they were filled.

        The calling thread reads the slots.
        """
        return self._compare(np.array(slots))

    def differing(self, slots: Sequence[int], others: Sequence[int], sums: NDArray[np.uint64]) -> Positions:
        """Return the positions in `slots` whose bytes are not those of which another engine has computed checksums.

        Args:
            slots: slots of this rank.
            others: the slots of the other engine from which these slots were copied.
            sums: the checksums of the other engine's slots.
        """
        found = digests_of(self._reader, np.array(slots), np.array(others))
        return tuple(np.flatnonzero(found != sums).tolist())

    def _take(self, slots: Numbers) -> Positions:
        self._known[slots] = digests_of(self._reader, slots)
        return ()

    def _compare(self, slots: Numbers) -> Positions:
        """Return the positions of slots that have changed, including slots without a checksum."""
        return tuple(np.flatnonzero(digests_of(self._reader, slots) != self._known[slots]).tolist())


def digests_of(reader: SlotReader, slots: Numbers, numbered: Numbers | None = None) -> NDArray[np.uint64]:
    """Return a digest of each slot; equal bytes in slots of the same number have equal digests. See `SlotReader`."""
    return np.fromiter(map(_digest, reader(slots, numbered)), np.uint64, len(slots))


def _digest(pieces: Iterable[memoryview]) -> int:
    state = xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def whole_slots(arena: Arena) -> SlotReader:
    """Return a reader of all bytes of a slot, chosen by the size of the pages."""
    is_long = arena.layout.slot_bytes > _LONG * len(arena.layout.regions)
    return slots_in_place(arena) if is_long else GatheredSlots(arena)


def slots_in_place(arena: Arena) -> SlotReader:
    """Return a reader that returns a slot's pages in place, without copying them."""
    return lambda slots, _=None: map(arena.pages, slots.tolist())


class GatheredSlots:
    """Reads whole slots by gathering their pages in a buffer, several slots at a time."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._copy = choose_copy()
        self._at_once = max(_SCRATCH // arena.layout.slot_bytes, 1)
        # Kept, because touching new memory takes as long as filling the memory.
        self._scratch = PerThread(partial(np.empty, self._at_once * arena.layout.slot_bytes, np.uint8))

    def __call__(self, slots: Numbers, _: Numbers | None = None) -> Iterator[tuple[memoryview]]:
        geometry, memory = self._arena.geometry, self._scratch.own
        gathered = memory.reshape(self._at_once, -1)
        places = np.cumsum(geometry.page) - geometry.page  # offset of each page in a gathered slot
        for start in range(0, len(slots), self._at_once):
            sources = geometry.page_addresses(slots[start : start + self._at_once])
            rows = gathered[: len(sources)]
            targets = memory.ctypes.data + np.arange(len(rows))[:, None] * rows.shape[1] + places
            self._copy(CopyRuns(sources.ravel(), targets.ravel(), np.tile(geometry.page, len(rows))))
            yield from ((row.data,) for row in rows)


class SampledSlots:
    """Reads one cache line of every 4 KiB stretch of every page; a page shorter than a line is read whole.

    The arrays in its attributes have one element for each line that is read in a slot.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        page = arena.geometry.page
        stretches = (page - np.minimum(page, _LINE)) // _STRETCH + 1
        self._region = region = np.repeat(np.arange(len(page)), stretches)
        stretch = np.arange(len(region)) - np.repeat(np.cumsum(stretches) - stretches, stretches)
        self._width = np.minimum(page, _LINE)[region]
        self._start = stretch * _STRETCH
        # At how many offsets in its stretch each line can start.
        self._places = np.minimum(_STRETCH, page[region] - self._start) // self._width
        self._turn = 29 * region + 11 * stretch
        self._at_once = max(_LINES // len(region), 1)

    def __call__(self, slots: Numbers, numbered: Numbers | None = None) -> Iterator[list[memoryview]]:
        widths = np.unique(self._width).tolist()
        numbered = slots if numbered is None else numbered
        for first in range(0, len(slots), self._at_once):
            some = slots[first : first + self._at_once]
            pages = self._arena.geometry.page_addresses(some).take(self._region, axis=1)
            places = (numbered[first : first + self._at_once, None] + self._turn) % self._places
            lines = pages + self._start + places * self._width
            rows = [_gathered(lines.compress(self._width == width, axis=1), width) for width in widths]
            yield from ([row[place].data for row in rows] for place in range(len(some)))


def _gathered(addresses: Numbers, width: int) -> NDArray[np.uint8]:
    """Return the bytes of the lines at `addresses`, [slots, lines], as an array [slots, bytes]."""
    low = int(addresses.min())
    lines = pieces_at(low, int(addresses.max()) - low + 1, width)
    return lines[addresses.ravel() - low].view(np.uint8).reshape(len(addresses), -1)
