"""Events that report to routers which blocks were stored on the host or removed from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.core.key_index import KeyIndex
from kvoffload.disk.open_folder import open_root
from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.wire import Tier
from kvoffload_vllm.events import BlockNotes, TierEvents, Wire, publishes_events
from kvoffload_vllm.groups import VllmGroups, vllm_groups
from kvoffload_vllm.kept_notes import DiskNotes, KeptNotes
from kvoffload_vllm.progress import KeyMaker
from kvoffload_vllm.support import Features
from tests.vllm.adapter.stand_ins import cache_config, full, group, spec, vllm_config, window

Extra = tuple[tuple[Any, ...] | None, int]


def extra_keys(request: Any, start: int, end: int, media: int) -> Extra:
    """Return a block's extra keys, as vLLM does: the salt in the first block, an image where it begins."""
    found = [(name, at - start) for name, at in request.images[media:] if start <= at < end]
    salt = [request.salt] if request.salt and not start else []
    return (*found, *salt) or None, media + len(found)


WIRE = Wire(
    lambda **fields: ("stored", fields),
    lambda **fields: ("removed", fields),
    bytes.hex,
    extra_keys,
    {0: ("full_attention", None), 2: ("sliding_window", 4)},
)


def groups() -> VllmGroups:
    """Return vLLM's groups 0 and 2, with blocks of 4 and 2 tokens. Every 2 tokens have a hash."""
    left_out = group(spec("CircularBufferSpec", 8, prefix_cacheable=False))
    config = cache_config(group(full(4)), left_out, group(window(4, 2)))
    return vllm_groups(vllm_config(), config, features=Features(), sizes=(4, 2))


def request(**fields: Any) -> Any:
    values: dict[str, Any] = {
        "block_hashes": [bytes([n]) for n in range(4)],
        "all_token_ids": list(range(100, 109)),
        "lora_request": None,
        "images": [],
        "salt": None,
        **fields,
    }
    return SimpleNamespace(**values)


def reported(of: Any, computed_tokens: int = 8) -> tuple[TierEvents, tuple[tuple[BlockKey, ...], ...]]:
    known = groups()
    maker, _, _ = tiers()
    maker.notes.take(of, 0, computed_tokens)
    return maker, KeyMaker(known.hash_ratios, known.ids).keys(of.block_hashes, 0)


def events(maker: TierEvents, *ledger: tuple[BlockKey, bool]) -> list[Any]:
    return list(maker.events(Tier.HOST, ledger))


def test_a_stored_block_is_published_with_its_tokens_parent_and_group() -> None:
    maker, (large, small) = reported(request())
    first, second, third = (
        fields for _, fields in events(maker, (large[0], True), (large[1], True), (small[3], True))
    )
    assert first["token_ids"] == [100, 101, 102, 103]
    assert (first["block_hashes"], first["parent_block_hash"]) == (["01"], None)
    assert (second["block_hashes"], second["parent_block_hash"]) == (["03"], "01")
    assert (second["block_size"], second["group_idx"], second["medium"]) == (4, 0, "CPU")
    assert (third["block_hashes"], third["parent_block_hash"]) == (["03"], "02")
    assert (third["block_size"], third["group_idx"], third["token_ids"]) == (2, 2, [106, 107])
    kinds = [(one["kv_cache_spec_kind"], one["kv_cache_spec_sliding_window"]) for one in (second, third)]
    assert kinds == [("full_attention", None), ("sliding_window", 4)]


def test_parents_are_published_before_their_children() -> None:
    """Report the blocks in the order in which they are evicted: deepest first, one job after another."""
    maker, (large, small) = reported(request())
    order = [small[1], small[0], large[1], small[3], large[0], small[2]]
    reported_of = [
        (fields["group_idx"], fields["block_hashes"][0])
        for _, fields in events(maker, *[(k, True) for k in order])
    ]
    assert reported_of == [(2, "00"), (2, "01"), (0, "01"), (0, "03"), (2, "02"), (2, "03")]


def test_everything_that_a_blocks_hash_depends_on_is_published() -> None:
    adapter = SimpleNamespace(adapter_id=7, name="poems")
    maker, (large, small) = reported(request(salt="s", images=[("cat", 1), ("dog", 7)], lora_request=adapter))
    fields = [event for _, event in events(maker, *[(key, True) for key in (*large, *small)])]
    head, dog = [(("cat", 1), "s")], [(("dog", 3),)]
    assert [one["extra_keys"] for one in fields] == [head, dog, head, [None], [None], [(("dog", 1),)]]
    assert {(one["lora_id"], one["lora_name"]) for one in fields} == {(7, "poems")}


