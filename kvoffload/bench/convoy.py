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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from kvoffload.bench.lines import Line, line, ratios
from kvoffload.bench.results import add_output_arguments, give_out
from kvoffload.cli.exits import CommandError
from kvoffload.cli.parser import positive

if TYPE_CHECKING:
    from kvoffload.engine import Engine, EngineConfig
    from kvoffload.runtime.scheduler_side import SchedulerSide

HELP = "many requests at once with one prefix that is on the host: how often it is loaded, and what they wait"

_BLOCK_TOKENS = 16
_TAIL_TOKENS, _ANSWER_TOKENS = 6, 4  # together under a block: what is stored is the prefix alone
_PATIENCE_S = 300.0
_IDLE_POLL_S = 0.0005


class Served(NamedTuple):
    """Requests that came at once.

    Args:
        all_ms: until the last of them had its first token.
        loaded_bytes: from the host to the device.
        computed_tokens: of all of them, generated ones included.
    """

    all_ms: float
    loaded_bytes: int
    computed_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's options."""
    parser.add_argument("--requests", type=positive, default=50, help="at once")
    parser.add_argument(
        "--prefix-tokens", type=positive, default=10_000, help="that they share, a multiple of 16"
    )
    parser.add_argument("--repeats", type=positive, default=6, help="measurements of each")
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
    method = (
        f"{args.repeats} repeats, in each one request, all with offloading and all without, one after the other; reference "
        "engine, a tiny model, copies between two pieces of host memory, the device's prefix cache emptied before each; "
        "medians [95 % interval]"
    )
    return give_out("convoy", args, method, _measure(args))


def _measure(args: argparse.Namespace) -> Iterator[Line]:
    yield from asyncio.run(measure(args.requests, args.prefix_tokens, args.repeats))


async def measure(requests: int, prefix_tokens: int, repeats: int) -> list[Line]:
    """Measure on two engines that are alike but for the plugin.

    Raises:
        CommandError: the plugin is another one, or the prefix is never stored.
    """
    from kvoffload.cli.demo.engines import offloading_engine
    from kvoffload.engine import Engine

    draw, config = random.Random(0), _config(requests, prefix_tokens)
    vocabulary = range(config.model.vocab_size)
    prefix = draw.choices(vocabulary, k=prefix_tokens)

    def prompts(count: int) -> list[list[int]]:
        return [[*prefix, *draw.choices(vocabulary, k=_TAIL_TOKENS)] for _ in range(count)]

    async with offloading_engine(config) as (offloaded, offload), Engine(config) as plain:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                # Until the prefix is on the host, whose memory is there only after a while.
                while (await _serve(offloaded, prompts(1), offload)).computed_tokens >= _BLOCK_TOKENS:
                    pass
        except TimeoutError:
            raise CommandError("the prefix did not come to the host") from None
        await _serve(plain, prompts(1))  # both are warm
        alone, together, computed = [], [], []
        for _ in range(repeats):
            alone.append(await _serve(offloaded, prompts(1), offload))
            together.append(await _serve(offloaded, prompts(requests), offload))
            computed.append(await _serve(plain, prompts(requests)))
    return _lines(
        f"{requests} requests with one prefix of {prefix_tokens:,} tokens", alone, together, computed
    )


def _lines(
    what: str, alone: Sequence[Served], together: Sequence[Served], computed: Sequence[Served]
) -> list[Line]:
    loads = [
        all_of_them.loaded_bytes / one.loaded_bytes for all_of_them, one in zip(together, alone, strict=True)
    ]
    with_ms, without_ms = ([one.all_ms for one in each] for each in (together, computed))
    return [
        line(f"{what} on the host: bytes loaded over those of one load", loads, at_most=1.1),
        line(f"{what}: all first tokens sooner than without", ratios(without_ms, with_ms)),
        line(f"{what}: until all first tokens are there", with_ms, " ms"),
        line(f"{what}: the same without offloading", without_ms, " ms"),
        line(f"{what}: one request alone", [one.all_ms for one in alone], " ms"),
    ]


def _config(requests: int, prefix_tokens: int) -> EngineConfig:
    from kvoffload.cli.demo.engines import TINY
    from kvoffload.engine import EngineConfig

    token_bytes = 2 * 4 * TINY.layers * TINY.kv_heads * TINY.head_dim
    return EngineConfig(
        model=TINY,
        block_tokens=_BLOCK_TOKENS,
        # Stores may lease a quarter of the pool.
        num_blocks=2 * (prefix_tokens // _BLOCK_TOKENS + requests) + 64,
        max_model_len=prefix_tokens + _BLOCK_TOKENS,
        max_requests=requests,
        plugin_config={"host_bytes": 2 * prefix_tokens * token_bytes + 2**24},
    )


async def _serve(
    engine: Engine, prompts: Sequence[Sequence[int]], offload: SchedulerSide | None = None
) -> Served:
    """Serve prompts that come at once, wait until nothing goes on, and empty the device's cache for the next."""
    from kvoffload.engine import SamplingParams

    before = _loaded(offload)
    streams = [engine.submit(prompt, SamplingParams(_ANSWER_TOKENS)) for prompt in prompts]
    for stream in streams:
        async with stream:
            async for _ in stream:
                pass
    async with asyncio.timeout(_PATIENCE_S):
        while engine.has_work or not engine.pool.reset_prefix_cache():  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(_IDLE_POLL_S)
    stats = [stream.stats for stream in streams]
    last = max(cast("float", one.first_token_s) for one in stats)
    return Served(
        1e3 * (last - min(one.arrived_s for one in stats)),
        _loaded(offload) - before,
        sum(one.computed_tokens for one in stats),
    )


def _loaded(offload: SchedulerSide | None) -> int:
    if offload is None:
        return 0
    return offload.counters.snapshot().count("kvoffload_transfer_bytes_total", "host", "load")
