"""Leases: device blocks that the engine must not hand out again while a copy reads or writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvoffload.model.engine import Device
from kvoffload.model.errors import ClosedTwice
from kvoffload.model.ids import DeviceBlockId


class Lease:
    """Some leased device blocks; closed exactly once, when the last copy on them has ended."""

    __slots__ = ("_leases", "blocks", "closed")

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self.blocks: list[DeviceBlockId] = []
        self.closed = False

    def add(self, blocks: Iterable[DeviceBlockId]) -> None:
        """Lease more blocks under the same roof. Changes the engine's reference counts."""
        more = list(blocks)
        self._leases.take(more)
        self.blocks += more

    def close(self) -> None:
        """Give the blocks back, the deepest first. Changes the engine's reference counts.

        Raises:
            ClosedTwice: it was closed before.
        """
        if self.closed:
            raise ClosedTwice(self)
        self.closed = True
        self._leases.give_back(self.blocks[::-1])

    def __repr__(self) -> str:
        return f"<Lease {len(self.blocks)} blocks{' closed' if self.closed else ''}>"


class Leases:
    """All leases of one engine: the only caller of `Device.lease` and `Device.release`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._counts: Counter[DeviceBlockId] = Counter()
        self.total = 0

    def open(self) -> Lease:
        """Return a lease with no blocks yet."""
        return Lease(self)

    def take(self, blocks: list[DeviceBlockId]) -> None:
        self._device.lease(blocks)
        self._counts.update(blocks)
        self.total += len(blocks)

    def give_back(self, blocks: list[DeviceBlockId]) -> None:
        counts = self._counts
        for block in blocks:
            count = counts.pop(block)
            if count > 1:
                counts[block] = count - 1
        self.total -= len(blocks)
        self._device.release(blocks)

    def counts(self) -> dict[DeviceBlockId, int]:
        """Return how often each block is leased. Reads only."""
        return dict(self._counts)
