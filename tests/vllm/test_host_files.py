"""Host memory in files, on a stock vLLM: what the next engine finds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvoffload.core.key_index import KeyIndex
from kvoffload.model.wire import Tier
from tests.vllm.engine_rig import MARKS, PUBLISHING, Asked, Reported, Rig, check_same, offloading, prompt
from tests.vllm.stock import checkpoints
from tests.vllm.test_router_events import Router
from tests.vllm.tiers_rig import CACHED, HOST_BLOCKS, KINDS, PROMPTS

pytestmark = MARKS


def wait_until_adopted(rig: Rig) -> None:
    """Serve requests until the host has all of its slots. The first step lets vLLM's KV be identified."""
    state = rig.side.state
    while state.growing:
        rig.run({"opens": Asked((1, 2, 3), 1)})


@pytest.mark.parametrize(("kind", "in_pool"), [*[(kind, False) for kind in KINDS], ("qwen3", True)])
def test_the_next_engine_finds_what_the_host_had(
    kind: checkpoints.Kind,
    in_pool: bool,
    shared_memory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr("kvoffload_vllm.kv_identity.process_began_ns", time.time_ns)
    extra = {"host_path": str(shared_memory)}
    if in_pool:
        extra["host_hugetlbfs"] = str(request.getfixturevalue("huge_pages"))
    answers: dict[str, Reported] = {}
    for life in range(2):
        with offloading(kind, tmp_path, HOST_BLOCKS[kind], extra=extra) as rig:
            wait_until_adopted(rig)
            found = rig.run(PROMPTS)
            if life:
                check_same(found, answers)
                assert {answer.cached for answer in found.values()} == {CACHED}
            answers = found
            rig.check_clean()


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_router_that_knows_only_the_next_engine_learns_what_it_adopted(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: Tier
) -> None:
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    monkeypatch.setattr("kvoffload_vllm.kv_identity.process_began_ns", time.time_ns)
    on_disk = {"disk_path": str(tmp_path / "disk"), "disk_bytes": "32MiB", "disk_min_hits": 0}
    extra = {"host_path": str(shared_memory)} if tier is Tier.HOST else on_disk
    settings: dict[str, Any] = {"extra": extra, **PUBLISHING}

    def index(rig: Rig) -> KeyIndex:
        state = rig.side.state
        return (state.pool if tier is Tier.HOST else state.by_name[tier].pool).index

    with offloading("qwen3", tmp_path, 512, **settings) as rig:
        wait_until_adopted(rig)
        rig.run({f"r{number}": Asked(prompt(number), 40) for number in range(3)})
        while len(index(rig)) < len(rig.side.state.pool.index):
            rig.run({"more": Asked((1, 2, 3), 1)})  # the disk gets what the host has in the engine's steps
        left = set(index(rig))
    with offloading("qwen3", tmp_path, 512, **settings) as rig, rig.published() as batches:
        wait_until_adopted(rig)
        while rig.side.catalogs[tier].is_restoring:
            rig.run({"opens": Asked((1, 2, 3), 1)})
        rig.run({"more": Asked((1, 2, 3), 4)})
        router = Router("CPU" if tier is Tier.HOST else "STORAGE")
        router.hear(batches)
        assert router.orphans == []
        assert left <= set(index(rig))
        assert {block_hash for _, block_hash in router.known} >= {
            maybe_convert_block_hash(key[:-4]) for key in left
        }
        roots = [event for event in router.known.values() if event.parent_block_hash is None]
        assert {event.token_ids[0] for event in roots} >= {prompt(number)[0] for number in range(3)}
