"""`kvoffload bench engine`: a table and JSON of the same measurement, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffload.bench import engine, engine_steps
from kvoffload.bench.copy_lanes import Lanes
from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main

SMALL = ["bench", "engine", "--model", "tiny", "--pairs", "1", "--repeats", "2", "--steps", "5"]


@pytest.mark.slow
def test_every_part_is_measured_told_and_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot, kept = tmp_path / "engine.svg", tmp_path / "kept"
    options = ["--conversations", "2", "--json", "--plot", str(plot), "--save", str(kept)]
    assert main([*SMALL, *options]) == Exit.OK
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["no_reuse"]["pairs"] == 1
    assert told["no_reuse"]["with_over_without"]["median"] > 0
    assert told["returning_turns"]["turns"] == 4
    assert told["returning_turns"]["times_sooner"]["median"] > 0
    assert told["step_time"]["steps"] == 10
    assert told["step_time"]["copies_pending"]["median"] > 0
    (saved,) = kept.iterdir()
    assert json.loads(saved.read_text())["step_time"] == told["step_time"]
    assert "Offloading on the reference engine" in plot.read_text()


@pytest.mark.slow
def test_nothing_wakes_while_nothing_is_pending_and_stores_do_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    pending: list[int] = []

    def counting(made: Lanes) -> object:
        hook = keeping(made)

        def note() -> None:
            hook()
            pending.append(made.open_jobs)

        return note

    keeping = engine_steps._keeping_pending
    monkeypatch.setattr(engine_steps, "_keeping_pending", counting)
    found = engine_steps.measure_steps(2**20, 2, steps=5)
    assert found.wake_ups == 0
    assert len(pending) == 3 * 5  # a warm-up and two repeats
    assert min(pending) > 0
    assert {name: len(seconds) for name, seconds in found.seconds.items()} == dict.fromkeys(found.seconds, 2)


def test_the_table_says_what_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    steps = engine_steps.Steps({"gone": [1.0] * 6, "idle": [1.0] * 6, "pending": [1.02] * 6}, 0, 3, 600)
    assert steps.to_plain()["wake_ups_with_nothing_pending"] == 0
    assert steps.ratio("pending").text("{:.3f}") == "1.020 [1.020, 1.020]"
    returns = engine.Returns(((3.0, 1.0), (2.0, 1.0)), 4.0)
    assert returns.to_plain()["times_sooner"] == {"median": 2.5, "low": None, "high": None}


@pytest.mark.parametrize("options", [["--pairs", "0"], ["--model", "large"], ["--steps", "x"]])
def test_bad_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "engine", *options])
    assert ended.value.code == Exit.USAGE
    assert options[0] in capsys.readouterr().err
