"""Conversations while host memory keeps getting corrupted, with aborts, preemptions and resets.

The tokens stay the same.
"""

from __future__ import annotations

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.model.ids import SlotId
from tests.reference.rig import KINDS, PLENTY, Rig, rig
from tests.reference.test_output import TIGHT, Talk

STORED = (SlotState.READY, SlotState.PINNED)


class RottingTalk(Talk):
    """In any step, a stored block may be corrupted on any rank, and computing checksums may pause."""

    def disturb(self) -> None:
        super().disturb()
        what = self.random.choices(["", "rot", "hold reading", "release reading"], [50, 20, 10, 20])[0]
        if what == "rot":
            self.rot()
        elif what == "hold reading":
            self.rig.portal.executor.hold()
        elif what == "release reading" or not self.open:
            self.rig.portal.executor.release()

    def rot(self) -> None:
        pool = self.rig.offload.core.state.pool
        stored = [slot for slot in range(pool.capacity) if pool.state(SlotId(slot)) in STORED]
        if stored:
            slot, worker = self.random.choice(stored), self.random.choice(self.rig.workers)
            region = self.random.randrange(len(worker.pump._arena.layout.regions))
            page = worker.pump._arena.pages(slot)[region]
            page[self.random.randrange(len(page))] ^= 1 << self.random.randrange(8)


def talk(made: Rig, seed: int) -> None:
    # With recurrent layers loads are rarer, because a hit must end at one of the few states.
    RottingTalk(made, seed).hold_it(turns=40 if made.kind == "recurrent" else 20)
    made.portal.executor.release()
    made.drain()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_output_is_the_same_while_host_memory_rots(kind: str, ranks: int) -> None:
    blocks = TIGHT[kind] + 1
    with rig(
        kind,
        ranks=ranks,
        host_blocks=PLENTY,
        num_blocks=blocks,
        step_tokens=8,
        timeout_s=1000.0,
        extra={"verify": "full"},
    ) as made:
        talk(made, seed=ranks)
        made.assert_clean()
        made.assert_outputs()
        corrupt, loaded = (made.count("load_blocks", outcome) for outcome in ("corrupt", "loaded"))
        assert corrupt > 0 < loaded
        # The count is lower than the number of corruptions found, because two loads may read one slot.
        assert made.offload.gauges()["kvoffload_slots"]["host", "quarantined"] > 0
