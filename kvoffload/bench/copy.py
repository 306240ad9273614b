"""`kvoffload bench copy`: copies of scattered blocks through the real copier, against one large copy of the same bytes.

Each repeat copies other blocks of a pool four times as large, scattered on both sides, and beside it as many bytes in one
piece, in turns: what else the machine does meets both alike. On a CPU the one piece is a `memmove` for each thread that
the copier uses; on CUDA it is one pinned copy each way. Merging and submitting count as copying. Every path is checked on
random bytes, each byte of both sides, before it is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.bench.output import add_output_arguments, check_output, give_out, heading
from kvoffload.bench.picture import Panel, picture
from kvoffload.bench.results import headline, machine
from kvoffload.bench.spread import Spread
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
_GOAL = 0.9  # from pages of 64 KiB on
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class Case:
    """One page size in one direction.

    Args:
        page_kib: bytes of a page, in KiB.
        way: "store", "load" or "both".
        threads: that copy, on a CPU.
        size: bytes that each copy moved, each way.
        seconds: of each repeat: the blocks, and as many bytes in one piece.
        path: "engine" or "kernel", on CUDA, where all was made to go that way.
    """

    page_kib: int
    way: str
    threads: int
    size: int
    seconds: Sequence[tuple[float, float]]
    path: str = ""

    def to_plain(self) -> dict[str, object]:
        """Return what is kept of it, for JSON."""
        moved = self.size * len(WAYS[self.way]) / 1e9
        return {
            "page_kib": self.page_kib,
            "way": self.way,
            "path": self.path,
            "threads": self.threads,
            "mib": self.size // 2**20,
            "gb_s": Spread.of([moved / blocks for blocks, _ in self.seconds]).to_plain(),
            "one_piece_gb_s": Spread.of([moved / whole for _, whole in self.seconds]).to_plain(),
            "of_one_piece": self.ratio.to_plain(),
        }

    @property
    def ratio(self) -> Spread:
        """Speed of the blocks over that of one piece, in pairs."""
        return Spread.of([whole / blocks for blocks, whole in self.seconds])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
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

    try:
        return _measure_and_print(args)
    except WrongBytes as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return Exit.FAILED


def _measure_and_print(args: argparse.Namespace) -> int:
    check_output(args)
    device, note = find_device(args.device)
    about = machine("numpy")
    size = args.mib * 2**20
    cases = [
        case for page in args.page_kib for case in measure(device, page, size, args.repeats, args.threads)
    ]
    told = {
        "machine": about,
        "device": note,
        "last_level_cache_mib": last_level_cache() // 2**20,
        "method": method(args),
        "cases": [case.to_plain() for case in cases],
        **lanes_told(device, size, args.repeats),
    }
    give_out("copy", told, args, _table(told, cases), lambda told: draw(told, cases))
    return Exit.OK


def find_device(asked: str) -> tuple[str, str]:
    """Return torch's name of the device to measure, and a sentence on it.

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


def measure(device: str, page_kib: int, size: int, repeats: int, threads: Sequence[int]) -> Iterator[Case]:
    """Measure one page size: on CUDA each way and both at once, by each path, on a CPU with so many threads."""
    from kvoffload.bench.copy_rig import Rig

    page = page_kib * 1024
    if device != "cpu":
        with Rig(device, page, size) as rig:
            for path in rig.paths():
                rig.use(path)
                for way in WAYS:
                    yield replace(measure_case(rig, page_kib, way, repeats), path=path)
        return
    for number in threads:
        with Rig(device, page, size, number) as rig:
            for way in ("store", "load") if number == min(threads) else ("load",):  # stores are copied by one
                yield measure_case(rig, page_kib, way, repeats)


def measure_case(rig: Rig, page_kib: int, way: str, repeats: int) -> Case:
    """Check the path, then time it beside one large copy.

    Raises:
        WrongBytes: the path moves other bytes than it should.
    """
    ways = WAYS[way]
    rig.check(ways)
    seconds = []
    for repeat in range(repeats + 1):
        pairs = rig.draw(len(ways))
        if repeat % 2:
            blocks = rig.scattered(ways, pairs)
            whole = rig.in_one_piece(ways)
        else:
            whole = rig.in_one_piece(ways)
            blocks = rig.scattered(ways, pairs)
        if repeat:  # the first warms up
            seconds.append((blocks, whole))
    return Case(page_kib, way, rig.threads(ways), rig.size, seconds)


