"""Regression tests. Each is a program that once broke a rule, as the exploration printed it."""

from __future__ import annotations

import pytest

from tests.explore.invariants import check_end
from tests.explore.programs import Action, replay
from tests.explore.scene import Scene
from tests.explore.worlds import WORLDS

FOUND: dict[str, tuple[str, list[Action]]] = {
    "R15 an offer that had waited touched one block of a prefix, and not its head": (
        "two requests",
        [
            ("add", "a"),
            ("add", "b"),
            ("lookup", "a", "patient"),
            ("allocate", "a", "all"),
            ("step", "a"),
            ("step", "a"),
            ("lookup", "b", "patient"),
            ("allocate", "b", "all"),
            ("step", "b"),
            ("step", "b"),
            ("step", "b"),
            ("report", 0, 0, "done"),
            ("end", "a"),
            ("step", "b"),
            ("report", 0, 0, "done"),
            ("step", "b"),
        ],
    ),
    "R12 a fetch of a request that had ended was cancelled after offloading was switched off": (
        "a disk that opens",
        [("open",), ("open",), ("add", "a"), ("step",), ("end", "a"), ("degrade",), ("step",)],
    ),
    "the index noted the use of a block that a rank had found wrong for an earlier fetch": (
        "a fetch on two ranks",
        [
            ("step",),
            ("report", 0, 0, "fail"),
            ("add", "a"),
            ("step",),
            ("report", 1, 0, "corrupt"),
        ],
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_a_program_that_once_broke_a_rule_breaks_none(what: str) -> None:
    world, program = FOUND[what]
    check_end(replay(Scene.first(WORLDS[world]), program))
