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
GPU_FAULTS = re.findall(
    r"^\| .* \| `(\S+)::(\w+)` \|$", (ROOT / "tests/cuda_emulator/README.md").read_text(), re.M
)


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", [pytest.param(row, id=row[0]) for row in ROWS])
def test_each_row_of_the_fault_table_is_complete_and_its_tests_exist(row: list[str]) -> None:
    assert len(row) == 5
    assert all(row)
    named = re.findall(r"`([^`]+)::(\w+)`", row[4])
    assert named
    assert len(named) == row[4].count("::")
    assert [name for path, name in named if name not in names_in(path)] == []


def test_the_test_of_each_gpu_fault_exists() -> None:
    assert len(GPU_FAULTS) > 30
    assert [name for path, name in GPU_FAULTS if name not in names_in(path)] == []


def test_the_metrics_and_log_events_in_the_fault_table_exist() -> None:
    from kvoffload.model.config import SETTINGS
    from kvoffload.telemetry.catalogue import BY_NAME

    sources = "\n".join(path.read_text() for path in (ROOT / "kvoffload").rglob("*.py"))
    for row in ROWS:
        for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)[`{]", row[1]):
            known = name in BY_NAME or name in SETTINGS or f'"{name}"' in sources
            # some event names are built from a verb, such as "copy", and an outcome
            assert known or f'"{name.partition("_")[2]}"' in sources, (row[0], name)
