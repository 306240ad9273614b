"""What an engine sees of another engine's table while that engine writes it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.disk.open_folder import OpenFolder, open_folder
from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.wire import NodeSlot
from kvoffload.node import neighbour as module
from kvoffload.node.neighbour import Neighbour, TableFile, find_neighbours
from kvoffload.node.resets import NO_RESET, last_reset, note_reset, open_resets
from kvoffload.node.table import RING, HostTable, Left, NotATable, TableHeader, places_of, read_table

SLOTS = 64
HEADER = TableHeader(SLOTS, (b"the id of a file", b"id of another..."))


def key(number: int) -> BlockKey:
    return BlockKey(random.Random(number).randbytes(36))


@pytest.fixture
def folder(shared_memory: Path) -> Iterator[OpenFolder]:
    """Yield an engine's folder in the folder of a kind."""
    (shared_memory / "0").mkdir(mode=0o700)
    with open_folder(shared_memory / "0") as opened:
        yield opened


@pytest.fixture
def table(folder: OpenFolder) -> HostTable:
    return HostTable.create(folder, HEADER)


@pytest.fixture
def reader(folder: OpenFolder, table: HostTable) -> Iterator[Neighbour]:
    made = Neighbour(TableFile.open(folder))
    assert made.follow()
    yield made
    made.close()


def seen(reader: Neighbour) -> dict[BlockKey, SlotId]:
    return {each: slot for part in reader.parts for each, (slot, _) in part.items()}


def has(reader: Neighbour, slot: SlotId, number: int) -> bool:
    return reader.table.have([NodeSlot("0", b"", slot, number)]) == [True]


def test_r21_a_block_is_seen_from_its_publication_until_its_slot_is_invalidated(
    table: HostTable, reader: Neighbour
) -> None:
    table.publish(SlotId(3), key(1), 0.0)
    assert seen(reader) == {}
    assert reader.follow()
    assert seen(reader) == {key(1): 3}
    table.invalidate(SlotId(3))
    assert reader.follow()
    assert seen(reader) == {}
    table.free(SlotId(3))
    table.publish(SlotId(3), key(2), 0.0)
    assert reader.follow()
    assert seen(reader) == {key(2): 3}


def test_r21_a_number_that_was_read_is_never_that_of_a_later_block(
    table: HostTable, reader: Neighbour
) -> None:
    numbers = list[int]()
    for block in range(5):
        table.publish(SlotId(3), key(block % 2), 0.0)
        assert reader.follow()
        slot, number = reader.parts[key(block % 2)[0]][key(block % 2)]
        assert has(reader, slot, number)
        assert not any(has(reader, slot, before) for before in numbers)
        numbers.append(number)
        table.invalidate(SlotId(3))
        assert not has(reader, slot, number)
        if block % 3 == 0:
            table.free(SlotId(3))
            assert not has(reader, slot, number)


