from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload.disk.index import IndexContents, IndexLog, NotAnIndex, load_index, new_generation, start_index
from kvoffload.disk.open_folder import open_folder
from kvoffload.model.wire import Put
from tests.disk import test_index_format
from tests.disk.blocks import fails_with, open_descriptors
from tests.disk.test_index_format import invalidate, put, use

HEADER = replace(test_index_format.HEADER, slots=1000, fingerprint="")


def load(folder: Path) -> IndexContents:
    found = load_index(open_folder(folder), HEADER.slots)
    assert found is not None
    return found


def entries(folder: Path) -> list[Put]:
    return load(folder).entries.puts()


@pytest.fixture
def log(tmp_path: Path) -> IndexLog:
    return start_index(open_folder(tmp_path), HEADER)


def test_a_folder_without_an_index_has_none(tmp_path: Path) -> None:
    assert load_index(open_folder(tmp_path), HEADER.slots) is None


def test_the_next_process_reads_appended_records(tmp_path: Path, log: IndexLog) -> None:
    log.append([put(1), put(2)])
    log.append([])
    log.append([invalidate(1), put(3), use(2)])
    log.close()
    assert entries(tmp_path) == [put(3), put(2)]
    assert log.records == 5


def test_the_next_start_drops_a_truncated_batch(tmp_path: Path, log: IndexLog) -> None:
    log.append([put(1)])
    log.append([put(2)])
    log.close()
    os.truncate(tmp_path / "index", (tmp_path / "index").stat().st_size - 1)
    found = load(tmp_path)
    assert found.is_cut
    again = start_index(open_folder(tmp_path), HEADER, found.entries)
    again.append([put(3)])
    assert entries(tmp_path) == [put(1), put(3)]


def test_a_rewritten_index_can_be_appended_to(tmp_path: Path, log: IndexLog) -> None:
    for turn in range(200):
        log.append([invalidate((turn - 1) % 10), put(turn % 10, turn), use(0)])
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
    start_index(open_folder(tmp_path), replace(HEADER, generation=generation)).close()
    found = load(tmp_path)
    assert (found.entries.puts(), found.header.generation) == ([], generation)


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
        patched.setattr(os, "rename", fails_with(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
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
    path.write_bytes(data)
    with pytest.raises(OSError, match="reads otherwise than it was written"):
        log.rewritten()


def test_an_index_too_large_for_its_slots_is_not_read(tmp_path: Path, log: IndexLog) -> None:
    log.append([put(1)])
    log.close()
    os.truncate(tmp_path / "index", 2**40)  # the file system stores only one page of this sparse file
    with pytest.raises(NotAnIndex, match=rf"it has {2**40} bytes, and 1000 slots take at most \d+"):
        load_index(open_folder(tmp_path), HEADER.slots)