def lanes_told(device: str, size: int, repeats: int) -> dict[str, object]:
    """Measure loads behind stores and submission, for JSON."""
    from kvoffload.bench import copy_lanes
    from kvoffload.bench.copy_rig import Rig

    loads = copy_lanes.measure_loads(device, size // 2, repeats)
    blocks, hook = copy_lanes.measure_submission(device, size, repeats)
    with Rig(device, copy_lanes.SMALL_PAGE, size) as rig:
        merged = [1e6 * rig.submit_adjacent() / rig.count for _ in range(repeats + 1)]
    return {
        "load_behind_stores": {
            "load_mib": size // 2 // 2**20,
            "queued_mib": copy_lanes.STORES * size // 2 // 2**20,
            "alone_ms": Spread.of([1e3 * alone for alone, _ in loads]).to_plain(),
            "behind_stores_ms": Spread.of([1e3 * behind for _, behind in loads]).to_plain(),
            "ratio": Spread.of([behind / alone for alone, behind in loads]).to_plain(),
        },
        "submission": {
            "adjacent_blocks": blocks,
            "merge_and_submit_us_a_block": Spread.of(merged[1:]).to_plain(),
            "hook_us_a_block": Spread.of(hook).to_plain(),
        },
    }


def draw(told: Mapping[str, object], cases: Sequence[Case]) -> str:
    """Return the picture: speed over that of one large copy, for each size of page."""
    pages = list(dict.fromkeys(case.page_kib for case in cases))
    series: dict[str, list[float]] = {}
    for case in cases:
        name = f"{case.way} {case.path}".strip() + ("" if case.threads == 1 else f", {case.threads} threads")
        series.setdefault(name, []).append(case.ratio.median)
    panel = Panel(
        "Speed of scattered blocks by size of page",
        "times that of one large copy",
        [f"{page} KiB" for page in pages],
        series,
        _GOAL,
    )
    about = told["machine"]
    assert isinstance(about, dict)
    return picture("Copies against one large copy of the same bytes", [headline(about)], [panel])


def last_level_cache() -> int:
    """Return the bytes of the largest cache of the first core, 0 where the system does not say."""
    found = [0]
    for path in _CACHE.glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            found.append(int(text[:-1]) * 1024)
    return max(found)


def method(args: argparse.Namespace) -> str:
    """Return in a sentence how it was measured."""
    return (
        f"{args.repeats} pairs of {args.mib} MiB of blocks, scattered on both sides of a pool of four times that, and as "
        "many bytes in one piece, in turns after a warm-up; median of the pairs' ratios [95 % interval]"
    )


def _table(told: Mapping[str, object], cases: Sequence[Case]) -> Iterator[str]:
    title = "Copies of scattered blocks, their speed as a multiple of one large copy of the same bytes"
    yield from heading(title, told, f"{told['device']}; last-level cache {told['last_level_cache_mib']} MiB")
    form = "{:>9}  {:<14}{:>8}{:>12}{:>12}{:>22}"
    yield form.format("page", "way", "threads", "blocks", "one piece", "blocks / one piece")
    for case in cases:
        plain = case.to_plain()
        speeds = [f"{_median(plain[name]):.1f} GB/s" for name in ("gb_s", "one_piece_gb_s")]
        names = (f"{case.page_kib} KiB", f"{case.way} {case.path}")
        yield form.format(*names, case.threads, *speeds, case.ratio.text())
    yield ""
    yield from _lane_lines(told)


def _lane_lines(told: Mapping[str, object]) -> Iterator[str]:
    load, submission = told["load_behind_stores"], told["submission"]
    assert isinstance(load, dict)
    assert isinstance(submission, dict)
    yield (
        f"a load of {load['load_mib']} MiB while {load['queued_mib']} MiB of stores are queued, over the same load alone: "
        f"{_shown(load['ratio'])} ({_median(load['alone_ms']):.1f} ms alone)"
    )
    yield (
        f"submitting {submission['adjacent_blocks']} adjacent blocks, us a block: "
        f"{_shown(submission['merge_and_submit_us_a_block'], '{:.3f}')} to merge and submit, "
        f"{_shown(submission['hook_us_a_block'], '{:.3f}')} in the hook, which takes the job in, too"
    )


def _median(plain: object) -> float:
    assert isinstance(plain, dict)
    return float(plain["median"])


def _shown(plain: object, form: str = "{:.2f}") -> str:
    assert isinstance(plain, dict)
    return Spread(**plain).text(form)
