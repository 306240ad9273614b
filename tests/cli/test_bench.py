"""`kvoffload bench`: what adapters bring is offered, and says clearly what it lacks."""

from __future__ import annotations

import importlib.util
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from kvoffload.cli import bench
from kvoffload.cli.main import main


def test_the_benches_of_the_adapters_are_offered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--help"])
    assert ended.value.code == 0
    assert "--help lists" not in capsys.readouterr().out
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out
    assert "  hooks " in listed
    assert "needs vllm" in listed or importlib.util.find_spec("vllm") is not None


def test_an_unknown_bench_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "nothing"])
    assert ended.value.code == 2
    assert "nothing" in capsys.readouterr().err


def test_a_benchs_options_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "hooks", "--help"])
    assert ended.value.code == 0
    assert "--running" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["bench", "hooks", "--runing", "3"])
    assert ended.value.code == 2
    reported = capsys.readouterr().err
    assert "did you mean --running?" in reported
    assert "kvoffload bench hooks --help" in reported


def test_one_that_cannot_be_imported_harms_no_other_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = EntryPoint("lost", "a_module_that_is_not_there", bench.ENTRY_POINT_GROUP)
    monkeypatch.setattr(bench, "entry_points", lambda group: EntryPoints([lost]).select(group=group))
    for command in ("bench", "demo"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
    assert main(["bench", "lost"]) == 2
    assert "'lost' cannot be imported" in capsys.readouterr().err


def test_without_its_engine_a_bench_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "hooks"]) == 2
    assert "vLLM, which is not installed" in capsys.readouterr().err
