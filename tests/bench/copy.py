"""Compares the host copier's copies of scattered blocks with one large copy of the same size.

Each repeat copies new blocks, scattered over a pool four times as large on both sides. Then it copies as many
bytes in one piece (one `memmove` per thread), so that other load on the machine affects both copies. The time
of a scattered copy includes merging and submitting. Before the measurement, the bench compares every byte of
both sides. On a GPU, `kvoffload gpu-check` makes the same comparison.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kvoffload.checks.options import positive
from kvoffload.model.wire import Direction
from tests.bench import copy_lanes
from tests.bench.copy_rig import Rig
from tests.bench.lines import Line, line
from tests.bench.results import add_output_arguments, give_out

_GOALS = {4: 0.6, 64: 0.9, 256: 0.9, 2048: 0.9}
"""For each page size in KiB: the required speed, relative to one large copy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--page-kib", type=positive, nargs="+", default=[4, 16, 64, 256, 2048], help="sizes of pages, in KiB"
    )
    parser.add_argument("--mib", type=positive, default=128, help="copied at a time, in MiB")
    parser.add_argument("--repeats", type=positive, default=15, help="measurements of each case")
    parser.add_argument("--threads", type=positive, nargs="+", default=[1, 2], help="threads that copy loads")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    method = (
        f"host memory on both sides, beside one memmove a thread; {args.repeats} pairs of {args.mib} MiB of blocks, scattered "
        "on both sides of a pool of four times that, and as many bytes in one piece, in turns after a warm-up; median of "
        "the pairs' ratios [95 % interval]"
    )
    return give_out("copy", args, method, _measure(args), "numpy")


def _measure(args: argparse.Namespace) -> Iterator[Line]:
    size = args.mib * 2**20
    for page_kib in args.page_kib:
        for threads in args.threads:
            with Rig(page_kib * 1024, size, threads) as rig:
                ways = (
                    list(Direction) if threads == min(args.threads) else [Direction.LOAD]
                )  # the copier uses one thread for stores
                for way in ways:
                    yield from _measure_case(rig, page_kib, way, args.repeats, threads)
    yield from copy_lanes.measure_loads(size // 2, args.repeats)


def _measure_case(rig: Rig, page_kib: int, way: Direction, repeats: int, threads: int) -> Iterator[Line]:
    """Check the copied bytes, then time scattered copies and large copies.

    Raises:
        WrongBytes: a byte differs.
    """
    rig.check(way)
    speeds, ratios = [], []
    for repeat in range(repeats + 1):
        slots, blocks = rig.draw()
        if repeat % 2:
            scattered = rig.scattered(way, slots, blocks)
            whole = rig.in_one_piece(way)
        else:
            whole = rig.in_one_piece(way)
            scattered = rig.scattered(way, slots, blocks)
        if repeat:  # The first repeat is a warm-up.
            speeds.append(rig.size / scattered / 1e9)
            ratios.append(whole / scattered)
    plural = "s" if threads > 1 else ""
    what = f"{way.value} of scattered pages of {page_kib} KiB, {threads} thread{plural}"
    yield line(f"{what}, over one large copy", ratios, at_least=_GOALS.get(page_kib))
    yield line(what, speeds, " GB/s")
