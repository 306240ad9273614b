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
    second.run()
    assert second.copied(Direction.LOAD) > 0
    assert second.tier is TierState.OPEN
    counted = second.offload.counters.snapshot()
    assert counted.count("kvoffload_tier_blocks_total", "remote", "load", "done") == second.copied(
        Direction.LOAD
    )
    assert counted.count("kvoffload_transfer_bytes_total", "remote", "load") > 0
    assert counted.count("kvoffload_transfer_bytes_total", "disk", "load") == 0
    assert counted.count("kvoffload_fetched_tokens_total", "remote") > 0
    assert counted.count("kvoffload_fetched_tokens_total", "disk") == 0
    assert counted.distributions["kvoffload_first_token_seconds"][("remote",)].samples == 1
    assert counted.count("kvoffload_load_blocks_total", "loaded") > 0


def test_r18_blocks_of_other_weights_or_ranks_are_not_found(start: StartEngine, url: str) -> None:
    start(url, weights_id="one").opened().share()
    for other in (start(url, weights_id="other"), start(url, ranks=2, weights_id="one")):
        other.opened().run()
        assert other.copied(Direction.LOAD) == 0


def test_r18_only_engines_with_the_same_tier_key_share_blocks(
    start: StartEngine, url: str, tmp_path: Path
) -> None:
    settings = [
        {"tier_key_file": str(key_file(tmp_path / name, name)), "weights_id": "keyed"} for name in "ab"
    ]
    start(url, **settings[0]).opened().share()
    second = start(url, **settings[0]).opened()
    second.run()
    assert second.copied(Direction.LOAD) > 0
    for other in (settings[1], {"weights_id": "keyed"}):
        engine = start(url, **other).opened()
        engine.run()
        assert engine.copied(Direction.LOAD) == 0


def key_file(path: Path, letter: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(letter * 32)
    return path


def keeping(lines: Sequence[dict[str, Any]]) -> int:
    return sum(line["event"] == "remote_generation_kept" for line in lines)


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
