"""What the index of a disk tier records: which block each slot holds."""

from __future__ import annotations

from typing import TypeAlias

from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.message import Message


class Put(Message, frozen=True, gc=False):
    """Every rank has written a block into a slot of its file.

    An engine that starts takes over a million of them: the collector of garbage must not count them.

    Args:
        slot: which.
        key: of the block.
        sums: a checksum of each rank's shard.
    """

    slot: SlotId
    key: BlockKey
    sums: tuple[int, ...]


class Strike(Message, frozen=True, gc=False):
    """A slot's block is not to be found any more."""

    slot: SlotId


class Use(Message, frozen=True, gc=False):
    """A slot's block was read, and is the most recently used."""

    slot: SlotId


class DiskFile(Message, frozen=True):
    """A rank's slot file.

    Args:
        file_id: random bytes, of the file and not of its name.
        slots: that it has numbers for.
        capacity: how many of them may hold a block; fewer than `slots` after `disk_bytes` was lowered.
    """

    file_id: bytes
    slots: int
    capacity: int


DiskRecord: TypeAlias = Put | Strike | Use
