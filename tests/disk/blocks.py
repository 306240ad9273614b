"""Blocks with recognizable bytes, and a writer that acts as the scheduler and as all ranks."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from random import Random

from xxhash import xxh3_64_intdigest

from kvoffload.disk.index import (
    IndexContents,
    IndexHeader,
    IndexLog,
    NotAnIndex,
    load_index,
    new_generation,
    start_index,
)
from kvoffload.disk.open_folder import open_folder
from kvoffload.disk.slot_file import SlotFile, SlotShape, open_slot_file
from kvoffload.disk.system import aligned_buffer
from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.wire import DiskRecord, Invalidate, Put

RANKS = 2
SLOT_BYTES = 6000  # a slot's size need not be a multiple of a disk sector


def shape_of(rank: int, slot_bytes: int = SLOT_BYTES) -> SlotShape:
    return SlotShape(rank, RANKS, slot_bytes, b"layout of a rank")


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(8, "big") * 4 + bytes(4))


def shard(generation: bytes, key: bytes, rank: int, size: int = SLOT_BYTES) -> bytes:
    """Return a rank's bytes for a key. The bytes differ between generations."""
    return Random(generation + key + bytes([rank])).randbytes(size)


class Writer:
    """Writes one engine's files in the order in which the tier does: invalidate a slot, write all ranks'
    data, then put the block.
    """

    def __init__(self, folder: Path, slots: int, slot_bytes: int = SLOT_BYTES) -> None:
        self.folder = open_folder(folder)
        self.files = open_files(folder, slots, slot_bytes)
        found = usable(folder, self.files)
        generation = found.header.generation if found is not None else new_generation()
        self.header = IndexHeader(generation, tuple(file.id for file in self.files), slots)
        self.log: IndexLog = start_index(
            self.folder, self.header, found.entries if found is not None else None
        )
        self.held = {put.slot: put for put in found.entries.puts()} if found is not None else {}
        self._buffer = aligned_buffer(self.files[0].shape.pitch)

    def strike(self, slot: SlotId) -> None:
        del self.held[slot]
        self.log.append([Invalidate(slot)])

    def put(self, slot: SlotId, key: BlockKey) -> None:
        sums = []
        for file in self.files:
            data = shard(self.header.generation, key, file.shape.rank, file.shape.slot_bytes)
            self._buffer[: len(data)] = data
            file.write(slot, [self._buffer])
            sums.append(xxh3_64_intdigest(data))
        record = Put(slot, key, tuple(sums))
        self.append([record])
        self.held[slot] = record

    def append(self, records: list[DiskRecord]) -> None:
        self.log.append(records)

    def sync(self) -> None:
        for file in self.files:
            file.sync()
        self.log.sync()

    def reset(self) -> None:
        self.log.close()
        self.header = IndexHeader(new_generation(), self.header.files, self.header.slots)
        self.log, self.held = start_index(self.folder, self.header), {}

    def rewrite(self) -> None:
        self.log = self.log.rewritten()

    def close(self) -> None:
        self.log.close()
        for file in self.files:
            file.close()
        self.folder.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def open_files(folder: Path, slots: int, slot_bytes: int = SLOT_BYTES) -> list[SlotFile]:
    with open_folder(folder) as opened:
        return [open_slot_file(opened, shape_of(rank, slot_bytes), slots) for rank in range(RANKS)]


def usable(folder: Path, files: list[SlotFile]) -> IndexContents | None:
    """Return the folder's index if it belongs to these files, else None."""
    found = None
    with open_folder(folder) as opened, suppress(NotAnIndex):
        found = load_index(opened, min(file.slots for file in files))
    if found is None or found.header.files != tuple(file.id for file in files):
        return None
    return found


def found_blocks(folder: Path, slots: int) -> dict[bytes, bool]:
    """Map each key that a new engine finds to whether its block's bytes match their checksums.

    Raise an error if bytes match their checksum but belong to another key: an engine would serve these bytes.
    """
    files = open_files(folder, slots)
    try:
        contents = usable(folder, files)
        if contents is None:
            return {}
        return {put.key: _matches(files, contents.header.generation, put) for put in contents.entries.puts()}
    finally:
        for file in files:
            file.close()


def _matches(files: list[SlotFile], generation: bytes, put: Put) -> bool:
    for file, expected in zip(files, put.sums, strict=True):
        buffer = aligned_buffer(file.shape.pitch)
        file.read(put.slot, [buffer])
        data = bytes(buffer[: file.shape.slot_bytes])
        if xxh3_64_intdigest(data) != expected:
            return False
        assert data == shard(generation, put.key, file.shape.rank), "wrong bytes would be served"
    return True
