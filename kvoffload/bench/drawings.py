"""What the benches of engines found, as SVG: each function draws what one bench writes to JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kvoffload.bench import lines
from kvoffload.bench.picture import Panel, picture
from kvoffload.bench.results import headline

Told: TypeAlias = Mapping[str, Any]


def engine(told: Told) -> str:
    """Draw what `bench engine` found."""
    steps, turns = told["step_time"], told["returning_turns"]
    costs = {
        "throughput, no reuse": told["no_reuse"]["with_over_without"],
        "step, nothing pending": steps["nothing_pending"],
        "step, copies pending": steps["copies_pending"],
    }
    first = {"recomputed": turns["recomputing_ms"], "offloaded": turns["offloaded_ms"]}
    panels = [
        _medians("With offloading over without it", "times", costs, 1.0),
        _medians("First token of returning turns", "milliseconds", first),
    ]
    return picture("Offloading on the reference engine", _head(told), panels)


def serve(told: Told) -> str:
    """Draw what `bench serve` found."""
    over, first = told["no_reuse"]["over_plain"], told["returning_turns"]["first_token_ms"]
    panels = [
        _medians("Throughput on prompts that never repeat, over no connector", "times", over, 1.0),
        _medians("First token of returning turns", "milliseconds", first),
    ]
    return picture("Offloading on a stock vLLM", [*_head(told), f"peer: {told['peer']}"], panels)


def convoy(told: Told) -> str:
    """Draw what `bench convoy` found."""
    times = {
        "one load": told["one_load_ms"],
        "first token": told["first_ms"],
        "all first tokens": told["all_ms"],
        "all, recomputed": told["recomputing_ms"],
    }
    panels = [
        _medians("Until the first tokens are there", "milliseconds", times),
        _medians(
            "Bytes loaded", "times those of one load", {"all requests": told["loads"]}, lines.CONVOY_TARGET
        ),
    ]
    title = f"{told['requests']} requests with one prefix of {told['prefix_tokens']:,} tokens"
    return picture(title, _head(told), panels)


def verify(told: Told) -> str:
    """Draw what `bench verify` found."""
    cases = told["cases"]
    marks = [f"{case['block_kib']} KiB, {case['direction']}" for case in cases]
    series = {mode: [case["ratios"][mode]["median"] for case in cases] for mode in cases[0]["ratios"]}
    panel = Panel("Copies with checksums over copies without", "times", marks, series)
    return picture("What checksums cost", _head(told), [panel])


def hooks(told: Told) -> str:
    """Draw what `bench hooks` found."""
    panels = []
    for phase, shown in lines.PHASES.items():
        cases = [case for case in told["cases"] if case["phase"] == phase]
        if cases:
            marks = [f"{case['attention']}, {case['running']} running" for case in cases]
            series = {name: [_microseconds(case, name) for case in cases] for name in cases[0]["repeats"]}
            panels.append(Panel(f"In hooks per step, {shown}", "microseconds", marks, series))
    return picture("Time in the scheduler's hooks", [*_head(told), f"peer: {told['peer']}"], panels)


def queue(told: Told) -> str:
    """Draw what `bench queue` found."""
    cases = told["cases"]
    marks = [f"{count:,} waiting" for count in dict.fromkeys(case["waiting"] for case in cases)]
    names = dict.fromkeys(case["connector"] for case in cases)
    panels = []
    for what, unit, field, target in (
        ("Hooks per step, over those with few waiting", "times", "growth", lines.QUEUE_TARGET),
        ("Hooks per step", "microseconds", "many_us", None),
    ):
        series = {
            name: [case[field]["median"] for case in cases if case["connector"] == name] for name in names
        }
        panels.append(Panel(what, unit, marks, series, target))
    return picture("Requests that wait and do nothing", _head(told), panels)


def _head(told: Told) -> Sequence[str]:
    return [headline(told["machine"]), told["method"]]


def _medians(title: str, unit: str, spreads: Mapping[str, Told], target: float | None = None) -> Panel:
    return Panel(title, unit, [*spreads], {"median": [one["median"] for one in spreads.values()]}, target)


def _microseconds(case: Told, name: str) -> float:
    return float(statistics.median(times["mean_us"] for times in case["repeats"][name]))
