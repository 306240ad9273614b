"""What the benches' table says of copies and engines: a verdict turns with the number that it is about."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.bench import lines, summary

Make = Callable[[dict[str, Any]], Iterator[lines.Line]]


def ratio(median: float, low: float | None = None) -> dict[str, float | None]:
    return {"median": median, "low": low, "high": None if low is None else median + 0.1}


ENGINE: dict[str, Any] = {
    "no_reuse": {"with_over_without": ratio(1.0, 0.99)},
    "step_time": {
        "steps": 10,
        "nothing_pending": ratio(1.01, 0.99),
        "copies_pending": ratio(1.05),
        "wake_ups_with_nothing_pending": 0,
    },
    "returning_turns": {"working_set_to_cache": 4.0, "times_sooner": ratio(3.0)},
}
SERVE: dict[str, Any] = {
    "machine": {"vllm": "0.0"},
    "no_reuse": {"over_plain": {"kvoffload": ratio(0.99), "peer": ratio(0.5)}},
    "returning_turns": {
        "working_set_to_cache": 4.0,
        "times_sooner_than_recomputing": {"kvoffload": ratio(3.0), "peer": ratio(2.0)},
        "times_sooner_than_peer": ratio(1.0),
    },
}
HOOKS: dict[str, Any] = {
    "cases": [
        {"attention": "full", "running": running, "phase": phase, "ratios": [ratio, 0.9 * ratio, 1.1 * ratio]}
        for running, phase, ratio in (
            (128, "decode", 0.3),
            (128, "prefill", 3.0),
            (16, "all", 1.5),
            (128, "all", 0.2),
        )
    ],
}
QUEUE: dict[str, Any] = {
    "few": 10,
    "cases": [
        {"connector": connector, "waiting": 10_000, "growth": ratio(growth)}
        for connector, growth in (("kvoffload", 1.1), ("OffloadingConnector", 12.0))
    ],
}
COPY: dict[str, Any] = {
    "cases": [
        {"page_kib": page, "way": way, "threads": 1, "of_one_piece": ratio(speed)}
        for page, speed in ((4, 0.6), (16, 0.1), (64, 0.9))
        for way in ("store", "load")
    ],
    "load_behind_stores": {"load_mib": 1, "queued_mib": 4, "ratio": ratio(1.2)},
    "submission": {
        "adjacent_blocks": 8,
        "merge_and_submit_us_a_block": ratio(0.05),
        "hook_us_a_block": ratio(0.1),
    },
}


@pytest.mark.parametrize(
    ("told", "make"),
    [
        (ENGINE, lines.engine),
        (SERVE, lines.serve),
        (HOOKS, lines.hooks),
        (QUEUE, lines.queue),
        (COPY, lines.copy),
    ],
    ids=["engine", "serve", "hooks", "queue", "copy"],
)
def test_what_is_just_met_is_met(told: dict[str, Any], make: Make) -> None:
    assert {is_met for _, _, target, is_met in make(told) if target} == {True}
    assert {is_met for _, _, target, is_met in make(told) if not target} <= {None}


@pytest.mark.parametrize(
    ("told", "make", "path", "value"),
    [
        (ENGINE, lines.engine, ("no_reuse", "with_over_without", "median"), 0.989),
        (ENGINE, lines.engine, ("step_time", "nothing_pending", "low"), 1.001),
        (ENGINE, lines.engine, ("step_time", "wake_ups_with_nothing_pending"), 1),
        (ENGINE, lines.engine, ("step_time", "copies_pending", "median"), 1.051),
        (ENGINE, lines.engine, ("returning_turns", "times_sooner", "median"), 2.9),
        (SERVE, lines.serve, ("no_reuse", "over_plain", "kvoffload", "median"), 0.98),
        (SERVE, lines.serve, ("returning_turns", "times_sooner_than_peer", "median"), 0.99),
        (HOOKS, lines.hooks, ("cases", 0, "ratios"), [0.2, 0.31, 0.4]),
        (HOOKS, lines.hooks, ("cases", 3, "ratios"), [1.0]),
        (QUEUE, lines.queue, ("cases", 0, "growth", "median"), 1.11),
        (COPY, lines.copy, ("cases", 1, "of_one_piece", "median"), 0.59),
        (COPY, lines.copy, ("cases", 4, "of_one_piece", "median"), 0.89),
        (COPY, lines.copy, ("load_behind_stores", "ratio", "median"), 1.21),
        (COPY, lines.copy, ("submission", "merge_and_submit_us_a_block", "median"), 0.06),
    ],
)
def test_what_is_just_missed_is_missed(
    told: dict[str, Any], make: Make, path: tuple[str | int, ...], value: float
) -> None:
    told = copy.deepcopy(told)
    place: Any = told
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert [is_met for *_, is_met in make(told)].count(False) == 1


def test_without_a_peer_nothing_is_said_of_hooks() -> None:
    alone = {"cases": [{**case, "ratios": []} for case in HOOKS["cases"]]}
    assert [*lines.hooks(alone)] == []


def test_another_connectors_growth_has_no_target() -> None:
    (*_, (what, found, target, is_met)) = lines.queue(QUEUE)
    assert "10,000 requests that wait, over 10; OffloadingConnector" in what
    assert (found.split("x")[0], target, is_met) == ("12.00", "", None)


def test_the_cost_where_nothing_repeats_comes_first(tmp_path: Path) -> None:
    about = {"cpu": "x", "cores": 2, "memory_gib": 1, "python": "3", "kvoffload": "0", "vllm": "0.0"}
    for name, told in (("copy", COPY), ("hooks", HOOKS), ("engine", ENGINE), ("serve", SERVE)):
        told = {**told, "bench": name, "date": "2026-01-01", "machine": about}
        (tmp_path / f"{name}.json").write_text(json.dumps(told))
    rows = [line for line in summary.render(tmp_path).splitlines() if line.startswith("| `")]
    assert rows[0].startswith("| `engine` | throughput on prompts that never repeat")
    assert [row.split("`")[1] for row in rows] == (
        ["engine"] * 5 + ["serve"] * 5 + ["hooks"] * 4 + ["copy"] * 5
    )
