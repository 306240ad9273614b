"""`kvoffload bench queue` on a stock vLLM: both connectors plan for the requests that run, while others wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffload.cli.main import main
from tests.vllm_adapter.engine_rig import MARKS

pytestmark = MARKS


def test_both_connectors_are_measured_and_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kvoffload_vllm import bench_queue

    monkeypatch.setattr(bench_queue, "RUNNING", 2)
    monkeypatch.setattr(bench_queue, "_STEPS", 8)
    options = ["--waiting", "20", "--pairs", "1", "--json", "--save", str(tmp_path)]
    assert main(["bench", "queue", *options]) == 0
    out = "\n" + capsys.readouterr().out  # vLLM prints before
    reported = json.loads(out[out.rindex("\n{\n") :], parse_constant=pytest.fail)
    assert ["OffloadingConnector" in line["what"] for line in reported["lines"]] == [False, False, True, True]
    assert all("20 requests that wait" in line["what"] and line["median"] > 0 for line in reported["lines"])
    (saved,) = tmp_path.iterdir()
    assert "vllm" in json.loads(saved.read_text())["machine"]
