"""Stock vLLMs that share a real store: each other's prefixes with the same answers, and nothing of other weights."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvoffload.model.causes import TierOutcome
from kvoffload.model.events import TierCopyEnded
from kvoffload.model.transfer import Direction, Tier
from tests.remote.servers import Bucket
from tests.vllm_adapter.engine_rig import MARKS, Asked, Reported, Rig, check_same, offloading
from tests.vllm_stock import checkpoints, engines

pytestmark = MARKS

BLOCKS = 6
HOST_BLOCKS = 80
_CHANCE = random.Random(3)
PROMPT, OF_ADAPTER = (
    Asked(tuple(_CHANCE.choices(range(256), k=BLOCKS * engines.BLOCK + 9))) for _ in range(2)
)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (folder := tmp_path / "bucket").mkdir()
    server = Bucket(folder)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server.url
    server.close()


@dataclass
class Sharing:
    """An engine that has reached the store."""

    rig: Rig
    copies: list[TierCopyEnded]

    def copied(self, direction: Direction) -> int:
        assert all((copy.tier, copy.outcome) == (Tier.REMOTE, TierOutcome.DONE) for copy in self.copies)
        return sum(copy.blocks for copy in self.copies if copy.direction is direction)

    def ask(self, name: str, asked: Asked, **options: Any) -> Reported:
        """Ask for what the device does not have."""
        assert self.rig.scheduler.reset_prefix_cache()
        self.rig.ask(name, asked, **options)
        self.rig.finish()
        return self.rig.reported[name]


@contextmanager
def sharing(model: Path, folder: Path, url: str) -> Iterator[Sharing]:
    """An engine without a disk. For the weights it counts as begun now."""
    extra = {"remote_url": url, "remote_timeout_s": 10.0}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvoffload_vllm.kv_identity._process_began_ns", time.time_ns)
        patched.setattr("vllm.envs.VLLM_CACHE_ROOT", str(folder), raising=False)
        with offloading(
            "qwen3", folder, HOST_BLOCKS, extra=extra, checkpoint=model, enable_lora=True, max_lora_rank=8
        ) as rig:
            copies: list[TierCopyEnded] = []
            rig.side.bus.count(TierCopyEnded, copies.append)
            remote: Any = rig.side.core.state.remote
            while not remote.is_usable:
                rig.run({"first": Asked((1, 2, 3), 1)})
            yield Sharing(rig, copies)
            rig.check_clean()


def test_r18_a_fresh_engine_finds_the_first_ones_prefix_and_no_adapters_or_other_weights(
    url: str, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    model = checkpoints.make("qwen3", tmp_path / "qwen3")
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    checkpoints.make_adapter(tmp_path / "adapter", seed=0)
    with sharing(model, tmp_path, url) as first:
        expected = first.ask("n0", PROMPT)
        assert expected.cached == 0
        adapted = [first.ask(f"a{number}", OF_ADAPTER, lora_request=adapter) for number in range(3)]
        assert [each.cached for each in adapted] == [0, BLOCKS * engines.BLOCK, BLOCKS * engines.BLOCK]
        assert first.copied(Direction.STORE) == 0  # what was found again is the adapter's
        first.ask("n1", PROMPT)
        assert first.copied(Direction.STORE) == BLOCKS
    assert (tmp_path / "kvoffload" / "weights.json").exists()

    checkpoints.make_adapter(tmp_path / "adapter", seed=1)
    with sharing(model, tmp_path, url) as second:
        found = second.ask("n0", PROMPT)
        check_same({"n0": found}, {"n0": expected})
        assert (found.cached, second.copied(Direction.LOAD)) == (BLOCKS * engines.BLOCK, BLOCKS)
        assert second.ask("a0", OF_ADAPTER, lora_request=adapter).cached == 0

    others = checkpoints.make("qwen3", tmp_path / "others", seed=1)
    with sharing(others, tmp_path, url) as third:
        found = third.ask("n0", PROMPT)
        assert (found.cached, third.copied(Direction.LOAD)) == (0, 0)
        assert found.tokens != expected.tokens
