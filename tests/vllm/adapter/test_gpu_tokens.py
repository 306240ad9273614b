"""How `gpu_tokens` judges answers. Prepared answers take the place of vLLM."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvoffload.gpu_check import command
from kvoffload.gpu_check.parts import NotHere, Options
from kvoffload_vllm import gpu_check, gpu_tokens
from tests.tooling.scripts import ROOT

if TYPE_CHECKING:
    from kvoffload.gpu_check.parts import Line
    from kvoffload_vllm.gpu_tokens import Answer

    LinesOf = Callable[["GivenEngine"], list[Line]]

OPTIONS = Options("cuda:0", 1 << 20, 1, 1 << 30)
RIGHT: Answer = [(0, [-0.5, -2.0]), (1, [-3.0, -0.1])]
CONTROL = "prompts of 1 that differ when the blocks on the host are overwritten"
WRONG: Answer = [(0, [-0.9, -2.0]), (1, [-3.0, -0.1])]


@pytest.mark.parametrize(
    ("answer", "difference"),
    [
        (RIGHT, 0),
        (WRONG, 0.4),
        # positions after the first different token do not count
        ([(1, [-2.5, -0.2]), (1, [-9.0, -9.0])], 2.0),
        ([(1, [-0.5, -0.3]), RIGHT[1]], 1.7),  # only the other token's probability has grown
        ([(0, [-0.5, -7.0]), RIGHT[1]], 0),  # tokens that neither engine chose do not count
        ([RIGHT[0], (1, [-3.0, float("nan")])], 1e6),
    ],
)
def test_the_difference_of_two_answers(answer: Answer, difference: float) -> None:
    assert gpu_tokens._difference(answer, RIGHT) == pytest.approx(difference)


@dataclass
class GivenEngine:
    """An engine with prepared answers for three runs: blocks are stored, loaded from the host, or overwritten there."""

    stored: Answer = field(default_factory=lambda: RIGHT)
    from_host: Answer = field(default_factory=lambda: RIGHT)
    overwritten: Answer = field(default_factory=lambda: WRONG)
    loaded: int = 7
    noise: float = 0.0
    calls: list[str] = field(default_factory=list)

    def answers(self) -> list[Answer]:
        self.calls.append("ask")
        return [[self.stored, self.from_host, self.overwritten][self.calls.count("ask") - 1]]

    def fill_host_memory(self, timeout_s: float) -> None:
        self.calls.append("fill")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def lines_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LinesOf:
    def found(engine: GivenEngine) -> list[Line]:
        parts = {
            "_engine": lambda *_: engine,
            "_answers": lambda given: given.answers(),
            "_loaded": lambda given: given.loaded if given.calls.count("ask") == 2 else 0,
            "_reset": lambda _: engine.calls.append("_reset"),
            "_overwrite": lambda _: engine.calls.append("_overwrite"),
            "PROMPTS": 1,
        }
        for name, part in parts.items():
            monkeypatch.setattr(gpu_tokens, name, part)
        (tmp_path / "expected").write_text(json.dumps({"answers": [RIGHT], "noise": engine.noise}))
        return list(gpu_tokens.offloading(OPTIONS, tmp_path, tmp_path / "expected", {}, "row", {}))

    return found


def test_equal_answers_pass(lines_of: LinesOf) -> None:
    engine = GivenEngine()
    lines = lines_of(engine)
    assert [line.verdict for line in lines] == ["pass", "", "", "pass", "pass", "", "", "pass"]
    assert lines[0].what == "row, while blocks are stored: prompts of 1 that differ by more than 0.05"
    assert engine.calls == ["fill", "ask", "_reset", "ask", "_reset", "_overwrite", "ask", "close"]


@pytest.mark.parametrize("engine", [GivenEngine(stored=WRONG), GivenEngine(from_host=WRONG)])
def test_one_wrong_answer_fails(engine: GivenEngine, lines_of: LinesOf) -> None:
    (failed,) = [line for line in lines_of(engine) if line.verdict == "fail"]
    assert failed.median == 1


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        (GivenEngine(loaded=0), "row: blocks loaded from the host"),
        (GivenEngine(overwritten=RIGHT), f"row, control: {CONTROL}"),
    ],
)
def test_a_comparison_without_loads_or_an_effective_control_is_a_miss(
    engine: GivenEngine, what: str, lines_of: LinesOf
) -> None:
    lines = lines_of(engine)
    assert (lines[-1].what, lines[-1].verdict) == (what, "miss")
    assert [line.what for line in lines if line.verdict != "pass" and line.target] == [what]


def test_a_different_but_equally_likely_token_is_counted_and_passes() -> None:
    tied: list[Answer] = [[(0, [-0.69, -0.69])]]
    swapped: list[Answer] = [[(1, [-0.69, -0.69])]]
    wrong, largest, changed = gpu_tokens._compared("row", swapped, tied, 0.05)
    assert (wrong.verdict, largest.median, changed.median) == ("pass", 0, 1)


def test_answers_may_vary_as_much_as_without_kvoffload(lines_of: LinesOf) -> None:
    lines = lines_of(GivenEngine(from_host=WRONG, noise=0.15))
    assert "fail" not in {line.verdict for line in lines}
    assert lines[4].what.endswith("differ by more than 0.45")


def test_answers_that_vary_too_much_without_kvoffload_are_a_miss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rounds = iter([[RIGHT], [[(0, [-0.8, -2.0]), RIGHT[1]]]])
    monkeypatch.setattr(gpu_tokens, "_engine", lambda *_: GivenEngine())
    monkeypatch.setattr(gpu_tokens, "_answers", lambda *_, **__: next(rounds))
    (line,) = gpu_tokens.plain(OPTIONS, tmp_path, tmp_path / "expected", {}, "row")
    noise = json.loads((tmp_path / "expected").read_text())["noise"]
    assert line.verdict == "miss"
    assert [line.median, noise] == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize(
    ("vllm", "reason"), [(None, "vLLM is not installed"), ("vllm", "the machine has 8.0 GiB left")]
)
def test_a_part_that_cannot_run_gives_the_reason(
    vllm: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: vllm)
    monkeypatch.setattr(gpu_check, "available_bytes", lambda _: 8 << 30)
    with pytest.raises(NotHere, match=reason):
        list(gpu_tokens.lines(OPTIONS))


def test_the_package_registers_each_part_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = project["entry-points"][command.ENGINES]
    points = [EntryPoint(name, value, command.ENGINES) for name, value in named.items()]
    monkeypatch.setattr(command, "entry_points", lambda group: EntryPoints(points).select(group=group))
    found = list(command.parts().values())[-2:]
    assert [(part.what, part.where) for part in found] == [
        ("vllm", "kvoffload_vllm.gpu_check:lines"),
        ("vllm-tokens", "kvoffload_vllm.gpu_tokens:lines"),
    ]
    assert [callable(point.load().lines) for point in points] == [True, True]
