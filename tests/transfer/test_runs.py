from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.model.wire import Direction
from kvoffload.testing import FakeDevice
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.host_copier import HostCopier, choose_copy, copy_by_memmove
from kvoffload.transfer.host_memory import MmapAllocator
from kvoffload.transfer.ports import Clocks, TicketState
from kvoffload.transfer.runs import CopyRuns, geometry_of, merge_runs
from tests.gates import ManualExecutor


def array(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def make_arena(device: FakeDevice, slots: int, chunk_slots: int = 1024) -> Arena:
    arena = Arena(
        device.layout,
        slots,
        MmapAllocator(ManualExecutor(held=False)),
        chunk_bytes=chunk_slots * device.layout.slot_bytes,
    )
    asyncio.run(arena.prepare())
    return arena


def slot_bytes(arena: Arena, slot: int) -> bytes:
    return b"".join(arena.pages(slot))


@pytest.mark.parametrize(
    ("pages", "padding", "slots", "blocks", "sizes"),
    [
        ([64, 32], [0, 0], (1, 2, 3), (4, 5, 6), [192, 96]),
        ([64], [0], (3, 1, 2), (6, 4, 5), [192]),  # blocks in another order
        ([64], [0], (1, 2), (4, 6), [64, 64]),  # blocks that are adjacent on one side only
        ([64], [0], (1, 3), (4, 5), [64, 64]),
        ([64], [0], (2, 1), (4, 5), [64, 64]),
        ([64], [0], (2, 3, 4, 5), (2, 3, 4, 5), [128, 128]),  # blocks on both sides of the end of a chunk
        ([64, 32], [0, 8], (1, 2), (4, 5), [128, 32, 32]),  # pages with padding
    ],
)
def test_blocks_adjacent_on_both_sides_become_one_copy_per_region(
    pages: list[int],
    padding: list[int],
    slots: tuple[int, ...],
    blocks: tuple[int, ...],
    sizes: list[int],
) -> None:
    arena = make_arena(FakeDevice(8, pages, padding), 16, chunk_slots=4)
    runs = merge_runs(arena.geometry, Direction.STORE, array(*slots), array(*blocks))
    assert sorted(runs.size.tolist(), reverse=True) == sizes
    arena.close()


def test_the_direction_decides_source_and_target() -> None:
    device = FakeDevice(4, [64])
    geometry = geometry_of(device.layout, 4).with_chunk([1 << 20])
    store = merge_runs(geometry, Direction.STORE, array(1), array(2))
    load = merge_runs(geometry, Direction.LOAD, array(1), array(2))
    assert store.target.tolist() == load.source.tolist() == [(1 << 20) + 64]
    assert store.source.tolist() == load.target.tolist() == [device.layout.regions[0].address + 128]
    assert (len(store), store.total_bytes) == (1, 64)


@dataclass
class Case:
    device: FakeDevice
    arena: Arena
    slots: np.ndarray
    blocks: np.ndarray


@st.composite
def cases(draw: st.DrawFn) -> Case:
    regions = draw(st.integers(1, 4))
    pages = draw(st.lists(st.integers(1, 200), min_size=regions, max_size=regions))
    padding = draw(st.lists(st.sampled_from([0, 0, 1, 64]), min_size=regions, max_size=regions))
    blocks, slots = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    count = draw(st.integers(1, min(blocks, slots)))
    # Half of the lists are sorted, so that some copies can be merged.
    order = st.one_of(st.just(False), st.just(True))
    chosen = [
        sorted(picked) if draw(order) else picked
        for picked in (draw(st.permutations(range(end))) for end in (slots, blocks))
    ]
    device = FakeDevice(blocks, pages, padding, seed=draw(st.integers(0, 9)))
    arena = make_arena(device, slots, draw(st.integers(1, 8)))
    return Case(device, arena, array(*chosen[0][:count]), array(*chosen[1][:count]))


@given(cases())
def test_property_a_round_trip_copies_every_byte_and_no_other(case: Case) -> None:
    device, arena = case.device, case.arena
    clean = [slot_bytes(arena, slot) for slot in range(arena.slots)]
    before = device.snapshot()
    copier = HostCopier(ManualExecutor(held=False), Clocks())
    ticket = copier.submit(
        Direction.STORE, merge_runs(arena.geometry, Direction.STORE, case.slots, case.blocks), ()
    )
    assert ticket.query() is TicketState.DONE
    expected = dict(
        zip(case.slots.tolist(), (device.read(block) for block in case.blocks.tolist()), strict=True)
    )
    for slot in range(arena.slots):
        assert slot_bytes(arena, slot) == expected.get(slot, clean[slot])
    for block in case.blocks.tolist():
        device.write(block, bytes(device.layout.slot_bytes))
    copier.submit(Direction.LOAD, merge_runs(arena.geometry, Direction.LOAD, case.slots, case.blocks), ())
    assert device.snapshot() == before
    arena.close()


@given(cases())
def test_property_no_two_copies_could_be_merged(case: Case) -> None:
    runs = merge_runs(case.arena.geometry, Direction.LOAD, case.slots, case.blocks)
    pieces = sorted(zip(runs.target.tolist(), runs.source.tolist(), runs.size.tolist(), strict=True))
    borders = set(case.arena.geometry.host_base.ravel().tolist())
    for (target, source, size), (next_target, next_source, _) in itertools.pairwise(pieces):
        touch = target + size == next_target and source + size == next_source
        assert not touch or next_source in borders
    case.arena.close()


@pytest.mark.parametrize("copy", [copy_by_memmove, choose_copy()])
@pytest.mark.parametrize(
    ("length", "gap", "pieces"),
    [(15, 1, 4096), (1000, 1, 4096), (2**20, 0, 2)],  # one system call takes 1,024 pieces
)
def test_pieces_of_any_length_are_copied_without_the_bytes_between_them(
    copy: Callable[[CopyRuns], None], length: int, gap: int, pieces: int
) -> None:
    source = np.random.default_rng(0).integers(1, 256, (pieces, length + gap), np.uint8)
    target = np.zeros_like(source)
    starts = np.arange(pieces, dtype=np.int64) * (length + gap)
    sizes = np.full(pieces, length, np.int64)
    copy(CopyRuns(source.ctypes.data + starts, target.ctypes.data + starts, sizes))
    assert (target[:, :length] == source[:, :length]).all()
    assert not target[:, length:].any()


@pytest.mark.parametrize("arena_is_target", [False, True])
@pytest.mark.parametrize("page", [512, 1024, 3072, 4096, 8192])
def test_short_pieces_of_many_lengths_are_copied_without_changing_other_bytes(
    page: int, arena_is_target: bool
) -> None:
    draw = np.random.default_rng(page)
    pages = 12 * 2**20 // page
    source, target = (draw.integers(0, 256, (pages, page), np.uint8) for _ in range(2))
    expected = target.copy()
    lengths = draw.integers(1, 3, pages // 4)  # the lengths are in pages; most runs have one page
    starts = np.cumsum(lengths) - lengths
    order = draw.permutation(len(lengths))
    places = np.cumsum(lengths[order]) - lengths[order] + pages // 3
    for start, length, place in zip(starts[order], lengths[order], places, strict=True):
        expected[place : place + length] = source[start : start + length]
    runs = CopyRuns(
        source.ctypes.data + starts[order] * page,
        target.ctypes.data + places * page,
        lengths[order] * page,
    )
    choose_copy(arena_is_target=arena_is_target)(runs)
    assert (target == expected).all()
