from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvoffload.disk.index import IndexHeader, IndexLog, NotAnIndex, load_index, new_generation, start_index
from kvoffload.disk.open_folder import open_folder
from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.wire import Invalidate, Put, Use
from tests.disk.blocks import open_descriptors

HEADER = IndexHeader(b"g" * 16, (b"the file's ident",), 1000)


def put(slot: int, key: int | None = None) -> Put:
    return Put(SlotId(slot), BlockKey((slot if key is None else key).to_bytes(36, "big")), (slot,))


def strike(slot: int) -> Invalidate:
    return Invalidate(SlotId(slot))


def use(slot: int) -> Use:
    return Use(SlotId(slot))


def entries(folder: Path) -> list[Put]:
    found = load_index(open_folder(folder), HEADER.slots)
    assert found is not None
    return found.entries.puts()


@pytest.fixture
def log(tmp_path: Path) -> IndexLog:
    return start_index(open_folder(tmp_path), HEADER)


def test_a_folder_without_an_index_has_none(tmp_path: Path) -> None:
    assert load_index(open_folder(tmp_path), HEADER.slots) is None


def test_the_next_process_reads_appended_records(tmp_path: Path, log: IndexLog) -> None:
    log.append([put(1), put(2)])
    log.append([])
    log.append([strike(1), put(3), use(2)])
    log.close()
    assert entries(tmp_path) == [put(3), put(2)]
    assert log.records == 5


def test_the_next_start_drops_a_truncated_batch(tmp_path: Path, log: IndexLog) -> None:
    log.append([put(1)])
    log.append([put(2)])
    log.close()
    size = (tmp_path / "index").stat().st_size
    os.truncate(tmp_path / "index", size - 1)
    found = load_index(open_folder(tmp_path), HEADER.slots)
    assert found is not None
    assert found.is_cut
    again = start_index(open_folder(tmp_path), HEADER, found.entries)
    again.append([put(3)])
    assert entries(tmp_path) == [put(1), put(3)]


def test_a_rewritten_index_can_be_appended_to(tmp_path: Path, log: IndexLog) -> None:
    for turn in range(200):
        log.append(
            [put(turn % 10, turn), use(0)] if turn == 0 else [strike((turn - 1) % 10), put(turn % 10, turn)]
        )
    before, size = entries(tmp_path), (tmp_path / "index").stat().st_size
    log = log.rewritten()
    assert entries(tmp_path) == before
    assert log.records == len(before)
    assert (tmp_path / "index").stat().st_size < size / 20
    log.append([put(500)])
    assert entries(tmp_path) == [*before, put(500)]


def test_an_index_counts_as_garbage_when_most_records_are(log: IndexLog) -> None:
    log.records = 2 * 2**16
    assert not log.is_mostly_garbage(2**16)
    log.records += 1
    assert log.is_mostly_garbage(2**16)
    assert not log.is_mostly_garbage(2**16 + 1)


def test_a_new_generation_has_no_earlier_blocks(tmp_path: Path, log: IndexLog) -> None:
    log.append([put(1)])
    log.close()
    generation = new_generation()
    assert generation != new_generation()
    start_index(open_folder(tmp_path), IndexHeader(generation, HEADER.files, HEADER.slots)).close()
    assert entries(tmp_path) == []
    found = load_index(open_folder(tmp_path), HEADER.slots)
    assert found is not None
    assert found.header.generation == generation


def test_an_append_after_a_failed_append_is_complete(
    tmp_path: Path, log: IndexLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append([put(1)])
    real = os.pwrite

    def half(descriptor: int, data: memoryview, offset: int) -> int:
        if offset > log._end:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:20], offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", half)
        with pytest.raises(OSError, match="No space"):
            log.append([put(2)])
    assert entries(tmp_path) == [put(1)]
    log.append([put(3)])
    assert entries(tmp_path) == [put(1), put(3)]


def test_the_old_index_stays_if_the_new_one_cannot_be_written(
    tmp_path: Path, log: IndexLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append([put(1)])
    files = open_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EIO, "I/O")))
        with pytest.raises(OSError, match="I/O"):
            log.rewritten()
    assert open_descriptors() == files
    assert entries(tmp_path) == [put(1)]
    log.append([put(2)])
    assert entries(tmp_path) == [put(1), put(2)]


def test_a_rewrite_of_a_damaged_index_is_refused(tmp_path: Path, log: IndexLog) -> None:
    log.append([put(1)])
    path = tmp_path / "index"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    with pytest.raises(OSError, match="reads otherwise than it was written"):
        log.rewritten()


def test_an_index_too_large_for_its_slots_is_not_read(tmp_path: Path, log: IndexLog) -> None:
    log.append([put(1)])
    log.close()
    os.truncate(tmp_path / "index", 2**40)  # the file system stores only one page of this sparse file
    with pytest.raises(NotAnIndex, match=rf"it has {2**40} bytes, and 1000 slots take at most \d+"):
        load_index(open_folder(tmp_path), HEADER.slots)
