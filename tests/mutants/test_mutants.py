"""The list is up to date and complete, and the hunt can both kill and miss."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutants.hunt import ROOT, is_killed
from tests.mutants.mutant import Mutant
from tests.mutants.of_rules import MUTANTS

_TESTS = ("tests/core/test_states.py",)


def test_every_rule_has_a_mutant() -> None:
    assert {mutant.rule for mutant in MUTANTS} == set(range(1, 17))
    assert len(set(MUTANTS)) == len(MUTANTS)


def test_every_mutants_line_is_there_once_and_changes(tmp_path: Path) -> None:
    for mutant in MUTANTS:
        copy = tmp_path / mutant.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / mutant.path, copy)
        mutant.apply(tmp_path)
        broken = copy.read_text()
        assert broken != (ROOT / mutant.path).read_text(), mutant
        compile(broken, mutant.path, "exec")
        for tests in mutant.tests:
            assert (ROOT / tests).exists(), mutant


def test_a_line_that_is_gone_is_an_error(tmp_path: Path) -> None:
    mutant = Mutant(1, "a.py", "was here")
    (tmp_path / "a.py").write_text("is not here")
    with pytest.raises(ValueError, match="0 times"):
        mutant.apply(tmp_path)


def test_a_mutant_that_a_test_notices_is_killed() -> None:
    table = "(JobState.PLANNED, JobEvent.SUBMIT): JobState.SUBMITTED"
    wrong = "(JobState.PLANNED, JobEvent.SUBMIT): JobState.DONE"
    assert is_killed(Mutant(4, "kvoffload/core/states.py", table, wrong, _TESTS))


def test_a_change_that_changes_nothing_survives() -> None:
    assert not is_killed(
        Mutant(4, "kvoffload/core/states.py", "def next_job_state", "\n\ndef next_job_state", _TESTS)
    )
