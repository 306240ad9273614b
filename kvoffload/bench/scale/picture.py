"""What `bench scale` found, as one SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvoffload.bench.picture import Panel, picture
from kvoffload.bench.results import headline
from kvoffload.bench.scale import idle, lookups, memory

Case = Mapping[str, Any]


def draw(told: Mapping[str, Any]) -> str:
    """Return the picture of what was measured, `told` as it is written to JSON."""
    panels = [panel for name, make in _PARTS.items() if name in told for panel in make(told[name])]
    lines = [
        headline(told["machine"]),
        "Dashed: the target. A real scheduler side, no engine, copies simulated.",
    ]
    return picture("The scheduler's side as requests and slots grow", lines, panels)


def _idle(cases: Sequence[Case]) -> Iterator[Panel]:
    works = dict.fromkeys(case["work"] for case in cases)
    series = {work: [case["growth"]["median"] for case in cases if case["work"] == work] for work in works}
    marks = [f"{count:,}" for count in dict.fromkeys(case["tracked"] for case in cases)]
    title = f"Hooks per step by requests that do nothing in it, over {idle.FEW} of them"
    yield Panel(title, "times", marks, series, idle.TARGET)


def _lookup(cases: Sequence[Case]) -> Iterator[Panel]:
    found = [case for case in cases if case["blocks"]]
    series = {name: [case[f"{name}_ratio"]["median"] for case in found] for name in ("search", "hook")}
    marks = [f"{case['blocks']:,} blocks" for case in found]
    yield Panel("A lookup over a bare loop on the same keys", "times", marks, series, lookups.TARGET)


def _memory(cases: Sequence[Case]) -> Iterator[Panel]:
    names = {"empty": "empty", "full": "full", "churned": "all blocks replaced twice"}
    series = {shown: [case[name] for case in cases] for name, shown in names.items()}
    marks = [f"{case['slots']:,} slots" for case in cases]
    yield Panel("Python memory of a host slot", "bytes", marks, series, memory.TARGET_BYTES)


def _growth(told: Case) -> Iterator[Panel]:
    readings = told["readings"]
    marks = [f"{one['requests']:,}" for one in readings]
    times = {"mean of each tenth": [one["request_us"] for one in readings]}
    yield Panel("Time in hooks of a request, as requests come and go", "microseconds", marks, times)
    sizes = {"end of each tenth": [one["resident_mib"] for one in readings]}
    yield Panel("Resident memory, as requests come and go", "MiB", marks, sizes)


_PARTS: dict[str, Any] = {"idle": _idle, "lookup": _lookup, "memory": _memory, "growth": _growth}
