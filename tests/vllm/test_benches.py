from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench import hooks, queue, restart, serve
from tests.bench.__main__ import main
from tests.bench.fs import Size, differing, files_in, play
from tests.vllm.engine_rig import MARKS, SLOT_BYTES

pytestmark = [*MARKS, pytest.mark.full]

SMALL = Size(8, SLOT_BYTES, {})


@pytest.mark.parametrize(
    ("name", "options", "smaller", "lines"),
    [
        ("hooks", ["--running", "2", "--models", "qwen3", "--repeats", "1"], {"WINDOW_STEPS": 4}, 8),
        ("hooks", ["--running", "2", "--prompt", "256", "--tokens", "4", "--repeats", "1"], {}, 4),
        ("queue", ["--waiting", "20", "--pairs", "1"], {"RUNNING": 2, "_STEPS": 8}, 4),
        (
            "serve",
            ["--pairs", "1", "--conversations", "6"],
            {"ON_CPU": replace(serve.ON_CPU, shape={}, prompt_tokens=128, turn_tokens=32)},
            8,
        ),
        ("restart", ["--turns", "1", "--prompts", "1"], {"TOKENS": 256}, 2),
    ],
)
def test_a_bench_measures_and_saves_its_lines(
    name: str,
    options: Sequence[str],
    smaller: Mapping[str, object],
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = {"hooks": hooks, "queue": queue, "restart": restart, "serve": serve}[name]
    for constant, value in smaller.items():
        monkeypatch.setattr(bench, constant, value)
    assert main([name, *options, "--save", str(tmp_path)]) == 0
    (saved,) = tmp_path.iterdir()
    kept = json.loads(saved.read_text())
    assert "vllm" in kept["machine"]
    assert [line["median"] > 0 for line in kept["lines"]] == [True] * lines


def test_engines_with_each_disk_serve_equal_tokens_after_restarts(tmp_path: Path) -> None:
    none, ours, fs, tier = play(tmp_path, SMALL, turns=2, count=4)
    assert len(none.answers) == 6
    for side in (ours, fs, tier):
        assert differing(none.answers, side.answers) == 0
    assert differing(none.flipped, ours.flipped) == differing(none.flipped, tier.flipped) == 0
    assert differing(none.flipped, fs.flipped) == 4, "wrong bytes must change the answers"
    blocks = [file for file in files_in(fs.folder) if file.suffix == ".bin"]
    assert len(blocks) == 2 * 4 * SMALL.blocks  # including the blocks of prompts that are not sent again
