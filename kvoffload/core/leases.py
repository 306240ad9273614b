"""Leases: device blocks that the engine must not hand out again while a copy reads or writes them (R5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvoffload.core.counts import count, uncount
from kvoffload.model.engine import BlockPool
from kvoffload.model.ids import DeviceBlockId


class Leases:
    """How often each block is leased, by the open jobs that copy it. The only caller of `lease` and `release`."""

    def __init__(self, device: BlockPool) -> None:
        self._device = device
        self._counts: dict[DeviceBlockId, int] = {}

    @property
    def counts(self) -> Mapping[DeviceBlockId, int]:
        """How often each block is leased."""
        return self._counts

    def take(self, blocks: Sequence[DeviceBlockId]) -> None:
        """Lease blocks. Changes the engine's reference counts."""
        count(self._counts, blocks)
        self._device.lease(blocks)

    def release(self, blocks: Sequence[DeviceBlockId]) -> None:
        """Release blocks, the deepest first. Changes the engine's reference counts.

        Raises:
            KeyError: one of them is not leased; nothing has changed.
        """
        uncount(self._counts, blocks)
        self._device.release(blocks[::-1])