def test_a_table_that_has_not_changed_is_not_read(
    table: HostTable, reader: Neighbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.publish(SlotId(3), key(1), 0.0)
    reader.follow()
    read: list[tuple[int, int]] = []
    monkeypatch.setattr(Neighbour, "_read", lambda self, first, end: read.append((first, end)))
    assert reader.follow()
    assert read == []
    table.publish(SlotId(60), key(2), 0.0)
    table.publish(SlotId(10), key(3), 0.0)
    table.publish(SlotId(12), key(4), 0.0)
    assert reader.follow()
    assert read == [(10, 13), (60, 61)]


@pytest.mark.parametrize("changes", [RING - 1, RING, RING + 1, 3 * RING])
def test_a_reader_that_was_overtaken_reads_the_whole_table(
    table: HostTable, reader: Neighbour, changes: int
) -> None:
    table.publish(SlotId(1), key(1), 0.0)
    for number in range(changes - 1):
        table.publish(SlotId(2 + number % 2), key(2 + number % 2), 0.0)
    assert reader.follow()
    assert seen(reader) == {key(1): 1, key(2): 2, key(3): 3}


def test_a_reader_follows_any_changes(table: HostTable, folder: OpenFolder, reader: Neighbour) -> None:
    draw = random.Random(7)
    blocks: dict[SlotId, BlockKey] = {}
    for number in range(3000):
        slot = SlotId(draw.randrange(SLOTS))
        held = blocks.pop(slot, None)
        if draw.random() < 0.6:
            name = key(number)
            table.publish(slot, name, 0.0)
            blocks[slot] = name
        elif held is not None:
            draw.choice((table.invalidate, table.free))(slot)
        if draw.random() < 0.05:
            assert reader.follow()
            assert seen(reader) == {name: slot for slot, name in blocks.items()}
    late = Neighbour(TableFile.open(folder))
    assert late.follow()
    assert seen(late) == {name: slot for slot, name in blocks.items()}
    late.close()


def test_a_large_table_is_read_in_parts_and_two_slots_with_one_key_do_no_harm(folder: OpenFolder) -> None:
    table = HostTable.create(folder, TableHeader(3000, HEADER.files))
    for slot in range(0, 3000, 3):
        table.publish(SlotId(slot), key(slot), 0.0)
    table.publish(SlotId(1), key(0), 0.0)
    reader = Neighbour(TableFile.open(folder))
    assert reader.follow()
    assert len(reader) == 1000
    assert seen(reader)[key(0)] in (0, 1)
    table.invalidate(SlotId(0))
    assert reader.follow()
    assert len(reader) in (999, 1000)
    assert seen(reader).get(key(0), 1) == 1
    reader.close()


def test_r21_a_slot_that_changes_while_it_is_read_has_no_block_until_it_is_read_again(
    table: HostTable, reader: Neighbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.publish(SlotId(3), key(1), 0.0)
    plain = os.pread
    looks: list[int] = []

    def pread(descriptor: int, size: int, start: int) -> bytes:
        data = plain(descriptor, size, start)
        if start >= reader.table.places.records:  # between the two looks at the number
            looks.append(start)
            table.publish(SlotId(3), key(2), 0.0)
        return data

    monkeypatch.setattr(os, "pread", pread)
    assert reader.follow()
    monkeypatch.undo()
    assert len(looks) == 1
    assert seen(reader) == {}
    assert reader.follow()
    assert seen(reader) == {key(2): 3}


def close(table: HostTable, folder: OpenFolder) -> None:
    table.close()


def replace(table: HostTable, folder: OpenFolder) -> None:
    HostTable.create(folder, HEADER)


def remove(table: HostTable, folder: OpenFolder) -> None:
    folder.unlink("table")


def cut(table: HostTable, folder: OpenFolder) -> None:
    os.truncate(folder.path / "table", 50)


def identify(table: HostTable, folder: OpenFolder) -> None:
    table.identify("f" * 32)


@pytest.mark.parametrize("end", [close, replace, remove, cut, identify])
def test_r21_a_table_that_another_one_replaces_or_that_is_closed_counts_no_more(
    table: HostTable, folder: OpenFolder, reader: Neighbour, end: object
) -> None:
    table.publish(SlotId(3), key(1), 0.0)
    assert reader.follow()
    end(table, folder)  # type: ignore[operator]
    assert not reader.follow()
    assert reader.table.changes() is None


def test_r21_no_flipped_bit_makes_a_reader_see_another_block(folder: OpenFolder, table: HostTable) -> None:
    blocks = {key(slot): SlotId(slot) for slot in range(0, SLOTS, 5)}
    for name, slot in blocks.items():
        table.publish(slot, name, 0.0)
    path = folder.path / "table"
    whole = path.read_bytes()
    places = places_of(HEADER)
    numbers = range(places.numbers, places.numbers + 8 * SLOTS)
    ring = range(places.ring, places.ring + 4 * len(blocks))
    for byte in (*range(places.changes + 8), *ring, *numbers, *range(places.records, places.end)):
        data = bytearray(whole)
        data[byte] ^= 1 << byte % 8
        path.write_bytes(data)
        try:
            reader = Neighbour(TableFile.open(folder))
        except NotATable:
            continue
        reader.follow()
        assert seen(reader).items() <= blocks.items(), f"byte {byte}"
        reader.close()


def test_engines_that_fit_are_found_once_and_what_cannot_be_read_is_skipped(
    shared_memory: Path, table: HostTable
) -> None:
    for name in ("1", "2", "3", "x"):
        (shared_memory / name).mkdir(mode=0o700)
    with open_folder(shared_memory / "1") as first:
        HostTable.create(first, TableHeader(5, ()))
    (shared_memory / "2" / "table").write_bytes(b"KVOHOSTS")
    (shared_memory / "4").symlink_to(shared_memory / "0")
    with open_folder(shared_memory) as kind:
        found = dict(find_neighbours(kind, (), lambda folder, each: True))
        assert sorted(found) == ["0", "1"]
        assert dict(find_neighbours(kind, found, lambda folder, each: True)) == {}
        asked: list[str] = []

        def fits(folder: OpenFolder, each: TableFile) -> bool:
            asked.append(folder.path.name)
            return each.header.slots == 5

        assert [name for name, _ in find_neighbours(kind, (), fits)] == ["1"]
        assert asked == ["0", "1"]


# -- resets ---------------------------------------------------------------------------------------------------------


def test_every_reset_has_another_name_and_a_removed_file_is_no_reset(shared_memory: Path) -> None:
    with open_folder(shared_memory) as kind:
        assert last_reset(kind) == NO_RESET
        descriptor = open_resets(kind)
        names = [last_reset(kind)]
        for _ in range(3):
            note_reset(descriptor)
            names.append(last_reset(kind))
        os.close(descriptor)
    assert names[0] == NO_RESET
    assert len(set(names)) == 4


def test_r21_a_table_from_before_a_reset_counts_no_more(folder: OpenFolder) -> None:
    table = HostTable.create(folder, HEADER)
    table.publish(SlotId(1), key(1), 0.0)
    assert isinstance(read_table(folder, HEADER.files), Left)
    with pytest.raises(NotATable, match="an engine that shares this memory was reset") as found:
        read_table(folder, HEADER.files, b"reset...")
    assert found.value.was_closed


def test_a_reader_copes_with_small_and_large_gaps() -> None:
    assert [*module._runs([])] == []
    assert [*module._runs([5])] == [range(5, 6)]
    assert [*module._runs([1, 2, 18, 35])] == [range(1, 19), range(35, 36)]
    whole = [*module._runs(range(600))]
    assert [slot for run in whole for slot in run] == [*range(600)]
    assert max(map(len, whole)) == 256
