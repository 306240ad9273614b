"""How the cost of offloading is judged, and that it can be measured at all."""

from __future__ import annotations

import json
import random

import pytest

from kvoffload.cli.demo.intervals import median_interval
from kvoffload.cli.demo.no_reuse import NoReuse, Pair
from kvoffload.cli.demo.table import render_no_reuse
from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (20, 6), (40, 14)])
def test_ranks_are_those_of_the_tables(count: int, rank: int) -> None:
    samples = list(range(1, count + 1))
    assert median_interval(samples[::-1]) == (rank, count + 1 - rank)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_too_few_samples_say_nothing(count: int) -> None:
    assert median_interval([1.0] * count) == (float("-inf"), float("inf"))


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    draw = random.Random(1)
    intervals = [median_interval([draw.expovariate(1.0) for _ in range(20)]) for _ in range(2000)]
    held = sum(low <= 0.6931 <= high for low, high in intervals)
    assert 0.94 < held / 2000 < 0.98  # 95.9 % by the binomial distribution


@pytest.mark.parametrize(
    ("ratios", "passed"),
    [
        ([1.0] * 20, True),
        ([0.97] * 20, False),
        ([1.03] * 20, True),  # faster is no cost
        ([0.97] * 15 + [0.985] * 5, False),
        ([0.97] * 10 + [0.99] * 10, True),  # the interval reaches in
        ([0.5] * 5, True),  # too few to say
    ],
)
def test_it_fails_only_if_the_whole_interval_is_too_slow(ratios: list[float], passed: bool) -> None:
    assert NoReuse.of([Pair(100.0, 100.0 * ratio) for ratio in ratios]).passed is passed


def test_what_people_read() -> None:
    result = NoReuse.of([Pair(2000.0, 1990.0)] * 20)
    assert render_no_reuse(result, []).splitlines() == [
        "20 pairs of prompts that never repeat, without and with offloading",
        "prompt and new tokens per second: 2,000 without, 1,990 with",
        "with over without, median: 0.9950; 95 % interval 0.9950 to 0.9950",
        "passed: it fails only if the whole interval is below 0.98",
    ]
    assert render_no_reuse(result, ["one"]).endswith("law BROKEN: one")


@pytest.mark.slow
def test_it_is_measured_from_the_command(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    # Two pairs say nothing of the speed, which is what a quick test wants.
    assert main([*small, "--no-reuse", "2", "--json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], len(found["pairs"]), found["broken_laws"]) == ("no_reuse", 2, [])
    assert found["low"] is None  # no interval
    assert all(pair["plain"] > 0 and pair["offloaded"] > 0 for pair in found["pairs"])


@pytest.mark.slow
def test_too_slow_fails(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure(*_: object) -> NoReuse:
        return NoReuse.of([Pair(2000.0, 1900.0)] * 20)

    monkeypatch.setattr("kvoffload.cli.demo.session.measure", measure)
    assert main([*small, "--no-reuse"]) == Exit.FAILED
    out, err = capsys.readouterr()
    assert "FAILED: it fails only if" in out
    assert "FAILED: offloading costs too much" in err
