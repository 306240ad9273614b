from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial

import numpy as np
import pytest

from kvoffload.model.errors import CopyError
from kvoffload.model.wire import Direction
from kvoffload.testing import FakeDevice, GatedTicket
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.checksums import (
    CheckedTicket,
    Checksums,
    GatheredSlots,
    SampledSlots,
    SlotReader,
    digests_of,
    slots_in_place,
    whole_slots,
)
from kvoffload.transfer.factory import make_checksums
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns
from tests.gates import ManualExecutor
from tests.transfer.rig import ready_arena

SLOTS = 7
PAGES = [[64, 32], [1], [100, 5000, 100], [4096, 4096], [9000], [70_000, 70_001]]
WAYS = [slots_in_place, GatheredSlots, SampledSlots]


def arena_of(pages: list[int], slots: int = SLOTS) -> Arena:
    """Return an arena full of random bytes, in chunks of three slots."""
    arena, draw = ready_arena(FakeDevice(2, pages), slots, chunk_slots=3), random.Random(0)
    for slot in range(slots):
        for region, size in enumerate(pages):
            arena.pages(slot)[region][:] = draw.randbytes(size)
    return arena


def of(reader: SlotReader, *slots: int) -> list[int]:
    return digests_of(reader, np.array(slots, np.int64)).tolist()


def spoil(arena: Arena, slot: int, region: int, start: int, count: int = 1) -> Callable[[], None]:
    """Change bytes of a slot's region; return a function that restores them."""
    page = arena.pages(slot)[region][start : start + count]
    before = bytes(page)
    page[:] = bytes(byte ^ 0x10 for byte in before)

    def heal() -> None:
        page[:] = before

    return heal


