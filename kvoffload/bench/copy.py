"""`kvoffload bench copy`: copies of scattered blocks through the real copier, against one large copy of the same bytes.

Each repeat copies other blocks of a pool four times as large, scattered on both sides, and beside it as many bytes in one
piece, in turns: other load on the machine affects both. On a CPU the one piece is a `memmove` for each thread that
the copier uses; on CUDA it is one pinned copy each way. Merging and submitting count as copying. Every path is checked on
random bytes, each byte of both sides, before it is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvoffload.bench.lines import Line, line
from kvoffload.bench.results import add_output_arguments, give_out
from kvoffload.cli.exits import CommandError, Exit
from kvoffload.cli.parser import positive
from kvoffload.model.transfer import Direction

if TYPE_CHECKING:
    from kvoffload.bench.copy_rig import Rig

HELP = "copies of scattered blocks against one large copy of the same bytes, and what a load finds before it"

WAYS: Mapping[str, tuple[Direction, ...]] = {
    "store": (Direction.STORE,),
    "load": (Direction.LOAD,),
    "both": (Direction.STORE, Direction.LOAD),
}
_GOALS = {4: 0.6, 64: 0.9, 256: 0.9, 2048: 0.9}
"""By KiB of a page: speed over that of one large copy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's options."""
    parser.add_argument(
        "--page-kib", type=positive, nargs="+", default=[4, 16, 64, 256, 2048], help="sizes of pages, in KiB"
    )
    parser.add_argument("--mib", type=positive, default=128, help="copied at a time, in MiB")
    parser.add_argument("--repeats", type=positive, default=15, help="measurements of each case")
    parser.add_argument(
        "--threads", type=positive, nargs="+", default=[1, 2], help="threads that copy loads, on a CPU"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if it is there"
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; fail where a copy has moved other bytes than it should.

    Raises:
        CommandError: there is no such device here, or the results cannot be written.
    """
    from kvoffload.bench.copy_rig import WrongBytes

    device, note = find_device(args.device)
    method = (
        f"{note}; {args.repeats} pairs of {args.mib} MiB of blocks, scattered on both sides of a pool of four times that, "
        "and as many bytes in one piece, in turns after a warm-up; median of the pairs' ratios [95 % interval]"
    )
    try:
        return give_out("copy", args, method, _measure(args, device), "numpy")
    except WrongBytes as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return Exit.FAILED


def find_device(asked: str) -> tuple[str, str]:
    """Return torch's name of the device to measure, and what it is compared with.

    Raises:
        CommandError: CUDA was asked for and is not there.
    """
    import torch

    if asked != "cpu" and torch.cuda.is_available():
        return "cuda:0", f"{torch.cuda.get_device_name()}, against one large pinned copy"
    if asked == "cuda":
        raise CommandError("there is no CUDA device here")
    without = (
        "" if torch.cuda.is_available() else "; there is no GPU here, so device copies were not measured"
    )
    return "cpu", f"host memory on both sides, against one memmove a thread{without}"


def _measure(args: argparse.Namespace, device: str) -> Iterator[Line]:
    from kvoffload.bench import copy_lanes

    size = args.mib * 2**20
    for page in args.page_kib:
        yield from _measure_page(device, page, size, args.repeats, args.threads)
    yield from copy_lanes.measure_loads(device, size // 2, args.repeats)
    yield from copy_lanes.measure_submission(device, size, args.repeats)


def _measure_page(
    device: str, page_kib: int, size: int, repeats: int, threads: Sequence[int]
) -> Iterator[Line]:
    """Measure one page size: on CUDA each way and both at once, by each path, on a CPU with so many threads."""
    from kvoffload.bench.copy_rig import Rig

    page = page_kib * 1024
    if device != "cpu":
        with Rig(device, page, size) as rig:
            for path in rig.paths():
                rig.use(path)
                for way in WAYS:
                    yield from _measure_case(rig, page_kib, way, repeats, f" by the {path}" if path else "")
        return
    for number in threads:
        with Rig(device, page, size, number) as rig:
            for way in ("store", "load") if number == min(threads) else ("load",):  # stores are copied by one
                plural = "s" if number > 1 else ""
                yield from _measure_case(rig, page_kib, way, repeats, f", {number} thread{plural}")


def _measure_case(rig: Rig, page_kib: int, way: str, repeats: int, how: str) -> Iterator[Line]:
    """Check the path, then time it beside one large copy.

    Raises:
        WrongBytes: the path moves other bytes than it should.
    """
    ways = WAYS[way]
    rig.check(ways)
    speeds, ratios = [], []
    for repeat in range(repeats + 1):
        pairs = rig.draw(len(ways))
        if repeat % 2:
            blocks = rig.scattered(ways, pairs)
            whole = rig.in_one_piece(ways)
        else:
            whole = rig.in_one_piece(ways)
            blocks = rig.scattered(ways, pairs)
        if repeat:  # the first warms up
            speeds.append(rig.size * len(ways) / blocks / 1e9)
            ratios.append(whole / blocks)
    what = f"{way} of scattered pages of {page_kib} KiB{how}"
    yield line(f"{what}, over one large copy", ratios, at_least=_GOALS.get(page_kib))
    yield line(what, speeds, " GB/s")
