"""Rules R1, R3, R6 and R7 with a whole engine: pins, stores, windows and small pools."""

from __future__ import annotations

import random

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.engine import PoolExhausted
from kvoffload.model.ids import RequestId
from kvoffload.transfer import arena
from tests.engine.tiny import taken
from tests.reference.rig import KINDS, TIMEOUT_S, on_host_only, open_stores, rig, slot_bytes, text

pytestmark = pytest.mark.slow
LOCAL = ("sliding_window", "chunked_local")


# -- R1 ---------------------------------------------------------------------------------------------------------


def test_what_a_waiting_request_has_found_is_not_evicted_by_the_stores_of_many_others() -> None:
    """The lookup found six blocks, but the device has no room for them. Meanwhile other requests store and evict."""
    with rig(num_blocks=17, host_blocks=8, step_tokens=64) as made:
        on_host_only(made, text(1, 25))
        made.submit(text(9, 3), 30)  # It grows to nine of the sixteen blocks.
        for n in range(4):
            made.submit(text(10 + n, 4), 2 + 2 * n)
        waiting = made.submit(text(1, 25), 2)
        waited, evicted = 0, made.count("evicted_blocks", "host", "space")
        while waiting.stats.external_tokens == 0:
            made.step()
            record = made.offload.core.state.requests.live[RequestId(waiting.request_id)]
            if record.hit is not None:
                waited += 1
                assert len(record.hit.slots) == made.offload.core.state.pool.count(SlotState.PINNED) == 6
        assert waited > 5
        assert made.count("evicted_blocks", "host", "space") > evicted
        made.drain()
        assert waiting.stats.external_tokens == 24
        made.assert_outputs()
        made.assert_clean()


# -- R3, R7 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOCAL)
@pytest.mark.parametrize("seed", range(2))
def test_freed_window_blocks_are_never_stored_under_their_old_keys(kind: str, seed: int) -> None:
    """Stores stay open for long, so that offers of window blocks wait while their ids are allocated again."""
    choose = random.Random(seed)
    with rig(kind, num_blocks=41, step_tokens=8) as made:
        prompts = [text(seed * 10 + n, 40 + 7 * n) for n in range(4)]
        for prompt in prompts:
            made.submit(prompt, 4)
        for _ in range(60):
            made.hold()
            made.step()
            for ticket in made.copiers[0].open_tickets[: choose.randrange(2)]:
                choose.choice([ticket.finish, ticket.finish, ticket.fail])()
        made.release()
        made.drain()
        made.assert_outputs()
        assert made.count("stale_blocks_zeroed") > 0
        made.forget_device()
        for prompt in prompts:
            made.run(prompt, 2)
        assert made.count("load_blocks", "loaded") > 0
        made.assert_clean()


def test_a_block_whose_store_is_open_is_not_stored_again() -> None:
    """The same prefix twice while its first store is open, and once after that (checked by `assert_exclusive`)."""
    with rig() as made:
        made.hold()
        first = made.submit(text(1, 20), 3)
        made.drain_requests()
        second = made.submit(text(1, 20), 3)
        made.drain_requests()
        assert first.stats.finished_s is not None
        assert second.stats.device_hit_tokens == 16
        bytes_open = sum(ticket.runs.total_bytes for ticket in open_stores(made))
        assert bytes_open == 5 * slot_bytes("full")
        made.release()
        made.drain()
        made.run(text(1, 20), 3)
        assert made.count("store_blocks", "stored") == 5
        made.assert_clean()


def test_a_block_whose_store_was_abandoned_is_not_stored_again_while_that_copy_may_run() -> None:
    with rig() as made:
        made.hold()
        made.submit(text(1, 21), 3)
        made.drain_requests()
        made.pass_time(1.1 * TIMEOUT_S)
        made.step()
        lost = made.engine.statistics().leased_blocks
        assert lost == made.count("store_blocks", "abandoned") > 0
        second = made.submit(text(1, 21), 3)
        made.drain_requests()
        assert second.stats.device_hit_tokens == 20
        made.assert_clean(lost_blocks=lost)
        made.release()
        for _ in range(3):
            made.step(TIMEOUT_S / 4)
        made.run(text(1, 21), 3)  # After the store has ended, they may be evicted.
        assert made.count("store_blocks", "stored") == lost
        made.assert_outputs()
        made.assert_clean()


# -- R6 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["eager", "lazy"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_request_passes_through_the_least_pool(kind: str, policy: str) -> None:
    """While stores are open, their leases take a part of the pool. The request waits only for these."""
    tokens = 100
    with rig(kind, num_blocks=200) as big:
        need = big.engine._capacity.request_blocks(tokens + 3)
    with rig(kind, num_blocks=1 + need, store_policy=policy) as made:
        limit = made.offload.shape.lease_limit
        assert limit <= need // 4
        for turn in range(3):
            stream = made.submit(text(turn % 2, tokens), 4)
            made.hold()
            for _ in range(30):
                made.step()
                assert made.leased_without_owner() <= limit
            made.release()
            made.drain()
            assert stream.stats.finished_s is not None
        made.assert_outputs()
        made.assert_clean()


def test_stores_that_never_end_take_a_quarter_of_the_pool_at_most() -> None:
    with rig(num_blocks=41) as made:
        made.hold()
        for n in range(12):
            made.submit(text(n, 60), 3)
        made.pass_time(2 * TIMEOUT_S)
        for _ in range(30):
            made.step(TIMEOUT_S / 5)
        made.drain()
        made.assert_outputs()
        lost = made.engine.statistics().leased_blocks
        assert 0 < lost <= made.offload.shape.lease_limit
        made.assert_clean(lost_blocks=lost)


def test_a_request_that_needs_the_blocks_lost_to_such_a_store_gets_an_error() -> None:
    with rig(num_blocks=11, step_tokens=8) as made:
        made.hold()
        made.submit(text(1, 16), 1)
        made.drain_requests()
        made.step(2 * TIMEOUT_S)
        made.step()
        lost = made.engine.statistics().leased_blocks
        assert lost == made.offload.shape.lease_limit
        stream = made.submit(text(2, 38), 2)
        made.drain_requests()
        with pytest.raises(PoolExhausted, match=str(lost)):
            taken(stream)
        made.streams.clear()


def test_a_request_that_came_before_host_memory_was_ready_is_stored_when_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first chunk of six slots is ready before the others."""
    monkeypatch.setattr(arena.Arena.__init__, "__kwdefaults__", {"chunk_bytes": 6 * slot_bytes("full")})
    with rig(starts_ready=False) as made:
        stream = made.submit(text(1, 60), 40)
        for _ in range(8):
            made.engine.step()
            made.check()
        assert made.count("store_blocks", "stored") == made.count("store_blocks", "host_full") == 0
        ended = made.submit(text(2, 9), 1)
        while ended.stats.finished_s is None:
            made.engine.step()
        assert made.count("store_blocks", "not_ready") == 2
        made.drain()
        assert stream.stats.finished_s is not None
        made.forget_device()
        made.run(text(1, 60), 4)
        assert made.count("load_blocks", "loaded") == 14
        assert made.count("store_blocks", "host_full") == 0
        assert made.count("store_blocks", "not_ready") == 2
        made.assert_clean()
