"""What a search looks up when it goes on below the host: several indexes as one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvoffload.core.key_index import KeyIndex
from kvoffload.core.match import PartOfKeys
from kvoffload.model.engine import BlockPool
from kvoffload.model.ids import BlockKey, SlotId

ON_DEVICE = SlotId(sys.maxsize)
"""Stands for a block that the device has."""


class LayeredIndex:
    """The slots that hold a key: those of the host as they are, those of lower tiers as numbers below zero.

    Of the lower tiers the first that has the key counts: slot `s` of tier number `t` of `n` is `-1 - (s * n + t)`.

    Args:
        host, below: the keys that can hit.
        device: asked behind the host, for blocks that need no slot; None where the search begins behind what the device has.

    Attributes:
        get: return a key's slot, None where none has it. A closure, because a search calls it for each block.
        parts: itself, whatever the byte.
    """

    __slots__ = ("get", "parts")

    def __init__(self, host: KeyIndex, below: Sequence[KeyIndex], device: BlockPool | None = None) -> None:
        on_host, levels, count = host.parts, list(enumerate([index.parts for index in below])), len(below)
        block_of = None if device is None else device.block_of

        def get(key: BlockKey, /) -> SlotId | None:
            byte = key[0]
            slot = on_host[byte].get(key)
            if slot is not None:
                return slot
            if block_of is not None and block_of(key) is not None:
                return ON_DEVICE
            for level, parts in levels:
                if (place := parts[byte].get(key)) is not None:
                    return -1 - place * count - level  # type: ignore[return-value]  # a `SlotId` of its own would be a call a block
            return None

        self.get = get
        self.parts: Sequence[PartOfKeys] = (self,) * 256
