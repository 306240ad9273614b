"""Prints a violation as the source of a test, which runs the shortest program that breaks the rule."""

from __future__ import annotations

import re

from tests.explore.search import Violation


def as_test(world: str, violation: Violation) -> str:
    steps = "".join(f"        {action!r},\n" for action in violation.program)
    program = f"[\n{steps}    ]" if steps else "[]"
    replayed = f"replay(Scene.first(WORLDS[{world!r}]), program)"
    return (
        "from tests.explore.invariants import check_end\n"
        "from tests.explore.programs import replay\n"
        "from tests.explore.scene import Scene\n"
        "from tests.explore.worlds import WORLDS\n"
        "\n\n"
        f"def test_{re.sub(r'[^a-z]+', '_', world)}() -> None:\n"
        f"    # {violation.problem}\n"
        f"    program = {program}\n"
        f"    {f'check_end({replayed})' if violation.at_end else replayed}\n"
    )
