"""`kvoffload bench convoy`: many requests at once whose common prefix is on the host and not on the device.

On the reference engine, with real copies. In each repeat, the device's prefix cache being emptied before each: one
request alone, which loads the prefix; all of them at once with offloading; all of them at once on an engine without, on
which one computes the prefix and the others find it on the device, if they are admitted after it. Each request has a few
tokens of its own behind the prefix.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kvoffload.bench import drawings
from kvoffload.bench.lines import CONVOY_TARGET
from kvoffload.bench.output import add_output_arguments, check_output, give_out, heading
from kvoffload.bench.results import machine
from kvoffload.bench.spread import Spread
from kvoffload.cli.ending import run_async
from kvoffload.cli.exits import CommandError, Exit
from kvoffload.cli.parser import positive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvoffload.engine import Engine, EngineConfig
    from kvoffload.runtime.scheduler_side import SchedulerSide

HELP = "many requests at once with one prefix that is on the host: how often it is loaded, and what they wait"

_PLUGIN = "kvoffload"
_BLOCK_TOKENS = 16
_TAIL_TOKENS, _ANSWER_TOKENS = 6, 4  # together under a block: what is stored is the prefix alone
_MODELS = {
    "small": {},
    "tiny": {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_size": 96},
}
_PATIENCE_S = 300.0
_IDLE_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class Served:
    """Requests that came at once.

    Args:
        first_s: seconds to each one's first token, in the order in which they came.
        all_s: seconds until the last of them had its first token.
        loaded_bytes: from the host to the device.
        computed_tokens: of all of them, generated ones included.
        deferred: lookups that were answered "not yet".
        waited_s: for loads, all requests' seconds added up, their own and others'.
    """

    first_s: tuple[float, ...]
    all_s: float
    loaded_bytes: int
    computed_tokens: int
    deferred: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Repeat:
    """One of each: a request alone and all at once with offloading, and all at once without."""

    alone: Served
    together: Served
    plain: Served

    @property
    def loads(self) -> float:
        """Bytes loaded for all, over those loaded for one."""
        return self.together.loaded_bytes / self.alone.loaded_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    parser.add_argument("--requests", type=positive, default=50, help="at once")
    parser.add_argument(
        "--prefix-tokens", type=positive, default=10_000, help="that they share, a multiple of 16"
    )
    parser.add_argument("--repeats", type=positive, default=6, help="measurements of each")
    parser.add_argument("--model", choices=_MODELS, default="tiny", help="of the reference engine")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        CommandError: the prefix is not of whole blocks, or the plugin is another one.
    """
    if args.prefix_tokens % _BLOCK_TOKENS:
        raise CommandError(
            f"--prefix-tokens {args.prefix_tokens} is not a multiple of {_BLOCK_TOKENS}: the rest of a block is not shared"
        )
    check_output(args)
    repeats = run_async(measure(args.requests, args.prefix_tokens, args.repeats, args.model, args.seed))
    told = {"machine": machine(), "method": method(args), **summary(repeats, args)}
    give_out("convoy", told, args, _table(told), drawings.convoy)
    return Exit.OK


async def measure(
    requests: int, prefix_tokens: int, repeats: int, model: str = "tiny", seed: int = 0
) -> list[Repeat]:
    """Measure on two engines that are alike but for the plugin."""
    draw = random.Random(seed)
    async with _engines(requests, prefix_tokens, model) as (offloaded, offload, plain):
        vocabulary = range(plain.config.model.vocab_size)
        prefix = draw.choices(vocabulary, k=prefix_tokens)

        def prompts(count: int) -> list[list[int]]:
            return [[*prefix, *draw.choices(vocabulary, k=_TAIL_TOKENS)] for _ in range(count)]

        await _bring_to_host(offloaded, offload, lambda: prompts(1))
        await _serve(plain, None, prompts(1))  # both are warm
        found = []
        for _ in range(repeats):
            alone = await _serve(offloaded, offload, prompts(1))
            together = await _serve(offloaded, offload, prompts(requests))
            found.append(Repeat(alone, together, await _serve(plain, None, prompts(requests))))
    return found


