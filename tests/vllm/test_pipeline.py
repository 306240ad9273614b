"""Tests pipeline stages with tensor-parallel ranks. Ranks have different layers, so their parts of a block
have different sizes.

The scheduler runs in this process, and each rank runs in a separate process. Tokens are compared with
those of one rank without a connector. As a control, the host's bytes are corrupted on one rank, which must
change the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvoffload.model.ids import SlotId
from tests.vllm.engine_rig import MARKS, offloading, overwrite, plain
from tests.vllm.scenes import Scene, Stage, aborted, preempted, reloaded, requests_for
from tests.vllm.stock import checkpoints

pytestmark = MARKS

Result = TypeVar("Result")

MAX_MODEL_LEN = 384


@dataclass(frozen=True)
class Shape:
    """How an engine's layers are distributed.

    Args:
        layers: the number of layers in each pipeline stage.
        ranks: the number of tensor-parallel ranks in each stage.
        pages: for each stage, the number of a block's pages on a rank. Groups share memory, so this is
            the largest number of layers that one group has in the stage.
        kind: the kind of model.
    """

    layers: tuple[int, ...]
    ranks: int
    pages: tuple[int, ...]
    kind: checkpoints.Kind = "gemma3"

    def __str__(self) -> str:
        return f"{self.kind}-{'+'.join(map(str, self.layers))}x{self.ranks}"


# Gemma 3 has six layers: two with a sliding window, one with full attention, and the same again. LFM2 has
# eight: three short convolutions, one layer with full attention, and the same again. The ranks split the
# convolutions.
SHAPES = (Shape((4, 2), 2, (2, 1)), Shape((8,), 2, (2,), "lfm2"))


@dataclass
class Ranks(Stage):
    """An engine with several ranks, and the answers of an engine with one rank."""

    shape: Shape = SHAPES[0]

    def ask_each(self, question: Callable[[Any], Result]) -> list[Result]:
        """Call a function with each rank's worker, in the worker's process. Return the results in the order
        of ranks.
        """
        found: list[Result] = self.rig.core.model_executor.collective_rpc(question)
        return found

    def check_clean(self) -> None:
        """Check that no block is in use, no request is recorded, and no rank waits for a load."""
        self.rig.check_clean()
        assert self.ask_each(open_loads) == [0] * len(self.shape.layers) * self.shape.ranks


def open_loads(_: Any) -> int:
    return len(_our_worker()._loading)


def pages_of_a_block(_: Any) -> int:
    return len(_our_worker().offload.pump._arena.layout.regions)


def corrupt(worker: Any, rank: int) -> None:
    if worker.vllm_config.parallel_config.rank == rank:
        arena = _our_worker().offload.pump._arena
        for slot in range(arena.ready_slots):
            overwrite(arena, SlotId(slot))


def _our_worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def ranks(request: pytest.FixtureRequest, folder: Path) -> Iterator[Ranks]:
    shape: Shape = request.param
    asked = requests_for(shape.kind)
    with plain(shape.kind, folder, num_gpu_blocks_override=512, max_model_len=MAX_MODEL_LEN) as rig:
        expected = rig.run(asked)
    spread: dict[str, Any] = {
        "pipeline_parallel_size": len(shape.layers),
        "tensor_parallel_size": shape.ranks,
        "distributed_executor_backend": "mp",
        "num_gpu_blocks_override": 44,  # too few blocks for all requests together
        "max_model_len": MAX_MODEL_LEN,
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_PP_LAYER_PARTITION", ",".join(map(str, shape.layers)))
        cores = [str(rank % 2) for rank in range(len(shape.layers) * shape.ranks)]
        patched.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(cores))
        with offloading(shape.kind, folder, 512, **spread) as rig:
            yield Ranks(shape.kind, rig, asked, expected, shape=shape)


def test_each_rank_stores_the_layers_of_its_stage(ranks: Ranks) -> None:
    shape = ranks.shape
    found = ranks.ask_each(pages_of_a_block)
    assert found == [pages for pages in shape.pages for _ in range(shape.ranks)]
    assert ranks.rig.side.core.state.shape.ranks == len(found)
    assert ranks.rig.connector._progress._stages == len(shape.layers)


@pytest.mark.parametrize("scene", [reloaded, preempted, aborted], ids=lambda scene: scene.__name__)
def test_answers_from_the_host_equal_those_without_offloading(ranks: Ranks, scene: Scene) -> None:
    if scene is preempted and ranks.kind == "lfm2":
        pytest.skip("a request of LFM2 always needs two state blocks per group, so all requests fit")
    before = ranks.rig.counts
    assert not ranks.different(scene(ranks))
    ranks.check_clean()
    assert ranks.rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded") > 0


def test_wrong_bytes_on_any_rank_are_noticed(ranks: Ranks) -> None:
    for rank in range(len(ranks.shape.layers) * ranks.shape.ranks):
        ranks.put_on_host()
        ranks.ask_each(partial(corrupt, rank=rank))
        assert ranks.different(ranks.rig.run(ranks.requests)), rank
        ranks.rig.finish()
