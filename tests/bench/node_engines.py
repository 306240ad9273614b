"""Measures the first token of a prefix that another engine of the machine holds: read from its memory, from a store, or computed.

One engine serves prompts, and has their blocks in its host memory and in a Mooncake store on this machine. Three others
serve each prompt in turns: one reads the first engine's memory, one asks the store, and one computes.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from kvoffload.cli.demo.command import local_store
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.exits import CommandError
from kvoffload.model.wire import Tier
from kvoffload.runtime.node_catalog import NodeCatalog
from tests.bench.lines import Line, line, ratios
from tests.bench.remote_engines import draw_prompts, first_token_s
from tests.bench.tier_hooks import moved, served, until

_NODE_BYTES = 2**29
_BLOCK = 16
_MEMORY: Mapping[str, object] = {"host_bytes": "256MiB"}


def measure_engines(args: argparse.Namespace) -> Iterator[Line]:
    with (
        local_store("mooncake", _NODE_BYTES) as store,
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
    ):
        yield from asyncio.run(_first_tokens(Path(folder), store.url, args))


async def _first_tokens(folder: Path, url: str, args: argparse.Namespace) -> list[Line]:
    tokens = 1280 if args.model == "small" else 512
    device_blocks = 8 * tokens // _BLOCK  # stores of a whole prompt may lease a quarter of them at once
    options = DemoOptions(
        turns=1, first_tokens=tokens, answer_tokens=4, model=args.model, device_blocks=device_blocks
    )
    prompts = draw_prompts(args.prompts, tokens)
    blocks = args.prompts * (tokens // _BLOCK - 1)
    node = {**_MEMORY, "host_path": folder}
    remote = {**_MEMORY, "remote_url": url, "remote_min_hits": 0}
    async with AsyncExitStack() as opened:
        owner, side = await opened.enter_async_context(served(options, {**node, **remote}))
        for prompt in prompts:
            await first_token_s(owner, prompt)
        await until(owner, "all blocks to be written", lambda: moved(side, "remote", "store") >= blocks)
        each = {"node": node, "Mooncake": remote, "computed": _MEMORY}
        engines = {
            name: await opened.enter_async_context(served(options, settings))
            for name, settings in each.items()
        }
        catalog = engines["node"][1].catalogs[Tier.NODE]
        assert isinstance(catalog, NodeCatalog)
        await until(
            engines["node"][0],
            "the blocks to be found",
            lambda: sum(map(len, catalog.neighbours.values())) >= blocks,
        )
        taken: dict[str, list[float]] = {name: [] for name in engines}
        names = [*engines]
        for number, prompt in enumerate(prompts):
            for name in names[number % 3 :] + names[: number % 3]:
                taken[name].append(1e3 * await first_token_s(engines[name][0], prompt))
        found = [
            moved(engines[name][1], tier, "load") for name, tier in (("node", "node"), ("Mooncake", "remote"))
        ]
        if min(found) < blocks:
            raise CommandError(
                f"of {blocks:g} blocks, {found[0]:g} were read from the engine and {found[1]:g} from the store"
            )
    what = "first token of a prefix that another engine of the machine holds"
    return [
        line(f"{what}: sooner than with Mooncake", ratios(taken["Mooncake"], taken["node"]), at_least=1.5),
        line(f"{what}: sooner than computed", ratios(taken["computed"], taken["node"]), at_least=3),
        *[line(f"{what}: {name}", taken[name], " ms") for name in taken],
    ]
