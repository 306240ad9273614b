"""Turns pairs of slots and blocks into the fewest contiguous copies.

A block and a slot each have one page in each region. A chunk of host memory is region-major, so the pages of
consecutive slots are adjacent in every region:

    device, region 0   | b4 | b5 | b6 | b7 |          host chunk   | region 0: s0 s1 s2 s3 | region 1: s0 s1 s2 s3 |
    job  b5->s1, b6->s2, b4->s0   becomes one copy of three pages in each region

Two pairs can be joined if their blocks are consecutive, their slots are consecutive and in one chunk (each chunk is a
separate piece of memory, pinned separately), and the region's pages are adjacent on the device. Pairs are first sorted
by block, so that pairs that can be joined are next to each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from kvoffload.model.wire import Direction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvoffload.transfer.layout import DeviceLayout

    Numbers = NDArray[np.int64]


_LINE = 64


def region_offsets(page_bytes: Sequence[int], count: int) -> list[int]:
    """Return the offset of each region in a chunk of `count` slots, followed by the chunk's size."""
    return list(accumulate((-(-size * count // _LINE) * _LINE for size in page_bytes), initial=0))


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """The addresses of all regions on the device and of all chunks on the host, as arrays.

    Args:
        page: [regions] bytes of a page, which is also the distance between consecutive slots on the host.
        device_base: [regions] address of block 0.
        device_stride: [regions] bytes from one block to the next.
        host_base: [chunks, regions] address of the chunk's first slot.
        chunk_slots: slots in each chunk (the last may have fewer).
    """

    page: Numbers
    device_base: Numbers
    device_stride: Numbers
    host_base: Numbers
    chunk_slots: int

    def with_chunk(self, starts: Sequence[int]) -> Geometry:
        """Return the geometry with another chunk, whose regions start at `starts`."""
        row = np.array([starts], np.int64)
        return replace(self, host_base=np.concatenate((self.host_base, row)))

    def page_addresses(self, slots: Numbers) -> Numbers:
        """Return the address of each slot's page in each region, [slots, regions]."""
        places: Numbers = (slots % self.chunk_slots)[:, None]
        return self.host_base[slots // self.chunk_slots] + places * self.page


class CopyRuns(Struct, frozen=True, eq=False):
    """Contiguous copies: `size[i]` bytes from address `source[i]` to address `target[i]`. No two targets overlap."""

    source: Numbers
    target: Numbers
    size: Numbers

    def __len__(self) -> int:
        return len(self.size)

    @property
    def total_bytes(self) -> int:
        return int(self.size.sum())

    def __getitem__(self, which: slice | NDArray[np.bool_]) -> CopyRuns:
        return CopyRuns(self.source[which], self.target[which], self.size[which])

    @classmethod
    def between(cls, direction: Direction, host: Numbers, device: Numbers, size: Numbers) -> CopyRuns:
        """Return the copies between host and device addresses in the given direction."""
        if direction is Direction.STORE:
            return cls(source=device, target=host, size=size)
        return cls(source=host, target=device, size=size)


def array_at(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: str = "|u1"
) -> NDArray[Any]:
    """Return memory of this process as an array, without copying it.

    Args:
        address: address of the first element.
        shape: number of elements in each dimension.
        strides: bytes from one element to the next in each dimension.
        kind: type of an element, as in numpy's array interface; bytes by default.
    """
    memory = {"version": 3, "data": (address, False), "shape": shape, "typestr": kind, "strides": strides}
    return np.asarray(SimpleNamespace(__array_interface__=memory))


def pieces_at(address: int, count: int, width: int) -> NDArray[np.void]:
    """Return an array whose element `i` is the `width` bytes at `address + i`; elements overlap."""
    return array_at(address, (count,), (1,), f"|V{width}")


def geometry_of(layout: DeviceLayout, chunk_slots: int) -> Geometry:
    """Return the geometry of `layout`, with no host chunks yet."""
    regions = layout.regions
    return Geometry(
        page=np.array(layout.page_bytes, np.int64),
        device_base=np.array([region.address for region in regions], np.int64),
        device_stride=np.array([region.block_stride for region in regions], np.int64),
        host_base=np.empty((0, len(regions)), np.int64),
        chunk_slots=chunk_slots,
    )


def merge_runs(geometry: Geometry, direction: Direction, slots: Numbers, blocks: Numbers) -> CopyRuns:
    """Return the copies between `slots[i]` and `blocks[i]` for every `i`; all slots and blocks must be in range."""
    slots, blocks = _sorted_by_block(slots, blocks)
    chunks = slots // geometry.chunk_slots
    places = slots - chunks * geometry.chunk_slots  # `np.divmod` takes five times as long.
    first = _run_starts(slots, blocks, chunks)
    lengths = np.diff(first, append=len(slots))
    touching = geometry.device_stride == geometry.page
    joined = _addresses(geometry, touching, chunks[first], places[first], blocks[first], lengths)
    if touching.all():
        return CopyRuns.between(direction, *joined)
    apart = _addresses(geometry, ~touching, chunks, places, blocks, np.ones_like(blocks))
    return CopyRuns.between(direction, *(np.concatenate(both) for both in zip(joined, apart, strict=True)))


def _sorted_by_block(slots: Numbers, blocks: Numbers) -> tuple[Numbers, Numbers]:
    if len(blocks) < 2 or (np.diff(blocks) > 0).all():
        return slots, blocks
    order = np.argsort(blocks, kind="stable")
    return slots[order], blocks[order]


def _run_starts(slots: Numbers, blocks: Numbers, chunks: Numbers) -> Numbers:
    breaks = np.empty(len(slots), np.bool_)
    breaks[:1] = True
    breaks[1:] = (np.diff(blocks) != 1) | (np.diff(slots) != 1) | (np.diff(chunks) != 0)
    return np.flatnonzero(breaks)


def _addresses(
    geometry: Geometry,
    chosen: NDArray[np.bool_],
    chunks: Numbers,
    places: Numbers,
    blocks: Numbers,
    lengths: Numbers,
) -> tuple[Numbers, Numbers, Numbers]:
    """Return the host address, device address and bytes of each run, for each chosen region in turn."""
    page = geometry.page[chosen, None]
    host = geometry.host_base[chunks][:, chosen].T + places * page
    device = geometry.device_base[chosen, None] + blocks * geometry.device_stride[chosen, None]
    return host.ravel(), device.ravel(), (lengths * page).ravel()
