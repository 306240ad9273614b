"""A small part of `make bench-fs`: both disks serve after restarts, change no token, and only one writes what never returns."""

from __future__ import annotations

from pathlib import Path

from tests.vllm_adapter.engine_rig import MARKS, SLOT_BYTES
from tests.vllm_adapter.fs_beside import Size, differing, play

pytestmark = MARKS

SMALL = Size(8, SLOT_BYTES, {})
PROMPT = SMALL.blocks * SMALL.block_bytes


def test_both_disks_serve_after_restarts(tmp_path: Path) -> None:
    none, ours, fs = play(tmp_path, SMALL, turns=2, count=4)
    assert differing(none, ours) == differing(none, fs) == 0
    assert len(ours.answers) == 6
    assert min(ours.read) >= 4 * PROMPT
    assert min(fs.read) >= 4 * PROMPT
    assert 4 * PROMPT <= ours.written < 8 * PROMPT <= fs.written
