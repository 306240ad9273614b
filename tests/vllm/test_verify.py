from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.core.machine import SlotState
from tests.vllm.engine_rig import MARKS, Asked, Reports, offloading, prompt, same, truth
from tests.vllm.stock import checkpoints

pytestmark = MARKS


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_blocks_with_a_flipped_bit_are_detected_counted_and_recomputed(
    kind: checkpoints.Kind, folder: Path
) -> None:
    asked = Asked(prompt(2), 12)
    with offloading(kind, folder, extra={"verify": "full"}) as rig:
        expected = truth(rig, asked)
        rig.forget()
        rig.put_on_host_only(asked.prompt)
        intact = rig.run({"a": asked})["a"]
        assert intact.cached > 0
        assert same(intact, expected)
        assert rig.counts.count("kvoffload_load_blocks_total", "corrupt") == 0

        assert rig.scheduler.reset_prefix_cache()
        before = rig.counts
        for slot in rig.ready_slots():
            rig.pump._arena.pages(slot)[0][5] ^= 0x40
        with Reports(rig) as reports:
            reported = rig.run({"a": asked})["a"]
        gained = rig.counts.minus(before)
        assert same(reported, expected)
        assert (reports.received, reports.failed) == (["a"], ["a"])
        assert gained.count("kvoffload_load_blocks_total", "loaded") == 0
        corrupt = gained.count("kvoffload_load_blocks_total", "corrupt")
        assert rig.slots(SlotState.QUARANTINED) == corrupt > 0
        assert gained.count("kvoffload_transfers_total", "host", "load", "corrupt") == 1
        rig.forget()  # removes corrupt blocks that no load has read
        rig.check_clean()
