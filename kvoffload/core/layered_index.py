"""What a search looks up when it goes on below the host: several indexes as one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvoffload.core.key_index import KeyIndex
from kvoffload.model.engine import BlockPool
from kvoffload.model.ids import BlockKey, SlotId

ON_DEVICE = SlotId(sys.maxsize)
"""Stands for a block that the device has."""


class LayeredIndex(Sequence["LayeredIndex"]):
    """The slots that hold a key: those of the host as they are, those of the first lower tier that has it as numbers below zero.

    `place_below` reads such a number. `parts` is the index itself, whatever the byte: it asks several dicts for a key.

    Args:
        host, below: the keys that can hit.
        device: asked behind the host, for blocks that need no slot; None where the search begins behind what the device has.
    """

    __slots__ = ("_below", "_device", "_host")

    def __init__(self, host: KeyIndex, below: Sequence[KeyIndex], device: BlockPool | None = None) -> None:
        self._host = host.parts
        self._below = [index.parts for index in below]
        self._device = device

    @property
    def parts(self) -> LayeredIndex:
        return self

    def __len__(self) -> int:
        return len(self._host)

    def __getitem__(self, byte: int) -> LayeredIndex:  # type: ignore[override]  # a search takes no slices
        return self

    def get(self, key: BlockKey, /) -> SlotId | None:
        byte = key[0]
        slot = self._host[byte].get(key)
        if slot is not None:
            return slot
        if self._device is not None and self._device.block_of(key) is not None:
            return ON_DEVICE
        for level, parts in enumerate(self._below):
            if (place := parts[byte].get(key)) is not None:
                return SlotId(-1 - place * len(self._below) - level)
        return None


def place_below(number: SlotId, levels: int) -> tuple[int, SlotId]:
    """Return which of the tiers below the host, and which slot there, a negative number stands for."""
    place, level = divmod(-1 - number, levels)
    return level, SlotId(place)
