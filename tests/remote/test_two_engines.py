from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvoffload.model.wire import Direction
from kvoffload.remote.address import parse_address
from kvoffload.remote.store import open_store
from kvoffload.remote.values import Shard
from kvoffload.runtime import remote_catalog
from kvoffload.telemetry.catalogue import TierState
from tests.captured_logs import capture_logs
from tests.reference.rig import BLOCK, text
from tests.remote import sharing
from tests.remote.servers import Mooncake
from tests.remote.sharing import PATIENCE_S, PROMPT, StartEngine

OTHER = text(2, 10 * BLOCK)
SNAPSHOTS = [
    "--enable_snapshot=true",
    "--enable_snapshot_restore=true",
    "--snapshot_interval_seconds=1",
    "--snapshot_object_store_type=local",
    "--snapshot_retention_count=1000",
    "--default_kv_lease_ttl=3600000",  # a restored master drops all objects whose lease has ended
]


@pytest.mark.parametrize(
    ("kind", "ranks", "replicas"), [("full", 2, 1), ("full", 2, 2), ("sliding_window", 1, 1)]
)
def test_r18_the_second_engine_finds_the_first_ones_blocks(
    start: StartEngine, url: str, kind: str, ranks: int, replicas: int
) -> None:
    identity = f"{url} {kind}"
    first = start(url, kind, ranks=ranks, replicas=replicas, weights_id=identity).opened()
    first.share()
    second = start(url, kind, ranks=ranks, replicas=replicas, weights_id=identity).opened()
    assert second.namespace == first.namespace
    second.find()
    assert second.tier is TierState.OPEN
    counted = second.offload.counters.snapshot()
    loaded = counted.count("kvoffload_tier_blocks_total", "remote", "load", "done")
    assert loaded == second.copied(Direction.LOAD)
    for name, labels in (("transfer_bytes", ("load",)), ("fetched_tokens", ())):
        assert counted.count(f"kvoffload_{name}_total", "remote", *labels) > 0
        assert counted.count(f"kvoffload_{name}_total", "disk", *labels) == 0
    assert counted.distributions["kvoffload_first_token_seconds"][("remote",)].samples == 1
    assert counted.count("kvoffload_load_blocks_total", "loaded") > 0


def test_a_prefix_of_more_than_a_quarter_of_the_host_is_found(
    start: StartEngine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "HOST_BLOCKS", 20)
    start(url, weights_id="long").opened().share()
    second = start(url, weights_id="long").opened()
    second.find()
    assert second.copied(Direction.LOAD) == 9


def test_r18_only_engines_with_the_same_weights_ranks_and_tier_key_share_blocks(
    start: StartEngine, url: str, tmp_path: Path
) -> None:
    for letter in "ab":
        (tmp_path / letter).touch(mode=0o600)
        (tmp_path / letter).write_text(letter * 32)
    key, other_key = ({"tier_key_file": str(tmp_path / letter)} for letter in "ab")
    start(url, weights_id="one", **key).opened().share()
    start(url, weights_id="one", **key).opened().find()
    for other in (
        start(url, weights_id="other", **key),
        start(url, ranks=2, weights_id="one", **key),
        start(url, weights_id="one", **other_key),
        start(url, weights_id="one"),
    ):
        other.opened().run()
        assert other.copied(Direction.LOAD) == 0


def keeping(lines: Sequence[dict[str, Any]]) -> int:
    return [line["event"] for line in lines].count("remote_generation_kept")


def test_r18_after_a_reset_only_the_engine_that_was_reset_loses_earlier_blocks(
    start: StartEngine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_catalog, "LOOK_PERIOD_S", 0.01)
    first, second, third = (start(url, weights_id="others").opened() for _ in range(3))
    first.share()
    shared = first.namespace
    with capture_logs() as lines:
        assert first.offload.reset()
        first.opened()
        second.step_until(lambda: keeping(lines) == 1)
        third.step_until(lambda: keeping(lines) == 2)
    second.run()
    # The second engine still finds blocks that the first engine wrote before its reset.
    assert second.copied(Direction.LOAD) > 0
    second.run(OTHER)
    second.run(OTHER)
    second.step_until(lambda: second.copied(Direction.STORE) > 0)
    third.run(OTHER)
    assert third.copied(Direction.LOAD) > 0
    assert {second.namespace, third.namespace} == {shared}
    late = start(url, weights_id="others").opened()  # this stands for a restart of the first engine
    for fresh in (first, late):
        for prompt in (PROMPT, OTHER):
            fresh.run(prompt)
        assert (fresh.namespace != shared, fresh.copied(Direction.LOAD)) == (True, 0)
    assert late.namespace != first.namespace


def test_r18_a_mooncake_master_restored_from_a_snapshot_does_not_undo_a_reset(
    start: StartEngine, own_mooncake: Callable[..., Mooncake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots, kept = tmp_path / "snapshots", tmp_path / "kept"
    monkeypatch.setenv("MOONCAKE_SNAPSHOT_LOCAL_PATH", str(snapshots))
    server = own_mooncake(*SNAPSHOTS)
    first, second = (start(server.url).opened() for _ in range(2))
    first.share()
    second.find()  # this gives the blocks a lease
    shared, state = first.namespace, second.offload.state.asked
    assert state is not None
    keys = [key for key, _ in state.pool.index.items() if key not in state.unconfirmed]
    assert keys
    latest = set[str]()

    def is_taken() -> bool:
        """Return whether two more snapshots have ended, so that the last one has begun after this test's reads."""
        latest.update(path.read_text() for path in snapshots.rglob("latest.txt"))
        return len(latest) == 3

    first.step_until(is_taken)
    shutil.copytree(snapshots, kept)
    assert first.offload.reset()
    for engine in (first, second):
        engine.engine.close()
    monkeypatch.setenv("MOONCAKE_SNAPSHOT_LOCAL_PATH", str(kept))
    server.master.kill()
    server.start_master()
    with closing(open_store(parse_address(server.url), PATIENCE_S)) as store:
        until = time.monotonic() + PATIENCE_S
        while not all(store.ask(Shard(shared, 0, 1), keys)):
            assert time.monotonic() < until, "the restored master has lost the blocks"
    late = start(server.url).opened()
    late.run()
    assert (late.namespace != shared, late.copied(Direction.LOAD)) == (True, 0)
