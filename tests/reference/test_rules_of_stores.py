"""Stores in tight pools, in a whole engine: requests wait for leased blocks, and for nothing else."""

from __future__ import annotations

import pytest

from kvoffload.engine import PoolExhausted
from kvoffload.transfer import arena
from tests.engine.tiny import taken
from tests.reference.rig import KINDS, TIMEOUT_S, rig, slot_bytes, text

pytestmark = pytest.mark.slow


# -- R6 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["eager", "lazy"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_request_passes_through_the_least_pool(kind: str, policy: str) -> None:
    """Open stores lease a part of the pool. The request waits only for these leases."""
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
    """The first chunk of six slots is ready before the other chunks."""
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
