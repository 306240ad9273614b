from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvoffload.core.key_index import KeyIndex
from kvoffload.model.ids import BlockKey, SlotId

MOST = 2048  # a dict with this many keys is split


def random_keys(count: int) -> list[BlockKey]:
    draw = random.Random(0)
    return [BlockKey(draw.randbytes(8)) for _ in range(count)]


def index_of(keys: Sequence[BlockKey]) -> KeyIndex:
    index = KeyIndex()
    index.add(keys, numbers(0, len(keys)))
    return index


def numbers(first: int, end: int) -> list[SlotId]:
    return list(map(SlotId, range(first, end)))


def sizes(index: KeyIndex) -> list[int]:
    return [len(part) for part in {id(part): part for part in index.parts}.values()]


def test_the_index_reports_added_and_removed_keys() -> None:
    index = KeyIndex()
    one, two = BlockKey(b"1"), BlockKey(b"2")
    index.add([one], [SlotId(0)])
    changes = index.watch()
    index.add([two], [SlotId(1)])
    index.remove([one])
    assert index.take_all() == {two: 1}
    assert changes == [(two, True), (one, False), (two, False)]
    assert not index


@pytest.mark.parametrize("there", [0, 5_000])
def test_adding_the_expected_number_of_keys_splits_no_dict(there: int) -> None:
    keys = random_keys(40_000)
    index = index_of(keys[:there])
    index.expect(len(keys))
    before = len(sizes(index))
    index.add(keys, numbers(0, len(keys)))
    assert len(sizes(index)) == before == 32
    assert index == {key: slot for slot, key in enumerate(keys)}
    index.expect(2)
    assert len(sizes(index)) == before


def test_the_key_index_is_a_mapping_with_one_dict_and_with_many() -> None:
    keys = random_keys(20_000)
    index, model = KeyIndex(), dict[BlockKey, SlotId]()
    for place in range(0, len(keys), 50):
        some, slots = keys[place : place + 50], numbers(place, place + 50)
        index.add(some, slots)
        model.update(zip(some, slots, strict=True))
        for key in keys[place // 2 : place // 2 + 20]:
            del model[key]
        index.remove(keys[place // 2 : place // 2 + 20])
    assert len(sizes(index)) > 4
    assert index == model
    assert len(index) == len(model)
    assert all((index.get(key), key in index) == (model.get(key), key in model) for key in keys)
    with pytest.raises(KeyError):
        index.remove(keys[:1])
    with pytest.raises(KeyError):
        index[keys[0]]


def test_each_dict_of_a_large_index_has_a_limited_size() -> None:
    index = index_of(random_keys(20 * MOST))
    assert max(sizes(index)) <= MOST
    assert min(sizes(index)) > MOST // 4  # no dict was split too early


def test_a_small_index_uses_one_dict() -> None:
    assert sizes(index_of(random_keys(MOST))) == [MOST]


def test_keys_that_begin_alike_share_a_dict() -> None:
    keys = [BlockKey(b"\x9f%d" % number) for number in range(3 * MOST)]
    index = index_of(keys)
    assert max(sizes(index)) == len(index) == len(keys)
    assert [index[key] for key in keys] == list(range(len(keys)))
    assert index.parts[0x9F] is not index.parts[0x9E]


def test_keys_of_many_dicts_are_taken_at_once() -> None:
    keys = random_keys(4 * MOST)
    index = index_of(keys)
    held = index.take_all()
    assert not index
    index.add(keys[:1], [SlotId(1)])
    assert held == {key: slot for slot, key in enumerate(keys)}
