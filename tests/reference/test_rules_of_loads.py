"""Rules R9, R10, R14 and R16 with a whole engine: loads that fail, are shared, or never end."""

from __future__ import annotations

import pytest

from kvoffload.model.wire import Direction
from tests.engine.tiny import assert_same, taken
from tests.reference.rig import (
    KINDS,
    TIMEOUT_S,
    TOLERANCE,
    on_host_only,
    open_loads,
    open_stores,
    plain,
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
        made.run(text(1, 30), 3)  # The failed blocks were removed, and the recomputed ones stored.
        assert made.count("load_blocks", "loaded") > 0
        made.assert_clean()


def test_after_a_failed_load_a_request_never_loads_again_though_the_host_has_it() -> None:
    with rig() as made:
        on_host_only(made, text(1, 25))
        made.hold()
        stream = made.submit(text(1, 25), 16)
        made.step()
        open_loads(made)[0].fail()
        made.release()
        while stream.stats.generated_tokens < 4 or made.engine.pool.leased_blocks:
            made.step()
        assert len(made.offload.core.state.pool.index) >= 6  # The blocks were computed and stored again.
        assert made.engine.preempt(stream.request_id)
        made.forget_device()
        made.drain()
        assert stream.stats.resumed_tokens == 0
        assert made.count("miss_blocks", "load_failed") == 2
        made.assert_outputs()
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
            assert made.engine.statistics().loading == 1  # The other rank still writes to its blocks.
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


# -- R10 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_reset_with_everything_in_flight_nothing_of_before_is_found(kind: str) -> None:
    with rig(kind, num_blocks=61, step_tokens=8) as made:
        on_host_only(made, text(1, 30), text(2, 20))
        made.hold()
        runs = made.submit(text(3, 20), 20)
        for _ in range(6):
            made.step()
        loads = made.submit(text(1, 30), 3)
        made.step()
        assert open_stores(made)
        assert open_loads(made)
        before = set(made.offload.core.state.pool.index) | set(made.offload.core.stores.in_flight.keys)
        assert made.engine.reset_prefix_cache() is False  # blocks are in use
        assert not made.offload.core.state.pool.index
        made.check()
        made.release()
        made.drain()
        assert runs.stats.finished_s is not None
        assert loads.stats.finished_s is not None
        assert runs.stats.preemptions == 0
        assert not before & set(made.offload.core.state.pool.index)
        assert made.engine.reset_prefix_cache() is True
        again = made.submit(text(1, 30), 2)
        made.drain()
        assert (again.stats.external_tokens, again.stats.device_hit_tokens) == (0, 0)
        made.assert_outputs()
        made.assert_clean()


def test_a_reset_drops_what_a_waiting_request_has_found() -> None:
    with rig(num_blocks=13, step_tokens=8) as made:
        on_host_only(made, text(1, 25))
        made.submit(text(10, 20), 6)
        made.submit(text(11, 20), 6)
        made.step()
        waiting = made.submit(text(1, 25), 2)
        while not any(record.hit for record in made.offload.core.state.requests.live.values()):
            made.step()
        made.engine.reset_prefix_cache()
        assert made.count("pin_dropped_blocks", "reset") == 6
        made.drain()
        assert waiting.stats.external_tokens == 0
        made.assert_outputs()
        made.assert_clean()


# -- R14 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_many_requests_with_one_prefix_load_it_once(kind: str) -> None:
    with rig(kind, num_blocks=400) as made:
        on_host_only(made, text(1, 25))
        made.hold()
        streams = [made.submit((*text(1, 24), n), 2) for n in range(10)]
        for _ in range(5):
            made.step()
        assert made.engine.statistics().loading == 1
        assert made.count("lookups_deferred", "others_load") > 0
        assert made.count("pin_dropped_blocks", "looked_up_again") == 0  # A waiting request pins nothing.
        made.release()
        made.drain()
        assert sum(stream.stats.external_tokens > 0 for stream in streams) == 1
        assert sum(stream.stats.device_hit_tokens > 0 for stream in streams) == 9
        loads = [ticket for ticket in made.copiers[0].tickets if ticket.direction is Direction.LOAD]
        assert len(loads) == 1
        assert made.count("transfer_bytes", "host", "load") == loads[0].runs.total_bytes
        made.assert_outputs()
        made.assert_clean()


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_those_who_wait_for_anothers_load_go_on_when_it_is_gone(how: str) -> None:
    with rig() as made:
        on_host_only(made, text(1, 25))
        made.hold()
        first, second = (made.submit((*text(1, 24), n), 2) for n in range(2))
        made.step()
        if how == "abort":
            made.engine.abort(first.request_id)
        else:
            open_loads(made)[0].fail()
        for _ in range(3):
            made.step()
        made.release()
        made.drain()
        assert second.stats.finished_s is not None
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
        for n in range(12):  # Overwrite all memory that can be allocated, on both sides.
            made.run(text(50 + n, 60), 2)
        made.assert_clean(lost_blocks=lost)
        stuck.finish()  # The copy still writes to its target.
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


def test_who_waited_for_a_load_that_never_ends_waits_no_longer_than_the_time_out() -> None:
    with rig() as made:
        on_host_only(made, text(1, 25))
        made.hold()
        streams = [made.submit((*text(1, 24), n), 2) for n in range(3)]
        made.step()
        made.copiers[0]._held = False
        made.pass_time(1.1 * TIMEOUT_S)
        made.drain()
        assert all(stream.stats.finished_s is not None for stream in streams)
        assert_same(taken(streams[2]), plain("full", (*text(1, 24), 2), 2), TOLERANCE)
