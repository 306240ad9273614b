from __future__ import annotations

import copy
from pathlib import Path
from random import Random

import pytest

from kvoffload.disk import index, open_folder, slot_file
from kvoffload.model.ids import SlotId
from tests.disk.blocks import Writer, found_blocks, key_of
from tests.disk.recorded_os import Disk, RecordedOs

SLOTS = 6
FAILURES = 60  # the number of power failures per seed
SEEDS = 8


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
        self.pictures: list[tuple[Disk, set[bytes], set[bytes]]] = []
        recorded = RecordedOs(self.disk, self.happened)
        for module in (index, open_folder, slot_file):
            monkeypatch.setattr(module, "os", recorded)
        self.writer = Writer(folder, SLOTS)
        for number in range(1, 80):
            self.act(number)

    def happened(self) -> None:
        if self.random.random() < 0.15:
            picture = copy.deepcopy(self.disk), set(self.durable), set(self.gone)
            self.pictures.append(picture)

    def act(self, number: int) -> None:
        writer, slot = self.writer, SlotId(self.random.randrange(SLOTS))
        if (old := writer.held.get(slot)) is not None:
            self.durable.discard(old.key)
            writer.strike(slot)
        writer.put(slot, key_of(number))
        chance = self.random.random()
        if chance < 0.2:
            writer.sync()
            self.durable = {put.key for put in writer.held.values()}
        elif chance < 0.3:
            writer.rewrite()
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
    life.writer.close()
    random = Random(seed)
    held = 0
    for number, (disk, durable, gone) in enumerate(random.choices(life.pictures, k=FAILURES)):
        after = tmp_path / f"after{number}"
        after.mkdir()
        disk.left(random, after)
        found = found_blocks(after, SLOTS)  # raises if accepted bytes belong to another key
        assert {key for key in durable if not found.get(key)} == set()
        assert found.keys() & gone == set()
        held += len(durable)
    assert held, "no failure came while anything was durable"
