"""Compares our hits with those of vLLM's own connector, for the same requests and the same host memory.

Both connectors copy inside the hook that starts the copy, so that the counts are reproducible. Each test uses
several host sizes. With the sizes in `FEWER` our connector may have fewer hits than the peer:

* A host smaller than the device's cache helps only with blocks that the device has evicted. Our host evicts
  in the order of use (R15), hits on the device count as uses, and evicted blocks of running requests are
  stored again (R8), so it has the same blocks as the device. The peer evicts in the order of storing, so its
  host has fewer blocks in common with the device. On a larger host, our order finds more blocks.
* If memory is large enough, both connectors save every token that can be saved. The more of these tokens the
  device finds itself, the fewer hits are left for the host.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from kvoffload.model.wire import DeviceJob
from kvoffload.transfer.ports import Fence
from kvoffload.transfer.pump import TransferPump
from tests.vllm.engine_rig import DEVICE_BLOCKS, MARKS, SLOT_BYTES, Held, offloading
from tests.vllm.stock import checkpoints, engines

pytestmark = [*MARKS, pytest.mark.full]

SEEDS = (1, 2, 3)
HOST_BLOCKS: Mapping[checkpoints.Kind, Sequence[int]] = {
    "qwen3": (32, 48, 64, 128),
    "gemma3": (32, 64, 96, 128, 512),
}
FEWER = {("qwen3", 32): 0.95, ("gemma3", 512): 1.0}
"""For these sizes our connector may have fewer hits, but must save this share of the tokens that the peer
saves.
"""
CONVERSATIONS = 10
WAVES = 8
AT_ONCE = 5


class Saved(NamedTuple):
    """How many prompt tokens were not computed: `hits` came from the host, `tokens` from host and device
    together.
    """

    hits: int
    tokens: int


@dataclass
class Counted:
    """An engine that counts the tokens its connector loads."""

    llm: Any
    hits: int = 0

    def __post_init__(self) -> None:
        connector = engines.scheduler_of(self.llm).connector
        allocated = connector.update_state_after_alloc

        def counting(request: Any, blocks: Any, external_tokens: int) -> None:
            self.hits += external_tokens
            allocated(request, blocks, external_tokens)

        connector.update_state_after_alloc = counting

    def saved(self, seeds: Sequence[int]) -> Saved:
        """Return the tokens saved in the workloads of these seeds. Each workload begins with empty caches."""
        # Run one request first: by the time it finishes, host memory is ready.
        self._run([[1] * engines.BLOCK])
        self._forget()
        self.hits = tokens = 0
        for seed in seeds:
            tokens += sum(map(self._run, waves(seed)))
            self._forget()
        return Saved(self.hits, tokens)

    def _run(self, wave: Sequence[Sequence[int]]) -> int:
        answers = engines.generate(self.llm, wave, 4)
        engines.drain(self.llm)
        return sum(answer.cached for answer in answers)

    def _forget(self) -> None:
        assert engines.scheduler_of(self.llm).reset_prefix_cache(reset_connector=True)


def waves(seed: int) -> Iterator[list[list[int]]]:
    """Yield waves of prompts from growing conversations. Half of the conversations share a prefix."""
    draw = random.Random(seed)
    shared = [draw.randrange(256) for _ in range(96)]
    stories = [list(shared) if number % 2 else [] for number in range(CONVERSATIONS)]
    for _ in range(WAVES):
        asked = draw.sample(stories, AT_ONCE)
        for story in asked:
            story += [draw.randrange(256) for _ in range(draw.randrange(24, 90))]
        yield [list(story) for story in asked]


class OneThread(TransferPump):
    """Runs the transfer coroutine's work in the hooks, and never wakes the coroutine."""

    def submit_stores(self, jobs: Sequence[DeviceJob]) -> None:
        self._sleeper.wake = lambda: True  # type: ignore[method-assign]
        super().submit_stores(jobs)
        self._turn()

    def submit_loads(self, jobs: Sequence[DeviceJob], fence: Fence = None) -> None:
        self._sleeper.wake = lambda: True  # type: ignore[method-assign]
        super().submit_loads(jobs, fence)


Connector = Callable[[checkpoints.Kind, Path, int, str, int | None], AbstractContextManager[Counted]]


