"""What benches find, as lines: a verdict turns with the number that it is about, and an interval says what it promises."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvoffload.bench.lines import Line, line, markdown, median_interval, ratios, table
from kvoffload_vllm.bench_hooks import Case
from kvoffload_vllm.bench_serve import first_tokens, throughput


@pytest.mark.parametrize(
    ("samples", "target", "is_met"),
    [
        ([0.99], {"at_least": 0.99}, True),
        ([0.989], {"at_least": 0.99}, False),
        ([1.1], {"at_most": 1.1}, True),
        ([1.11], {"at_most": 1.1}, False),
        ([0.5, 1.1, 9.0], {"at_most": 1.1}, True),  # the median counts
        ([5.0], {}, None),
    ],
)
def test_a_target_is_met_or_missed_by_the_median(
    samples: Sequence[float], target: dict[str, float], is_met: bool | None
) -> None:
    found = line("it", samples, at_least=target.get("at_least"), at_most=target.get("at_most"))
    assert (found.is_met, bool(found.target)) == (is_met, is_met is not None)


def test_numbers_are_shown_with_their_interval_where_there_is_one() -> None:
    assert line("it", [1.0, 2.0], " us").found == "1.50 us"
    assert line("it", [1234.5] * 6, " us").found == "1,234 us [1,234, 1,234]"
    assert line("it", [0.98765] * 6).found == "0.988x [0.988, 0.988]"
    assert Line("it", 0, unit="").found == "0"
    assert ratios([1.0, 4.0], [2.0, 2.0]) == [0.5, 2.0]


def test_the_table_of_a_terminal() -> None:
    rows = list(table([line("short", [1.0]), line("much longer", [2.0], at_most=1)]))
    assert rows == ["short        1.00x", "much longer  2.00x  at most 1x      miss"]


def reported(bench: str, cpu: str, found: Line) -> dict[str, Any]:
    about = {"cpu": cpu, "cores": 2, "memory_gib": 1, "python": "3", "kvoffload": "0"}
    return {"bench": bench, "date": "2026-01-01", "machine": about, "lines": [found.to_plain()]}


def test_the_page_has_a_table_a_machine_and_what_offloading_costs_first() -> None:
    one, other = line("a cost", [0.9], at_least=1), line("a copy", [1.0], at_least=1)
    page = markdown(
        [reported("copy", "x", other), reported("engine", "x", one), reported("copy", "y", other)]
    ).splitlines()
    assert [row for row in page if row.startswith(("| `", "x", "y"))] == [
        "x, 2 cores, 1 GiB, Python 3, kvoffload 0, 2026-01-01:",
        "| `engine` | a cost | 0.900x | at least 1x | **missed** |",
        "| `copy` | a copy | 1.00x | at least 1x | met |",
        "y, 2 cores, 1 GiB, Python 3, kvoffload 0, 2026-01-01:",
        "| `copy` | a copy | 1.00x | at least 1x | met |",
    ]


def test_a_curve_is_shown_second_by_second_with_what_happened() -> None:
    one = replace(line("while it fails", [0.5]), curve=(1200, 30, 900), marks=(1, 2))
    assert list(table([one]))[1].strip() == "each second: 1,200 | 30 | 900"
    assert Line(**json.loads(json.dumps(one.to_plain()))).over_time == one.over_time
    assert r"<br>each second: 1,200 \| 30 \| 900 |" in markdown([reported("remote", "x", one)])
    assert "curve" not in line("at once", [1.0]).to_plain()


def test_what_is_kept_comes_back() -> None:
    found = line("it", [1.0, 2.0, 3.0], " us", at_most=4)
    assert Line(**found.to_plain()) == found  # type: ignore[arg-type]


# -- the peer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("running", "phase", "ratio", "is_met"),
    [
        (128, "decode", 0.3, True),
        (128, "all", 0.31, False),
        (128, "prefill", 3.0, None),
        (16, "all", 1.5, None),
    ],
)
def test_hooks_have_a_target_where_many_run(
    running: int, phase: str, ratio: float, is_met: bool | None
) -> None:
    case = Case("qwen3", running, phase, {"kvoffload": [10 * ratio], "peer": [10.0]})
    beside, alone = case.lines()
    assert beside.median == pytest.approx(ratio)
    assert beside.is_met is is_met
    assert alone.is_met is None


def test_without_a_peer_nothing_is_compared() -> None:
    alone = Case("qwen3", 128, "decode", {"kvoffload": [10.0]})
    assert alone.ratios() == []
    assert [one.unit for one in alone.lines()] == [" us"]
    assert len([*throughput({"plain": [1.0], "kvoffload": [1.0]}, "vLLM")]) == 2
    assert len([*first_tokens({"plain": [3.0], "kvoffload": [1.0]}, "4")]) == 2


def test_only_this_connector_has_targets_on_vllm() -> None:
    rates = {"plain": [100.0], "kvoffload": [98.0], "peer": [99.5]}
    assert [one.is_met for one in throughput(rates, "vLLM")] == [False, None, None]
    first_ms = {"plain": [30.0], "kvoffload": [10.0], "peer": [9.0]}
    assert [one.is_met for one in first_tokens(first_ms, "4")] == [True, None, False, None]


# -- intervals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (20, 6), (40, 14)])
def test_ranks_are_those_of_the_tables(count: int, rank: int) -> None:
    samples = list(range(1, count + 1))
    assert median_interval(samples[::-1]) == (rank, count + 1 - rank)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_too_few_samples_say_nothing(count: int) -> None:
    assert median_interval([1.0] * count) == (-math.inf, math.inf)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    draw = random.Random(1)
    intervals = [median_interval([draw.expovariate(1.0) for _ in range(20)]) for _ in range(2000)]
    held = sum(low <= 0.6931 <= high for low, high in intervals)
    assert 0.94 < held / 2000 < 0.98  # 95.9 % by the binomial distribution
