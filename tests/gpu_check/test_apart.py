from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvoffload.gpu_check.parts import CheckPart, Line, Options, lines_of

OPTIONS = Options("cuda:0", 1 << 20, 1, 1 << 30)
HERE = "tests.gpu_check.parts"


def found(name: str, tmp_path: Path, *arguments: int) -> list[Line]:
    part = CheckPart("the part", f"{HERE}:{name}", 60, arguments, is_check=True)
    return list(lines_of(part, OPTIONS, tmp_path / "log"))


@pytest.mark.parametrize(
    ("name", "last", "verdict"),
    [
        ("crashes", "ended by SIGSEGV: a last word", "fail"),
        ("leaves", "ended with 7", "fail"),
        ("raises", "ValueError: no such thing: | none", "fail"),
    ],
)
def test_a_part_that_ends_early_keeps_its_lines_and_gets_one_with_the_reason(
    name: str, last: str, verdict: str, tmp_path: Path
) -> None:
    before, after = found(name, tmp_path)
    assert before.words == "found"
    assert (after.what, after.words, after.verdict) == ("the part", last, verdict)
    assert name != "raises" or "raise ValueError" in (tmp_path / "log").read_text()


def test_a_part_that_cannot_begin_is_reported_in_one_line(tmp_path: Path) -> None:
    (impossible,), (missing,) = found("is_not_here", tmp_path), found("missing", tmp_path)
    assert (impossible.words, impossible.verdict) == ("not asked: there is nothing", "")
    assert missing.verdict == "fail"


def test_a_hanging_part_is_killed_and_its_results_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("kvoffload.gpu_check.parts.time", SimpleNamespace(monotonic=lambda: now[0]))
    lines = lines_of(CheckPart("the part", f"{HERE}:hangs", 60, (2,)), OPTIONS, tmp_path / "log")
    first, second = next(lines), next(lines)
    assert (first.what, second.what) == ("line 0", "line 1")
    now[0] = 61.0
    (last,) = lines
    assert (last.words, last.verdict) == ("has not ended after 60 s, and was killed", "miss")
    assert not is_alive(int(first.words))


def test_after_a_kill_at_any_moment_the_file_has_all_results(tmp_path: Path) -> None:
    code = (
        "import sys; from kvoffload.cli.main import main; from kvoffload.gpu_check import command\n"
        "from kvoffload.gpu_check.parts import CheckPart\n"
        f"command.parts = lambda: {{'device': CheckPart('GPU', '{HERE}:device', 60), 'two': CheckPart('two', '{HERE}:hangs', 60, (3,))}}\n"
        "sys.exit(main(['gpu-check']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        printed = [process.stdout.readline() for _ in range(3)]
        process.kill()
        process.wait()
    kept = json.loads((tmp_path / "gpu-check.json").read_text())["lines"]
    assert [line["what"] for line in kept][:3] == ["GPU", "line 0", "line 1"]
    assert [line.split(":")[0].strip() for line in printed] == ["GPU", "line 0", "line 1"]
    until = time.monotonic() + 30
    while is_alive(int(kept[1]["words"])) and time.monotonic() < until:
        pass
    assert not is_alive(int(kept[1]["words"]))


def is_alive(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
