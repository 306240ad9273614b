from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvoffload.disk import slot_file
from kvoffload.disk.open_folder import open_folder
from kvoffload.disk.slot_file import PIECE_BYTES, SlotFile, SlotShape, open_slot_file
from kvoffload.disk.system import PAGE, aligned_buffer
from kvoffload.model.errors import DiskError
from tests.captured_logs import capture_logs
from tests.disk.blocks import fails_with

SHAPE = SlotShape(rank=1, ranks=2, slot_bytes=6000, layout=b"a rank's layout.")
SIZE = PAGE + 4 * SHAPE.pitch  # of a file with four slots


Opened = Callable[..., SlotFile]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    files: list[SlotFile] = []

    def make(slots: int = 4, shape: SlotShape = SHAPE, fingerprint: str = "") -> SlotFile:
        while files:
            files.pop().close()
        files.append(open_slot_file(open_folder(tmp_path, fingerprint), shape, slots))
        return files[-1]

    yield make
    for file in files:
        file.close()


def write(file: SlotFile, slot: int, data: bytes) -> None:
    buffer = aligned_buffer(file.shape.pitch)
    buffer[: len(data)] = data
    file.write(slot, [buffer])


def read(file: SlotFile, slot: int) -> bytes:
    buffer = aligned_buffer(file.shape.pitch)
    file.read(slot, [buffer])
    return bytes(buffer[: file.shape.slot_bytes])


def some_bytes(seed: int, size: int = SHAPE.slot_bytes) -> bytes:
    return Random(seed).randbytes(size)


def test_the_next_process_reads_written_slots(opened: Opened) -> None:
    file = opened()
    for slot in range(4):
        write(file, slot, some_bytes(slot))
    file.sync()
    first = file.id
    again = opened()
    assert again.id == first
    assert [read(again, slot) for slot in range(4)] == [some_bytes(slot) for slot in range(4)]


@pytest.mark.parametrize("most", [PAGE, 3 * PAGE, 2**30])
def test_short_reads_and_writes_are_continued(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    file = opened(3, SlotShape(0, 1, 550 * PAGE, b"a rank's layout."))
    sizes: list[int] = []
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)

        def call(descriptor: int, parts: list[memoryview], offset: int, real: Any = real) -> int:  # noqa: ANN401
            few, left = list[memoryview](), most
            while parts and left:
                few.append(parts[0][:left])
                left, parts = left - len(few[-1]), parts[1:]
            sizes.append(sum(map(len, few)))
            return int(real(descriptor, few, offset))

        monkeypatch.setattr(os, name, call)
    written, found = aligned_buffer(1100 * PAGE), aligned_buffer(1100 * PAGE)
    written[:] = some_bytes(0, 1100 * PAGE)
    file.write(1, [written[start : start + PAGE] for start in range(0, len(written), PAGE)])
    file.read(1, [found[: 100 * PAGE], found[100 * PAGE :]])
    assert found == written
    if most > PIECE_BYTES:
        assert (len(sizes), max(sizes)) == (10, PIECE_BYTES)


def test_a_slot_files_space_is_allocated_at_once_and_only_this_user_can_open_it(
    opened: Opened, tmp_path: Path
) -> None:
    path = tmp_path / "slots1"
    for _ in range(2):
        size = PAGE + 100 * opened(100).shape.pitch
        found = path.stat()
        assert found.st_size == size
        assert found.st_blocks * 512 >= size
        assert found.st_mode & 0o777 == 0o600
        for end in (PAGE, size):  # now the slots are a hole in the file, as after a copy by some tools
            os.truncate(path, end)


def test_every_byte_of_the_header_counts(opened: Opened, tmp_path: Path) -> None:
    ids, path = {opened().id}, tmp_path / "slots1"
    for place in (0, 8, 12, 20, 33, 45, 60, 79, 100, PAGE - 1):
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        ids.add(opened().id)
    assert len(ids) == 11


def with_header(data: bytes, slots: int = 4, **other: Any) -> bytes:  # noqa: ANN401  # a shape's fields
    return slot_file._header(b"the file's ident", "", replace(SHAPE, **other), slots) + data[PAGE:]


# for each case: how the file changes, and why it is replaced
SPOILED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "it has 0 bytes"),
    "other format": (lambda data: b"OTHERFMT" + data[8:], "it begins with b'OTHERFMT', not with b'KVOSLOTS'"),
    "other version": (lambda data: data[:8] + b"\1" + data[9:], "its format is version 1, not 2"),
    "a byte short": (lambda data: data[:-1], f"its {SIZE - 1} bytes end before the last of 4"),
    "a slot short": (
        lambda data: data[: -SHAPE.pitch],
        f"its {SIZE - SHAPE.pitch} bytes end before the last of 4",
    ),
    "other ranks": (lambda data: with_header(data, ranks=3), "ranks=3"),
    "other slots": (lambda data: with_header(data, slot_bytes=6001), "slot_bytes=6001"),
    "other pages": (lambda data: with_header(data, layout=b"another layout.."), "other pages"),
    "2^31 slots": (lambda data: with_header(data, 2**31), f"its {SIZE} bytes end before the last of {2**31}"),
    "2^60 slots": (lambda data: with_header(data, 2**60), f"its {SIZE} bytes end before the last of {2**60}"),
}


