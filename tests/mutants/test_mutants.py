from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.generate import mutants, sample
from tests.mutants.rules import RULES, undone
from tests.mutants.table import Result, read, summary, written

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "kvoffload/core/stores.py", ROOT / "kvoffload/transfer/disk.py"]


EXAMPLE = """
class Shelf:
    def lend(self, number: int) -> str:
        if number < 0 or not self.books:
            raise ValueError("which book?")
        return sorted(self.books)[number - 1]
"""

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

TRIALS = """
import os, sys, threading
from tests.mutants.hunt import Trial, hunt, prepare

CHANGES = {
    "hangs": threading.Event().wait,
    "aborts": os.abort,
    "cannot be imported": lambda: sys.modules.update({"example.module": None}),
    "as before": lambda: None,
}

prepare()
tests = ["checks/test_module.py::test_least"]
trials = [Trial(name, change, tests, 5 if name == "hangs" else 60) for name, change in CHANGES.items()]
for trial, verdict in hunt(trials, 2):
    print(f"{trial.name}: {verdict.outcome}")
"""


def test_every_mutant_compiles_and_leaves_the_tree_as_it_was() -> None:
    for mutant in [*mutants("example.py", EXAMPLE), *sample(SOURCES, 1, 100)]:
        before = ast.dump(mutant.tree)
        mutant.compiled()
        assert ast.dump(mutant.tree) == before


def test_with_the_same_seed_a_smaller_sample_is_the_start_of_a_larger_one() -> None:
    few, many, others = sample(SOURCES, 1, 20), sample(SOURCES, 1, 50), sample(SOURCES, 2, 20)
    keys = [mutant.key for mutant in many]
    assert [mutant.key for mutant in few] == keys[:20]
    assert len(set(keys)) == 50
    assert {mutant.key for mutant in others} != set(keys[:20])


def test_a_mutant_keeps_its_name_and_digest_while_its_statement_stays() -> None:
    def names(source: str) -> list[tuple[str, str]]:
        return [(mutant.key, mutant.digest) for mutant in mutants("example.py", source)]

    assert names(f"import os\n\n{EXAMPLE}") == names(EXAMPLE)
    changed = EXAMPLE.replace("number < 0 or", "number < 0  or len(self.books) == 3 or")
    gone = {*names(EXAMPLE)} - {*names(changed)}
    assert len(gone) == 6  # all mutants of the changed statement, including those whose own text is unchanged
    assert len({digest for _, digest in gone}) == 1


@pytest.mark.parametrize("name", RULES)
def test_every_attribute_that_a_disabled_rule_replaces_exists(name: str) -> None:
    with undone(name):
        assert int(name[1:].split("_")[0]) in range(1, 22)


def test_a_table_numbers_the_tests_and_joins_consecutive_numbers() -> None:
    results = [
        Result("a.py f: constant: 1 -> 2", "d1", 3, "killed", ["t0"]),
        Result("a.py f: call: x -> y", "d2", 7, "killed", ["t1", "t2", "t3", "t5"]),
        Result("a.py g: constant: 1 -> 2", "d3", 9, "survived"),
    ]
    assert list(read(written(results, "today"))) == results
    lines = written(results, "today").splitlines()
    assert lines[4:6] == [
        "a.py:7\tf: call: x -> y\tkilled\t1-4\td2",
        "a.py:9\tg: constant: 1 -> 2\tsurvived\t\td3",
    ]
    assert list(summary(results, ["t0", "t1", "t2", "t9"], has_all=True))[-3:] == [
        "1 tests notice a mutant that no other test notices",
        "4 tests notice only what other tests notice too",
        "1 tests notice nothing",
    ]


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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hangs_crashes_and_errors_at_import_are_distinguished(tmp_path: Path) -> None:
    example(tmp_path)
    (tmp_path / "trials.py").write_text(TRIALS)
    outcomes = ["aborts: crash", "as before: survived", "cannot be imported: import", "hangs: timeout"]
    assert sorted(run(tmp_path, "trials.py").splitlines()) == outcomes


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