def test_removed_blocks_are_published_by_group() -> None:
    maker, (large, small) = reported(request())
    one, other = events(maker, (large[0], False), (small[0], False), (large[1], False))
    fields = {"block_hashes": ["01", "03"], "medium": "CPU", "group_idx": 0, "locality": "LOCAL"}
    assert one == ("removed", fields)
    assert (other[1]["block_hashes"], other[1]["group_idx"]) == (["00"], 2)


def test_only_the_last_change_of_a_block_is_published() -> None:
    maker, (large, _) = reported(request())
    assert [kind for kind, _ in events(maker, (large[0], True), (large[0], False))] == ["removed"]
    ((kind, fields),) = events(maker, (large[0], False), (large[0], True))
    assert (kind, fields["token_ids"]) == ("stored", [100, 101, 102, 103])


def test_a_block_without_a_note_is_not_published_and_neither_is_its_removal() -> None:
    """Without its parent and tokens, the block would look like the first block of a prompt."""
    maker, (large, _) = reported(request(), computed_tokens=4)
    assert events(maker, (large[1], True)) == []
    assert [fields["block_hashes"] for _, fields in events(maker, (large[0], True))] == [["01"]]
    ((kind, fields),) = events(maker, (large[0], False), (large[1], False))
    assert (kind, fields["block_hashes"]) == ("removed", ["01"])
    assert len(events(maker, (large[1], False))) == 1


# -- notes ----------------------------------------------------------------------------------------------------------


def taker(holds: Callable[[BlockKey], bool], device_blocks: int, *, count: int = 1) -> BlockNotes:
    config = cache_config(*[group(full(2))] * count, num_blocks=device_blocks + 1)
    return BlockNotes(vllm_groups(vllm_config(), config, features=Features(), sizes=(2, 2)), WIRE, holds)


def count_of(notes: BlockNotes) -> int:
    return sum(map(len, notes.by_ratio.values()))


def prompt(hashes: Iterable[int]) -> Any:
    block_hashes = [number.to_bytes(2, "big") for number in hashes]
    return request(block_hashes=block_hashes, all_token_ids=list(range(2 * len(block_hashes))))


def key(number: int, group_number: int = 0) -> BlockKey:
    return BlockKey(number.to_bytes(2, "big") + group_number.to_bytes(4, "big"))


def test_each_computed_block_is_noted_once_for_all_groups_with_its_block_size() -> None:
    notes = taker(lambda key: True, 10, count=3)
    assert notes.take(prompt(range(4)), 0, 5) == 2
    assert count_of(notes) == 2
    assert notes.take(prompt(range(4)), 2, 5) == 2
    assert notes.take(prompt(range(4)), 2, 100) == 4  # not all computed tokens have a hash
    assert notes.take(prompt(range(4)), 0, 8) == 4
    assert count_of(notes) == 4
    assert notes.get(key(1, 0)) is notes.get(key(1, 2)) is not None


def test_a_note_is_kept_while_the_device_holds_its_block() -> None:
    """A lazy store may happen long after the block's request has ended."""
    on_device = {key(number) for number in range(0, 12, 2)}
    notes = taker(on_device.__contains__, 12)
    for start in range(0, 1000, 10):
        notes.take(prompt(range(start, start + 10)), 0, 20)
        assert count_of(notes) <= 24
    assert all(notes.get(key) is not None for key in on_device)
    on_device.clear()
    notes.take(prompt(range(2000, 2040)), 0, 80)
    assert count_of(notes) == 12


def test_a_note_is_kept_while_one_of_its_groups_holds_the_block() -> None:
    on_device = {key(3, 1)}
    notes = taker(on_device.__contains__, 4, count=2)
    notes.take(prompt(range(40)), 0, 80)
    assert notes.get(key(3, 0)) is not None
    assert notes.get(key(4, 0)) is None


def test_events_are_made_only_if_the_engine_publishes_events() -> None:
    off, on = (SimpleNamespace(enable_kv_cache_events=value) for value in (False, True))
    configs: list[Any] = [SimpleNamespace(kv_events_config=events) for events in (None, off, on)]
    assert list(map(publishes_events, configs)) == [False, False, True]


