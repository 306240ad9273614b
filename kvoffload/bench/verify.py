"""`kvoffload bench verify`: what checksums add to copies between two pieces of host memory, for each setting of `verify`.

Every repeat copies the same blocks of memory to slots and back, once with each setting, in an order that changes from
repeat to repeat, so that what else the machine does meets all alike. Copies and checksums run one after the other on one
thread, and each repeat chooses other blocks of more memory than a cache holds. A setting's time is compared with that of
"off" in the same repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.bench import drawings
from kvoffload.bench.output import add_output_arguments, check_output, give_out, heading
from kvoffload.bench.results import machine
from kvoffload.cli.demo.intervals import median_interval
from kvoffload.cli.exits import Exit
from kvoffload.cli.parser import positive
from kvoffload.model.transfer import COPY_DIRECTIONS, Direction
from kvoffload.testing import FakeDevice, ManualExecutor
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.clock import SystemClock
from kvoffload.transfer.factory import make_checksums
from kvoffload.transfer.host_copier import HostCopier
from kvoffload.transfer.host_memory import MmapAllocator
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import merge_runs

if TYPE_CHECKING:
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.runs import Numbers

HELP = "what checksums (`verify`) add to copies of blocks in host memory"

MODES = ("off", "sample", "full")
REGIONS = 32  # pages of a block: keys and values of 16 layers, or of 32 that keep both in one tensor
_POOL = 4  # times what a repeat copies


@dataclass(frozen=True, slots=True)
class Case:
    """What was measured of one size of block in one direction.

    Args:
        block_kib: bytes of a block, in KiB.
        direction: of the copies.
        seconds: of each repeat, by setting.
    """

    block_kib: int
    direction: Direction
    seconds: Mapping[str, Sequence[float]]

    def ratios(self, mode: str) -> list[float]:
        """Time with a setting over time without checksums, for each repeat."""
        return [mine / off for mine, off in zip(self.seconds[mode], self.seconds["off"], strict=True)]

    def to_plain(self) -> dict[str, object]:
        """Seconds and ratios, for JSON."""
        ratios = {}
        for mode in MODES:
            found = self.ratios(mode)
            interval = _interval(found)
            ratios[mode] = {"median": statistics.median(found), "interval": interval}
        return {
            "block_kib": self.block_kib,
            "direction": self.direction.value,
            "seconds": {mode: list(found) for mode, found in self.seconds.items()},
            "ratios": ratios,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    parser.add_argument(
        "--block-kib", type=positive, nargs="+", default=[64, 2048], help="sizes of blocks, in KiB"
    )
    parser.add_argument("--mib", type=positive, default=64, help="copied in each repeat, in MiB")
    parser.add_argument("--repeats", type=positive, default=15, help="measurements of each setting")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        CommandError: the results cannot be written.
    """
    check_output(args)
    cases = [
        case
        for block_kib in args.block_kib
        for case in measure(block_kib, args.mib * 2**20, args.repeats).values()
    ]
    told = {
        "machine": machine("numpy", "xxhash"),
        "method": method(args),
        "cases": [case.to_plain() for case in cases],
    }
    give_out("verify", told, args, _table(told, cases), drawings.verify)
    return Exit.OK


def measure(block_kib: int, size: int, repeats: int) -> dict[Direction, Case]:
    """Copy `size` bytes of blocks in each repeat, to slots and back."""
    page = max(block_kib * 1024 // REGIONS, 1)
    count = max(size // (page * REGIONS), 1)
    side = Side(_POOL * count, page)
    draw = np.random.default_rng(0)
    found: dict[Direction, dict[str, list[float]]] = {
        way: {mode: [] for mode in MODES} for way in COPY_DIRECTIONS
    }
    for repeat in range(repeats + 1):
        blocks, slots = (draw.permutation(_POOL * count)[:count] for _ in range(2))
        turn = repeat % len(MODES)
        for mode in MODES[turn:] + MODES[:turn]:
            for way in COPY_DIRECTIONS:
                seconds = side.copy(way, mode, slots, blocks)
                if repeat:  # the first warms up
                    found[way][mode].append(seconds)
    return {way: Case(block_kib, way, seconds) for way, seconds in found.items()}


class Side:
    """One rank's memory on both sides, and a set of checksums for each setting."""

    def __init__(self, blocks: int, page: int) -> None:
        layout = FakeDevice(blocks, [page] * REGIONS).layout
        at_once = ManualExecutor(held=False)
        self._arena = Arena(layout, blocks, MmapAllocator(at_once))
        asyncio.run(self._arena.prepare())
        self._copier = HostCopier(at_once, SystemClock())
        self._checksums: dict[str, Checksums | None] = {
            mode: make_checksums(mode, self._arena, executor=at_once) for mode in MODES
        }

    def copy(self, way: Direction, mode: str, slots: Numbers, blocks: Numbers) -> float:
        """Copy the blocks and read their checksums; return the seconds."""
        checksums, begun = self._checksums[mode], time.perf_counter()
        tickets = [self._copier.submit(way, merge_runs(self._arena.geometry, way, slots, blocks), ())]
        read = checksums.start(way, slots) if checksums is not None else None
        seconds = time.perf_counter() - begun
        assert all(ticket.query() is TicketState.DONE for ticket in tickets)
        assert read is None or (read.query(), read.corrupt) == (TicketState.DONE, ())
        return seconds


def method(args: argparse.Namespace) -> str:
    """Return in a sentence how it was measured."""
    return (
        f"{args.repeats} repeats of {args.mib} MiB, blocks of {REGIONS} pages, settings in turns on one thread; "
        "median of the time over that of off in the same repeat [95 % interval]"
    )


def _table(told: Mapping[str, object], cases: Sequence[Case]) -> Iterator[str]:
    title = "Copies of blocks in host memory with their checksums, time as a multiple of copies without"
    yield from heading(title, told)
    form = "{:>9}  {:<10}{:>12}{:>24}{:>24}"
    yield form.format("block", "direction", "off", "sample", "full").rstrip()
    for case in cases:
        off = statistics.median(case.seconds["off"])
        cells = [_cell(case.ratios(mode)) for mode in ("sample", "full")]
        yield form.format(
            f"{case.block_kib} KiB", case.direction.value, f"{1e3 * off:.1f} ms", *cells
        ).rstrip()


def _cell(ratios: Sequence[float]) -> str:
    interval = _interval(ratios)
    shown = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval is not None else ""
    return f"{statistics.median(ratios):.2f}{shown}"


def _interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the median's interval, None where there are too few samples to have one."""
    low, high = median_interval(ratios)
    return (low, high) if math.isfinite(low) else None
