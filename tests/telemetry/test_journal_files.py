from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from kvoffload.bus.bus import Bus
from kvoffload.model.engine import EngineIdentity, EngineShape
from kvoffload.model.events import BlocksOffered
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import GroupId
from kvoffload.telemetry.journal import Journal, JournalFile
from kvoffload.telemetry.provenance import as_line, describe_run
from kvoffload.telemetry.records import (
    BEGUN,
    JournalError,
    OnBegun,
    Record,
    Selection,
    files_of,
    last_time,
    read_journal,
    rotated,
)
from tests.settings import make_config
from tests.telemetry.ticks import Ticks

PROVENANCE = {"kvoffload": "0.1", "settings": {"verify": "off"}}


def write(path: Path, lines: int, *, max_bytes: int | None = None, batch: int = 10) -> None:
    """Write events to a new journal, `batch` lines at a time."""
    bus = Bus(Ticks(1.0))
    journal = Journal(bus.hook, path=path, max_bytes=max_bytes, provenance=PROVENANCE)
    journal.subscribe(bus)

    async def both() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(journal.run)
            for first in range(0, lines, batch):
                for number in range(first, min(first + batch, lines)):
                    bus.publish(BlocksOffered(number))
                await anyio.wait_all_tasks_blocked()
            bus.close()

    anyio.run(both)


def sequences(path: Path, on_begun: OnBegun = lambda provenance: None) -> list[int]:
    return [record.sequence for record in read_journal(path, None, on_begun)]


def test_each_process_begins_with_its_provenance(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for _ in range(2):
        write(path, 3)
    begun: list[Mapping[str, object]] = []
    assert sequences(path, begun.append) == [1, 2, 3] * 2
    assert begun == [PROVENANCE] * 2
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["event"], first["seq"]) == (BEGUN, 0)


@pytest.mark.parametrize("batch", [10, 500])
def test_a_bounded_journal_keeps_the_last_lines_and_each_file_has_the_provenance(
    tmp_path: Path, batch: int
) -> None:
    path, most = tmp_path / "journal", 4000
    write(path, 500, max_bytes=most, batch=batch)
    assert files_of(path) == [rotated(path), path]
    sizes = [file.stat().st_size for file in files_of(path)]
    assert 0.25 * most < sum(sizes) <= most
    assert [oct(file.stat().st_mode)[-3:] for file in files_of(path)] == ["600", "600"]
    begun: list[Mapping[str, object]] = []
    kept = sequences(path, begun.append)
    assert kept == list(range(kept[0], 501))
    assert kept[0] > 1
    assert begun == [PROVENANCE] * 2


def test_a_rotated_journal_stays_locked(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / "journal", max_bytes=20)
    for _ in range(4):
        file.append(["0123456789"])
    with pytest.raises(Exception, match="another process writes it"):
        JournalFile(tmp_path / "journal")
    file.close()
    JournalFile(tmp_path / "journal").close()


def test_a_line_larger_than_the_bound_is_written_whole(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / "journal", max_bytes=10, head="head")
    file.append(["x" * 100, "y" * 100])
    file.close()
    assert (tmp_path / "journal").read_text() == "head\n" + "y" * 100 + "\n"
    assert rotated(tmp_path / "journal").read_text() == "head\n" + "x" * 100 + "\n"


def test_gzip_is_read_without_unpacking(tmp_path: Path) -> None:
    path, packed = tmp_path / "journal", tmp_path / "journal.gz"
    write(path, 50)
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert list(read_journal(packed)) == list(read_journal(path))
    assert last_time(packed) == last_time(path)


def test_truncated_gzip_is_read_up_to_the_cut(tmp_path: Path) -> None:
    path, packed = tmp_path / "journal", tmp_path / "journal.gz"
    write(path, 5000, batch=500)
    packed.write_bytes(gzip.compress(path.read_bytes())[:-2000])
    seen = list[Record]()
    with pytest.raises(JournalError, match=r"end-of-stream|cut off"):
        seen.extend(read_journal(packed))
    assert [record.sequence for record in seen] == list(range(1, len(seen) + 1))
    assert len(seen) > 100
    assert last_time(packed) == seen[-1].time


@pytest.mark.parametrize("content", [b"\x28\xb5\x2f\xfd0000\n", b"\x89PNG\r\n\x1a\n"])
def test_a_file_that_is_not_a_journal_is_reported(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=r"line 1: .*can't decode"):
        list(read_journal(path))


def test_lines_outside_the_wanted_times_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, 900, batch=500)
    times = [record.time for record in read_journal(path)]
    begun: list[Mapping[str, object]] = []
    wanted = read_journal(path, Selection(times[100], times[200]), begun.append)
    assert [record.time for record in wanted] == times[100:201]
    assert begun == [PROVENANCE]
    assert last_time(path) == max(json.loads(line)["t"] for line in path.read_text().splitlines())


@pytest.mark.parametrize("time", ["1-2", "1e", "1e999", "9" * 400])
def test_the_search_for_the_last_time_skips_invalid_times(tmp_path: Path, time: str) -> None:
    path = tmp_path / "journal"
    path.touch()
    assert last_time(path) is None
    write(path, 3)
    last = last_time(path)
    with path.open("a") as file:
        file.write(f'{{"seq":4,"t":{time},"event":"BlocksOffered","blocks":1}}\n')
    assert last_time(path) == last


def test_provenance_names_the_engine_its_shape_and_the_settings() -> None:
    shape = EngineShape(
        (GroupSpec(GroupId(0), AttentionKind.FULL, 16),), ranks=2, device_blocks=10, step_tokens=64
    )
    config = make_config(journal_path=Path("/somewhere"), verify="full")
    run = describe_run(EngineIdentity("vllm", "0.33", "m", 1), shape, config, 0.0)
    assert json.loads(json.dumps(run)) == run
    assert run["engine"] == {"name": "vllm", "version": "0.33", "index": 1, "model": "m"}
    assert (run["ranks"], run["device_blocks"], run["began"]) == (2, 10, "1970-01-01T00:00:00+00:00")
    assert run["groups"] == ["full, 16 tokens a block"]
    assert {"journal_path": "/somewhere", "verify": "full"}.items() <= run["settings"].items()  # type: ignore[attr-defined]
    assert "vllm 0.33; model m; " in as_line(run)
