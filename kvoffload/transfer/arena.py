"""Host memory for the slots of one rank.

The arena grows in chunks, so that its first slots can be used before all of its memory is touched and pinned. A chunk
is region-major: first the pages of all its slots in region 0, then their pages in region 1, and so on. So in each
region the pages of neighbouring slots are adjacent in memory.

    chunk 0: slots 0..k-1      | region 0: s0 s1 .. | region 1: s0 s1 .. |      chunk 1: slots k..2k-1   ...

Sizes are not rounded to powers of two; each region starts on a cache line.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvoffload.logs import get_logger
from kvoffload.model.errors import EngineContractError, HostMemoryBusy, HostMemoryError
from kvoffload.transfer.ports import Clocks
from kvoffload.transfer.runs import array_at, geometry_of, region_offsets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvoffload.transfer.host_memory import HostAllocator, HostChunk
    from kvoffload.transfer.layout import DeviceLayout
    from kvoffload.transfer.ports import Clock

    # Pages of all regions that share a page size: [regions, slots, page] for a chunk, [regions, page] for a slot.
    Pages: TypeAlias = NDArray[np.uint8]

CHUNK_BYTES = 64 * 2**20
"""The usual size of a chunk. Pinning it takes about 6 ms, during which the driver may block other calls.

Pinning is short compared with a step, but long compared with a driver call.
"""

_RETRY_S = 1.0  # the first wait after memory could not be pinned; each further wait is twice as long
_LONGEST_RETRY_S = 30.0

log = get_logger("transfer")


class Arena:
    """The host memory of one rank. Slots 0 to `ready_slots - 1` can be used; `prepare` adds the remaining slots.

    Args:
        layout: the rank's device layout.
        slots: how many slots to prepare; 0 is allowed.
        allocator: allocates the chunks.
        chunk_bytes: approximate size of a chunk; a chunk has at least one slot.
        clock: the clock for pauses.

    Attributes:
        ready_slots: number of slots that can be used; never decreases before `close`. Readable from any thread.
        geometry: addresses of all ready slots; replaced by a new object whenever the arena grows.
        refusal: why growth stopped early; None if growth did not stop early.
    """

    def __init__(
        self,
        layout: DeviceLayout,
        slots: int,
        allocator: HostAllocator,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        clock: Clock | None = None,
    ) -> None:
        self.layout = layout
        self.slots = slots
        self.refusal: str | None = None
        self._allocator = allocator
        self._clock = clock or Clocks()
        self._chunk_slots = slots_in_chunk(layout, chunk_bytes)
        self._chunks: list[HostChunk] = []
        self._pages: list[list[Pages]] = []  # the pages of each chunk, in the order of the regions
        self.geometry = geometry_of(layout, self._chunk_slots)
        self.ready_slots = 0
        self._closed = False
        self._lock = threading.Lock()
        self._holders = 1  # the number of open `held` contexts, plus one until `close`

    @property
    def is_growing(self) -> bool:
        """Return whether more slots will become ready. Readable from any thread."""
        return self.ready_slots < self.slots and self.refusal is None and not self._closed

    async def prepare_for(self, seconds: float) -> None:
        """Prepare slots, but start no further chunk after `seconds`.

        If memory cannot be pinned now, stop, so that `prepare` can retry.
        """
        deadline = self._clock.monotonic() + seconds
        with suppress(HostMemoryBusy):
            while self.is_growing and self._clock.monotonic() < deadline:
                await self._grow()

    async def prepare(self, *, with_pauses: bool = False) -> None:
        """Prepare all slots, chunk by chunk. If memory cannot be pinned now, wait and retry.

        A refused chunk ends growth: slots that are ready stay usable, and the reason is logged and kept in `refusal`.

        Args:
            with_pauses: after each chunk, pause for as long as the chunk took, because pinning blocks other driver
                calls.
        """
        retry_s = _RETRY_S
        while self.is_growing:
            begun = self._clock.monotonic()
            try:
                await self._grow()
            except HostMemoryBusy as error:
                log.info("host_memory_busy", ready_slots=self.ready_slots, reason=str(error), retry_s=retry_s)
                await self._clock.sleep(retry_s)
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
                continue
            retry_s = _RETRY_S
            if with_pauses:
                await self._clock.sleep(self._clock.monotonic() - begun)

    def move_device(self, layout: DeviceLayout) -> None:
        """Use the addresses of `layout` for the device blocks. Call this on the thread that runs `prepare`.

        Raises:
            EngineContractError: blocks of `layout` differ from the arena's in number, pages, meaning or device.
        """
        if _kind(layout) != _kind(self.layout):
            raise EngineContractError("the engine registered its KV cache again, with blocks of another kind")
        moved = geometry_of(layout, self._chunk_slots)
        self.geometry = replace(
            self.geometry, device_base=moved.device_base, device_stride=moved.device_stride
        )
        self.layout = layout

    def pages(self, slot: int) -> list[memoryview]:
        """Return a slot's pages, one for each region; they are writable, and valid until `close`."""
        return [page.data for pages in self._pages_of(slot) for page in pages]

    def views(self, memory: memoryview) -> list[Pages]:
        """Return views of one slot's pages at the start of `memory`, in the form that `read` and `write` take."""
        flat, start, found = np.frombuffer(memory, np.uint8), 0, list["Pages"]()
        for size, group in groupby(self.layout.page_bytes):
            end = start + size * len(list(group))
            found.append(flat[start:end].reshape(-1, size))
            start = end
        return found

    def read(self, slot: int, target: Sequence[Pages]) -> None:
        """Copy a slot's bytes to `target`, a result of `views`."""
        for pages, part in zip(self._pages_of(slot), target, strict=True):
            part[:] = pages  # One numpy call copies many pages and releases the GIL.

    def write(self, slot: int, source: Sequence[Pages]) -> None:
        """Copy `source`, a result of `views`, to a slot."""
        for pages, part in zip(self._pages_of(slot), source, strict=True):
            pages[:] = part

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the arena's memory while the context is open, even if `close` is called. Callable from any thread.

        Raises:
            HostMemoryError: the arena is already closed.
        """
        with self._lock:
            if self._closed:
                raise HostMemoryError("the host memory was released")
            self._holders += 1
        try:
            yield
        finally:
            self._let_go()

    def close(self) -> None:
        """Release all memory, now or when the last `held` context ends. The caller's copies must have ended.

        Closing twice does nothing.
        """
        with self._lock:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            self._let_go()

    def _pages_of(self, slot: int) -> list[Pages]:
        """Return a slot's pages as arrays, [regions, page]; consecutive regions of equal page size share an array."""
        if not 0 <= slot < self.ready_slots:
            raise IndexError(f"slot {slot} is not among the {self.ready_slots} ready slots")
        chunk, place = divmod(slot, self._chunk_slots)
        return [pages[:, place] for pages in self._pages[chunk]]

    def _let_go(self) -> None:
        """Remove one holder. If it was the last, release the memory."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self.ready_slots = 0
        self.geometry = geometry_of(self.layout, self._chunk_slots)
        self._pages.clear()
        while self._chunks:
            self._chunks.pop().release()

    async def _grow(self) -> None:
        """Prepare one more chunk.

        Raises:
            HostMemoryBusy: the memory cannot be pinned now; a later call may succeed.
        """
        count = min(self._chunk_slots, self.slots - self.ready_slots)
        try:
            size = region_offsets(self.layout.page_bytes, count)[-1]
            chunk = await self._allocator.allocate(size, self.ready_slots)
        except HostMemoryBusy:
            raise
        except HostMemoryError as error:
            self.refusal = str(error)
            # Without any ready slot nothing is offloaded, so the log entry is an error.
            say = log.warning if self.ready_slots else log.error
            say(
                "host_memory_refused",
                ready_slots=self.ready_slots,
                wanted_slots=self.slots,
                reason=self.refusal,
            )
            return
        if self._closed:  # `close` was called while the chunk was being allocated
            chunk.release()
            return
        self._chunks.append(chunk)
        sizes = self.layout.page_bytes
        starts = [chunk.address + offset for offset in region_offsets(sizes, count)[:-1]]
        self.geometry = self.geometry.with_chunk(starts)
        self._pages.append(_pages_at(starts, sizes, count))
        # Set `ready_slots` last, because other threads read it before they use the addresses.
        self.ready_slots += count


def slots_in_chunk(layout: DeviceLayout, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return how many slots a chunk has, except the last one, which may have fewer."""
    return max(1, chunk_bytes // layout.slot_bytes)


def _kind(layout: DeviceLayout) -> tuple[object, ...]:
    return layout.page_bytes, layout.meaning, layout.blocks, layout.device


def _pages_at(starts: Sequence[int], sizes: Sequence[int], count: int) -> list[Pages]:
    """Return a chunk's memory as arrays; consecutive regions of equal page size share an array."""
    found: list[Pages] = []
    for size, group in groupby(zip(starts, sizes, strict=True), key=lambda region: region[1]):
        first, *others = [start for start, _ in group]
        step = others[0] - first if others else 0
        found.append(array_at(first, (1 + len(others), count, size), (step, size, 1)))
    return found
