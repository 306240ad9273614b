from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.rules import RULES, undone

ROOT = Path(__file__).parents[2]


MODULE = """
def least(numbers):
    return min(numbers)

def unused():
    return 1

def is_positive(number):
    return number > 0
"""

TESTS = """
from example.module import is_positive, least

def test_least():
    assert least([2, 1]) == 1

def test_one_is_positive():
    assert is_positive(1)
"""


@pytest.mark.parametrize("name", RULES)
def test_every_attribute_that_a_disabled_rule_replaces_exists(name: str) -> None:
    with undone(name):
        assert int(name[1:].split("_")[0]) in range(1, 22)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_reports_each_mutants_result_and_does_not_repeat_it(tmp_path: Path) -> None:
    example(tmp_path)
    options = ["--sources", "example", "--tests", "checks", "--keep", "kept", "--table", "table"]
    printed = run(tmp_path, "-m", "tests.mutants", *options, "--all", "--processes", "2")
    rows = {
        row[1]: row[2:4]
        for line in (tmp_path / "table").read_text().splitlines()
        if len(row := line.split("\t")) == 5
    }
    assert rows == {
        "least: call: min(numbers) -> max(numbers)": ["killed", "0"],
        "least: return value: return min(numbers) -> return None": ["killed", "0"],
        "unused: constant: 1 -> 2": ["not run", ""],
        "unused: return value: return 1 -> return None": ["not run", ""],
        "is_positive: comparison swapped: number > 0 -> number >= 0": ["survived", ""],
        "is_positive: constant: 0 -> 1": ["killed", "1"],
        "is_positive: return value: return number > 0 -> return None": ["killed", "1"],
    }
    assert "survived  example/module.py:9  is_positive: comparison swapped" in printed
    assert "2 tests notice a mutant that no other test notices" in printed
    kept = (tmp_path / "kept/all-tests.jsonl").read_bytes()
    assert "survived  example" not in run(tmp_path, "-m", "tests.mutants", *options, "--all")
    assert (tmp_path / "kept/all-tests.jsonl").read_bytes() == kept
    # Delete this machine's results, so that only the table is left.
    (tmp_path / "kept/all-tests.jsonl").unlink()
    assert "survived  example" not in run(tmp_path, "-m", "tests.mutants", *options, "--all")
    assert (tmp_path / "example/module.py").read_text() == MODULE


def example(folder: Path) -> None:
    for name, source in {"example/module.py": MODULE, "checks/test_module.py": TESTS}.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text(source)


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