@contextmanager
def ours(
    kind: checkpoints.Kind, folder: Path, host_blocks: int, policy: str, unit: int | None
) -> Iterator[Counted]:
    extra = {"store_policy": policy} | ({"min_load_tokens": 1} if unit else {})
    with (
        patch("kvoffload.runtime.worker_side.TransferPump", OneThread),
        offloading(kind, folder, host_blocks, held=Held(), extra=extra, prefix_match_unit=unit) as rig,
    ):
        yield Counted(rig.llm)


@contextmanager
def peers(
    kind: checkpoints.Kind, folder: Path, host_blocks: int, policy: str, unit: int | None
) -> Iterator[Counted]:
    from tests.vllm.stock import peer

    transfer = peer.kv_transfer(host_blocks * SLOT_BYTES, lazy=policy == "lazy", inline=True)
    checkpoint = checkpoints.make(kind, folder / kind)
    options = {
        "num_gpu_blocks_override": DEVICE_BLOCKS[kind],
        "kv_transfer_config": transfer,
        "prefix_match_unit": unit,
    }
    with engines.in_process(checkpoint, **options) as llm:
        yield Counted(llm)


@cache
def saved(
    whose: Connector,
    kind: checkpoints.Kind,
    folder: Path,
    size: int,
    policy: str,
    unit: int | None = None,
) -> Saved:
    """Return the tokens saved by an engine with this connector, and with hashes of `unit` tokens."""
    with whose(kind, folder, size, policy, unit) as counted:
        return counted.saved(SEEDS)


def side_by_side(
    kind: checkpoints.Kind, folder: Path, policy: str, sizes: Sequence[int], unit: int | None = None
) -> Mapping[int, tuple[Saved, Saved]]:
    return {
        size: (saved(ours, kind, folder, size, policy, unit), saved(peers, kind, folder, size, policy, unit))
        for size in sizes
    }


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_our_eager_hits_are_at_least_the_peers(kind: checkpoints.Kind, folder: Path) -> None:
    table = side_by_side(kind, folder, "eager", HOST_BLOCKS[kind])
    fewer = {size for size, (mine, other) in table.items() if mine.hits < other.hits}
    assert fewer <= {size for named, size in FEWER if named == kind}, table
    for size in fewer:
        mine, other = table[size]
        assert mine.tokens >= FEWER[kind, size] * other.tokens, table
    assert sum(mine.hits for mine, _ in table.values()) >= sum(other.hits for _, other in table.values())
    assert all(other.hits > 0 for size, (_, other) in table.items() if size >= DEVICE_BLOCKS[kind]), table


@pytest.mark.parametrize("ends_inside", [False, True])
@pytest.mark.parametrize(
    ("kind", "policy", "size", "unit"),
    [
        ("lfm2", "eager", 96, 16),
        ("lfm2", "eager", 256, 16),
        ("lfm2", "lazy", 256, 16),
        ("granite4", "eager", 256, 16),
        ("granite4", "lazy", 256, 32),
        ("qwen3_next", "eager", 96, 32),
    ],
)
def test_our_hits_with_recurrent_layers_are_at_least_the_peers(
    kind: checkpoints.Kind, policy: str, size: int, unit: int, ends_inside: bool, folder: Path
) -> None:
    """A hit needs a state, which has one block in each recurrent group. With hashes of `unit` tokens, it may end inside a block."""
    mine, other = side_by_side(kind, folder, policy, (size,), unit if ends_inside else None)[size]
    assert ends_inside or other.hits > 0
    assert mine.hits >= other.hits, (mine, other)
    assert mine.tokens >= other.tokens, (mine, other)


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_our_lazy_hits_are_at_least_the_peers(kind: checkpoints.Kind, folder: Path) -> None:
    table = side_by_side(kind, folder, "lazy", (64, 128, 512))
    assert all(mine.hits >= other.hits for mine, other in table.values()), table
    assert all(mine.hits > 0 for mine, _ in table.values()), table


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_on_a_host_smaller_than_the_device_our_lazy_policy_saves_more_than_any_eager_one(
    kind: checkpoints.Kind, folder: Path
) -> None:
    size = {"qwen3": 32, "gemma3": 64}[kind]
    assert size < DEVICE_BLOCKS[kind]
    eager = side_by_side(kind, folder, "eager", (size,))[size]
    lazy = saved(ours, kind, folder, size, "lazy")
    assert all(lazy.hits > other.hits and lazy.tokens > other.tokens for other in eager), (lazy, eager)
