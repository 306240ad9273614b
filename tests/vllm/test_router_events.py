"""Tests a stock engine's events as a router uses them: to build a tree of blocks, by medium and group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.remote.servers import Bucket
from tests.vllm.engine_rig import MARKS, PUBLISHING, Asked, offloading, prompt
from tests.vllm.stock import checkpoints
from tests.vllm.tiers_rig import living

pytestmark = MARKS


class Router:
    """Follows the events about blocks on the host, or another medium. Like a radix tree, it accepts only blocks whose parent it
    has.
    """

    def __init__(self, medium: str = "CPU") -> None:
        self.medium = medium
        self.known: dict[tuple[int, Any], Any] = {}
        self.orphans: list[Any] = []

    def hear(self, batches: Sequence[Any]) -> None:
        for event in (event for batch in batches for event in batch.events if event.medium == self.medium):
            if type(event).__name__ == "BlockStored":
                self._stored(event)
            else:
                for block_hash in event.block_hashes:
                    self.known.pop((event.group_idx, block_hash), None)

    def _stored(self, event: Any) -> None:
        (block_hash,) = event.block_hashes
        if event.parent_block_hash is None or (event.group_idx, event.parent_block_hash) in self.known:
            self.known[event.group_idx, block_hash] = event
        else:
            self.orphans.append(event)


def events(batches: Sequence[Any], name: str, medium: str, locality: str | None = None) -> list[Any]:
    """Return the events with this name and medium and, if it is given, this locality."""
    return [
        event
        for event in (event for batch in batches for event in batch.events)
        if type(event).__name__ == name and event.medium == medium and locality in (None, event.locality)
    ]


def test_a_router_accepts_every_published_block(folder: Path) -> None:
    """With eager stores and room for all blocks, each block is published after its parent, with its group."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    with offloading("gemma3", folder, 512, **PUBLISHING) as rig, rig.published() as batches:
        asked = {f"r{number}": Asked(prompt(number), 40, "pepper") for number in range(3)}
        rig.run(asked)
        router = Router()
        router.hear(batches)
        pool = rig.side.core.state.pool
        on_host = {
            (int.from_bytes(key[-4:], "big"), maybe_convert_block_hash(key[:-4])) for key in pool.index
        }
        windows = [orphan for orphan in router.orphans if orphan.kv_cache_spec_sliding_window is not None]
        assert router.orphans == windows  # vLLM hashes only those window blocks that a hit can need
        assert {*router.known, *((one.group_idx, one.block_hashes[0]) for one in windows)} == on_host
        theirs = {
            (event.group_idx, event.block_hashes[0]): event
            for event in events(batches, "BlockStored", "GPU")
            if len(event.block_hashes) == 1
        }
        both = router.known.keys() & theirs.keys()
        assert both
        for place in both:
            mine, other = router.known[place], theirs[place]
            assert {
                name for name in other.__struct_fields__ if getattr(mine, name) != getattr(other, name)
            } <= {"medium", "locality"}
        roots = [event for event in router.known.values() if event.parent_block_hash is None]
        assert {event.extra_keys[0] for event in roots} == {("pepper",)}
        kinds = {
            (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
            for event in (*router.known.values(), *router.orphans)
        }
        assert kinds == {("full_attention", None), ("sliding_window", checkpoints.WINDOW)}


def test_lazy_stores_and_evictions_are_published(folder: Path) -> None:
    """With the lazy policy, a block may be stored long after its request has ended."""
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 96,
        "max_num_batched_tokens": 64,
        "extra": {"store_policy": "lazy"},
    }
    with offloading("qwen3", folder, 64, **options, **PUBLISHING) as rig, rig.published() as batches:
        prompts = [prompt(number) for number in range(24)]
        for number, one in enumerate(prompts):
            rig.run({f"r{number}": Asked(one, 1)})
        heads, seen = {one[:32] for one in prompts}, set[Any]()
        for batch in batches:
            stored = events([batch], "BlockStored", "CPU")
            hashes = [event.block_hashes[0] for event in stored]
            seen.update(hashes)
            for number, event in enumerate(stored):
                assert len(event.token_ids) == 32
                assert (event.parent_block_hash is None) == (tuple(event.token_ids) in heads)
                assert event.parent_block_hash not in hashes[number:]
        assert len(seen) > 64
        removed = {each for event in events(batches, "BlockRemoved", "CPU") for each in event.block_hashes}
        assert removed
        assert removed <= seen
        notes = rig.connector.tier_events.notes.by_ratio
        assert sum(map(len, notes.values())) < 2 * 95
        rig.check_clean()


def test_blocks_on_lower_tiers_are_published_with_their_medium(bucket: Bucket, tmp_path: Path) -> None:
    """Blocks that are found again are written to the disk and to the remote tier. Resetting both caches removes
    them.
    """
    disk = {"disk_path": str(tmp_path / "disk"), "disk_bytes": 2**24}
    places = [("CPU", "LOCAL"), ("STORAGE", "LOCAL"), ("STORAGE", "REMOTE")]
    with (
        living("qwen3", tmp_path, bucket.url, extra=disk, **PUBLISHING) as life,
        life.rig.published() as batches,
    ):
        for _ in range(3):
            life.ask_without_device({"a": Asked(prompt(1), 4)})
        host, *lower = [
            {one.block_hashes[0]: one for one in events(batches, "BlockStored", *place)} for place in places
        ]
        assert len(host) == 8
        for stored in lower:
            assert stored.keys() == host.keys()
            for block_hash, one in stored.items():
                mine = host[block_hash]
                assert (one.token_ids, one.parent_block_hash) == (mine.token_ids, mine.parent_block_hash)
        batches.clear()
        life.rig.forget()
        life.ask({"after": Asked(prompt(2), 1)})
        for place in places:
            gone = events(batches, "BlockRemoved", *place)
            assert {each for one in gone for each in one.block_hashes} == host.keys()
