"""`kvoffload bench`: what adapters bring is offered, and says clearly what it lacks."""

from __future__ import annotations

import importlib.util

import pytest

from kvoffload.cli.main import main


def test_the_benches_of_the_adapters_are_offered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--help"])
    assert ended.value.code == 0
    assert "hooks" in capsys.readouterr().out


def test_an_unknown_bench_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "nothing"])
    assert ended.value.code == 2
    assert "nothing" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="needs an environment without vLLM")
def test_without_its_engine_a_bench_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hooks"]) == 2
    assert "vLLM, which is not installed" in capsys.readouterr().err
