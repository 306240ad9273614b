"""`kvoffload bench queue`: what requests that wait cost each step, beside vLLM's `OffloadingConnector`.

Some requests decode, many wait behind them and do nothing. This connector rides an engine of its own. Of the peer only
the scheduler's side runs without a GPU: it follows an engine without a connector, is told of each request and asked for
a plan in each step, and its stores end at once. The model has sliding windows, so both must notice blocks that left a
window and were handed out again; the peer looks for them in all requests that it knows.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload.bench import drawings
from kvoffload.bench.output import add_output_arguments, check_output, give_out, heading
from kvoffload.bench.results import machine
from kvoffload.bench.spread import Spread
from kvoffload.cli.exits import Exit
from kvoffload.cli.parser import positive
from kvoffload_vllm.bench_engines import (
    HOST_BYTES,
    Rider,
    kv_transfer,
    prepare_process,
    require_vllm,
    write_checkpoint,
)

HELP = "time in the scheduler's hooks per step while many requests wait, beside vLLM's OffloadingConnector"

RUNNING = 16
FEW = 10
_STEPS = 64  # in which each running request completes two blocks
_WAITING_TOKENS = 64
_VOCABULARY = 64
_OURS, _PEER = "kvoffload", "OffloadingConnector"
_PEER_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"


@dataclass(frozen=True, slots=True)
class Case:
    """One connector, with one number of waiting requests.

    Args:
        connector, waiting: which.
        few_us, many_us: microseconds in hooks per step, with `FEW` waiting and with that number, in pairs.
    """

    connector: str
    waiting: int
    few_us: Sequence[float]
    many_us: Sequence[float]

    @property
    def growth(self) -> Spread:
        """The steps' time with many over that with few, in pairs."""
        return Spread.of([many / few for many, few in zip(self.many_us, self.few_us, strict=True)])

    def to_plain(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "connector": self.connector,
            "waiting": self.waiting,
            "few_us": Spread.of(self.few_us).to_plain(),
            "many_us": Spread.of(self.many_us).to_plain(),
            "growth": self.growth.to_plain(),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    parser.add_argument(
        "--waiting", type=positive, nargs="+", default=[100, 10_000], help="requests that wait"
    )
    parser.add_argument("--pairs", type=positive, default=7, help="measurements with few and with many")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        CommandError: there is no vLLM here, or the results cannot be written.
    """
    require_vllm()
    check_output(args)
    about = machine("vllm")
    cases = measure(args.waiting, args.pairs, args.seed)
    told = {
        "machine": about,
        "method": method(args),
        "few": FEW,
        "cases": [case.to_plain() for case in cases],
    }
    give_out("queue", told, args, _table(told, cases), drawings.queue)
    return Exit.OK


def measure(waiting: Sequence[int], pairs: int, seed: int = 0) -> list[Case]:
    """Measure both connectors with each number of waiting requests; the peer only where this vLLM has it."""
    import torch

    prepare_process(torch.cuda.is_available())
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        checkpoint = write_checkpoint("gemma3", Path(folder))
        riders = [Rider(_OURS, checkpoint, kv_transfer("KVOffloadConnector", host_bytes=HOST_BYTES), RUNNING)]
        stack.callback(riders[0].close)
        if importlib.util.find_spec(_PEER_MODULE) is not None:
            riders.append(Rider(_PEER, checkpoint, None, RUNNING))
            stack.callback(riders[1].close)
            riders[1].follow(_peers_side, _all_ended)
        for rider in riders:
            _steps_us(rider, FEW, draw)  # warms up
        return [case for count in waiting for case in _measure(riders, count, pairs, draw)]


def _measure(riders: Sequence[Rider], waiting: int, pairs: int, draw: random.Random) -> Iterator[Case]:
    few: dict[str, list[float]] = {rider.name: [] for rider in riders}
    many: dict[str, list[float]] = {rider.name: [] for rider in riders}
    for pair in range(pairs):
        ways = [(few, FEW), (many, waiting)]
        for times, count in ways if pair % 2 else reversed(ways):
            for rider in riders:
                times[rider.name].append(_steps_us(rider, count, draw))
    for rider in riders:
        yield Case(rider.name, waiting, few[rider.name], many[rider.name])


def _steps_us(rider: Rider, waiting: int, draw: random.Random) -> float:
    """Return the mean microseconds in hooks of the steps in which all that can run decode and so many wait."""
    prompts = [draw.choices(range(2, _VOCABULARY), k=draw.randrange(64, 128)) for _ in range(RUNNING)]
    names = rider.ask(prompts, 2 * _STEPS)
    took: list[float] = []
    names += rider.ask([draw.choices(range(2, _VOCABULARY), k=_WAITING_TOKENS) for _ in range(waiting)], 1)
    while len(took) < _STEPS:
        step = rider.step()
        if step.requests == step.tokens == RUNNING:
            took.append(step.hook_ns / 1e3)
    rider.abort(names)
    while rider.is_busy:
        rider.step()
    return statistics.fmean(took)


def _peers_side(vllm_config: Any, kv_cache_config: Any) -> Any:
    """Make the scheduler's side of vLLM's `OffloadingConnector` for an engine that does not have it."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    config = copy.copy(vllm_config)
    config.kv_transfer_config = KVTransferConfig(**kv_transfer(_PEER, cpu_bytes_to_use=HOST_BYTES))
    spec = OffloadingSpecFactory.create_spec(build_offloading_config(config, kv_cache_config))
    return OffloadingConnectorScheduler(spec, config, kv_cache_config)


def _all_ended(plan: Any) -> Any:
    """Report to the peer that all stores of a plan have ended."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.v1.outputs import KVConnectorOutput

    told = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(plan.store_jobs, 1))
    return KVConnectorOutput(kv_connector_worker_meta=told)


def method(args: argparse.Namespace) -> str:
    """Return in a sentence how it was measured."""
    return (
        f"{RUNNING} requests decode, {_STEPS} steps each time, hybrid windows; {args.pairs} pairs of {FEW} waiting and "
        "of many; engines in turns in one process; medians of the pairs' ratios [95 % interval]"
    )


def _table(told: Mapping[str, object], cases: Sequence[Case]) -> Iterator[str]:
    title = "Time in the scheduler's hooks per step while requests wait, microseconds"
    note = f"{_PEER}: its scheduler's side alone, following an engine without a connector"
    yield from heading(title, told, note)
    form = "{:<22}{:>10}{:>16}{:>16}{:>24}"
    yield form.format("connector", "waiting", f"with {FEW}", "with these", "growth").rstrip()
    for case in cases:
        few, many = (f"{statistics.median(times):.0f}" for times in (case.few_us, case.many_us))
        yield form.format(case.connector, case.waiting, few, many, case.growth.text("{:.2f}", "x")).rstrip()
