from __future__ import annotations

import pytest

from kvoffload.model.events import LoadScheduled
from tests.reference.rig import KINDS, Rig, on_host_only, rig, text

PROMPT = text(1, 30)


def reload(made: Rig, new_tokens: int = 4) -> list[int]:
    """Serve the prompt from the host, and compare its tokens; return the slots of the load."""
    slots: list[int] = []
    made.offload.bus.count(LoadScheduled, lambda event: slots.extend(event.slots))
    made.forget_device()
    made.run(PROMPT, new_tokens)
    return list(slots)


def flip(made: Rig, slot: int, rank: int = 0, *, bit: int = 3, page: int = 0) -> None:
    made.workers[rank].pump._arena.pages(slot)[page][0] ^= 1 << bit


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_with_one_flipped_bit_is_counted_and_computed_again(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with rig(kind, extra={"verify": "full"}) as made:
        on_host_only(made, PROMPT)
        slots = reload(made)
        assert made.count("load_blocks", "loaded") == len(slots) > 1
        flip(made, slots[-1])
        again = reload(made)
        assert slots[-1] in again
        assert made.count("load_blocks", "corrupt") == 1
        assert made.count("load_blocks", "failed") == len(again) - 1
        assert made.count("transfers", "host", "load", "corrupt") == 1
        assert made.count("evicted_blocks", "host", "corrupt") == 1
        assert made.offload.gauges()["kvoffload_slots"]["host", "quarantined"] == 1
        assert "ERROR" in {one.levelname for one in caplog.records if "blocks_corrupt" in one.getMessage()}
        made.assert_clean()


@pytest.mark.parametrize("rotten", [(0,), (1,), (0, 1)])
def test_corruption_on_one_of_two_ranks_is_detected(rotten: tuple[int, ...]) -> None:
    with rig(ranks=2, extra={"verify": "full"}) as made:
        on_host_only(made, PROMPT)
        slots = reload(made)
        for rank in rotten:
            flip(made, slots[rank], rank)
        reload(made)
        assert made.count("load_blocks", "corrupt") == len(rotten)
        assert made.count("transfers", "host", "load", "corrupt") == len(rotten)
        assert made.offload.gauges()["kvoffload_slots"]["host", "quarantined"] == len(rotten)
        before = made.count("load_blocks", "corrupt")
        reload(made)
        assert made.count("load_blocks", "corrupt") == before
        made.assert_clean()
