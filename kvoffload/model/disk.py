"""What the index of a disk tier records: which block each slot holds."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.message import Message


class Put(NamedTuple):
    """Every rank has written a block into a slot of its file."""

    slot: SlotId
    key: BlockKey
    sums: tuple[int, ...]  #: a checksum of each rank's shard


class Strike(NamedTuple):
    """A slot's block is not to be found any more."""

    slot: SlotId


class Use(NamedTuple):
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