@pytest.mark.parametrize(("spoil", "reason"), SPOILED.values(), ids=SPOILED)
def test_a_damaged_or_foreign_slot_file_is_replaced_with_one_warning(
    opened: Opened, tmp_path: Path, spoil: Callable[[bytes], bytes], reason: str
) -> None:
    path, file = tmp_path / "slots1", opened()
    write(file, 3, some_bytes(3))
    with capture_logs() as lines:
        assert opened().id == file.id
    assert lines == []
    path.write_bytes(spoil(path.read_bytes()))
    with capture_logs() as lines:
        again = opened()
    assert (again.id != file.id, again.slots, read(again, 3)) == (True, 4, bytes(SHAPE.slot_bytes))
    (line,) = lines
    assert (line["event"], line["log_level"], line["file"]) == ("slot_file_replaced", "warning", str(path))
    assert reason in line["reason"]


def test_r18_a_slot_file_of_another_fingerprint_is_replaced_and_the_log_is_left_to_the_index(
    opened: Opened,
) -> None:
    file = opened(fingerprint="a" * 32)
    write(file, 3, some_bytes(3))
    with capture_logs() as lines:
        again = opened(fingerprint="b" * 32)
    assert (again.id != file.id, read(again, 3), lines) == (True, bytes(SHAPE.slot_bytes), [])


def test_growing_a_slot_file_keeps_its_slots(opened: Opened) -> None:
    file = opened(2)
    write(file, 1, some_bytes(1))
    first = file.id
    grown = opened(5)
    assert (grown.id, grown.slots, read(grown, 1)) == (first, 5, some_bytes(1))
    assert opened(5).id == first


def test_shrinking_a_slot_file_keeps_its_first_slots(opened: Opened, tmp_path: Path) -> None:
    file = opened(100)
    for slot in (2, 7):
        write(file, slot, some_bytes(slot))
    first = file.id
    smaller = opened(3)
    assert (smaller.id, smaller.slots, read(smaller, 2)) == (first, 3, some_bytes(2))
    assert (tmp_path / "slots1").stat().st_size == PAGE + 3 * SHAPE.pitch
    again = opened(100)
    assert (again.id, read(again, 2)) == (first, some_bytes(2))
    assert read(again, 7) != some_bytes(7)


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (2, 1), (1, 2)])
def test_a_slot_outside_the_file_is_refused(opened: Opened, first: int, count: int) -> None:
    file = opened(2)
    with pytest.raises(IndexError, match="not among the 2"):
        file.write(first, [aligned_buffer(count * SHAPE.pitch)])


def test_a_file_that_is_in_use_is_refused(opened: Opened, tmp_path: Path) -> None:
    opened()
    with pytest.raises(DiskError, match="in use by another process"):
        open_slot_file(open_folder(tmp_path), SHAPE, 4)


@pytest.mark.parametrize("had", [0, 3])
def test_a_start_without_disk_space_is_refused_and_keeps_the_file(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had: int
) -> None:
    path = tmp_path / "slots1"
    if had:
        write(opened(had), 2, some_bytes(2))
        opened(had)
    size = path.stat().st_size if had else 0
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", fails_with(errno.ENOSPC))
        with pytest.raises(DiskError, match=r"no room for .* lower disk_bytes or free space"):
            opened(1000)
    assert path.stat().st_size == size
    if had:
        assert read(opened(had), 2) == some_bytes(2)


def test_a_failing_disk_is_reported(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", fails_with(errno.EIO))
    with pytest.raises(DiskError, match="cannot be used: Input/output error"):
        opened()


def test_the_page_cache_is_used_if_direct_io_is_refused(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def no_direct(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", no_direct)
    file = opened()
    assert file.page_cache_reason == "direct I/O: Invalid argument"
    write(file, 2, some_bytes(2))
    file.sync()
    assert read(file, 2) == some_bytes(2)


def test_reading_past_the_end_of_a_truncated_file_is_an_error(opened: Opened, tmp_path: Path) -> None:
    file = opened()
    os.truncate(tmp_path / "slots1", PAGE + SHAPE.pitch)
    with pytest.raises(OSError, match="ends before slot 3"):
        read(file, 3)
