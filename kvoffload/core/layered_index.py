"""What a search looks up when it goes on below the host: several indexes as one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from kvoffload.core.key_index import KeyIndex
from kvoffload.core.match import PartOfKeys
from kvoffload.core.tier_state import TierState
from kvoffload.model.engine import BlockPool
from kvoffload.model.ids import BlockKey, SlotId

Block = tuple[BlockKey, TierState, SlotId]
"""A block's key, the lower tier that has it, and its slot there."""

ON_DEVICE = SlotId(sys.maxsize)
"""Stands for a block that the device has."""


class _AllKeys:
    """In place of every part of an index. `get` is a closure, because a search calls it for each block."""

    __slots__ = ("get",)

    def __init__(self, get: Callable[[BlockKey], SlotId | None]) -> None:
        self.get = get


class LayeredIndex:
    """The slots that hold a key: those of the host as they are. A number below zero stands for a block of a lower tier.

    Args:
        host: the keys that can hit there.
        tiers: below the host; the first that has a key counts.
        device: asked behind the host, for blocks that need no slot; None where the search begins behind what the device has.

    Attributes:
        get: return a key's slot, None where none has it.
        parts: what `get` finds, whatever the byte.
    """

    __slots__ = ("_found", "get", "parts")

    def __init__(self, host: KeyIndex, tiers: Sequence[TierState], device: BlockPool | None = None) -> None:
        on_host, below = host.parts, [(tier, tier.pool.index.parts) for tier in tiers]
        block_of = None if device is None else device.block_of
        found = self._found = list[Block]()

        def get(key: BlockKey, /) -> SlotId | None:
            byte = key[0]
            slot = on_host[byte].get(key)
            if slot is not None:
                return slot
            if block_of is not None and block_of(key) is not None:
                return ON_DEVICE
            for tier, parts in below:
                if (place := parts[byte].get(key)) is not None:
                    found.append((key, tier, place))
                    return -len(found)  # type: ignore[return-value]  # a `SlotId` of its own would be a call a block
            return None

        self.get = get
        # Not itself: what was found would stay until the collector of garbage comes, and make it come.
        self.parts: Sequence[PartOfKeys] = (_AllKeys(get),) * 256

    def below(self, slots: Iterable[SlotId]) -> list[Block]:
        """Return the blocks of lower tiers among slots that `get` returned, in their order."""
        found = self._found
        return [found[-1 - slot] for slot in slots if slot < 0]
