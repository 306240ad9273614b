"""The bytes of host slots in memory that direct I/O takes.

    pages that are aligned and long    written and read where they lie
    other pages                        gathered in, or scattered from, a buffer of the calling thread's

A call that hangs costs its buffer. A read without one costs its host slots: it may still fill them, so they are not used again. A
write without one costs no host slot: whatever it still reads there goes to a place in the file that is not used again. Without the
copies, blocks of 1 and 4 MiB in 8 pages are fetched for 0.7 of the processor time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from kvoffload.disk.slot_file import PIECE_BYTES
from kvoffload.disk.system import PAGE, aligned_buffer

if TYPE_CHECKING:
    from kvoffload.transfer.arena import Arena, Pages

Pieces: TypeAlias = Sequence[memoryview]
"""A slot's bytes; the end of the last piece is padding to a whole page."""

_LONG = 2**16
"""Bytes from which on a page is long. Shorter ones are many, and each is a part of a call to the disk and an update of a checksum."""


class _Buffer:
    """A thread's memory for some slots, and all views of it that copies need: made anew they took longer than short copies."""

    def __init__(self, arena: Arena, pitch: int, slots: int) -> None:
        memory = aligned_buffer(slots * pitch)
        parts = [memory[start : start + pitch] for start in range(0, slots * pitch, pitch)]
        self.pieces: list[Pieces] = [(part,) for part in parts]
        self.views: list[Sequence[Pages]] = [arena.views(part) for part in parts]


class SlotBuffers:
    """Gathers slots to be written, and scatters what was read. Callable from several threads at once.

    Args:
        arena: where the slots are.
        pitch: bytes of a slot on the disk.

    Attributes:
        at_once: slots that a thread's buffer has room for.
        are_in_place: no buffers are used; reads go into the host slots themselves.
    """

    def __init__(self, arena: Arena, pitch: int) -> None:
        self._arena = arena
        self._pitch = pitch
        self.at_once = max(PIECE_BYTES // pitch, 1)
        sizes = arena.layout.page_bytes
        self.are_in_place = not any(size % PAGE for size in sizes) and min(sizes) >= _LONG
        self._threads = threading.local()

    def gather(self, slots: Sequence[int]) -> Sequence[Pieces]:
        """Return the bytes of slots, valid until the thread's next call."""
        if self.are_in_place:
            return self.room(slots)
        buffer = self._buffer()
        for slot, views in zip(slots, buffer.views, strict=False):
            self._arena.read(slot, views)
        return buffer.pieces[: len(slots)]

    def room(self, slots: Sequence[int]) -> Sequence[Pieces]:
        """Return memory to read slots into, valid until the thread's next call; `scatter` brings it to them."""
        if self.are_in_place:
            return [self._arena.pages(slot) for slot in slots]
        return self._buffer().pieces[: len(slots)]

    def scatter(self, slots: Mapping[int, int]) -> None:
        """Copy what was read into `room`: to each slot what its value, an index, has there."""
        if self.are_in_place:
            return
        views = self._buffer().views
        for slot, index in slots.items():
            self._arena.write(slot, views[index])

    def _buffer(self) -> _Buffer:
        buffer: _Buffer | None = getattr(self._threads, "buffer", None)
        if buffer is None:
            buffer = self._threads.buffer = _Buffer(self._arena, self._pitch, self.at_once)
        return buffer
