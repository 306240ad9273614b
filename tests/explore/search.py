"""Breadth-first search over scenes."""

from __future__ import annotations

import pickle
import re
from collections import deque
from dataclasses import dataclass

from tests.explore import invariants
from tests.explore.programs import Action, act, actions
from tests.explore.scene import Scene
from tests.explore.worlds import SmallWorld

_END_CHECKED = 8
"""One in this many states is also run until all its work is done.

States in which only an empty step is possible are always run to the end.
"""


@dataclass(frozen=True)
class Violation:
    """A shortest program that breaks a rule, and the error, which may appear only after all work is done."""

    program: tuple[Action, ...]
    problem: str
    at_end: bool

    def as_test(self, world: str) -> str:
        """Return the source of a test that runs the program, in the world with this name."""
        steps = "".join(f"        {action!r},\n" for action in self.program)
        program = f"[\n{steps}    ]" if steps else "[]"
        replayed = f"replay(Scene.first(WORLDS[{world!r}]), program)"
        return (
            "from tests.explore.invariants import check_end\n"
            "from tests.explore.programs import replay\n"
            "from tests.explore.scene import Scene\n"
            "from tests.explore.worlds import WORLDS\n"
            "\n\n"
            f"def test_{re.sub(r'[^a-z]+', '_', world)}() -> None:\n"
            f"    # {self.problem}\n"
            f"    program = {program}\n"
            f"    {f'check_end({replayed})' if self.at_end else replayed}\n"
        )


@dataclass
class Found:
    """The result of an exploration."""

    states: int = 1  # the number of different states
    transitions: int = 0  # the number of actions between them
    ends: int = 0  # the number of states that were run to their end
    depth: int = 0  # the length of the longest program
    is_exhausted: bool = False  # whether all states were reached
    violation: Violation | None = None


def explore(kind: SmallWorld, *, states: int) -> Found:
    """Explore a world until this many states are known, no state is left, or a rule is broken."""
    try:
        first = Scene.first(kind)
    except Exception as problem:  # Building the scene serves texts, which may already break a rule.
        return Found(violation=Violation((), _said(problem), False))
    return _Search(first).run(states)


class _Search:
    def __init__(self, first: Scene) -> None:
        self._found = Found()
        self._came_by: dict[bytes, tuple[bytes, Action] | None] = {first.digest(): None}
        self._todo = deque([(first.digest(), pickle.dumps(first, pickle.HIGHEST_PROTOCOL))])

    def run(self, states: int) -> Found:
        found = self._found
        while self._todo and found.states < states and found.violation is None:
            digest, saved = self._todo.popleft()
            self._expand(digest, saved)
        found.is_exhausted = not self._todo and found.violation is None
        found.depth = max(found.depth, len(self._program(next(reversed(self._came_by)))))
        return found

    def _expand(self, digest: bytes, saved: bytes) -> None:
        scene: Scene = pickle.loads(saved)
        choices = list(actions(scene))
        if digest[0] % _END_CHECKED == 0 or len(choices) == 1:
            self._found.ends += 1
            if not self._survives_end(digest, scene):
                return
        for action in choices:
            scene = pickle.loads(saved)
            self._found.transitions += 1
            try:
                act(scene, action)
                self._add(scene, digest, action)
            except Exception as problem:
                self._found.violation = Violation((*self._program(digest), action), _said(problem), False)
                return

    def _add(self, scene: Scene, before: bytes, action: Action) -> None:
        digest = scene.digest()
        if digest not in self._came_by:
            self._came_by[digest] = (before, action)
            self._found.states += 1
            self._todo.append((digest, pickle.dumps(scene, pickle.HIGHEST_PROTOCOL)))

    def _survives_end(self, digest: bytes, scene: Scene) -> bool:
        try:
            invariants.check_end(scene)
        except Exception as problem:
            self._found.violation = Violation(self._program(digest), _said(problem), True)
            return False
        return True

    def _program(self, digest: bytes) -> tuple[Action, ...]:
        program: list[Action] = []
        while (step := self._came_by[digest]) is not None:
            digest, action = step
            program.append(action)
        return tuple(reversed(program))


def _said(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".split("\n")[0]
