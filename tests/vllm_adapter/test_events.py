"""Events for routers: what came to the host and what left it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvoffload.model.ids import BlockKey
from kvoffload_vllm.events import BlockNotes, EventMaker, Wire, publishes_events, split_key
from kvoffload_vllm.groups import BlockSizes, VllmGroups, vllm_groups
from kvoffload_vllm.support import Features
from kvoffload_vllm.tracked import KeyMaker
from tests.vllm_adapter.stand_ins import cache_config, full, group, spec, vllm_config, window

WIRE = Wire(lambda **fields: ("stored", fields), lambda **fields: ("removed", fields), bytes.hex)


def groups() -> VllmGroups:
    """vLLM's groups 0 and 2, with blocks of 4 and 2 tokens; a hash for each 2."""
    left_out = group(spec("CircularBufferSpec", 8, prefix_cacheable=False))
    config = cache_config(group(full(4)), left_out, group(window(4, 2)))
    return vllm_groups(vllm_config(), config, features=Features(), sizes=BlockSizes(4, 2))


def request(**fields: Any) -> Any:
    values: dict[str, Any] = {"block_hashes": [bytes([n]) for n in range(4)], "lora_request": None, **fields}
    return SimpleNamespace(all_token_ids=list(range(100, 109)), **values)


def told(of: Any, limit: int = 100) -> tuple[EventMaker, tuple[tuple[BlockKey, ...], ...]]:
    known = groups()
    keys = KeyMaker(known.hash_ratios, known.ids).keys(of.block_hashes, 0)
    notes = BlockNotes(known, limit)
    notes.take(of, keys, (0, 0))
    return EventMaker(known, notes, WIRE), keys


def events(maker: EventMaker, *ledger: tuple[BlockKey, bool]) -> list[Any]:
    return list(maker.events(ledger))


def test_a_block_that_came_is_told_with_its_tokens_and_parent() -> None:
    maker, (large, small) = told(request())
    first, second, third = events(maker, (large[0], True), (large[1], True), (small[3], True))
    assert first[1]["token_ids"] == [100, 101, 102, 103]
    assert (first[1]["block_hashes"], first[1]["parent_block_hash"]) == (["01"], None)
    assert (second[1]["block_hashes"], second[1]["parent_block_hash"]) == (["03"], "01")
    assert (second[1]["block_size"], second[1]["group_idx"], second[1]["medium"]) == (4, 0, "CPU")
    assert (third[1]["block_hashes"], third[1]["parent_block_hash"]) == (["03"], "02")
    assert (third[1]["block_size"], third[1]["group_idx"], third[1]["token_ids"]) == (2, 2, [106, 107])


def test_the_adapter_of_a_block_is_told() -> None:
    maker, (large, _) = told(request(lora_request=SimpleNamespace(adapter_id=7, name="poems")))
    ((_, fields),) = events(maker, (large[0], True))
    assert (fields["lora_id"], fields["lora_name"]) == (7, "poems")


def test_blocks_that_left_are_told_by_group() -> None:
    maker, (large, small) = told(request())
    one, other = events(maker, (large[0], False), (small[0], False), (large[1], False))
    assert one == (
        "removed",
        {"block_hashes": ["01", "03"], "medium": "CPU", "group_idx": 0, "locality": "LOCAL"},
    )
    assert (other[1]["block_hashes"], other[1]["group_idx"]) == (["00"], 2)


def test_of_a_block_that_came_and_left_the_last_holds() -> None:
    maker, (large, _) = told(request())
    key = large[0]
    assert [kind for kind, _ in events(maker, (key, True), (key, False))] == ["removed"]
    assert [kind for kind, _ in events(maker, (key, False), (key, True))] == ["stored"]


def test_a_block_that_comes_again_is_told_in_full_again() -> None:
    maker, (large, _) = told(request())
    for came in (True, False, True):
        ((_, fields),) = events(maker, (large[0], came))
    assert fields["token_ids"] == [100, 101, 102, 103]


def test_notes_are_bounded_and_a_block_without_one_is_told_by_its_hash() -> None:
    maker, (large, small) = told(request(), limit=1)
    assert len(maker._notes) == 1
    forgotten, noted = events(maker, (large[0], True), (small[3], True))
    assert (forgotten[1]["block_hashes"], forgotten[1]["token_ids"]) == (["01"], [])
    assert noted[1]["token_ids"] == [106, 107]


def test_only_an_engine_that_publishes_events_has_any() -> None:
    assert not publishes_events(SimpleNamespace(kv_events_config=None))
    for on in (True, False):
        config: Any = SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=on))
        assert publishes_events(config) is on


def test_a_key_is_a_hash_and_vllms_number_of_the_group() -> None:
    _, (_, small) = told(request())
    assert split_key(small[2]) == (b"\x02", 2)
