"""`verify`: a corrupt block in host memory is computed again and never served, on any rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvoffload.model.events import LoadScheduled
from tests.reference.rig import KINDS, Rig, on_host_only, rig, text

VERIFY = ("sample", "full")
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


def spoil(made: Rig, slots: Sequence[int], rank: int = 0) -> None:
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


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_detects_overwritten_bytes(kind: str, verify: str) -> None:
    with rig(kind, extra={"verify": verify}) as made:
        on_host_only(made, PROMPT)
        slots = reload(made)
        spoil(made, slots)
        assert sorted(reload(made)) == sorted(slots)
        assert made.count("load_blocks", "corrupt") == len(slots)
        assert made.offload.gauges()["kvoffload_slots"]["host", "quarantined"] == len(slots)
        made.assert_clean()


def test_off_finds_nothing() -> None:
    """A control: without checksums, the engine serves the same corrupt blocks."""
    with rig() as made:
        on_host_only(made, PROMPT)
        spoil(made, reload(made))
        with pytest.raises(AssertionError):
            reload(made)
        assert made.count("load_blocks", "corrupt") == 0
        made.streams.clear()


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


def test_the_engine_closes_while_a_load_is_being_checked() -> None:
    made = Rig(extra={"verify": "full"})
    on_host_only(made, PROMPT)
    made.portal.executor.hold()
    made.submit(PROMPT, 3)
    made.step()
    arena = made.workers[0].pump._arena
    made.close()  # The memory must stay, because copies may still read it.
    assert arena.ready_slots > 0


@pytest.mark.parametrize("verify", ["off", *VERIFY])
def test_the_start_says_what_is_verified(verify: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), rig(extra={"verify": verify}):
        assert f"verify={verify}" in caplog.text
