from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main
from kvoffload.telemetry.records import read_journal


@pytest.fixture(scope="module")
def trace(demo_journal: Path) -> list[dict[str, Any]]:
    assert main(["timeline", str(demo_journal)]) == Exit.OK
    drawn: list[dict[str, Any]] = json.loads(Path(f"{demo_journal}.trace.json").read_text())["traceEvents"]
    return drawn


@pytest.mark.slow
def test_everything_that_happened_is_drawn_once(demo_journal: Path, trace: list[dict[str, Any]]) -> None:
    reported = Counter(
        getattr(record.message, "name", type(record.message).__name__)
        for record in read_journal(demo_journal)
    )
    drawn = Counter(event["name"] for event in trace)
    spans = Counter(event["cat"] for event in trace if event["ph"] == "X")
    assert spans["steps"] == reported["StepScheduled"]
    assert drawn["lookup"] == reported["LookupAnswered"]
    assert drawn["copy"] == drawn["queued"] == reported["RankReported"]
    assert drawn["waits for load"] == reported["LoadScheduled"] > 0
    for name in ("HitPinned", "HitDropped", "BlocksEvicted", "CapacityGrown"):
        assert drawn[name] == reported[name]
    assert drawn["HitPinned"] > 0
    assert drawn["BlocksEvicted"] > 0


@pytest.mark.slow
def test_spans_of_one_line_nest(trace: list[dict[str, Any]]) -> None:
    """If spans on one line overlap without nesting, a viewer draws them wrongly and shows no error."""
    lines: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            span = (event["ts"], event["ts"] + event["dur"])
            lines.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in lines.values():
        open_until: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 0.01:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.01
            open_until.append(end)


@pytest.mark.slow
def test_the_trace_has_the_format_that_viewers_read(trace: list[dict[str, Any]]) -> None:
    named = {(event["pid"], event["tid"]) for event in trace if event["name"] == "thread_name"}
    for event in trace:
        assert event["ph"] in "XiMsf"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert event["ph"] == "M" or (event["pid"], event["tid"]) in named
