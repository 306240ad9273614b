"""`kvoffload bench verify`: a table and JSON of the same measurement, on any machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffload.bench import verify
from kvoffload.cli.main import main

SMALL = ["bench", "verify", "--mib", "1", "--block-kib", "64"]


def test_the_table_has_each_direction_and_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--repeats", "6"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-3].split() == ["block", "direction", "off", "sample", "full"]
    assert [line.split()[:3] for line in told[-2:]] == [["64", "KiB", "store"], ["64", "KiB", "load"]]
    assert all(line.count("[") == 2 for line in told[-2:])


def test_json_has_every_repeat_and_no_interval_of_too_few(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "verify.svg"
    assert main([*SMALL, "--repeats", "2", "--json", "--plot", str(plot)]) == 0
    assert "64 KiB, store" in plot.read_text()
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert "xxhash" in told["machine"]
    for case in told["cases"]:
        assert {mode: len(found) for mode, found in case["seconds"].items()} == dict.fromkeys(verify.MODES, 2)
        assert case["ratios"]["off"] == {"median": 1.0, "interval": None}
        assert all(case["ratios"][mode]["median"] > 0 for mode in verify.MODES)
