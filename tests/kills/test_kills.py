from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from tests.kills.killing import Killer, draw

KILLS = int(os.environ.get("KVOFFLOAD_COMMAND_KILLS", "40"))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * KILLS)
def test_a_killed_command_leaves_no_traceback_and_no_partial_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("KILLS_SEED") or random.SystemRandom().randrange(10**6))
    with capsys.disabled():
        sys.stdout.write(f" KILLS_SEED={seed} ")
    killer = Killer(tmp_path)
    assert list(killer.problems(draw(seed, KILLS))) == []
    assert killer.hits > KILLS // 2
