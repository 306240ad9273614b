"""Measures how much time waiting requests add to each step, compared with vLLM's `OffloadingConnector`.

Some requests decode while many wait. The model has sliding windows, so both connectors must notice blocks
that left a window and were allocated again. The peer searches all of its requests for such blocks.

Our connector runs in its own engine. The peer's worker side needs a GPU, so only its scheduler side runs. It
follows an engine without a connector: it receives each request and plans in each step, and its stores end at
once.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from kvoffload.checks.options import positive
from tests.bench.lines import Line, line, ratios
from tests.bench.results import add_output_arguments, give_out
from tests.bench.vllm_engines import (
    HOST_BYTES,
    OURS,
    VOCABULARY,
    Rider,
    draw_prompts,
    kv_transfer,
    open_riders,
    prepare_process,
    require_vllm,
)

RUNNING = 16
FEW = 10
_STEPS = 64  # enough that each decoding request completes two blocks
_WAITING_TOKENS = 64
_PEER = "OffloadingConnector"
_PEER_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--waiting", type=positive, nargs="+", default=[100, 10_000], help="requests that wait"
    )
    parser.add_argument("--pairs", type=positive, default=7, help="measurements with few and with many")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    require_vllm()
    method = (
        f"{RUNNING} requests decode, {_STEPS} steps each time, hybrid windows; {args.pairs} pairs of {FEW} waiting and "
        "of many; engines in turns in one process; medians of the pairs' ratios [95 % interval]; of the peer the "
        "scheduler's side alone, following an engine without a connector"
    )
    return give_out("queue", args, method, _measure(args.waiting, args.pairs), "vllm")


def _measure(waiting: Sequence[int], pairs: int) -> Iterator[Line]:
    """Measure our connector, and the peer if vLLM has the peer, with each number of waiting requests."""
    import torch

    prepare_process(torch.cuda.is_available())
    draw = random.Random(0)
    connectors: dict[str, dict[str, Any] | None] = {
        OURS: kv_transfer("KVOffloadConnector", host_bytes=HOST_BYTES)
    }
    if importlib.util.find_spec(_PEER_MODULE) is not None:
        connectors[_PEER] = None
    with open_riders("gemma3", connectors, RUNNING) as riders:
        for rider in riders[1:]:
            rider.follow(_peers_side, _all_ended)
        for rider in riders:
            _steps_us(rider, FEW, draw)  # a warm-up
        for count in waiting:
            yield from _measure_case(riders, count, pairs, draw)


def _measure_case(riders: Sequence[Rider], waiting: int, pairs: int, draw: random.Random) -> Iterator[Line]:
    few: dict[str, list[float]] = {rider.name: [] for rider in riders}
    many: dict[str, list[float]] = {rider.name: [] for rider in riders}
    for pair in range(pairs):
        ways = [(few, FEW), (many, waiting)]
        for times, count in ways if pair % 2 else reversed(ways):
            for rider in riders:
                times[rider.name].append(_steps_us(rider, count, draw))
    for name in few:
        what = f"scheduler's hooks per step with {waiting:,} requests that wait"
        whose = "" if name == OURS else f"; {name}, for comparison"
        growth = ratios(many[name], few[name])
        yield line(f"{what}, over {FEW}{whose}", growth, at_most=1.1 if name == OURS else None)
        yield line(f"{what}{whose}", many[name], " us")


def _steps_us(rider: Rider, waiting: int, draw: random.Random) -> float:
    """Return the mean microseconds in hooks per step, while `RUNNING` requests decode and `waiting` wait."""
    names = rider.ask(draw_prompts(draw, RUNNING), 2 * _STEPS)
    took: list[float] = []
    names += rider.ask([draw.choices(range(2, VOCABULARY), k=_WAITING_TOKENS) for _ in range(waiting)], 1)
    while len(took) < _STEPS:
        step = rider.step()
        if step.requests == step.tokens == RUNNING:
            took.append(step.hook_ns / 1e3)
    rider.abort(names)
    while rider.is_busy:
        rider.step()
    return statistics.fmean(took)


def _peers_side(vllm_config: Any, kv_cache_config: Any) -> Any:
    """Return the scheduler side of vLLM's `OffloadingConnector`, for an engine that runs without a connector."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    config = copy.copy(vllm_config)
    config.kv_transfer_config = KVTransferConfig(**kv_transfer(_PEER, cpu_bytes_to_use=HOST_BYTES))
    spec = OffloadingSpecFactory.create_spec(build_offloading_config(config, kv_cache_config))
    return OffloadingConnectorScheduler(spec, config, kv_cache_config)


def _all_ended(plan: Any) -> Any:
    """Return a workers' report in which all stores of a plan have finished."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.v1.outputs import KVConnectorOutput

    metadata = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(plan.store_jobs, 1))
    return KVConnectorOutput(kv_connector_worker_meta=metadata)
