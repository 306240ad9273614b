from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from xxhash import xxh3_64_intdigest

from kvoffload.disk import index, open_folder, slot_file
from kvoffload.disk.index import IndexHeader, NotAnIndex, load_index, new_generation, start_index
from kvoffload.disk.slot_file import SlotFile, open_slot_file
from kvoffload.disk.system import aligned_buffer
from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.wire import Invalidate, Put
from tests.disk.blocks import RANKS, shape_of
from tests.disk.recorded_os import Disk, RecordedOs

SLOTS = 6
FAILURES = 60  # the number of power failures per seed
SEEDS = 8


def open_files(folder: Path) -> list[SlotFile]:
    with open_folder.open_folder(folder) as opened:
        return [open_slot_file(opened, shape_of(rank), SLOTS) for rank in range(RANKS)]


def bytes_of(generation: bytes, key: bytes, file: SlotFile) -> bytes:
    """Return a rank's bytes for a key. The bytes differ between generations."""
    return Random(generation + key + bytes([file.shape.rank])).randbytes(file.shape.slot_bytes)


class Writer:
    """Writes one engine's files in the order in which the tier does: invalidate a slot, write all ranks' data,
    then put the block.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = open_folder.open_folder(folder)
        self.files = open_files(folder)
        self.header = IndexHeader(new_generation(), tuple(file.id for file in self.files), SLOTS, "")
        self.log = start_index(self.folder, self.header)
        self.held: dict[SlotId, Put] = {}
        self._buffer = aligned_buffer(self.files[0].shape.pitch)

    def put(self, slot: SlotId, key: BlockKey) -> None:
        if self.held.pop(slot, None) is not None:
            self.log.append([Invalidate(slot)])
        sums = []
        for file in self.files:
            data = bytes_of(self.header.generation, key, file)
            self._buffer[: len(data)] = data
            file.write(slot, [self._buffer])
            sums.append(xxh3_64_intdigest(data))
        self.held[slot] = Put(slot, key, tuple(sums))
        self.log.append([self.held[slot]])

    def sync(self) -> None:
        for file in self.files:
            file.sync()
        self.log.sync()

    def reset(self) -> None:
        self.log.close()
        self.header = replace(self.header, generation=new_generation())
        self.log, self.held = start_index(self.folder, self.header), {}

    def close(self) -> None:
        self.log.close()
        for file in self.files:
            file.close()
        self.folder.close()


def found_blocks(folder: Path) -> dict[bytes, bool]:
    """Map each key that a new engine finds to whether its block's bytes match their checksums.

    Raise an error if bytes match their checksum but belong to another key: an engine would serve these bytes.
    """
    files, contents = open_files(folder), None
    with open_folder.open_folder(folder) as opened, suppress(NotAnIndex):
        contents = load_index(opened, min(file.slots for file in files))
    found = dict[bytes, bool]()
    if contents is not None and contents.header.files == tuple(file.id for file in files):
        found = {put.key: matches(files, contents.header.generation, put) for put in contents.entries.puts()}
    for file in files:
        file.close()
    return found


def matches(files: list[SlotFile], generation: bytes, put: Put) -> bool:
    for file, expected in zip(files, put.sums, strict=True):
        buffer = aligned_buffer(file.shape.pitch)
        file.read(put.slot, [buffer])
        data = bytes(buffer[: file.shape.slot_bytes])
        if xxh3_64_intdigest(data) != expected:
            return False
        assert data == bytes_of(generation, put.key, file), "wrong bytes would be served"
    return True


class Life:
    """Runs a writer, and takes snapshots of the disk at random moments. Each snapshot lists the blocks that
    must be found in it.
    """

    def __init__(self, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = Random(seed)
        self.disk = Disk()
        # keys of blocks whose data and index entry are synced, and which are not invalidated
        self.durable: set[bytes] = set()
        self.gone: set[bytes] = set()  # keys of blocks from before a completed reset
        self.snapshots: list[tuple[Disk, set[bytes], set[bytes]]] = []
        recorded = RecordedOs(self.disk, self.happened)
        for module in (index, open_folder, slot_file):
            monkeypatch.setattr(module, "os", recorded)
        self.writer = Writer(folder)
        for number in range(1, 80):
            self.act(BlockKey(number.to_bytes(36, "big")))
        self.writer.close()

    def happened(self) -> None:
        if self.random.random() < 0.15:
            self.snapshots.append((copy.deepcopy(self.disk), set(self.durable), set(self.gone)))

    def act(self, key: BlockKey) -> None:
        writer, slot = self.writer, SlotId(self.random.randrange(SLOTS))
        if (old := writer.held.get(slot)) is not None:
            self.durable.discard(old.key)
        writer.put(slot, key)
        chance = self.random.random()
        if chance < 0.2:
            writer.sync()
            self.durable = {put.key for put in writer.held.values()}
        elif chance < 0.3:
            writer.log = writer.log.rewritten()
        elif chance < 0.35:
            before = {put.key for put in writer.held.values()}
            self.durable = set()
            writer.reset()
            self.gone |= before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_after_a_power_failure_at_any_moment_no_wrong_byte_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    (tmp_path / "before").mkdir()
    with monkeypatch.context() as patched:
        life = Life(tmp_path / "before", seed, patched)
    random, expected = Random(seed), 0
    for number, (disk, durable, gone) in enumerate(random.choices(life.snapshots, k=FAILURES)):
        after = tmp_path / f"after{number}"
        after.mkdir()
        disk.left(random, after)
        found = found_blocks(after)  # raises if accepted bytes belong to another key
        assert {key for key in durable if not found.get(key)} == set()
        assert found.keys() & gone == set()
        expected += len(durable)
    assert expected, "no failure came while anything was durable"
