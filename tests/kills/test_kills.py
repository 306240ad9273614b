"""Forty kills at random moments leave no traceback, no undocumented exit code and no half-written file."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from tests.kills.killing import Killer, draw

KILLS = 40


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_commands_end_well_whenever_they_are_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("KILLS_SEED") or random.SystemRandom().randrange(10**6))
    with capsys.disabled():
        sys.stdout.write(f" KILLS_SEED={seed} ")
    killer = Killer(tmp_path)
    assert list(killer.problems(draw(seed, KILLS))) == []
    assert killer.hits > KILLS // 2
