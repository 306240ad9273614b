"""Each row of the fault table names at least one test, and all these tests exist."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.tooling.scripts import ROOT

PAGE = (ROOT / "tests" / "faults" / "README.md").read_text()
ROWS = [
    line.strip("| ").split(" | ")
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| what breaks")
]


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", [pytest.param(row, id=row[0]) for row in ROWS])
def test_a_row_is_whole_and_its_tests_exist(row: list[str]) -> None:
    assert len(row) == 5
    assert all(row)
    named = re.findall(r"`([^`]+)::(\w+)`", row[4])
    assert named
    assert len(named) == row[4].count("::")
    assert [name for path, name in named if name not in names_in(path)] == []


def test_every_fault_that_is_promised_has_a_row() -> None:
    reported = " ".join(row[0] for row in ROWS).lower()
    for word in (
        *("refused at start", "raises", "hangs", "after all", "one rank", "corrupt", "never reads", "blocks"),
        *(
            "thread dies",
            "journal's disk",
            "sigterm",
            "sigkill",
            "fork",
            "imports",
            "monotonic clock",
            "wall clock",
        ),
        *("disk is full", "too little room", "eio", "on it hangs", "torn", "bit flips", "index loses bytes"),
        *(
            "killed, or stops",
            "comes back empty",
            "is cut",
            "another writer",
            "store is full",
            "lease",
            "credentials",
            "certificate",
        ),
        *("missing", "swapped", "another model", "parallel shape", "power fails", "32 writers", "is removed"),
    ):
        assert word in reported, word


def test_every_test_of_a_fault_is_in_the_table() -> None:
    named = set(re.findall(r"::(\w+)`", PAGE))
    remote = ROOT / "tests" / "remote" / "test_faults.py"
    for file in [*sorted((ROOT / "tests" / "faults").glob("test_*.py")), remote]:
        if file.name == "test_resets.py":  # described below the table
            continue
        tests = {name for name in names_in(str(file.relative_to(ROOT))) if name.startswith("test_")}
        assert tests <= named, file.name


def test_what_the_operator_sees_is_said_somewhere() -> None:
    """Log events must be literals in the sources, and metrics must be in the catalogue."""
    from kvoffload.model.config import OffloadConfig
    from kvoffload.telemetry.catalogue import BY_NAME

    sources = "\n".join(path.read_text() for path in (ROOT / "kvoffload").rglob("*.py"))
    for row in ROWS:
        for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)[`{]", row[1]):
            known = name in BY_NAME or name in OffloadConfig.__slots__ or f'"{name}"' in sources
            # The lanes build these events from a verb, such as "copy", and an outcome.
            assert known or f'"{name.partition("_")[2]}"' in sources, (row[0], name)
