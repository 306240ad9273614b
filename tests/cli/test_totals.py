from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from kvoffload.cli.main import main
from kvoffload.model import events
from kvoffload.model.wire import Direction
from kvoffload.telemetry.records import Record, Summary, read_journal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

TURNS = 4 * 7


@pytest.mark.slow
def test_the_demos_table_agrees_with_its_journal(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sum the counts directly from the journal's events, without `Counters`."""
    path = tmp_path / "journal"
    # Use enough turns for some hits, and so little host memory that blocks are evicted however fast copies
    # are.
    tight = ["--turns", "7", "--host-bytes", "1600KiB", "--config", f"journal_path={path}"]
    assert main([*small, *tight, "--device-blocks", "40", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["offloading"]
    records = list(read_journal(path))
    assert [record.sequence for record in records] == list(range(1, len(records) + 1))
    played = after_warming_up(records)
    assert table["stored_blocks"] == by(played, events.StoreEnded, "outcome")
    assert table["stored_blocks"]["stored"] > 0
    assert sum(table["stored_blocks"].values()) == by(played, events.BlocksOffered).total()
    assert table["loaded_blocks"] == by(played, events.LoadEnded, "outcome")
    assert table["evicted_blocks"] == by(played, events.BlocksEvicted, "cause") != {}
    for direction, name in ((Direction.STORE, "stored_bytes"), (Direction.LOAD, "loaded_bytes")):
        copies = [one for one in of(played, events.RankReported) if one.direction is direction]
        assert table[name] == sum(one.copied_bytes for one in copies) > 0
    missed: Counter[str] = Counter()
    for one in of(played, events.LookupAnswered):
        if one.cause is not None:
            missed[one.cause.value] += 1
            missed["behind_miss"] += one.miss_blocks - 1
    assert table["missed_blocks"] == +missed != {}


def after_warming_up(records: Sequence[Record]) -> list[events.Event]:
    """Return the events since the first conversation. The warm-up's copies end before it."""
    seen = [
        at
        for at, record in enumerate(records)
        if isinstance(record.message, Summary) and record.message.name == "RequestSeen"
    ]
    return [record.message for record in records[seen[-TURNS] :] if isinstance(record.message, events.Event)]


def of(reported: Iterable[events.Event], cls: type[Any]) -> list[Any]:
    return [one for one in reported if isinstance(one, cls)]


def by(reported: Iterable[events.Event], cls: type[Any], label: str | None = None) -> Counter[str]:
    blocks: Counter[str] = Counter()
    for one in of(reported, cls):
        blocks[getattr(one, label).value if label else ""] += one.blocks
    return blocks
