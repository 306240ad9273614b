from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.model.wire import Direction
from kvoffload.testing import FakeDevice
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.host_copier import HostCopier, choose_copy, copy_by_memmove
from kvoffload.transfer.ports import Clocks, TicketState
from kvoffload.transfer.runs import CopyRuns, merge_runs
from tests.gates import ManualExecutor
from tests.transfer.rig import ready_arena


class Case(NamedTuple):
    device: FakeDevice
    arena: Arena
    slots: list[int]
    blocks: list[int]

    def runs(self, way: Direction) -> CopyRuns:
        slots, blocks = np.array(self.slots, np.int64), np.array(self.blocks, np.int64)
        return merge_runs(self.arena.geometry, way, slots, blocks)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    regions = st.tuples(st.integers(1, 200), st.sampled_from([0, 0, 1, 64]))
    pages, padding = zip(*draw(st.lists(regions, min_size=1, max_size=4)), strict=True)
    blocks, slots = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    count = draw(st.integers(1, min(blocks, slots)))
    # Half of the lists are sorted, so that some copies can be merged.
    chosen = [
        sorted(picked) if draw(st.booleans()) else picked
        for picked in (draw(st.permutations(range(end))) for end in (slots, blocks))
    ]
    device = FakeDevice(blocks, pages, padding, seed=draw(st.integers(0, 9)))
    arena = ready_arena(device, slots, draw(st.integers(1, 8)))
    return Case(device, arena, chosen[0][:count], chosen[1][:count])


@given(cases())
def test_property_a_round_trip_copies_every_byte_and_no_other(case: Case) -> None:
    device, arena = case.device, case.arena
    clean = [b"".join(arena.pages(slot)) for slot in range(arena.slots)]
    before = device.snapshot()
    copier = HostCopier(ManualExecutor(held=False), Clocks())
    assert copier.submit(Direction.STORE, case.runs(Direction.STORE), ()).query() is TicketState.DONE
    expected = dict(zip(case.slots, map(device.read, case.blocks), strict=True))
    for slot in range(arena.slots):
        assert b"".join(arena.pages(slot)) == expected.get(slot, clean[slot])
    for block in case.blocks:
        device.write(block, bytes(device.layout.slot_bytes))
    copier.submit(Direction.LOAD, case.runs(Direction.LOAD), ())
    assert device.snapshot() == before
    arena.close()


@given(cases())
def test_property_no_two_copies_could_be_merged(case: Case) -> None:
    runs = case.runs(Direction.LOAD)
    pieces = sorted(zip(runs.target.tolist(), runs.source.tolist(), runs.size.tolist(), strict=True))
    borders = set(case.arena.geometry.host_base.ravel().tolist())
    for (target, source, size), (next_target, next_source, _) in itertools.pairwise(pieces):
        touch = target + size == next_target and source + size == next_source
        assert not touch or next_source in borders
    case.arena.close()


def test_a_copy_ends_with_its_chunk_of_host_memory() -> None:
    device = FakeDevice(6, (64,), (0,), seed=0)
    arena = ready_arena(device, 6, chunk_slots=3)
    runs = Case(device, arena, [1, 2, 3, 4], [2, 3, 4, 5]).runs(Direction.STORE)
    assert runs.size.tolist() == [128, 128]
    arena.close()


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
        source.ctypes.data + starts[order] * page, target.ctypes.data + places * page, lengths[order] * page
    )
    choose_copy(arena_is_target=arena_is_target)(runs)
    assert (target == expected).all()
