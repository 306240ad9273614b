"""`kvoffload bench serve` on a stock vLLM: it measures three engines in turns, and offloading finds what comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffload.cli.main import main
from tests.vllm_adapter.engine_rig import MARKS

pytestmark = MARKS


def test_every_engine_is_measured_and_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kvoffload_vllm import bench_serve

    monkeypatch.setattr(bench_serve, "PROMPT_TOKENS", 128)
    monkeypatch.setattr(bench_serve, "TURN_TOKENS", 32)
    monkeypatch.setattr(bench_serve, "_SHAPE", {})
    options = ["--pairs", "1", "--conversations", "6", "--json", "--save", str(tmp_path)]
    assert main(["bench", "serve", "--peer", "tests.vllm_stock.peer", *options]) == 0
    out = "\n" + capsys.readouterr().out  # vLLM prints before
    reported = json.loads(out[out.rindex("\n{\n") :], parse_constant=pytest.fail)
    found = [line["what"] for line in reported["lines"]]
    assert len(found) == 7
    assert sum("vLLM's own connector" in what for what in found) == 3
    assert all(line["median"] > 0 for line in reported["lines"])
    (saved,) = tmp_path.iterdir()
    assert "vllm" in json.loads(saved.read_text())["machine"]
