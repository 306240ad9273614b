from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import pytest

from kvoffload.model.causes import DegradeCause
from kvoffload.model.errors import DeviceLost
from kvoffload.testing import GatedTicket
from kvoffload.transfer import arena
from tests.reference.rig import (
    KINDS,
    TIMEOUT_S,
    Rig,
    on_host_only,
    open_loads,
    open_stores,
    rig,
    slot_bytes,
    text,
)

Span = tuple[int, int]


@pytest.mark.parametrize("granted", [0, 2])
def test_an_engine_runs_with_less_host_memory_than_requested(
    granted: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host grants no memory, or two chunks of six slots. More slots were requested."""
    left, real = [granted], mmap.mmap

    def refuse(*args: Any, **kwargs: Any) -> mmap.mmap:  # noqa: ANN401  # mmap's own
        if not left[0]:
            raise OSError(12, "Cannot allocate memory")
        left[0] -= 1
        return real(*args, **kwargs)

    monkeypatch.setattr(mmap, "mmap", refuse)
    monkeypatch.setattr(arena.Arena.__init__, "__kwdefaults__", {"chunk_bytes": 6 * slot_bytes("full")})
    with rig() as made:
        made.run(text(1, 60), 6)
        made.forget_device()
        made.run(text(1, 60), 6)
        assert made.offload.gauges()["kvoffload_capacity_slots"]["host",] == 6 * granted
        assert (made.count("load_blocks", "loaded") > 0) is (granted > 0)
        assert made.count("store_blocks", "host_full") > 0
        assert caplog.text.count("host_memory_refused") == 1
        assert f"ready_slots={6 * granted}" in caplog.text
        made.assert_outputs()
        made.assert_clean()


def test_a_lost_device_switches_offloading_off_and_the_engine_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with rig() as made:
        made.hold()
        made.run_requests(text(1, 20))
        for ticket in made.copiers[0].open_tickets:
            ticket.query_error = DeviceLost("CUDA_ERROR_ILLEGAL_ADDRESS (700)")
        made.step()
        made.step()
        assert made.offload.degraded is DegradeCause.TRANSFER_DEAD
        assert made.engine.pool.leased_blocks == 0
        made.run(text(2, 20))
        made.assert_outputs()
    assert "offloading_off cause=transfer_dead" in caplog.text
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in caplog.text


def test_a_store_that_one_rank_fails_is_never_found(caplog: pytest.LogCaptureFixture) -> None:
    with rig(ranks=2) as made:
        made.hold()
        made.run_requests(text(1, 20))
        slow, quick = made.copiers
        for ticket in quick.open_tickets:
            ticket.fail()
        made.step()
        assert not made.offload.core.state.pool.index
        assert made.count("store_blocks", "failed") > 0
        assert made.engine.pool.leased_blocks  # the slower rank is still reading these blocks
        assert slow.open_tickets
        made.release()
        made.drain()
        assert made.engine.pool.leased_blocks == 0
        made.forget_device()
        stream = made.submit(text(1, 20), 2)
        made.drain()
        assert stream.stats.external_tokens == 0
        assert made.count("miss_blocks", "store_failed") > 0
        made.assert_outputs()
        made.assert_clean()
    assert "store_failed" in caplog.text


def test_an_engine_that_takes_a_leased_block_back_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    with rig() as made:
        made.hold()
        made.run_requests(text(1, 20))
        block = next(iter(made.engine.pool.leases()))
        made.engine.pool.free([block])
        problems = made.offload.audit()
        assert problems == [f"block {block} is leased 1 times, the engine counts 0"]
        assert made.offload.degraded is DegradeCause.INVARIANT_BROKEN
        assert f"detail='{problems[0]}'" in caplog.text
        made.engine.pool.touch([block])
        made.release()
        made.drain()
        made.run_plain(text(2, 20))
        made.assert_clean()


@pytest.mark.parametrize("end", ["fail", "tear", "finish"])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_copy_that_ends_after_its_job_was_abandoned_releases_only_device_blocks(
    direction: str, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The device blocks must be released, and the host slots must stay quarantined."""
    with rig(host_blocks=40) as made:
        stuck = never_ending(made, direction)
        assert made.engine.statistics().leased_blocks > 0
        lost = made.offload.gauges()["kvoffload_slots"]["host", "quarantined"]
        assert lost == made.count("abandoned_blocks", direction) > 0
        outcomes = made.counts().counts[f"kvoffload_{direction}_blocks_total"]
        getattr(stuck, end)()
        for _ in range(3):
            made.step(TIMEOUT_S / 4)
        assert made.engine.statistics().leased_blocks == 0
        assert made.offload.gauges()["kvoffload_slots"]["host", "quarantined"] == lost
        # each block is still counted once, as abandoned
        assert made.counts().counts[f"kvoffload_{direction}_blocks_total"] == outcomes
        made.run(text(1, 30), 3)
        made.assert_clean()
    assert "job_abandoned" in caplog.text


def never_ending(made: Rig, direction: str) -> GatedTicket:
    """Start copies, end all but one, and wait until its job is abandoned; return the hanging copy."""
    if direction == "load":
        on_host_only(made, text(1, 30))
    made.hold()
    made.submit(text(1, 30), 3)
    made.step()
    if direction == "store":
        made.drain_requests()
    [stuck, *_] = open_loads(made) if direction == "load" else open_stores(made)
    made.copiers[0]._held = False
    for other in made.copiers[0].open_tickets:
        if other is not stuck:
            other.finish()
    made.pass_time(1.1 * TIMEOUT_S)
    made.drain()
    return stuck


def spans(ticket: GatedTicket) -> Iterator[Span]:
    """Yield the memory ranges that a copy reads and writes."""
    for side in ("source", "target"):
        for start, size in zip(getattr(ticket.runs, side), ticket.runs.size, strict=True):
            yield int(start), int(start + size)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_memory_under_a_copy_that_never_ends_is_never_allocated_again(kind: str, direction: str) -> None:
    """While the copy hangs, requests fill both pools. The test also resets, preempts, aborts, breaks an
    invariant and closes the engine.
    """
    made = Rig(kind, host_blocks=40, num_blocks=70)
    stuck = never_ending(made, direction)
    pool, before = made.engine.pool, len(made.copiers[0].tickets)
    lost = set(pool.leases())
    assert lost
    for number in range(6):
        made.run(text(50 + number, 60), 3)
    made.engine.reset_prefix_cache()
    for number in range(6):
        made.run(text(70 + number, 60), 3)
    first, second = made.submit(text(90, 60), 8), made.submit(text(91, 60), 8)
    for _ in range(8):
        made.step()
    made.engine.preempt(first.request_id)
    made.engine.abort(second.request_id)
    made.drain()
    later = [span for ticket in made.copiers[0].tickets[before:] for span in spans(ticket)]
    assert len(later) > 100
    assert not [one for one in spans(stuck) for other in later if one[0] < other[1] and other[0] < one[1]]
    assert lost == set(pool.leases())
    assert lost.isdisjoint(block for block in range(pool.num_blocks) if pool.is_free(block))
    made.assert_clean(lost_blocks=len(lost))
    made.offload.core.state.pool._counts[0] += 1  # break an invariant
    assert made.offload.audit()
    made.run_plain(text(95, 60), 3)
    assert lost == set(pool.leases())
    arenas = [worker.pump._arena for worker in made.workers]
    made.close()
    assert all(one.ready_slots for one in arenas)  # the memory is never unmapped
