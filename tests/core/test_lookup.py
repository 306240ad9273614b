"""Compares the search for the longest prefix with a simple search that checks every length and every block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core.key_index import KeyIndex
from kvoffload.core.match import Match, longest_match
from kvoffload.model.engine import EngineShape
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import BlockKey, GroupId, SlotId
from tests.core.world import chunked, full, recurrent, window
from tests.keys import block_key

BOUNDED = (AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED_LOCAL)


@st.composite
def specs(draw: st.DrawFn, group: int, one_full: bool) -> GroupSpec:
    if one_full:
        return GroupSpec(GroupId(group), AttentionKind.FULL, draw(st.sampled_from([1, 2, 3, 4])))
    kind = draw(st.sampled_from(AttentionKind))
    reach = draw(st.integers(1, 14)) if kind in BOUNDED else None
    size = draw(st.sampled_from([1, 2, 3, 4]))
    return GroupSpec(GroupId(group), kind, size, reach, draw(st.booleans()))


Index = Mapping[BlockKey, SlotId]
Search = tuple[EngineShape, list[list[BlockKey]], KeyIndex, int, int]


@st.composite
def searches(draw: st.DrawFn, *, one_full: bool = False) -> Search:
    count = 1 if one_full else draw(st.integers(1, 3))
    groups = tuple(draw(specs(group, one_full)) for group in range(count))
    least = math.lcm(*(group.block_tokens for group in groups))
    shape = EngineShape(groups, 1, 8, 8, match_tokens=draw(st.sampled_from([0, least, 2 * least])))
    length = draw(st.integers(1, 40))
    keys = [
        [block_key(b"%d" % position, group.group) for position in range(length // group.block_tokens)]
        for group in groups
    ]
    present = draw(st.sampled_from(["any", "most", "all"]))
    index = KeyIndex()
    for key in (key for group in keys for key in group):
        here = {"any": st.booleans(), "most": st.integers(0, 9).map(bool), "all": st.just(True)}[present]
        if draw(here):
            index.add([key], [SlotId(len(index))])
    start = draw(st.integers(0, length))
    return shape, keys, index, start, draw(st.integers(0, length))


def needed(group: GroupSpec, start: int, length: int) -> set[int]:
    """Return the blocks that a computation from token `length` reads, except blocks entirely on the device."""
    reads: set[int] = set()
    for token in range(length):
        back = length - token
        if (
            group.kind is AttentionKind.FULL
            or (group.kind is AttentionKind.SLIDING_WINDOW and back < (group.reach_tokens or 0))
            or (
                group.kind is AttentionKind.CHUNKED_LOCAL
                and token // (group.reach_tokens or 1) == length // (group.reach_tokens or 1)
            )
            or (group.kind is AttentionKind.RECURRENT and back == 1)
        ):
            reads.add(token // group.block_tokens)
    return {position for position in reads if (position + 1) * group.block_tokens > start}


def naive(
    shape: EngineShape, keys: Sequence[Sequence[BlockKey]], index: Index, start: int, limit: int
) -> int:
    for length in range(limit - limit % shape.alignment, start, -shape.alignment):
        if all(is_usable(group, keys[group.group], index, start, length) for group in shape.groups):
            return length
    return start


def is_usable(group: GroupSpec, keys: Sequence[BlockKey], index: Index, start: int, length: int) -> bool:
    wanted = needed(group, start, length)
    if group.has_lookahead:
        # The lookahead block must match too, although it is dropped from the hit.
        wanted.add(length // group.block_tokens)
    return all(position < len(keys) and keys[position] in index for position in wanted)


any_search = given(st.one_of(searches(), searches(one_full=True)))


@any_search
def test_the_search_finds_the_same_length_and_blocks_as_the_simple_search(search: Search) -> None:
    shape, keys, index, start, limit = search
    match = longest_match(shape, keys, index, start, limit)
    assert match.tokens == naive(shape, keys, index, start, limit)
    wanted = [
        index[keys[group.group][position]]
        for group in shape.groups
        for position in (needed(group, start, match.tokens) if match.tokens > start else ())
    ]
    assert sorted(match.slots) == sorted(wanted)
    assert shape.state_key_ends or not match.lacks_state


@any_search
def test_the_key_reported_as_missing_is_missing(search: Search) -> None:
    shape, keys, index, start, limit = search
    match = longest_match(shape, keys, index, start, limit)
    assert match.missing is None or match.missing not in index
    longer = match.tokens - match.tokens % shape.alignment + shape.alignment
    if longer > limit or match.missing is None:
        return
    with_it = {**index, match.missing: SlotId(len(index))}
    everything = {key: SlotId(0) for group in keys for key in group}
    del everything[match.missing]
    assert naive(shape, keys, everything, start, longer) < longer or longer <= start
    assert naive(shape, keys, with_it, start, limit) >= match.tokens


@pytest.mark.parametrize("groups", [(full(),), (full(), window(6, group=1)), (chunked(8), full(2, group=1))])
def test_matched_slots_are_returned_heads_first(groups: tuple[GroupSpec, ...]) -> None:
    shape = EngineShape(groups, 1, 8, 8)
    keys = [
        [block_key(b"%d" % at, group.group) for at in range(32 // group.block_tokens)] for group in groups
    ]
    place = {key: at * group.block_tokens for group in groups for at, key in enumerate(keys[group.group])}
    index = KeyIndex()
    index.add(list(place), list(map(SlotId, range(len(place)))))
    slots = longest_match(shape, keys, index, 0, 32).slots
    depth = {slot: place[key] for key, slot in index.items()}
    assert [depth[slot] for slot in slots] == sorted(depth[slot] for slot in slots)


class Part(dict[BlockKey, SlotId]):
    """A part of an index that records which keys are looked up."""

    def __init__(self, slots: Mapping[BlockKey, SlotId]) -> None:
        super().__init__(slots)
        self.asked: list[BlockKey] = []

    def get(self, key: BlockKey, default: object = None) -> object:  # type: ignore[override]
        self.asked.append(key)
        return super().get(key, default)


def recording(slots: Mapping[BlockKey, SlotId]) -> tuple[KeyIndex, Part]:
    """Return an index of these keys, and its only part."""
    index, part = KeyIndex(), Part(slots)
    index.parts = [part] * len(index.parts)
    return index, part


def test_each_block_is_looked_up_once() -> None:
    shape = EngineShape((full(4), window(9, 4, group=1), recurrent(4, group=2)), 1, 8, 8)
    keys = [[block_key(b"%d" % at, GroupId(group)) for at in range(50)] for group in range(3)]
    index, part = recording({key: SlotId(0) for each in keys for key in each[:40]})
    index.remove([*(keys[2][hole] for hole in (39, 38, 35)), keys[1][36]])
    assert longest_match(shape, keys, index, 8, 199).tokens == 140
    assert part.asked
    assert len(part.asked) == len(set(part.asked))


def test_a_group_is_not_searched_for_a_length_that_another_has_ruled_out() -> None:
    # Regression: a group with lookahead looked up the block after the device's hit. If this block was
    # missing, the lookup blamed the group for the miss.
    shape = EngineShape((window(5), window(5, group=1, has_lookahead=True)), 1, 8, 8)
    keys = [[block_key(b"%d" % at, GroupId(group)) for at in range(3)] for group in range(2)]
    index, part = recording({})
    assert longest_match(shape, keys, index, 4, 8) == Match(4, (), keys[0][1])
    assert part.asked == [keys[0][1]]
