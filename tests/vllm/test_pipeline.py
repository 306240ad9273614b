"""Tests pipeline stages with tensor-parallel ranks. Ranks have different layers, so their parts of a block
have different sizes.

The scheduler runs in this process, and each rank runs in a separate process. Tokens are compared with
those of one rank without a connector. As a control, the host's bytes are corrupted on one rank, which must
change the tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import pytest

from kvoffload.model.ids import SlotId
from tests.conservation import conservation
from tests.core.audit import audit_side
from tests.vllm.engine_rig import (
    MARKS,
    Asked,
    Reported,
    Rig,
    check_same,
    offloading,
    plain,
    same,
)
from tests.vllm.stock import checkpoints, engines

pytestmark = MARKS

Result = TypeVar("Result")

MAX_MODEL_LEN = 384
DEVICE_BLOCKS = 44  # too few blocks for all requests together


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


def _requests() -> dict[str, Asked]:
    draw = random.Random(7)
    stem = [draw.randrange(256) for _ in range(160)]
    asked = {}
    for number in range(8):
        tail = [draw.randrange(256) for _ in range(draw.randrange(20, 100))]
        asked[f"r{number}"] = Asked(tuple(stem[: 32 * (number % 6)] + tail), 16)
    return asked


REQUESTS = _requests()


class Ranks:
    """An engine with several ranks, and the answers of an engine with one rank."""

    def __init__(self, rig: Rig, shape: Shape, expected: Mapping[str, Reported]) -> None:
        self.rig = rig
        self.shape = shape
        self.expected = expected

    def ask_each(self, question: Callable[[Any], Result]) -> list[Result]:
        """Call a function with each rank's worker, in the worker's process. Return the results in the order
        of ranks.
        """
        found: list[Result] = self.rig.core.model_executor.collective_rpc(question)
        return found

    def put_on_host(self) -> None:
        """Store the blocks of all requests on the host, and empty the device's cache."""
        self.rig.forget()
        check_same(self.rig.run(REQUESTS), self.expected)
        assert self.rig.scheduler.reset_prefix_cache()

    def check_clean(self) -> None:
        """Check that no block is in use, no request is recorded, and no rank waits for a load."""
        self.rig.finish()
        side = self.rig.side
        assert engines.held_blocks(self.rig.llm) == 0
        assert audit_side(side) == []
        assert conservation(self.rig.counts, drained=True) == []
        state = side.core.state
        assert state.degraded is None
        assert not state.jobs.open.values()
        assert not state.requests.live.values()
        assert self.ask_each(open_loads) == [0] * len(self.shape.layers) * self.shape.ranks


def open_loads(_: Any) -> int:
    return len(_our_worker()._loading)


def pages_of_a_block(_: Any) -> list[int]:
    arena = _our_worker().offload.pump._arena
    return [region.page_bytes for region in arena.layout.regions]


def corrupt(worker: Any, rank: int) -> None:
    """Overwrite the host memory of one rank with numbers near 1. The values of KV are near 0."""
    if worker.vllm_config.parallel_config.rank != rank:
        return
    arena = _our_worker().offload.pump._arena
    for slot in range(arena.ready_slots):
        for region in range(len(arena.layout.regions)):
            page = arena.pages(SlotId(slot))[region]
            page[:] = bytes([0x40, 0x41, 0x42, 0x3F]) * (len(page) // 4)


def _our_worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    shape: Shape = request.param
    folder = tmp_path_factory.getbasetemp() / "checkpoints"
    with plain(shape.kind, folder, num_gpu_blocks_override=512, max_model_len=MAX_MODEL_LEN) as rig:
        expected = rig.run(REQUESTS)
    spread: dict[str, Any] = {
        "pipeline_parallel_size": len(shape.layers),
        "tensor_parallel_size": shape.ranks,
        "distributed_executor_backend": "mp",
        "num_gpu_blocks_override": DEVICE_BLOCKS,
        "max_model_len": MAX_MODEL_LEN,
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_PP_LAYER_PARTITION", ",".join(map(str, shape.layers)))
        cores = [str(rank % 2) for rank in range(len(shape.layers) * shape.ranks)]
        patched.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(cores))
        with offloading(shape.kind, folder, 512, **spread) as rig:
            yield Ranks(rig, shape, expected)


def test_each_rank_stores_the_layers_of_its_stage(ranks: Ranks) -> None:
    shape = ranks.shape
    found = ranks.ask_each(pages_of_a_block)
    assert [len(pages) for pages in found] == [n for n in shape.pages for _ in range(shape.ranks)]
    assert ranks.rig.side.core.state.shape.ranks == len(found)


def test_answers_from_the_host_equal_those_without_offloading(ranks: Ranks) -> None:
    """The device has room for only a few requests. With attention models, vLLM therefore also preempts
    requests.
    """
    ranks.put_on_host()
    before, scheduler = ranks.rig.counts, ranks.rig.scheduler
    with patch.object(scheduler, "_preempt_request", side_effect=scheduler._preempt_request) as preempted:
        check_same(ranks.rig.run(REQUESTS), ranks.expected)
    # A request of LFM2 always needs two state blocks per group, so all its requests fit.
    assert preempted.call_count > 0 or ranks.shape.kind == "lfm2"
    ranks.check_clean()
    assert ranks.rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded") > 0


def test_requests_can_be_aborted_while_they_load(ranks: Ranks) -> None:
    ranks.put_on_host()
    for name, asked in REQUESTS.items():
        ranks.rig.ask(name, asked)
    ranks.rig.reported.clear()
    ranks.rig.step()
    ranks.rig.abort("r1", "r4")
    for _ in range(4):
        ranks.rig.step()
    ranks.rig.abort("r2", "r5")
    ranks.check_clean()
    gone = {"r1", "r2", "r4", "r5"}
    check_same({name: one for name, one in ranks.rig.reported.items() if name not in gone}, ranks.expected)


def test_wrong_bytes_on_any_rank_are_noticed(ranks: Ranks) -> None:
    for rank in range(len(ranks.shape.layers) * ranks.shape.ranks):
        ranks.put_on_host()
        ranks.ask_each(partial(corrupt, rank=rank))
        reported = ranks.rig.run(REQUESTS)
        assert not all(same(one, ranks.expected[name]) for name, one in reported.items()), rank
        ranks.rig.finish()
