"""Runs mixed traffic with a disk, for one model. `make disk-traffic` runs all models, also with two ranks."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.disk_traffic import Traffic, run
from tests.vllm.engine_rig import MARKS

pytestmark = MARKS


def test_answers_are_right_with_aborts_restarts_and_a_reset_on_a_far_too_small_host(
    tmp_path: Path,
) -> None:
    traffic = Traffic("qwen3", tmp_path, ranks=1, seed=1)
    run(traffic)
    assert traffic.counts["aborted"] > 0
    assert traffic.counts["compared"] > 400
