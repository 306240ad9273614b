"""What a search looks up when it goes on below the host: several indexes as one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvoffload.core.key_index import KeyIndex
from kvoffload.model.engine import BlockPool
from kvoffload.model.ids import BlockKey, SlotId

ON_DEVICE = SlotId(sys.maxsize)
"""Stands for a block that the device has."""


class LayeredIndex:
    """The slots that hold a key: those of the host as they are, those of the disk as negative numbers.

    Args:
        host, disk: the keys that can hit.
        device: asked last, for blocks that need no slot; None where the search begins behind what the device has.
    """

    def __init__(self, host: KeyIndex, disk: KeyIndex, device: BlockPool | None = None) -> None:
        self.parts = _Parts(host, disk, device)


class _Parts(Sequence["_Part"]):
    def __init__(self, host: KeyIndex, disk: KeyIndex, device: BlockPool | None) -> None:
        self._host, self._disk, self._device = host, disk, device

    def __len__(self) -> int:
        return len(self._host.parts)

    def __getitem__(self, byte: int) -> _Part:  # type: ignore[override]  # a search takes no slices
        return _Part(self._host.parts[byte], self._disk.parts[byte], self._device)


class _Part:
    __slots__ = ("_device", "_disk", "_host")

    def __init__(
        self, host: dict[BlockKey, SlotId], disk: dict[BlockKey, SlotId], device: BlockPool | None
    ) -> None:
        self._host, self._disk, self._device = host, disk, device

    def get(self, key: BlockKey, /) -> SlotId | None:
        slot = self._host.get(key)
        if slot is not None:
            return slot
        place = self._disk.get(key)
        if self._device is not None and self._device.block_of(key) is not None:
            return ON_DEVICE
        return None if place is None else as_negative(place)


def as_negative(place: SlotId) -> SlotId:
    """Return the negative number that stands for a slot of the disk, or that slot for such a number."""
    return SlotId(-1 - place)
