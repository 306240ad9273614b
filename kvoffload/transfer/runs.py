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
from functools import cached_property
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Columns(NamedTuple):
    """The addresses of some regions, as columns, so that one operation computes those of all regions.

    Args:
        page, device_base, device_stride: [regions, 1], as in `Geometry`.
        host_zero: [regions, chunks] where slot 0 would be if the chunk continued down to it.
        chunk_numbers: one more than the slots in each chunk, see `merge_runs`.
    """

    page: Numbers
    device_base: Numbers
    device_stride: Numbers
    host_zero: Numbers
    chunk_numbers: Numbers

    def addresses(
        self, numbers: Numbers, blocks: Numbers, lengths: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Return the host address, device address and bytes of each run, for each region in turn.

        Args:
            numbers: the number of each run's first slot, see `merge_runs`.
            blocks: the first block of each run.
            lengths: the number of pairs in each run.
        """
        host = numbers * self.page
        host += self.host_zero.take(numbers // self.chunk_numbers, 1)
        device = blocks * self.device_stride
        device += self.device_base
        return host.ravel(), device.ravel(), (lengths * self.page).ravel()


@dataclass(frozen=True, eq=False)
class Geometry:
    """The addresses of all regions on the device and of all chunks on the host, as arrays.

    Args:
        page: [regions] bytes of a page, which is also the distance between consecutive slots on the host.
        device_base: [regions] address of block 0.
        device_stride: [regions] bytes from one block to the next.
        host_base: [chunks, regions] address of the chunk's first slot.
        chunk_slots: slots in each chunk (the last may have fewer); an array without dimensions.
    """

    page: Numbers
    device_base: Numbers
    device_stride: Numbers
    host_base: Numbers
    chunk_slots: Numbers

    def with_chunk(self, starts: Sequence[int]) -> Geometry:
        """Return the geometry with another chunk, whose regions start at `starts`."""
        row = np.array([starts], np.int64)
        return replace(self, host_base=np.concatenate((self.host_base, row)))

    def page_addresses(self, slots: Numbers) -> Numbers:
        """Return the address of each slot's page in each region, [slots, regions]."""
        places: Numbers = (slots % self.chunk_slots)[:, None]
        bases: Numbers = self.host_base[slots // self.chunk_slots]
        return bases + places * self.page

    @cached_property
    def touching(self) -> Columns | None:
        """Return the regions whose pages are adjacent on the device, so that pairs can be joined; None without any."""
        return self._columns(self.device_stride == self.page)

    @cached_property
    def apart(self) -> Columns | None:
        """Return the other regions; None without any."""
        return self._columns(self.device_stride != self.page)

    def _columns(self, chosen: NDArray[np.bool_]) -> Columns | None:
        if not chosen.any():
            return None
        chunk_numbers = np.array(self.chunk_slots + 1)
        first_numbers = np.arange(len(self.host_base)) * chunk_numbers
        host_zero = self.host_base[:, chosen].T - first_numbers * self.page[chosen, None]
        device = self.device_base[chosen, None], self.device_stride[chosen, None]
        return Columns(self.page[chosen, None], *device, host_zero, chunk_numbers)


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
        chunk_slots=np.array(chunk_slots),
    )


def merge_runs(geometry: Geometry, direction: Direction, slots: Numbers, blocks: Numbers) -> CopyRuns:
    """Return the copies between `slots[i]` and `blocks[i]` for every `i`; all slots and blocks must be in range.

    A hook calls this function for a load, so it makes few calls of numpy: each takes as long for 8 blocks as for 64.
    """
    # Between chunks a number is left out, so that the slots on both sides of a border are not joined.
    numbers = slots + slots // geometry.chunk_slots
    # Each pair is one number, so that one sort puts slots and blocks in the order of the blocks.
    pairs = (blocks << _BITS) + numbers
    pairs.sort()
    found = []
    if geometry.touching is not None:
        borders = _borders(pairs)
        starts = borders[:-1]
        first = pairs[starts]
        found.append(geometry.touching.addresses(first & _NUMBERS, first >> _BITS, borders[1:] - starts))
    if geometry.apart is not None:
        found.append(geometry.apart.addresses(pairs & _NUMBERS, pairs >> _BITS, np.ones_like(pairs)))
    if len(found) == 1:
        return CopyRuns.between(direction, *found[0])
    return CopyRuns.between(direction, *(np.concatenate(both) for both in zip(*found, strict=True)))


# These are arrays, because an operation with an `int` takes twice as long.
_BITS = np.array(32)
_NUMBERS = np.array((1 << 32) - 1)
_NEXT = np.array((1 << 32) + 1)
"""The difference between a pair and the pair of the next block and the next slot."""


def _borders(pairs: Numbers) -> Numbers:
    """Return the position of each run's first pair, followed by the number of pairs."""
    is_border = np.frombuffer(bytearray(b"\1") * (len(pairs) + 1), np.bool_)
    np.not_equal(pairs[1:] - pairs[:-1], _NEXT, out=is_border[1:-1])
    return is_border.nonzero()[0]
