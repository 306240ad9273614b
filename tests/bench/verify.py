"""Measures the time that checksums (`verify`) add to copies within host memory.

Every repeat copies the same blocks to slots and back once with each setting, in rotating order, so that other
load on the machine affects all settings. Copies and checksums run one after the other on one thread. Each
repeat uses other blocks of memory that is larger than the processor's caches. The result is each setting's time
divided by the time of "off" in the same repeat.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from kvoffload.checks.options import positive
from kvoffload.model.wire import Direction
from kvoffload.transfer.factory import make_checksums
from tests.bench.copy_rig import Rig
from tests.bench.lines import Line, line, ratios
from tests.bench.results import add_output_arguments, give_out

MODES = ("off", "sample", "full")
REGIONS = 32  # 16 layers with separate keys and values, or 32 layers with one tensor each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block-kib", type=positive, nargs="+", default=[64, 2048], help="sizes of blocks, in KiB"
    )
    parser.add_argument("--mib", type=positive, default=64, help="copied in each repeat, in MiB")
    parser.add_argument("--repeats", type=positive, default=15, help="measurements of each setting")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    method = (
        f"{args.repeats} repeats of {args.mib} MiB, blocks of {REGIONS} pages, settings in turns on one thread; "
        "median of the time over that of off in the same repeat [95 % interval]"
    )
    found = (
        one for block_kib in args.block_kib for one in measure(block_kib, args.mib * 2**20, args.repeats)
    )
    return give_out("verify", args, method, found, "numpy", "xxhash")


def measure(block_kib: int, size: int, repeats: int) -> Iterator[Line]:
    """Measure copies of `size` bytes of blocks to slots and back, with every setting."""
    seconds: dict[Direction, dict[str, list[float]]] = {
        way: {mode: [] for mode in MODES} for way in Direction
    }
    with Rig(max(block_kib * 1024 // REGIONS, 1), size, regions=REGIONS) as rig:
        all_checksums = {mode: make_checksums(mode, rig.arena, executor=rig.executor) for mode in MODES}
        for repeat in range(repeats + 1):
            slots, blocks = rig.draw()
            turn = repeat % len(MODES)
            for mode in MODES[turn:] + MODES[:turn]:
                checksums = all_checksums[mode]
                for way in Direction:
                    begun = time.perf_counter()
                    rig.scattered(way, slots, blocks)
                    read = checksums.start(way, slots) if checksums is not None else None
                    rig.executor.wait()
                    took = time.perf_counter() - begun
                    assert read is None or read.result() == ()
                    if repeat:  # The first repeat is a warm-up.
                        seconds[way][mode].append(took)
    for way, taken in seconds.items():
        for mode in MODES[1:]:
            what = f"{way.value} of blocks of {block_kib} KiB with checksums, verify {mode!r} over 'off'"
            yield line(what, ratios(taken[mode], taken["off"]))
