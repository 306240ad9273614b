from __future__ import annotations

import pytest

from kvoffload.model.events import LoadScheduled
from tests.reference.rig import KINDS, Rig, on_host_only, rig, text

PROMPT = text(1, 30)


def reload(made: Rig) -> list[int]:
    """Serve the prompt from the host, and compare its tokens; return the slots of the load."""
    slots: list[int] = []
    made.offload.bus.count(LoadScheduled, lambda event: slots.extend(event.slots))
    made.forget_device()
    made.run(PROMPT)
    return list(slots)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_with_one_flipped_bit_is_counted_and_computed_again(
    kind: str, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    with rig(kind, ranks=2, extra={"verify": "full"}) as made:
        on_host_only(made, PROMPT)
        slots = reload(made)
        assert made.count("load_blocks", "loaded") == len(slots) > 1
        made.workers[rank].pump._arena.pages(slots[-1])[0][0] ^= 1 << 3
        again = reload(made)
        assert slots[-1] in again
        reload(made)  # this load is not corrupt any more
        assert made.count("load_blocks", "corrupt") == 1
        assert made.count("load_blocks", "failed") == len(again) - 1
        assert made.count("transfers", "host", "load", "corrupt") == 1
        assert made.count("evicted_blocks", "host", "corrupt") == 1
        assert made.offload.gauges()["kvoffload_slots"]["host", "quarantined"] == 1
        assert "ERROR" in {one.levelname for one in caplog.records if "blocks_corrupt" in one.getMessage()}
        made.assert_clean()
