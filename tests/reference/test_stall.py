"""Copies that never end take a limited part of the device pool, and the engine continues with the rest (R5, R16)."""

from __future__ import annotations

import pytest

from kvoffload.engine import TokenStream
from tests.reference.rig import KINDS, TIMEOUT_S, Rig, rig, text

BLOCKS = 60


def served(made: Rig, stream: TokenStream) -> bool:
    """Step until a request has its answer, with time passing. Return False if that takes too long."""
    for _ in range(60):
        if stream.stats.finished_s is not None:
            return True
        made.step(TIMEOUT_S / 10)
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_with_copies_that_all_hang_every_request_is_served_on_most_of_the_pool(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each conversation's prompt is served twice, so that loads would be started again and again."""
    caplog.set_level("INFO")
    with rig(kind, num_blocks=BLOCKS, step_tokens=32) as made:
        for seed in range(3):
            made.run(text(seed, 17), 3)
        made.forget_device()
        made.hold()
        lost = []
        for number in range(24):
            assert served(made, made.submit(text(number % 6, 17), 3))
            lost.append(made.offload.gauges()["kvoffload_abandoned_device_blocks"][()])
        # Only the copies that were running when the first copies were abandoned are lost.
        assert lost[12:] == [lost[12]] * 12
        gauges = made.offload.gauges()
        abandoned = gauges["kvoffload_abandoned_device_blocks"][()]
        assert gauges["kvoffload_copies_stalled"][()]
        assert 0 < abandoned == made.engine.statistics().leased_blocks
        assert abandoned <= BLOCKS // 2
        assert made.count("abandoned_jobs", "store") + made.count("abandoned_jobs", "load") <= 6
        assert made.count("miss_blocks", "stalled") > 0
        made.assert_outputs()
        made.pass_time()
        assert caplog.text.count("copies_stalled") == 1
        made.release()
        made.pass_time(TIMEOUT_S)
        made.drain()
        made.step()
        assert not made.offload.gauges()["kvoffload_copies_stalled"][()]
        assert "copies_resumed" in caplog.text
        loaded = made.count("load_blocks", "loaded")
        made.run(text(20, 17), 6)
        made.forget_device()
        made.run(text(20, 17), 3)
        assert made.count("load_blocks", "loaded") > loaded
        made.assert_clean()
