"""Tests the comparison of tokens in `gpu-check` on a CPU. Each engine runs in a separate process, without
graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvoffload.gpu_check.parts import NotHere, Options
from kvoffload_vllm import gpu_check, gpu_tokens
from kvoffload_vllm.gpu_tokens import Mode
from tests.vllm.engine_rig import MARKS
from tests.vllm.stock import engines

if TYPE_CHECKING:
    from kvoffload.gpu_check.parts import Line

pytestmark = MARKS

EAGER: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "compilation_config": {"custom_ops": ["none"]},
}
HOST = {"host_bytes": 1 << 28}
OPTIONS = Options("cuda:0", 1 << 20, 1, 1 << 30)
ROUNDS = "while blocks are stored", "from the host"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tokens, "_ENGINE_S", 3600)  # the test has its own timeout
    own = {"OMP_NUM_THREADS": "1", "VLLM_TARGET_DEVICE": "cpu", **engines.BLOCK_LAYOUTS}
    for name, value in {**gpu_check.ENVIRONMENT, **own}.items():
        monkeypatch.setenv(name, value)


def found(*modes: Mode) -> dict[str, Line]:
    return {line.what: line for line in gpu_tokens.compared(OPTIONS, modes)}


def check_equal(what: str, lines: dict[str, Line]) -> None:
    for one in ROUNDS:
        assert lines[f"{what}, {one}: prompts of 24 that differ by more than 0.05"].median == 0
        assert lines[f"{what}, {one}: prompts with another token"].median == 0
        assert (lines[f"{what}, {one}: largest difference of a log-probability"].median or 0) < 1e-3
    assert (lines[f"{what}: blocks loaded from the host"].median or 0) > 20
    control = f"{what}, control: prompts of 24 that differ when the blocks on the host are overwritten"
    assert lines[control].median == 24


@pytest.mark.full
@pytest.mark.timeout(900)  # two engines, one after the other
def test_tokens_from_the_host_are_equal_and_the_control_differs() -> None:
    lines = found(Mode("vLLM", EAGER, {"": HOST}))
    check_equal("vLLM", lines)
    assert {line.verdict for line in lines.values()} == {"", "pass"}


def test_without_a_gpu_the_comparison_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "available_bytes", lambda _: None)
    with pytest.raises(NotHere, match="torch sees no GPU"):
        list(gpu_tokens.lines(OPTIONS))


@pytest.mark.full
@pytest.mark.timeout(900)  # four
def test_an_engine_that_fails_is_reported_in_a_line_and_the_others_run() -> None:
    modes = [
        Mode("broken", {**EAGER, "dtype": "float31"}, {"": HOST}),
        Mode(
            "vLLM",
            {**EAGER, "dtype": "bfloat16"},
            {" refused": {"host_bytes": "much"}, " blocks": {**HOST, "layout": "blocks"}},
        ),
    ]
    lines = found(*modes)
    assert [what for what in lines if what.startswith("broken")] == ["broken, without kvoffload"]
    assert lines["broken, without kvoffload"].verdict == "miss"
    assert "float31" in lines["broken, without kvoffload"].words
    assert lines["vLLM refused"].verdict == "fail"
    assert "host_bytes" in lines["vLLM refused"].words
    check_equal("vLLM blocks", lines)