# -- tiers ----------------------------------------------------------------------------------------------------------


def tiers(
    kept: Mapping[Tier, KeptNotes] | None = None, is_adopting: Callable[[Tier], bool] = lambda tier: False
) -> tuple[TierEvents, dict[Tier, KeyIndex], tuple[BlockKey, ...]]:
    known, indexes = groups(), {tier: KeyIndex() for tier in (Tier.HOST, Tier.DISK, Tier.REMOTE)}
    device = SimpleNamespace(block_of=lambda key: None)
    large, small = KeyMaker(known.hash_ratios, known.ids).keys(request().block_hashes, 0)
    made = TierEvents(known, indexes, WIRE, device, removed, kept, is_adopting)  # type: ignore[arg-type]
    return made, indexes, large + small


def removed(name: str, error: Exception) -> None:
    raise AssertionError(f"{name} was removed") from error


def test_each_tier_publishes_its_stored_and_removed_blocks() -> None:
    published, indexes, keys = tiers()
    published.notes.take(request(), 0, 8)
    assert list(published.take()) == []
    for index in indexes.values():
        index.add(keys[:1], [SlotId(0)])
    indexes[Tier.HOST].remove(keys[:1])
    found = [(kind, fields["medium"], fields["locality"]) for kind, fields in published.take()]
    assert found == [
        ("removed", "CPU", "LOCAL"),
        ("stored", "STORAGE", "LOCAL"),
        ("stored", "STORAGE", "REMOTE"),
    ]


def test_a_block_stored_before_its_note_is_published_when_the_note_is_made() -> None:
    """The block is on the disk or in the remote tier, but this engine has not computed it yet."""
    published, indexes, keys = tiers()
    disk, remote = indexes[Tier.DISK], indexes[Tier.REMOTE]
    for index in (disk, remote):
        index.add(keys[:3], [SlotId(0), SlotId(1), SlotId(2)])
    assert list(published.take()) == []
    remote.remove(keys[:1])
    for index in (disk, remote):
        index.remove(keys[2:3])
    assert list(published.take()) == []
    published.notes.take(request(), 0, 8)
    found = [(fields["block_hashes"], fields["locality"]) for _, fields in published.take()]
    assert found == [(["01"], "LOCAL"), (["03"], "LOCAL"), (["03"], "REMOTE")]
    assert (list(published.take()), published.notes.awaited) == ([], {})


def test_the_note_of_a_block_on_the_host_is_kept() -> None:
    published, indexes, keys = tiers()
    indexes[Tier.HOST].add(keys[:1], [SlotId(0)])
    assert [published.notes._is_held(key) for key in keys[:2]] == [True, False]


@pytest.mark.parametrize("raises", ["note", "take"])
def test_after_an_error_there_are_no_events_and_changes_are_not_collected(raises: str) -> None:
    published, indexes, keys = tiers()
    failures: list[str] = []
    published._on_removed = lambda name, error: failures.append(f"{name}: {error}")
    broken = request(block_hashes=None) if raises == "note" else request()
    if raises == "take":
        published.notes.by_ratio.clear()
        indexes[Tier.HOST].add(keys[:1], [SlotId(0)])
    assert published.note(broken, 0, 8) in (0, 4)
    assert list(published.take()) == []
    assert [failure.partition(":")[0] for failure in failures] == ["TierEvents"]
    indexes[Tier.HOST].add(keys[1:2], [SlotId(1)])
    assert published.note(request(), 0, 8) == 0
    assert list(published.take()) == []
    assert len(failures) == 1
    assert indexes[Tier.HOST]._changes is None


# -- host memory that outlives its engine ------------------------------------------------------------------------------


FINDS = [Tier.HOST, Tier.DISK]


def kept_notes(tier: Tier, root: Path, slots: int = 16) -> dict[Tier, KeptNotes]:
    kept = KeptNotes(8) if tier is Tier.HOST else DiskNotes(8)
    with open_root(root) as folder:
        kept.open(folder, slots)
    return {tier: kept}


def leave(tier: Tier, kept: Mapping[Tier, KeptNotes], root: Path) -> None:
    """Do what the disk's catalog does now and then."""
    if isinstance(notes := kept[tier], DiskNotes):
        with open_root(root) as folder:
            notes.flush(folder)


