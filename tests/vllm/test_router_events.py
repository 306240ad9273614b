"""Tests a stock engine's events as a router uses them: to build a tree of blocks, by medium and group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.remote.servers import Bucket
from tests.vllm.engine_rig import MARKS, Asked, Rig, offloading, prompt
from tests.vllm.stock import checkpoints

if TYPE_CHECKING:
    import pytest

pytestmark = MARKS


@contextmanager
def publishing(
    kind: checkpoints.Kind, folder: Path, host_blocks: int, **options: Any
) -> Iterator[tuple[Rig, list[Any]]]:
    """Run an engine during the `with` block. The yielded list receives the batches of events that it
    publishes.
    """
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with offloading(kind, folder, host_blocks, kv_events_config=events, **options) as rig:
        batches: list[Any] = []
        with patch.object(rig.scheduler.kv_event_publisher, "publish", side_effect=batches.append):
            yield rig, batches


class Router:
    """Follows the events about blocks on the host. Like a radix tree, it accepts only blocks whose parent it
    has.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, Any], Any] = {}
        self.orphans: list[Any] = []

    def hear(self, batches: Sequence[Any]) -> None:
        for event in (event for batch in batches for event in batch.events if event.medium == "CPU"):
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


def stored_on_host(batch: Any) -> list[Any]:
    return [one for one in batch.events if one.medium == "CPU" and type(one).__name__ == "BlockStored"]


def test_a_router_accepts_every_published_block(folder: Path) -> None:
    """With eager stores and room for all blocks, each block is published after its parent, with its group."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    with publishing("gemma3", folder, 512) as (rig, batches):
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
            for batch in batches
            for event in batch.events
            if event.medium == "GPU"
            and type(event).__name__ == "BlockStored"
            and len(event.block_hashes) == 1
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


def test_lazy_stores_are_published_in_full(folder: Path) -> None:
    """With the lazy policy, a block may be stored long after its request has ended."""
    options: dict[str, Any] = {"num_gpu_blocks_override": 96, "max_num_batched_tokens": 64}
    with publishing("qwen3", folder, 64, extra={"store_policy": "lazy"}, **options) as (rig, batches):
        prompts = [prompt(number) for number in range(24)]
        for number, one in enumerate(prompts):
            rig.run({f"r{number}": Asked(one, 1)})
        heads = {one[:32] for one in prompts}
        for stored in map(stored_on_host, batches):
            hashes = [event.block_hashes[0] for event in stored]
            for number, event in enumerate(stored):
                assert len(event.token_ids) == 32
                assert (event.parent_block_hash is None) == (tuple(event.token_ids) in heads)
                assert event.parent_block_hash not in hashes[number:]
        assert sum(len(stored_on_host(batch)) for batch in batches) > 40
        notes = rig.connector.tier_events.notes.by_ratio
        assert sum(map(len, notes.values())) < 2 * 95
        rig.check_clean()


def reported(batches: Sequence[Any], medium: str, locality: str) -> list[Any]:
    events = [one for batch in batches for one in batch.events if type(one).__name__ != "AllBlocksCleared"]
    return [one for one in events if (one.medium, one.locality) == (medium, locality)]


def test_blocks_on_lower_tiers_are_published_with_their_medium(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are found again are written to the disk and to the remote tier. Resetting both caches removes
    them.
    """
    (bucket_folder := tmp_path / "bucket").mkdir()
    server = Bucket(bucket_folder)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    extra = {
        "disk_path": str(tmp_path / "disk"),
        "disk_bytes": 2**24,
        "weights_id": "events",
        "remote_url": server.url,
        "remote_timeout_s": 10.0,
    }
    try:
        with publishing("qwen3", folder, 64, extra=extra) as (rig, batches):
            state = rig.side.core.state
            while not (
                all(tier.is_usable for tier in state.tiers)
                and rig.side.gauges()["kvoffload_capacity_slots"]["host",]
            ):
                rig.run({"warm": Asked((1, 2, 3), 1)})
            batches.clear()
            asked = Asked(prompt(1), 4)
            for number in range(3):
                assert rig.scheduler.reset_prefix_cache()
                rig.run({f"r{number}": asked})
            places = [("CPU", "LOCAL"), ("STORAGE", "LOCAL"), ("STORAGE", "REMOTE")]
            stored = {
                place: {one.block_hashes[0]: one for one in reported(batches, *place)} for place in places
            }
            on_host = stored["CPU", "LOCAL"]
            assert len(on_host) == 8
            for place in places[1:]:
                assert stored[place].keys() == on_host.keys()
                for block_hash, one in stored[place].items():
                    mine = on_host[block_hash]
                    assert (one.token_ids, one.parent_block_hash) == (mine.token_ids, mine.parent_block_hash)
            batches.clear()
            assert rig.scheduler.reset_prefix_cache(reset_connector=True)
            rig.run({"after": Asked(prompt(2), 1)})
            for place in places:
                gone = [one for one in reported(batches, *place) if type(one).__name__ == "BlockRemoved"]
                assert {each for one in gone for each in one.block_hashes} == on_host.keys()
    finally:
        server.close()
