"""A small part of `make bench-fs`: both disks serve after restarts, and the `fs` tier's files are where its bytes come from."""

from __future__ import annotations

from pathlib import Path

from tests.vllm_adapter.engine_rig import MARKS, SLOT_BYTES
from tests.vllm_adapter.fs_beside import Size, differing, draw_prompts, files_in, play

pytestmark = MARKS

SMALL = Size(8, SLOT_BYTES, {})


def test_both_disks_serve_after_restarts_and_change_no_token(tmp_path: Path) -> None:
    none, ours, fs = play(tmp_path, SMALL, turns=2, count=4)
    assert len(none.answers) == 6
    assert differing(none, ours) == differing(none, fs) == 0

    blocks = [file for file in files_in(fs.folder) if file.suffix == ".bin"]
    assert len(blocks) == 2 * 4 * SMALL.blocks  # also of the prompts that never return
    for file in blocks:  # so what the tier loads is what its files hold
        file.write_bytes(bytes(SLOT_BYTES))
    fs.answers.clear()
    fs.return_to(draw_prompts(SMALL, 4))
    assert all(answer not in none.answers for answer in fs.answers)