def _said(event: Any) -> tuple[Any, ...]:
    _, fields = event
    return fields["group_idx"], fields["block_hashes"], fields["token_ids"]


@pytest.mark.parametrize("tier", FINDS)
def test_adopted_blocks_are_announced_after_the_last_one_parents_first(
    shared_memory: Path, tier: Tier
) -> None:
    kept = kept_notes(tier, shared_memory)
    published, indexes, keys = tiers(kept)
    published.notes.take(request(), 0, 8)
    slots = [*map(SlotId, range(len(keys)))]
    indexes[tier].add(keys, slots)
    before = list(published.take())
    leave(tier, kept, shared_memory)
    adopting = [True]
    published, indexes, _ = tiers(kept_notes(tier, shared_memory, 32), lambda _: adopting[0])
    for place in reversed(range(len(keys))):  # the deepest is the least recently used, and is adopted first
        indexes[tier].add(keys[place : place + 1], slots[place : place + 1])
        assert list(published.take()) == []
    adopting.clear()
    adopting.append(False)
    after = list(published.take())
    assert sorted(map(_said, after)) == sorted(map(_said, before))
    known: set[tuple[int, str]] = set()
    for kind, fields in after:
        parent = fields["parent_block_hash"]
        assert kind == "stored"
        assert parent is None or (fields["group_idx"], parent) in known
        known.update((fields["group_idx"], one) for one in fields["block_hashes"])
    indexes[tier].remove(keys[:1])
    assert [kind for kind, _ in published.take()] == ["removed"]
    assert (list(published.take()), published.notes.awaited) == ([], {})


@pytest.mark.parametrize("tier", FINDS)
def test_a_million_adopted_blocks_give_the_garbage_collector_no_million_sets(
    shared_memory: Path, tier: Tier
) -> None:
    published, indexes, keys = tiers(kept_notes(tier, shared_memory), lambda _: True)
    indexes[tier].add(keys, [*map(SlotId, range(len(keys)))])
    assert list(published.take()) == []
    assert len(published.notes.awaited) == len(keys) > 1
    assert len({id(awaited) for awaited in published.notes.awaited.values()}) == 1


@pytest.mark.parametrize("tier", FINDS)
def test_an_adopted_block_that_leaves_before_it_is_announced_is_never_mentioned(
    shared_memory: Path, tier: Tier
) -> None:
    kept = kept_notes(tier, shared_memory)
    published, indexes, keys = tiers(kept)
    published.notes.take(request(), 0, 8)
    slots = [*map(SlotId, range(len(keys)))]
    indexes[tier].add(keys, slots)
    published.take()
    leave(tier, kept, shared_memory)
    adopting = [True]
    published, indexes, _ = tiers(kept_notes(tier, shared_memory), lambda _: bool(adopting))
    indexes[tier].add(keys, slots)
    assert list(published.take()) == []
    indexes[tier].remove(keys[1:])
    adopting.clear()
    assert [_said(event)[:2] for event in published.take()] == [(0, [keys[0][:1].hex()])]
    assert published.notes.awaited == {}


@pytest.mark.parametrize("tier", FINDS)
def test_a_slot_whose_note_is_of_another_block_is_announced_with_its_first_use(
    shared_memory: Path, tier: Tier
) -> None:
    kept = kept_notes(tier, shared_memory)
    published, indexes, keys = tiers(kept)
    published.notes.take(request(), 0, 8)
    indexes[tier].add(keys[:1], [SlotId(3)])
    published.take()
    leave(tier, kept, shared_memory)
    published, indexes, _ = tiers(kept_notes(tier, shared_memory))
    indexes[tier].add(keys[1:2], [SlotId(3)])
    assert list(published.take()) == []
    published.notes.take(request(), 0, 8)
    assert [kind for kind, _ in published.take()] == ["stored"]


@pytest.mark.parametrize("tier", FINDS)
def test_a_file_of_notes_that_cannot_be_made_costs_only_early_announcements(
    tmp_path: Path, tier: Tier
) -> None:
    (tmp_path / "notes").mkdir()
    published, indexes, keys = tiers(kept_notes(tier, tmp_path))
    published.notes.take(request(), 0, 8)
    indexes[tier].add(keys[:1], [SlotId(0)])
    assert [kind for kind, _ in published.take()] == ["stored"]
