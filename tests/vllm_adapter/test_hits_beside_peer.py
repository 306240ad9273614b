"""Hits, counted as vLLM takes them, beside those of vLLM's own connector: same requests, same room on the host."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_adapter.engine_rig import DEVICE_BLOCKS, MARKS, SLOT_BYTES, Held, offloading
from tests.vllm_stock import checkpoints, engines

pytestmark = MARKS

SEEDS = (1, 2, 3)
HOST_BLOCKS = (12, 32, 64, 128, 512)
CONVERSATIONS = 10
WAVES = 8
AT_ONCE = 5


@dataclass
class Counted:
    """An engine whose connector's hits are added up where the scheduler takes them."""

    llm: Any
    tokens: int = 0

    def __post_init__(self) -> None:
        connector = engines.scheduler_of(self.llm).connector
        allocated = connector.update_state_after_alloc

        def counting(request: Any, blocks: Any, external_tokens: int) -> None:
            self.tokens += external_tokens
            allocated(request, blocks, external_tokens)

        connector.update_state_after_alloc = counting

    def hits(self, seeds: Sequence[int]) -> int:
        """The tokens that came from the host, each seed's workload on empty caches."""
        self.tokens = 0
        for seed in seeds:
            for wave in waves(seed):
                engines.generate(self.llm, wave, 4)
                engines.drain(self.llm)
            assert engines.scheduler_of(self.llm).reset_prefix_cache(reset_connector=True)
        return self.tokens


def waves(seed: int) -> Iterator[list[list[int]]]:
    """Conversations that grow from turn to turn, a few of them at once; half share their beginning."""
    draw = random.Random(seed)
    shared = [draw.randrange(256) for _ in range(96)]
    stories = [list(shared) if number % 2 else [] for number in range(CONVERSATIONS)]
    for _ in range(WAVES):
        asked = draw.sample(stories, AT_ONCE)
        for story in asked:
            story += [draw.randrange(256) for _ in range(draw.randrange(24, 90))]
        yield [list(story) for story in asked]


@contextmanager
def ours(kind: checkpoints.Kind, folder: Path, host_blocks: int, policy: str) -> Iterator[Counted]:
    """Copies end when they are submitted, as the peer's do here, so that counts do not hang on the machine."""
    with offloading(kind, folder, host_blocks, held=Held(), extra={"store_policy": policy}) as rig:
        yield Counted(rig.llm)


@contextmanager
def peers(kind: checkpoints.Kind, folder: Path, host_blocks: int, policy: str) -> Iterator[Counted]:
    from tests.vllm_stock import peer

    transfer = peer.kv_transfer(host_blocks * SLOT_BYTES, lazy=policy == "lazy", inline=True)
    checkpoint = checkpoints.make(kind, folder / kind)
    options = {"num_gpu_blocks_override": DEVICE_BLOCKS[kind], "kv_transfer_config": transfer}
    with engines.in_process(checkpoint, **options) as llm:
        yield Counted(llm)


def side_by_side(
    kind: checkpoints.Kind, folder: Path, policy: str, sizes: Sequence[int]
) -> Mapping[int, tuple[int, int]]:
    """By host size: our hits and the peer's."""
    table = {}
    for size in sizes:
        with ours(kind, folder, size, policy) as mine:
            hits = mine.hits(SEEDS)
        with peers(kind, folder, size, policy) as other:
            table[size] = (hits, other.hits(SEEDS))
    return table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "checkpoints"


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_eager_hits_are_at_least_the_peers(kind: checkpoints.Kind, folder: Path) -> None:
    table = side_by_side(kind, folder, "eager", HOST_BLOCKS)
    # Summed over the host sizes: on pools of a few dozen blocks single sizes may lose by a few blocks.
    assert sum(mine for mine, _ in table.values()) >= sum(other for _, other in table.values()), table
    assert table[HOST_BLOCKS[-1]][1] > 0


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_lazy_hits_where_the_peers_lazy_mode_has_none(kind: checkpoints.Kind, folder: Path) -> None:
    table = side_by_side(kind, folder, "lazy", HOST_BLOCKS[2:])
    assert all(mine >= other for mine, other in table.values()), table
    assert all(mine > 0 for mine, _ in table.values()), table
