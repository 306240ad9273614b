"""`verify`: corrupt host memory is computed again and never served, on any rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvoffload.model.events import LoadScheduled
from tests.reference.rig import KINDS, TIMEOUT_S, Rig, on_host_only, open_loads, rig, text

VERIFY = ("sample", "full")
PROMPT = text(1, 30)


def reload(made: Rig, new_tokens: int = 4) -> list[int]:
    """Run the prompt, which is not on the device, and compare its tokens; return the slots of the load."""
    slots: list[int] = []
    made.offload.bus.count(LoadScheduled, lambda event: slots.extend(event.slots))
    made.forget_device()
    made.run(PROMPT, new_tokens)
    return list(slots)


def flip(made: Rig, slot: int, rank: int = 0, *, bit: int = 3, page: int = 0) -> None:
    made.workers[rank].pump._arena.pages(slot)[page][0] ^= 1 << bit


def spoil(made: Rig, slots: Sequence[int], rank: int = 0) -> None:
    """Overwrite every page of these slots."""
    arena = made.workers[rank].pump._arena
    for slot in slots:
        for region in range(len(arena.layout.regions)):
            page = arena.pages(slot)[region]
            page[:] = bytes(byte ^ 0x55 for byte in page)


@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_bit_is_found_counted_and_computed_again(
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


def test_the_next_lookup_misses_because_of_it() -> None:
    """The request with the corrupt load is aborted before it computes the block again."""
    with rig(extra={"verify": "full"}) as made:
        on_host_only(made, PROMPT)
        flip(made, reload(made)[2])
        made.forget_device()
        made.portal.executor.hold()
        stream = made.submit(PROMPT, 4)
        made.step()
        made.engine.abort(stream.request_id)
        made.portal.executor.release()
        made.drain()
        assert (made.count("load_blocks", "corrupt"), made.count("miss_blocks", "corrupt")) == (1, 0)
        loaded = made.count("load_blocks", "loaded")
        reload(made)
        assert made.count("miss_blocks", "corrupt") == 1
        assert made.count("load_blocks", "loaded") == loaded + 2  # the blocks before it
        loaded = made.count("load_blocks", "loaded")
        # The block was stored again.
        assert len(reload(made)) == made.count("load_blocks", "loaded") - loaded > 2
        made.assert_clean()


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_finds_what_was_written_over(kind: str, verify: str) -> None:
    with rig(kind, extra={"verify": verify}) as made:
        on_host_only(made, PROMPT)
        slots = reload(made)
        spoil(made, slots)
        assert sorted(reload(made)) == sorted(slots)
        assert made.count("load_blocks", "corrupt") == len(slots)
        assert made.offload.gauges()["kvoffload_slots"]["host", "quarantined"] == len(slots)
        made.assert_clean()


def test_off_finds_nothing() -> None:
    """A control: without checksums, the same corruption is served."""
    with rig() as made:
        on_host_only(made, PROMPT)
        spoil(made, reload(made))
        with pytest.raises(AssertionError):
            reload(made)
        assert made.count("load_blocks", "corrupt") == 0
        made.streams.clear()


@pytest.mark.parametrize("rotten", [(0,), (1,), (0, 1)])
def test_of_two_ranks_one_that_rots_is_enough(rotten: tuple[int, ...]) -> None:
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


def test_two_requests_of_one_prefix_both_get_right_tokens() -> None:
    """One request loads, and the other waits for it (R14). The load is corrupt."""
    with rig(extra={"verify": "full"}) as made:
        on_host_only(made, PROMPT)
        flip(made, reload(made)[2])
        made.forget_device()
        made.run_requests(PROMPT, PROMPT)
        made.drain()
        assert made.count("load_blocks", "corrupt") == 1
        made.assert_outputs()
        made.assert_clean()


def test_a_request_waits_for_the_check_of_its_load() -> None:
    with rig(extra={"verify": "full"}) as made:
        on_host_only(made, PROMPT)
        made.portal.executor.hold()
        stream = made.submit(PROMPT, 3)
        for _ in range(5):
            made.step()
        assert not open_loads(made)
        assert stream.stats.first_token_s is None
        assert made.engine.statistics().loading == 1
        made.portal.executor.release()
        made.drain()
        assert stream.stats.external_tokens > 0
        made.assert_outputs()
        made.assert_clean()


@pytest.mark.parametrize("ending", ["abort", "preempt", "reset"])
def test_a_load_that_is_being_checked_survives_what_ends_its_request(ending: str) -> None:
    with rig(extra={"verify": "full"}) as made:
        on_host_only(made, PROMPT)
        made.portal.executor.hold()
        stream = made.submit(PROMPT, 3)
        made.step()
        assert made.portal.executor.waiting
        if ending == "abort":
            made.engine.abort(stream.request_id)
        elif ending == "preempt":
            made.engine.preempt(stream.request_id)
        else:
            made.engine.reset_prefix_cache()
        for _ in range(3):
            made.step()
        made.portal.executor.release()
        made.drain()
        made.assert_outputs()
        made.assert_clean()


def test_a_check_that_never_ends_is_recomputed_and_its_memory_is_abandoned() -> None:
    with rig(num_blocks=100, host_blocks=40, extra={"verify": "full"}) as made:
        on_host_only(made, PROMPT)
        made.portal.executor.hold()
        made.submit(PROMPT, 3)
        made.step()
        made.pass_time(1.1 * TIMEOUT_S)
        made.portal.executor._work.popleft()  # The call is lost.
        made.portal.executor.release()
        made.drain()
        lost = made.engine.statistics().leased_blocks
        assert lost == made.count("load_blocks", "abandoned") > 0
        made.assert_outputs()
        made.assert_clean(lost_blocks=lost)


def test_loads_are_checked_when_the_portals_thread_is_gone() -> None:
    with rig(extra={"verify": "full"}) as made:
        on_host_only(made, PROMPT)
        flip(made, reload(made)[0])
        made.forget_device()
        made.portal.is_dead = True
        made.submit(PROMPT, 3)
        for _ in range(60):
            made.engine.step()
            made.check()
        made.portal.is_dead = False
        assert not made.engine.has_work
        made.assert_outputs()
        assert made.count("load_blocks", "corrupt") == 1


def test_the_engine_closes_while_a_load_is_being_checked() -> None:
    made = Rig(extra={"verify": "full"})
    on_host_only(made, PROMPT)
    made.portal.executor.hold()
    made.submit(PROMPT, 3)
    made.step()
    arena = made.workers[0].pump._arena
    made.close()  # It waits for the timeout, and does not free the memory, which copies may still read.
    assert arena.ready_slots > 0


@pytest.mark.parametrize("verify", ["off", *VERIFY])
def test_the_start_says_what_is_verified(verify: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), rig(extra={"verify": verify}):
        assert f"verify={verify}" in caplog.text
