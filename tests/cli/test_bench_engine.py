"""`kvoffload bench engine`: a table and JSON of the same measurement, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffload.bench import engine_steps
from kvoffload.bench.copy_lanes import Lanes
from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main

SMALL = ["bench", "engine", "--model", "tiny", "--pairs", "1", "--repeats", "2"]


@pytest.mark.slow
def test_every_part_is_measured_printed_and_saved(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_steps, "STEPS", 5)
    assert main([*SMALL, "--conversations", "2", "--json", "--save", str(tmp_path)]) == Exit.OK
    reported = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    found = {line["what"]: line for line in reported["lines"]}
    for what in (
        "never repeat",
        "nothing pending",
        "copies pending",
        "sooner than recomputed",
        "wake-ups in 10 steps",
    ):
        assert any(what in name for name in found), what
    assert all(line["median"] > 0 for name, line in found.items() if "wake-ups" not in name)
    (saved,) = tmp_path.iterdir()
    assert json.loads(saved.read_text())["lines"] == reported["lines"]


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
    monkeypatch.setattr(engine_steps, "STEPS", 5)
    idle, wake_ups, busy = engine_steps.measure_steps(2**20, 2)
    assert (wake_ups.median, wake_ups.is_met) == (0, True)
    assert len(pending) == 3 * 5  # a warm-up and two repeats
    assert min(pending) > 0
    assert idle.is_met  # two repeats have no interval that could tell
    assert busy.median is not None
    assert busy.median > 0


@pytest.mark.parametrize("options", [["--pairs", "0"], ["--model", "large"], ["--repeats", "x"]])
def test_bad_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "engine", *options])
    assert ended.value.code == Exit.USAGE
    assert options[0] in capsys.readouterr().err
