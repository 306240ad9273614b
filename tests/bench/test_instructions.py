"""Tests of the count of instructions, without callgrind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.beside import HERE
from tests.bench.instructions import KINDS, Count, instructions_by_kind, lines

CALLGRIND = """\
events: Ir
fl=hook_kinds.c
fn=hook_seen
0 10
cfn=PyObject_Vectorcall
calls=2 352
0 700

fn=PyObject_Vectorcall
352 5
cfn=hook_seen
calls=1 0
0 9000
fn=hook_has_work
0 3
"""

UNCOUNTED = """\
def __getattr__(kind):
    return lambda *hook: hook[0](*hook[1:]) if hook else None
"""
"""A module `hook_kinds` that only calls."""


def test_instructions_of_a_kind_include_those_of_all_that_the_hooks_call() -> None:
    assert instructions_by_kind(CALLGRIND) == {"seen": 710, "has_work": 3}


def test_every_kind_of_hook_has_a_function_that_callgrind_knows() -> None:
    source = (HERE / "hook_kinds.c").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"each({kind})" not in source] == []


def test_a_whole_wave_is_compared_without_the_metrics_messages() -> None:
    mine = Count({"seen": 2, "stats": 1}, {"seen": 2_000, "stats": 9_000})
    other = Count({"seen": 2, "stats": 1}, {"seen": 4_000, "stats": 1_000})
    found = {one.what: one.median for one in lines("1 group", mine, other)}
    assert found["a whole wave, 1 group, over the other build"] == 0.5
    assert found["metrics are taken, 1 group, over the other build"] == 9
    assert found["a request is seen, 1 group"] == 1


@pytest.mark.parametrize(("where", "loads"), [("no hits", 0), ("hits", 12)])
def test_a_wave_drives_the_hooks_as_an_engine_does(where: str, loads: int, tmp_path: Path) -> None:
    (tmp_path / "hook_kinds.py").write_text(UNCOUNTED)
    path = [str(tmp_path), *sys.path, str(HERE.parents[1] / "plugins")]
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / "wave.py"), "2", "4", "40", where],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        check=True,
        capture_output=True,
    )
    calls = json.loads(done.stdout)
    assert calls["seen"] == calls["lookup"] == calls["ended"] == 12
    assert calls.get("load_allocated", 0) == loads
    assert calls["report"] >= 3  # each wave stores blocks
    assert set(calls) <= set(KINDS)
