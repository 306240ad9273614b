from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload.core.order import FASTER, Came, LruOrder
from kvoffload.core.slots import SlotPool
from kvoffload.model.ids import BlockKey, SlotId

RUNS = st.tuples(st.integers(0, 40), st.integers(0, 40), st.sampled_from([1, -1])).map(
    lambda run: range(*run)
)
SLOTS = st.lists(st.integers(0, 40).map(SlotId), unique=True, max_size=8) | RUNS.map(
    lambda run: [SlotId(slot) for slot in run]
)
"""Any distinct slots, or neighbours, as the slots of a prefix mostly are."""


@given(st.lists(st.tuples(SLOTS, st.booleans())))
@example([([SlotId(0), SlotId(1)], False), ([SlotId(1), SlotId(0)], True)])
def test_slots_are_evicted_in_the_order_of_their_last_uses(batches: list[tuple[list[SlotId], bool]]) -> None:
    order, model = LruOrder(), OrderedDict[SlotId, None]()
    order.grow(20)
    for number, (batch, is_renewed) in enumerate(batches):
        if number == len(batches) // 2:
            order.grow(41)
        batch = batch if number >= len(batches) // 2 else [slot for slot in batch if slot < 20]
        inside = [slot for slot in batch if slot in model]
        outside = [slot for slot in batch if slot not in model]
        if is_renewed:
            order.renew(batch, 0.0)
        else:
            order.remove(inside)
            order.add(outside, Came.USED, 0.0)
        for slot in inside:
            del model[slot]
        model.update(dict.fromkeys(batch if is_renewed else outside))
        assert list(order) == list(model)
        assert order.count == len(model)
    taken = order.take(len(model) // 2, 0.0)
    assert [*taken, *order] == list(model)
    assert order.count == len(list(order))
    order.add(taken, Came.USED, 0.0)
    assert [*order.take(99, 0.0)] == [*list(model)[len(taken) :], *taken]
    assert order.count == 0


@given(st.lists(st.tuples(st.sampled_from(["use", "renew", "end", "take"]), SLOTS, st.integers(0, 9))))
def test_slots_of_ended_sessions_age_faster_than_others(steps: list[tuple[str, list[SlotId], int]]) -> None:
    order, now = LruOrder(), 0
    order.grow(41)
    others, ended = OrderedDict[SlotId, int](), OrderedDict[SlotId, int]()
    for what, slots, passed in steps:
        now += passed
        if what == "take":
            taken, ages = [], []
            for _ in range(min(len(slots), len(others) + len(ended))):
                ages_of = [next(iter([now - at for at in each.values()]), -1) for each in (ended, others)]
                first = ended if ages_of[0] >= 0 and ages_of[0] * FASTER >= ages_of[1] else others
                slot, at = first.popitem(last=False)
                taken.append(slot)
                ages.append(now - at)
            assert list(order.take(len(slots), float(now))) == taken
            assert not ages or order.age_s == min(ages)
        else:
            if what == "renew":
                order.renew(slots, float(now))
            else:
                order.remove([slot for slot in slots if slot in others or slot in ended])
                order.add(slots, Came.ENDED if what == "end" else Came.USED, float(now))
            for slot in slots:
                others.pop(slot, None)
                ended.pop(slot, None)
            (ended if what == "end" else others).update(dict.fromkeys(slots, now))
        assert [*order] == [*ended, *others]
        assert order.count == len(ended) + len(others)


@pytest.mark.parametrize(("used_at", "first"), [(0.0, 0), (1.0, 1)])
def test_r15_a_slot_of_an_ended_session_leaves_first_unless_another_is_more_than_8_times_as_old(
    used_at: float, first: int
) -> None:
    order = LruOrder()
    order.grow(2)
    order.add([SlotId(0)], Came.USED, used_at)
    order.add([SlotId(1)], Came.ENDED, 8.0)
    assert order.take(1, 9.0) == [first]


def test_the_eviction_age_is_that_of_the_most_recently_used_slot_taken() -> None:
    order = LruOrder()
    order.grow(4)
    for now, slot in ((1.0, 0), (5.0, 1), (6.0, 2)):
        order.add([SlotId(slot)], Came.USED, now)
    order.remove([SlotId(0)])
    order.add([SlotId(0)], Came.USED, 7.0)
    assert (list(order.take(2, 10.0)), order.age_s) == ([1, 2], 4.0)
    assert (list(order.take(1, 10.0)), order.age_s) == ([0], 3.0)
    assert (list(order.take(1, 10.0)), order.age_s) == ([], 3.0)


class Noting(LruOrder):
    """An order that evicts like `LruOrder` and notes why slots join it."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Came, float]] = []

    def add(self, slots: Sequence[SlotId], came: Came, now: float) -> None:
        self.noted += [(came, now)] * len(slots)
        super().add(slots, came, now)

    def renew(self, slots: Sequence[SlotId], now: float) -> None:
        self.noted += [(Came.USED, now)] * len(slots)
        super().renew(slots, now)


def test_a_pool_tells_its_order_why_and_when_each_slot_joins() -> None:
    order = Noting()
    pool = SlotPool(order)
    pool.grow(4)
    pool.now = 1.0
    [slot], _ = pool.reserve([BlockKey(b"a")])
    pool.fill([slot])
    pool.now = 2.0
    pool.pin([slot])
    pool.unpin([slot])
    pool.pin([slot])
    pool.unpin([slot], Came.COPIED)
    pool.now = 3.0
    pool.hold([slot])
    pool.release([slot])
    pool.use([slot])
    assert order.noted == [
        (Came.FILLED, 1.0),
        (Came.USED, 2.0),
        (Came.COPIED, 2.0),
        (Came.RELEASED, 3.0),
        (Came.USED, 3.0),
    ]


def test_removing_a_slot_that_is_not_evictable_is_an_error() -> None:
    order = LruOrder()
    order.grow(3)
    order.add([SlotId(2), SlotId(1)], Came.USED, 0.0)
    order.remove([SlotId(2)])
    for slot in (0, 2):
        with pytest.raises(KeyError):
            order.remove([SlotId(slot)])
    assert list(order) == [1]


def test_hooks_that_fill_a_pool_split_no_dict_of_its_index() -> None:
    """Splitting a dict of 2,048 keys takes most of a millisecond. An empty one is split when memory grows."""
    pool, slots = SlotPool(), 10_000
    pool.grow(slots // 2)
    pool.grow(slots)
    parts = [*pool.index.parts]
    pool.fill(pool.reserve([BlockKey(bytes([number % 256, number // 256])) for number in range(slots)])[0])
    assert all(now is before for now, before in zip(pool.index.parts, parts, strict=True))
    pool.grow(100 * slots)
    assert all(now is before for now, before in zip(pool.index.parts, parts, strict=True))
