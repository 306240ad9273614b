"""The list is up to date and complete, and the hunt can both kill and miss."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.hunt import ROOT, killer, snapshot
from tests.mutants.mutant import Mutant
from tests.mutants.of_rules import MUTANTS

_STATES = "kvoffload/core/machine.py"
_TESTS = ("tests/core/test_states.py",)


def test_every_rule_has_a_mutant() -> None:
    assert {mutant.rule for mutant in MUTANTS} == set(range(1, 19))
    assert len(set(MUTANTS)) == len(MUTANTS)


def test_every_mutants_line_is_there_once_and_changes() -> None:
    for mutant in MUTANTS:
        broken = mutant.broken(ROOT)
        assert broken != (ROOT / mutant.path).read_text(), mutant
        compile(broken, mutant.path, "exec")
        for tests in mutant.tests:
            assert (ROOT / tests).exists(), mutant


def test_a_line_that_is_gone_is_an_error(tmp_path: Path) -> None:
    mutant = Mutant(1, "a.py", "was here")
    (tmp_path / "a.py").write_text("is not here")
    with pytest.raises(ValueError, match="0 times"):
        mutant.broken(tmp_path)


@pytest.mark.slow
def test_a_mutant_that_a_test_notices_is_killed() -> None:
    table = "(JobState.PLANNED, JobEvent.SUBMIT): JobState.SUBMITTED"
    wrong = "(JobState.PLANNED, JobEvent.SUBMIT): JobState.DONE"
    mutant = Mutant(4, _STATES, table, wrong, _TESTS)
    assert (killer(mutant) or "").startswith("tests/core/test_states.py::test_")


@pytest.mark.full
@pytest.mark.slow
def test_a_mutant_that_cannot_be_imported_is_killed() -> None:
    assert killer(Mutant(4, _STATES, "class JobState(IntEnum):", "class OfJob(IntEnum):", _TESTS))


@pytest.mark.full
@pytest.mark.slow
def test_a_mutant_that_crashes_the_process_is_killed() -> None:
    crash = "import os; os.abort()\n\nclass JobState(IntEnum):"
    assert killer(Mutant(4, _STATES, "class JobState(IntEnum):", crash, _TESTS))


@pytest.mark.full
@pytest.mark.slow
def test_a_change_that_changes_nothing_survives() -> None:
    assert (
        killer(Mutant(4, _STATES, "class JobState(IntEnum):", "\n\nclass JobState(IntEnum):", _TESTS)) is None
    )


@pytest.mark.full
@pytest.mark.slow
def test_a_hunt_breaks_the_sources_as_they_were_when_it_began() -> None:
    mutant = Mutant(4, _STATES, "class JobState(IntEnum):", "\n\nclass JobState(IntEnum):", _TESTS)
    with snapshot() as sources:
        before = (sources / _STATES).read_text()
        assert before == (ROOT / _STATES).read_text()
        (sources / "tests/core/test_states.py").write_text("def test_r4_that_fails():\n    assert False\n")
        assert killer(mutant, sources) == "tests/core/test_states.py::test_r4_that_fails"
        assert (sources / _STATES).read_text() == before
