from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvoffload.model.wire import Direction
from kvoffload.runtime import remote_catalog
from kvoffload.telemetry.catalogue import TierState
from tests.captured_logs import capture_logs
from tests.reference.rig import BLOCK, text
from tests.remote import sharing
from tests.remote.sharing import PROMPT, StartEngine

OTHER = text(2, 10 * BLOCK)


@pytest.mark.parametrize(("kind", "ranks"), [("full", 2), ("sliding_window", 1)])
def test_r18_the_second_engine_finds_the_first_ones_blocks(
    start: StartEngine, url: str, kind: str, ranks: int
) -> None:
    identity = f"{url} {kind}"
    first = start(url, kind, ranks=ranks, weights_id=identity).opened()
    first.share()
    second = start(url, kind, ranks=ranks, weights_id=identity).opened()
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