@pytest.mark.parametrize("pages", PAGES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_slots_digest_does_not_depend_on_other_slots(
    way: Callable[[Arena], SlotReader], pages: list[int]
) -> None:
    arena = arena_of(pages)
    digests = way(arena)
    alone = [of(digests, slot)[0] for slot in range(SLOTS)]
    assert of(digests, *range(SLOTS)) == alone
    assert of(digests, 5, 2, 2, 0) == [alone[slot] for slot in (5, 2, 2, 0)]
    assert len(set(alone)) > 1


@pytest.mark.parametrize("pages", PAGES, ids=str)
@pytest.mark.parametrize("way", [slots_in_place, GatheredSlots])
def test_a_whole_digest_detects_any_flipped_bit_of_its_own_slot_only(
    way: Callable[[Arena], SlotReader], pages: list[int]
) -> None:
    arena = arena_of(pages)
    digests = way(arena)
    before, draw = of(digests, *range(SLOTS)), random.Random(1)
    for _ in range(40):
        slot, region = draw.randrange(SLOTS), draw.randrange(len(pages))
        heal = spoil(arena, slot, region, draw.choice([0, pages[region] - 1, draw.randrange(pages[region])]))
        now = of(digests, *range(SLOTS))
        assert [place for place in range(SLOTS) if now[place] != before[place]] == [slot]
        heal()
    assert of(digests, *range(SLOTS)) == before


def test_long_pages_are_read_in_place() -> None:
    arena = arena_of([70_000])
    ((piece,),) = whole_slots(arena)(np.array([1]))
    assert np.frombuffer(piece, np.uint8).ctypes.data == arena.geometry.page_addresses(np.array([1]))[0, 0]
    assert isinstance(whole_slots(arena_of([64, 70_000])), GatheredSlots)


def test_the_memory_for_gathered_slots_is_reused() -> None:
    reader = GatheredSlots(arena_of([64]))
    (first,), (second,) = (piece for slot in (0, 1) for piece in reader(np.array([slot])))
    assert np.shares_memory(np.frombuffer(first), np.frombuffer(second))


def test_digests_of_more_slots_than_are_gathered_at_once_are_right() -> None:
    arena = arena_of([2**16, 2**16], slots=20)
    every = np.arange(20)
    assert of(GatheredSlots(arena), *every) == of(slots_in_place(arena), *every)
    lines = arena_of([64] * 40, slots=150)
    sampled = SampledSlots(lines)
    assert of(sampled, *range(150)) == [of(sampled, slot)[0] for slot in range(150)]


@pytest.mark.slow
@pytest.mark.parametrize("pages", PAGES, ids=str)
def test_a_sample_detects_a_corrupt_page_and_any_8_kib(pages: list[int]) -> None:
    arena = arena_of(pages)
    digests = SampledSlots(arena)
    for slot in range(SLOTS):
        for region, size in enumerate(pages):
            for start in range(0, max(size - 8191, 1), 2003):
                before = of(digests, slot)
                heal = spoil(arena, slot, region, start, min(size, 8192))
                assert of(digests, slot) != before
                heal()


@pytest.mark.slow
def test_a_sample_reads_one_byte_in_64_in_every_part_of_a_page() -> None:
    arena = arena_of([4096, 4096 + 64], slots=64)
    digests = SampledSlots(arena)
    seen = np.zeros((64, 2, 4096 // 64), np.bool_)
    for slot in range(64):
        before = of(digests, slot)
        for region in range(2):
            for line in range(4096 // 64):
                heal = spoil(arena, slot, region, line * 64 + slot % 64)
                seen[slot, region, line] = of(digests, slot) != before
                heal()
    assert (seen.sum(axis=2) == 1).all()
    assert seen.any(axis=0).all()


# -- the checksums --------------------------------------------------------------------------------------------


def checksums_of(arena: Arena, executor: ManualExecutor, verify: str = "full") -> Checksums:
    made = make_checksums(verify, arena, executor=executor)
    assert made is not None
    return made


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_slots_changed_since_their_store_are_reported_by_position(verify: str) -> None:
    arena, executor = arena_of([4096, 64]), ManualExecutor(held=False)
    checksums = checksums_of(arena, executor, verify)
    checksums.start(Direction.STORE, np.array([4, 0, 6]))
    spoil(arena, 0, 0, 0, 4096)
    assert checksums.start(Direction.LOAD, np.array([6, 0, 4, 0])).result() == (1, 3)


def test_a_store_renews_the_checksum() -> None:
    arena, executor = arena_of([64]), ManualExecutor(held=False)
    checksums = checksums_of(arena, executor)
    for _ in range(2):
        spoil(arena, 1, 0, 5)
        checksums.start(Direction.STORE, np.array([1]))
        assert checksums.start(Direction.LOAD, np.array([1])).result() == ()


def test_slots_are_not_read_before_their_copies_have_ended_or_after_they_failed() -> None:
    executor = ManualExecutor()
    checksums = checksums_of(arena_of([64]), executor)
    copies = GatedTicket(Direction.LOAD, CopyRuns(*[np.empty(0, np.int64)] * 3), ())
    ticket = CheckedTicket(copies, partial(checksums.start, Direction.LOAD, np.array([0])))
    assert (ticket.query(), executor.waiting) == (TicketState.PENDING, 0)
    copies.fail()
    assert (ticket.query(), executor.waiting) == (TicketState.FAILED, 0)


def test_a_ticket_reports_that_reading_failed_or_will_not_happen() -> None:
    def fail(*_: object) -> np.ndarray:
        raise CopyError("lost")

    executor = ManualExecutor()
    checksums = Checksums(fail, 3, executor)
    failed, cancelled = (checksums.start(Direction.STORE, np.array([0])) for _ in range(2))
    cancelled.cancel()
    executor.run_all()
    copies = GatedTicket(Direction.STORE, CopyRuns(*[np.empty(0, np.int64)] * 3), ())
    copies.finish()
    for work, error in ((failed, CopyError), (cancelled, CancelledError)):
        with pytest.raises(error):
            CheckedTicket(copies, lambda work=work: work).query()  # type: ignore[misc]
