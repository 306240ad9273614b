"""Tests which blocks a request offers, and in which order."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.core.jobs import Offer, singles
from kvoffload.core.planners import EagerPlanner
from kvoffload.core.request import RequestRecord
from kvoffload.core.state import CoreState, Policy
from kvoffload.core.stores import Stores
from kvoffload.model.causes import StoreOutcome
from kvoffload.model.engine import EngineShape
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import NULL_BLOCK, BlockKey, DeviceBlockId, RequestId
from tests.core.world import DevicePool, World, full, window


class Case(NamedTuple):
    groups: tuple[GroupSpec, ...]
    record: RequestRecord
    found: int
    loaded: int

    def expected(self) -> list[tuple[BlockKey, DeviceBlockId]]:
        """Return each confirmed block that is new, is no null block of the device's hit, and was not loaded."""
        rows = []
        assert self.record.table is not None
        for number, (group, keys, table) in enumerate(
            zip(self.groups, self.record.keys, self.record.table, strict=True)
        ):
            size = group.block_tokens
            for position, (key, block) in enumerate(zip(keys, table, strict=False)):
                is_hit, is_loaded = position < self.found // size, position < self.loaded // size
                is_new = self.record.offered[number] <= position < self.record.confirmed_tokens // size
                if is_new and (block != NULL_BLOCK if is_hit else not is_loaded):
                    rows.append((position * size, number, key, block))
        return [(key, block) for _, _, key, block in sorted(rows)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.sampled_from([(4,), (4, 4), (4, 4, 4), (4, 8)]))
    groups = tuple(
        full(size, number) if not number else window(8, size, number) for number, size in enumerate(sizes)
    )
    found = 8 * draw(st.integers(0, 2))
    loaded = found + 8 * draw(st.integers(0, 1))
    confirmed = draw(st.integers(loaded, 40))
    count, first = draw(st.integers(2, 10)), draw(st.integers(0, 3))
    # Usually all groups have as many blocks and keys, and were offered as far.
    odd = draw(st.sampled_from(["nothing", "nothing", "blocks", "keys", "offered"]))
    keys, table, offered = [], [], []
    for number, size in enumerate(sizes):
        blocks = (draw(st.integers(0, 10)) if odd == "blocks" else count) * 4 // size
        known = draw(st.integers(0, 10)) if odd == "keys" else count * 4 // size
        keys.append([BlockKey(b"%d %d" % (number, position)) for position in range(known)])
        row = [DeviceBlockId(1 + 100 * number + position) for position in range(blocks)]
        nulls = draw(st.integers(0, found // size)) if number else 0
        table.append([NULL_BLOCK] * min(nulls, blocks) + row[nulls:])
        offered.append(draw(st.integers(0, 3)) if odd == "offered" else first)
    record = RequestRecord(RequestId("a"), 99, tuple(keys), table=table, offered=offered)
    record.found_tokens, record.loaded_tokens, record.confirmed_tokens = found, loaded, confirmed
    return Case(groups, record, found, loaded)


class Noted(Stores):
    """Notes the offers instead of deciding on them."""

    def offer(self, offers: object, *, last_chance: bool = False) -> None:
        self.noted = offers


@settings(max_examples=300)
@given(cases())
def test_property_a_request_offers_each_confirmed_block_once_heads_first(case: Case) -> None:
    shape = EngineShape(case.groups, ranks=1, device_blocks=400, step_tokens=8)
    stores = Noted(CoreState(shape, Policy(), DevicePool(400, 1)))
    stores.noted = []
    expected = case.expected()
    planner = EagerPlanner(stores._state, stores)
    planner.ending(case.record)
    found = singles(stores.noted)
    assert [(offer.keys[0], offer.blocks[0]) for offer in found] == expected
    for offer in found:
        position, group = divmod(offer.places[0], len(case.groups))
        assert case.record.keys[group][position] == offer.keys[0]
    stores.noted = []
    planner.ending(case.record)
    assert stores.noted == []


@pytest.mark.parametrize(
    "wanted", [[True, True, False], [False, True, True], [True, False, True], [False] * 3]
)
def test_an_offer_is_split_into_two_with_all_its_blocks(wanted: list[bool]) -> None:
    keys, blocks = [BlockKey(b"%d" % number) for number in range(3)], [DeviceBlockId(5 + n) for n in range(3)]
    rows = list(zip(keys, blocks, range(4, 7), strict=True))
    parts = Offer(keys, blocks, None, 2, range(4, 7)).split(wanted)
    for part, is_in in zip(parts, (True, False), strict=True):
        assert list(zip(part.keys, part.blocks, part.places, strict=True)) == [
            row for row, chosen in zip(rows, wanted, strict=True) if chosen is is_in
        ]
        assert part.incarnation == 2


def test_blocks_that_another_request_stores_are_watched_together() -> None:
    world = World(step_tokens=32)
    requests = [world.admitted(name, "abcdefghijklmnopq") for name in "abc"]
    world.step(*requests)
    for _ in range(2):
        world.step_and_copy()
    assert world.stores()[StoreOutcome.IN_FLIGHT] == 8
    live = world.core.state.requests.live
    assert [len(live[request.name].watched) for request in requests] == [0, 1, 1]