async def _bring_to_host(
    engine: Engine, side: SchedulerSide, prompts: Callable[[], Sequence[Sequence[int]]]
) -> None:
    """Serve prompts until only what is behind the prefix is computed: the host's memory is there only after a while."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while (await _serve(engine, side, prompts())).computed_tokens >= _BLOCK_TOKENS:
                pass
    except TimeoutError:
        raise CommandError("the prefix did not come to the host") from None


def summary(repeats: Sequence[Repeat], args: argparse.Namespace) -> dict[str, object]:
    """Sum the repeats up, for JSON and the table."""

    def spread(values: Sequence[float]) -> dict[str, float | None]:
        return Spread.of(values).to_plain()

    waited = [one.together.first_s for one in repeats]
    return {
        "requests": args.requests,
        "prefix_tokens": args.prefix_tokens,
        "repeats": len(repeats),
        "loaded_bytes": {"one": repeats[0].alone.loaded_bytes, "all": repeats[0].together.loaded_bytes},
        "loads": spread([one.loads for one in repeats]),
        "one_load_ms": spread([1e3 * one.alone.all_s for one in repeats]),
        "first_ms": spread([1e3 * min(times) for times in waited]),
        "all_ms": spread([1e3 * one.together.all_s for one in repeats]),
        "recomputing_ms": spread([1e3 * one.plain.all_s for one in repeats]),
        "times_sooner": spread([one.plain.all_s / one.together.all_s for one in repeats]),
        "all_over_one": spread([one.together.all_s / one.alone.all_s for one in repeats]),
        "waited_ms": spread([1e3 * one.together.waited_s / args.requests for one in repeats]),
        "deferred_lookups": spread([float(one.together.deferred) for one in repeats]),
        "computed_tokens": spread([float(one.together.computed_tokens) for one in repeats]),
        "recomputed_tokens": spread([float(one.plain.computed_tokens) for one in repeats]),
    }


def method(args: argparse.Namespace) -> str:
    """Return in a sentence how it was measured."""
    return (
        f"{args.repeats} repeats, in each one request, all with offloading and all without, one after the other; "
        f"reference engine, model {args.model!r}, copies between two pieces of host memory, the device's prefix cache "
        "emptied before each; medians [95 % interval]"
    )


@asynccontextmanager
async def _engines(
    requests: int, prefix_tokens: int, model: str
) -> AsyncIterator[tuple[Engine, SchedulerSide, Engine]]:
    from kvoffload.engine import Engine
    from kvoffload.engine.plugin import load_plugin

    plugin = load_plugin(_PLUGIN)
    async with Engine(_config(requests, prefix_tokens, model), plugin) as offloaded:
        side = getattr(plugin, "offload", None)
        if side is None:
            raise CommandError(f"the engine plugin {_PLUGIN!r} is not kvoffload's own: it shows no counters")
        async with Engine(_config(requests, prefix_tokens, model)) as plain:
            yield offloaded, cast("SchedulerSide", side), plain


def _config(requests: int, prefix_tokens: int, model: str) -> EngineConfig:
    from kvoffload.engine import EngineConfig, ModelConfig

    blocks = prefix_tokens // _BLOCK_TOKENS
    model_config = ModelConfig(**cast("dict[str, Any]", _MODELS[model]))
    token_bytes = 2 * 4 * model_config.layers * model_config.kv_heads * model_config.head_dim
    return EngineConfig(
        model=model_config,
        block_tokens=_BLOCK_TOKENS,
        # Stores may lease a quarter of the pool.
        num_blocks=2 * (blocks + requests) + 64,
        max_model_len=prefix_tokens + _BLOCK_TOKENS,
        max_requests=max(requests, 1),
        plugin_config={"host_bytes": 2 * prefix_tokens * token_bytes + 2**24},
    )


async def _serve(engine: Engine, side: SchedulerSide | None, prompts: Sequence[Sequence[int]]) -> Served:
    """Serve prompts that come at once, wait until nothing goes on, and empty the device's cache for the next."""
    from kvoffload.engine import SamplingParams

    before, waited = (side.counters.snapshot(), _waited_s(side)) if side is not None else (None, 0.0)
    streams = [engine.submit(prompt, SamplingParams(_ANSWER_TOKENS)) for prompt in prompts]
    for stream in streams:
        async with stream:
            async for _ in stream:
                pass
    async with asyncio.timeout(_PATIENCE_S):
        while engine.has_work or not engine.pool.reset_prefix_cache():  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(_IDLE_POLL_S)
    loaded = deferred = 0
    if side is not None and before is not None:
        counted = side.counters.snapshot().minus(before)
        loaded = counted.count("kvoffload_transfer_bytes_total", "host", "load")
        deferred = counted.total("kvoffload_lookups_deferred_total")
    stats = [stream.stats for stream in streams]
    begun = min(one.arrived_s for one in stats)
    firsts = [cast("float", one.first_token_s) for one in stats]
    return Served(
        tuple(first - one.arrived_s for first, one in zip(firsts, stats, strict=True)),
        max(firsts) - begun,
        loaded,
        sum(one.computed_tokens for one in stats),
        deferred,
        _waited_s(side) - waited if side is not None else 0.0,
    )


def _waited_s(side: SchedulerSide) -> float:
    return sum(side.benefit.series()["kvoffload_load_wait_seconds_total"].values())


def _table(told: Mapping[str, Any]) -> Iterator[str]:
    title = (
        f"{told['requests']} requests at once with one prefix of {told['prefix_tokens']:,} tokens, which is on the host "
        "and not on the device"
    )
    yield from heading(title, told)
    loads = told["loads"]
    verdict = "met" if loads["median"] <= CONVOY_TARGET else "missed"
    mib = told["loaded_bytes"]["one"] / 2**20
    form = "  {:<58}{}"
    yield form.format("bytes of one load", f"{mib:,.1f} MiB")
    yield form.format(
        f"bytes loaded over those (target: at most {CONVOY_TARGET:g})",
        f"{_cell(loads, '{:.2f}x')}  {verdict}",
    )
    yield form.format("until one request alone has its first token", _cell(told["one_load_ms"], "{:,.0f} ms"))
    yield form.format("until the first of them has its first token", _cell(told["first_ms"], "{:,.0f} ms"))
    yield form.format("until all have their first token", _cell(told["all_ms"], "{:,.0f} ms"))
    yield form.format("of it a request waits for the load", _cell(told["waited_ms"], "{:,.0f} ms"))
    yield form.format(
        "the same without offloading: one computes the prefix", _cell(told["recomputing_ms"], "{:,.0f} ms")
    )
    yield form.format("times sooner with offloading", _cell(told["times_sooner"], "{:.1f}x"))
    yield form.format('lookups answered "not yet"', _cell(told["deferred_lookups"], "{:,.0f}"))
    computed, recomputed = told["computed_tokens"], told["recomputed_tokens"]
    yield form.format(
        "tokens computed, with | without", f"{computed['median']:,.0f} | {recomputed['median']:,.0f}"
    )


def _cell(spread: Mapping[str, float | None], form: str) -> str:
    if spread["low"] is None:
        return form.format(spread["median"])
    return f"{form.format(spread['median'])} [{form.format(spread['low'])}, {form.format(spread['high'])}]"
