from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
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

SHAPE = SlotShape(rank=1, ranks=2, slot_bytes=6000, layout=b"a rank's layout.")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., SlotFile]]:
    files: list[SlotFile] = []

    def make(slots: int = 4, shape: SlotShape = SHAPE) -> SlotFile:
        while files:
            files.pop().close()
        files.append(open_slot_file(open_folder(tmp_path), shape, slots))
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


def test_the_next_process_reads_written_slots(opened: Callable[..., SlotFile]) -> None:
    file = opened()
    for slot in range(4):
        write(file, slot, some_bytes(slot))
    file.sync()
    first = file.id
    again = opened()
    assert again.id == first
    assert [read(again, slot) for slot in range(4)] == [some_bytes(slot) for slot in range(4)]


def test_slots_larger_than_one_call_are_written_and_read_completely(opened: Callable[..., SlotFile]) -> None:
    size = 2 * PIECE_BYTES + 5000
    file = opened(2, SlotShape(0, 1, size, b"a rank's layout."))
    for slot in (0, 1):
        write(file, slot, some_bytes(slot, size))
    assert [read(file, slot) for slot in (0, 1)] == [some_bytes(slot, size) for slot in (0, 1)]


@pytest.mark.parametrize("most", [PAGE, 3 * PAGE, 2**30])
def test_short_reads_and_writes_are_continued(
    opened: Callable[..., SlotFile], monkeypatch: pytest.MonkeyPatch, most: int
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
    with pytest.raises(IndexError, match="slot 3 is not among the 3"):
        file.write(2, [written])


def test_a_slot_files_space_is_allocated_at_once_and_only_this_user_can_open_it(
    opened: Callable[..., SlotFile], tmp_path: Path
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


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (SlotShape(1, 3, 6000, SHAPE.layout), "ranks=2.* ranks=3"),
        (SlotShape(1, 2, 6001, SHAPE.layout), "slot_bytes=6000.* slot_bytes=6001"),
        (SlotShape(1, 2, 6000, b"another layout.."), "other pages"),
    ],
)
def test_a_slot_file_of_another_shape_is_replaced_with_a_warning_that_says_why(
    opened: Callable[..., SlotFile], other: SlotShape, reason: str
) -> None:
    first = opened().id
    with capture_logs() as lines:
        assert opened(4, other).id != first
    assert re.search(reason, lines[0]["reason"])


def test_every_byte_of_the_header_counts(opened: Callable[..., SlotFile], tmp_path: Path) -> None:
    ids = {opened().id}
    for place in (0, 8, 12, 20, 33, 45, 60, 79, 100, PAGE - 1):
        path = tmp_path / "slots1"
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        ids.add(opened().id)
    assert len(ids) == 11


def test_a_truncated_slot_file_is_replaced(opened: Callable[..., SlotFile], tmp_path: Path) -> None:
    first = opened().id
    os.truncate(tmp_path / "slots1", PAGE + 3 * SHAPE.pitch)
    again = opened()
    assert again.id != first
    assert read(again, 3) == bytes(SHAPE.slot_bytes)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: b"", "it has 0 bytes"),
        (lambda data: b"OTHERFMT" + data[8:], "it begins with b'OTHERFMT', not with b'KVOSLOTS'"),
        (lambda data: data[:8] + b"\2" + data[9:], "its format is version 2, not 1"),
        (
            lambda data: data[:-1],
            f"its header is damaged, or its {PAGE + 4 * SHAPE.pitch - 1} bytes end before the last of 4",
        ),
        (lambda data: data[:20] + b"xxxx" + data[24:], "its header is damaged"),
    ],
)
def test_replacing_a_slot_file_logs_one_warning_with_its_name(
    opened: Callable[..., SlotFile], tmp_path: Path, spoil: Callable[[bytes], bytes], reason: str
) -> None:
    path = tmp_path / "slots1"
    with capture_logs() as lines:
        opened()
        opened()
    assert lines == []
    path.write_bytes(spoil(path.read_bytes()))
    with capture_logs() as lines:
        opened()
    (line,) = lines
    assert (line["event"], line["log_level"], line["file"]) == ("slot_file_replaced", "warning", str(path))
    assert reason in line["reason"]


@pytest.mark.parametrize("slots", [2**31, 2**36, 2**60])
def test_a_header_with_more_slots_than_the_file_is_refused(
    opened: Callable[..., SlotFile], tmp_path: Path, slots: int
) -> None:
    first, path = opened().id, tmp_path / "slots1"
    path.write_bytes(slot_file._header(first, SHAPE, slots) + path.read_bytes()[PAGE:])
    again = opened()
    assert again.id != first
    assert again.slots == 4


def test_growing_a_slot_file_keeps_its_slots(opened: Callable[..., SlotFile]) -> None:
    file = opened(2)
    write(file, 1, some_bytes(1))
    first = file.id
    grown = opened(5)
    assert (grown.id, grown.slots, read(grown, 1)) == (first, 5, some_bytes(1))
    assert opened(5).id == first


def test_shrinking_a_slot_file_keeps_its_first_slots(opened: Callable[..., SlotFile], tmp_path: Path) -> None:
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


def test_a_slot_outside_the_file_is_refused(opened: Callable[..., SlotFile]) -> None:
    file = opened(2)
    for slot in (-1, 2):
        with pytest.raises(IndexError, match="not among the 2"):
            read(file, slot)


def test_a_file_that_is_in_use_is_refused(opened: Callable[..., SlotFile], tmp_path: Path) -> None:
    opened()
    with pytest.raises(DiskError, match="in use by another process"):
        open_slot_file(open_folder(tmp_path), SHAPE, 4)


def refuse(*, number: int) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("had", [0, 3])
def test_a_start_without_disk_space_is_refused_and_keeps_the_file(
    opened: Callable[..., SlotFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had: int
) -> None:
    path = tmp_path / "slots1"
    if had:
        write(opened(had), 2, some_bytes(2))
        opened(had)
    size = path.stat().st_size if had else 0
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse(number=errno.ENOSPC))
        with pytest.raises(DiskError, match=r"no room for .* lower disk_bytes or free space"):
            opened(1000)
    assert path.stat().st_size == size
    if had:
        assert read(opened(had), 2) == some_bytes(2)


def test_a_failing_disk_is_reported(opened: Callable[..., SlotFile], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", refuse(number=errno.EIO))
    with pytest.raises(DiskError, match="cannot be used: Input/output error"):
        opened()


def test_the_page_cache_is_used_if_direct_io_is_refused(
    opened: Callable[..., SlotFile], monkeypatch: pytest.MonkeyPatch
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


def test_reading_past_the_end_of_a_truncated_file_is_an_error(
    opened: Callable[..., SlotFile], tmp_path: Path
) -> None:
    file = opened()
    os.truncate(tmp_path / "slots1", PAGE + SHAPE.pitch)
    with pytest.raises(OSError, match="ends before slot 3"):
        read(file, 3)
