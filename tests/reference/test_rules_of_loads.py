"""Copies that fail or never end, in a whole engine: the engine computes every block that was not loaded."""

from __future__ import annotations

import pytest

from tests.reference.rig import (
    KINDS,
    TIMEOUT_S,
    on_host_only,
    open_loads,
    open_stores,
    rig,
    text,
)

pytestmark = pytest.mark.slow


# -- R9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fail", "tear"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_load_is_recomputed_and_not_tried_again(kind: str, how: str) -> None:
    with rig(kind) as made:
        on_host_only(made, text(1, 30))
        made.hold()
        stream = made.submit(text(1, 30), 3)
        made.step()
        [ticket] = open_loads(made)
        getattr(ticket, how)()
        made.release()
        made.drain()
        assert stream.stats.external_tokens == 0
        assert made.count("load_blocks", "failed") == made.counts().total(
            "kvoffload_load_scheduled_blocks_total"
        )
        assert made.count("miss_blocks", "load_failed") == 1
        made.assert_outputs()
        made.forget_device()
        made.run(text(1, 30), 3)  # The failed blocks were removed, and the recomputed blocks were stored.
        assert made.count("load_blocks", "loaded") > 0
        made.assert_clean()


def test_a_load_that_one_rank_fails_is_recomputed_when_the_other_has_ended() -> None:
    with rig(ranks=2) as made:
        on_host_only(made, text(1, 30))
        made.hold()
        stream = made.submit(text(1, 30), 3)
        made.step()
        slow, quick = made.copiers
        quick.open_tickets[0].fail()
        for _ in range(3):
            made.step()
            assert made.engine.statistics().loading == 1  # The slow rank still writes to its blocks.
        slow.open_tickets[0].finish()
        made.release()
        made.drain()
        assert stream.stats.external_tokens == 0
        made.assert_outputs()
        made.assert_clean()


@pytest.mark.parametrize(
    ("refusal", "loaded_tokens"),
    [("refuse_submit", 0), ("refuse_fence", 28)],  # Submitting the load records another fence.
)
def test_copies_that_cannot_be_started_fail(refusal: str, loaded_tokens: int) -> None:
    with rig() as made:
        on_host_only(made, text(1, 30))
        getattr(made.copiers[0], refusal)(RuntimeError("no"))
        stream = made.submit(text(1, 30), 3)
        made.drain()
        assert stream.stats.external_tokens == loaded_tokens
        made.assert_outputs()
        made.assert_clean()


# -- R16 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_that_never_ends_is_recomputed_and_its_memory_is_abandoned(kind: str) -> None:
    with rig(kind, host_blocks=40, num_blocks=100) as made:
        on_host_only(made, text(1, 30))
        made.hold()
        stream = made.submit(text(1, 30), 3)
        made.step()
        [stuck] = open_loads(made)
        made.copiers[0]._held = False
        made.pass_time(1.1 * TIMEOUT_S)
        made.drain()
        assert stream.stats.external_tokens == 0
        made.assert_outputs()
        lost = made.engine.statistics().leased_blocks
        assert lost == made.count("load_blocks", "abandoned")
        assert made.offload.gauges()["kvoffload_slots"]["host", "quarantined"] == lost
        assert made.engine.has_work is False
        for n in range(12):  # This overwrites all memory that can be allocated on the device and the host.
            made.run(text(50 + n, 60), 2)
        made.assert_clean(lost_blocks=lost)
        stuck.finish()  # The abandoned copy still writes to its target.
        for _ in range(3):
            made.step(TIMEOUT_S / 4)
        for n in range(12):
            made.run(text(50 + n, 60), 2)
        assert made.offload.gauges()["kvoffload_slots"]["host", "quarantined"] == lost
        made.assert_clean()


def test_a_store_that_never_ends_keeps_its_memory() -> None:
    with rig(host_blocks=20) as made:
        made.hold()
        made.run_requests(text(1, 20))
        [stuck] = open_stores(made)[:1]
        made.pass_time(1.1 * TIMEOUT_S)
        made.step()
        lost = made.engine.statistics().leased_blocks
        assert lost == made.count("store_blocks", "abandoned")
        assert made.engine.has_work is False
        made.copiers[0]._held = False
        made.run(text(1, 20), 3)
        made.check()
        stuck.finish()
        made.release()
        for _ in range(3):
            made.step(TIMEOUT_S / 4)
        assert made.offload.gauges()["kvoffload_slots"]["host", "quarantined"] == lost
        made.assert_clean()
