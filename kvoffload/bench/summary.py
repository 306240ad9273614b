"""The table of bench/README.md: what the benches found, from the results that are kept in the sources."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload.bench import lines
from kvoffload.bench.scale import idle, lookups, memory

Told = Mapping[str, Any]


class Row(NamedTuple):
    """One line: what was measured, what came of it, the target and whether it is met; both empty without a target."""

    what: str
    found: str
    target: str = ""
    is_met: bool | None = None


def render(folder: Path) -> str:
    """Return a table for each machine that has results in `folder`."""
    parts = []
    by_machine: dict[str, list[tuple[str, Told]]] = {}
    for path in sorted(folder.glob("*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["bench"] in _ROWS:
            by_machine.setdefault(_machine(told["machine"]), []).append((told["bench"], told))
    for about, results in by_machine.items():
        dates = sorted({told["date"] for _, told in results})
        parts += [
            f"{about}, {' and '.join(dates)}:",
            "",
            "| bench | what | found | target | |",
            "|---|---|---|---|---|",
        ]
        for name, told in sorted(results, key=lambda one: list(_ROWS).index(one[0])):
            parts += [_line(name, row) for row in _ROWS[name](told)]
        parts.append("")
    return "\n".join(parts)


def _machine(about: Told) -> str:
    named = about.get("gpu") or f"{about['cpu']}, {about['cores']} cores"
    return f"{named}, {about['memory_gib']:g} GiB, Python {about['python']}, kvoffload {about['kvoffload']}"


def _line(name: str, row: Row) -> str:
    verdict = "" if row.is_met is None else "met" if row.is_met else "**missed**"
    return f"| `{name}` | {row.what} | {row.found} | {row.target} | {verdict} |"


def _scale(told: Told) -> Iterator[Row]:
    for part, rows in (("idle", _idle), ("lookup", _lookup), ("memory", _memory), ("growth", _growth)):
        if part in told:
            yield from rows(told[part])


def _idle(cases: Sequence[Told]) -> Iterator[Row]:
    most = max(case["tracked"] for case in cases)
    for case in cases:
        if case["tracked"] == most:
            what = f"hooks per step with {most:,} requests that do nothing, over {idle.FEW}: {case['work']}"
            growth = case["growth"]
            yield Row(what, times(growth), f"at most {idle.TARGET:g}x", growth["median"] <= idle.TARGET)


def _lookup(cases: Sequence[Told]) -> Iterator[Row]:
    found = [case for case in cases if case["blocks"]]
    lengths = ", ".join(f"{case['blocks']:,}" for case in found)
    for part, what in (
        ("search", "the search behind a lookup"),
        ("hook", "the whole lookup, pins and counters included"),
    ):
        ratios = [case[f"{part}_ratio"] for case in found]
        is_met = all(ratio["median"] <= lookups.TARGET for ratio in ratios)
        what = f"{what}, over a bare loop on the same {lengths} keys"
        yield Row(what, "; ".join(map(times, ratios)), f"at most {lookups.TARGET:g}x", is_met)
    for case in cases:
        if not case["blocks"]:
            search, hook = case["search_us"]["median"], case["hook_us"]["median"]
            target, is_met = f"at most {lookups.MISS_TARGET_US:g} us", hook <= lookups.MISS_TARGET_US
            yield Row(
                "a miss: the search; the whole lookup", f"{search:.1f} us; {hook:.1f} us", target, is_met
            )


def _memory(cases: Sequence[Told]) -> Iterator[Row]:
    for case in cases:
        slots, is_target = f"{case['slots']:,} slots", case["slots"] == memory.TARGET_SLOTS
        sizes, pause = (case["full"], case["churned"]), f"{1e3 * case['longest_put_s']:,.1f} ms"
        is_met = max(sizes) <= memory.TARGET_BYTES if is_target else None
        target = f"at most {memory.TARGET_BYTES}" if is_target else ""
        found = f"{sizes[0]:,.0f}; {sizes[1]:,.0f}"
        yield Row(f"bytes a slot, {slots}: full; every block replaced twice", found, target, is_met)
        is_met = case["start_s"] < memory.TARGET_START_S if is_target else None
        target = f"under {memory.TARGET_START_S:g} s" if is_target else ""
        yield Row(f"start-up, {slots}", f"{case['start_s']:.2f} s", target, is_met)
        yield Row(f"longest pause while blocks take others' places, {slots}", pause)


def _growth(told: Told) -> Iterator[Row]:
    second, last = told["readings"][1], told["readings"][-1]
    names = {"request_us": "time in hooks of a request", "resident_mib": "resident memory"}
    for name, shown in names.items():
        what = f"{shown}, last tenth of {told['requests']:,} requests over the second, {told['pool']:,} slots"
        yield Row(what, f"{last[name] / second[name]:.2f}x")


def _convoy(told: Told) -> Iterator[Row]:
    requests = f"{told['requests']} requests with one prefix of {told['prefix_tokens']:,} tokens"
    loads = told["loads"]
    what = f"{requests} on the host: bytes loaded over those of one load"
    yield Row(what, times(loads), f"at most {lines.CONVOY_TARGET:g}x", loads["median"] <= lines.CONVOY_TARGET)
    yield Row("until all of them have their first token: how many times sooner", times(told["times_sooner"]))


def times(spread: Told) -> str:
    """Return a ratio with its interval."""
    if spread["low"] is None:
        return f"{spread['median']:.2f}x"
    return f"{spread['median']:.2f}x [{spread['low']:.2f}, {spread['high']:.2f}]"


_ROWS: dict[str, Any] = {  # in the table's order: what offloading costs where it cannot help comes first
    "engine": lambda told: starmap(Row, lines.engine(told)),
    "serve": lambda told: starmap(Row, lines.serve(told)),
    "hooks": lambda told: starmap(Row, lines.hooks(told)),
    "queue": lambda told: starmap(Row, lines.queue(told)),
    "copy": lambda told: starmap(Row, lines.copy(told)),
    "scale": _scale,
    "convoy": _convoy,
}
