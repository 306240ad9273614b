from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.fs import differing
from tests.bench.hicache import lines, play

pytestmark = [pytest.mark.sglang, pytest.mark.full, pytest.mark.timeout(3600)]


def test_both_backends_serve_after_a_kill_and_only_ours_notices_flipped_bits(tmp_path: Path) -> None:
    none, ours, file = sides = play(tmp_path, turns=1, count=3)
    assert sum(none.stored) == 0 < sum(ours.stored)
    assert sum(file.stored) > 0
    assert differing(none.answers, ours.answers) == differing(none.answers, file.answers) == 0
    assert differing(none.flipped, ours.flipped) == 0 < differing(none.flipped, file.flipped)
    assert all(line.median >= 0 for line in lines(sides))
