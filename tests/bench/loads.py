"""Measures first tokens when hits are always loaded, never loaded, or only if that delays requests less ("auto").

By default the reference engine runs with the whole plugin in simulated time. Only the model and the link are simulated:
a step takes a fixed time and a time for each of its tokens, and so does a load, one load after the other. So equal
options give equal numbers on every machine. Three of four prompts begin with a text that the host has, the others are
new. At a rate of 1, an engine that loads nothing is busy all the time.

With `--vllm`, stock vLLM engines with a tiny model take turns with the same prompts, in real time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvoffload.checks.options import positive
from kvoffload.engine import Engine, EngineConfig, SamplingParams
from kvoffload.engine.config import ModelConfig
from kvoffload.engine.request import Token
from kvoffload.engine.runner import Runner
from kvoffload.model.wire import Direction
from kvoffload.transfer.host_copier import copy_by_memmove
from kvoffload.transfer.ports import Clocks, Fence, TicketState
from kvoffload_reference.plugin import ReferencePlugin
from tests.bench.lines import Line
from tests.bench.results import add_output_arguments, give_out
from tests.simulate.loop import SimClock, SimLoop, SimPortal

if TYPE_CHECKING:
    from kvoffload.engine.plugin import GroupFacts
    from kvoffload.engine.scheduler import Batch
    from kvoffload.transfer.runs import CopyRuns

POLICIES: Mapping[str, object] = {"always": None, "never": 10_000, "auto": "auto"}
"""The values of `min_load_tokens`."""
LINKS = {"fast": 0.05, "even": 0.7, "slow": 3.0}
"""For each link, the time to load a token over the time to compute one."""
LOADS = {"light": 0.4, "near saturation": 0.9, "overloaded": 1.5}

_BLOCK = 32
_PAGE = 64  # bytes of a block
_TEXTS = 200
_TEXT_BLOCKS = (4, 64)
_NEW_TOKENS = 64  # after a text
_ANSWER_TOKENS = 8
_RETURNING = 0.75
_STEP_S = 0.004
_TOKEN_S = 0.0001
_LOAD_S = 0.002
_PAUSE_S = 0.001  # after a step that computes nothing


class _Runner(Runner):
    """Computes nothing, but lets the time of a step pass."""

    def __init__(self, loop: SimLoop, config: EngineConfig, num_blocks: int) -> None:
        self._loop = loop
        self._replicas = self._stages = 1
        tensors = range(config.model.layers_per_group)
        self.kv_tensors = [[torch.zeros((num_blocks, _PAGE), dtype=torch.int8) for _ in tensors]]

    def launch(self, batch: Batch) -> torch.Tensor:
        self._loop.jump(_STEP_S + _TOKEN_S * sum(chunk.end - chunk.start for chunk in batch.chunks))
        return torch.empty(0)

    def sample(self, batch: Batch, logits: torch.Tensor) -> list[Token]:
        return [Token(0, 0.0) for chunk in batch.chunks if chunk.samples]


class _Ticket:
    is_started = True

    def __init__(self, loop: SimLoop, end: float, seconds: float) -> None:
        self._loop, self._end = loop, end
        self.copy_seconds = seconds

    def query(self) -> TicketState:
        return TicketState.DONE if self._loop.now >= self._end else TicketState.PENDING


class _Link:
    """Copies one batch of a direction after the other. Stores take no time."""

    slices = 0

    def __init__(self, loop: SimLoop, token_s: float) -> None:
        self._loop, self._block_s = loop, token_s * _BLOCK
        self._free_at = 0.0

    def fence(self) -> Fence:
        return None

    def submit(self, direction: Direction, runs: CopyRuns, fences: Sequence[Fence]) -> _Ticket:
        copy_by_memmove(runs)
        if direction is Direction.STORE:
            return _Ticket(self._loop, 0.0, 0.0)
        seconds = int(runs.size.sum()) / _PAGE * self._block_s
        self._free_at = max(self._free_at, self._loop.now) + _LOAD_S + seconds
        return _Ticket(self._loop, self._free_at, seconds)

    def close(self) -> None:
        """Do nothing: there are no resources."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=positive, default=1000, help="of each case (default 1000)")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS), help="speeds of the link")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="rates of requests")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and their times (default 0)")
    parser.add_argument(
        "--vllm", action="store_true", help="stock vLLM engines in real time, at 0.9 of their rate"
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.vllm:
        from tests.bench.loads_vllm import METHOD, measure

        return give_out("loads-vllm", args, METHOD, measure(args.requests, args.seed), "vllm")
    times = ", ".join(f"{name} {share:g}" for name, share in LINKS.items())
    rates = ", ".join(f"{name} {rate:g}" for name, rate in LOADS.items())
    method = (
        f"the reference engine in simulated time; {args.requests} requests, the first fifth not counted; "
        f"loading a token takes the time to compute one times: {times}; rates: {rates}"
    )
    return give_out("loads", args, method, _measure(args))


def _measure(args: argparse.Namespace) -> Iterator[Line]:
    for link in args.links:
        for load in args.loads:
            first = {
                policy: serve(least, LINKS[link], LOADS[load], args.requests, args.seed)[args.requests // 5 :]
                for policy, least in POLICIES.items()
            }
            yield from first_tokens(f"{link} link, {load}", first)


def first_tokens(where: str, first_s: Mapping[str, Sequence[float]]) -> Iterator[Line]:
    """Yield the lines of a case. "auto" must be no worse than the better one of the other policies."""
    for name, of in (("median", statistics.median), ("99 %", _late)):
        found = {policy: 1e3 * of(seconds) for policy, seconds in first_s.items()}
        best = min(found["always"], found["never"])
        for policy, value in found.items():
            yield Line(f"first token, {where}, {policy}: {name}", value, unit=" ms")
        ratio = found["auto"] / best
        what = f"first token, {where}, auto over the better one of always and never: {name}"
        yield Line(what, ratio, target="at most 1x", is_met=ratio <= 1)


def _late(seconds: Sequence[float]) -> float:
    """Return the value that 99 % of the values are at most."""
    return sorted(seconds)[int(0.99 * len(seconds))]


def serve(least: object, link: float, load: float, requests: int, seed: int) -> list[float]:
    """Serve requests in simulated time. Return the seconds to each first token.

    Args:
        least: the value of `min_load_tokens`; None for the default.
        link: the time to load a token over the time to compute one.
        load: the rate of requests.
        requests: how many requests.
        seed: of the prompts and their times.
    """
    loop = SimLoop()
    settings: dict[str, Any] = {"host_bytes": 2**21} | ({} if least is None else {"min_load_tokens": least})
    config = EngineConfig(
        model=ModelConfig(vocab_size=50_000, layers=1),
        block_tokens=_BLOCK,
        num_blocks=1500,
        max_model_len=4096,
        step_tokens=2048,
        plugin_config=settings,
    )
    plugin = ReferencePlugin(
        portal=SimPortal(loop),
        clocks=Clocks(loop.time, loop.time),
        clock=SimClock(loop),
        make_copier=lambda _: _Link(loop, link * _TOKEN_S),
    )

    def make_runner(config: EngineConfig, groups: Sequence[GroupFacts], blocks: int) -> Runner:
        return _Runner(loop, config, blocks)

    engine = Engine(config, plugin, clock=loop.time, make_runner=make_runner)
    try:
        return loop.run_until_complete(_serve(engine, loop, random.Random(seed), load, requests))
    finally:
        engine.close()  # runs the loop until copies have ended
        loop.close()


async def _serve(
    engine: Engine, loop: SimLoop, draw: random.Random, load: float, requests: int
) -> list[float]:
    texts = [_tokens(draw, draw.randint(*_TEXT_BLOCKS) * _BLOCK) for _ in range(_TEXTS)]
    prompts = [_prompt(draw, texts) for _ in range(requests)]
    mean_s = statistics.fmean(len(prompt) * _TOKEN_S for prompt in prompts) + _STEP_S
    stepping = loop.create_task(_step(engine))
    for text in texts:
        await _ask(engine, text)
    at = loop.now
    tasks = []
    for prompt in prompts:
        at += draw.expovariate(load / mean_s)
        tasks.append(loop.create_task(_ask_at(engine, loop, prompt, at)))
    found = await asyncio.gather(*tasks)
    stepping.cancel()
    return found


async def _step(engine: Engine) -> None:
    while True:
        has_computed = engine.has_work and engine.step()
        await asyncio.sleep(0 if has_computed else _PAUSE_S)


def _prompt(draw: random.Random, texts: Sequence[list[int]]) -> list[int]:
    known = draw.random() < _RETURNING
    text = draw.choice(texts) if known else _tokens(draw, draw.randint(*_TEXT_BLOCKS) * _BLOCK)
    return text + _tokens(draw, _NEW_TOKENS)


def _tokens(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(50_000), k=count)


async def _ask_at(engine: Engine, loop: SimLoop, prompt: list[int], at: float) -> float:
    """Ask at a time. Return the seconds from then to the first token."""
    await asyncio.sleep(at - loop.now)
    return await _ask(engine, prompt) - at


async def _ask(engine: Engine, prompt: list[int]) -> float:
    """Return when the first token came."""
    async with engine.submit(prompt, SamplingParams(_ANSWER_TOKENS)) as stream:
        async for _ in stream:
            pass
    first_s = stream.stats.first_token_s
    assert first_s is not None
    return first_s
