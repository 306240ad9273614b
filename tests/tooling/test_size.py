from pathlib import Path

import pytest

from tests.tooling.scripts import load_script

size = load_script("size")


def function(lines: int, head: str = "def f():") -> str:
    return "\n".join([head, *["    pass"] * (lines - 1)]) + "\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n" * 400, None),
        ("x = 1\n" * 401, ": 401 lines, more than 400"),
        (function(40), None),
        (function(41), ":1: f has 41 lines, more than 40"),
        (function(41, "async def g():"), ":1: g has 41 lines, more than 40"),
        ("@decorate\n" + function(40), ":2: f has 41 lines, more than 40"),
    ],
)
def test_what_is_large_is_a_warning_and_no_failure(
    source: str, message: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "module.py").write_text(source)
    assert size.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed == (f"warning: {tmp_path / 'module.py'}{message}\n" if message else "")


def test_a_long_method_inside_a_class_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method = "".join(f"    {line}\n" for line in function(41).splitlines())
    (tmp_path / "module.py").write_text(f"class C:\n{method}")
    assert size.main([str(tmp_path)]) == 0
    assert "module.py:2: f has 41 lines" in capsys.readouterr().out


def test_finding_no_files_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert size.main([str(tmp_path)]) == 1
    assert "nothing was checked" in capsys.readouterr().out
