"""`kvoffload bench verify`: a table and JSON of the same measurement, on any machine."""

from __future__ import annotations

import json

import pytest

from kvoffload.cli.main import main

SMALL = ["bench", "verify", "--mib", "1", "--block-kib", "64"]


def test_the_table_has_each_direction_and_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--repeats", "6"]) == 0
    reported = capsys.readouterr().out.splitlines()[-4:]
    assert [line.partition(" over ")[0] for line in reported] == [
        f"{way} of blocks of 64 KiB with checksums, verify '{mode}'"
        for way in ("store", "load")
        for mode in ("sample", "full")
    ]
    assert all(line.count("[") == 1 for line in reported)


def test_json_has_no_interval_of_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--repeats", "2", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert "xxhash" in reported["machine"]
    assert len(reported["lines"]) == 4
    for line in reported["lines"]:
        assert line["median"] > 0
        assert (line["low"], line["high"]) == (None, None)
