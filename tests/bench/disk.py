"""Compares the disk tier's copies with the disk's own speed, and measures an engine that restarts after a
SIGKILL.

Each repeat first writes and reads a file sequentially, with direct I/O on one thread, using the blocks' host
memory. Then it spills and fetches as many bytes with the real `RankDisk`, between scattered host slots and
disk slots, with checksums. Other load on the machine thus affects both. Before the measurement, the bench
compares every fetched byte.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import cast

from kvoffload.checks.options import positive
from kvoffload.cli.exits import CommandError
from kvoffload.disk.open_folder import open_folder
from kvoffload.disk.slot_file import SlotFile, SlotShape, open_slot_file
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.ids import JobId, SlotId
from kvoffload.model.wire import CopyJob, Direction, Tier
from kvoffload.transfer.disk import THREADS, FileOpening, RankDisk
from kvoffload.transfer.ports import Clocks
from tests.bench.copy_rig import Rig, WatchedExecutor
from tests.bench.disk_opening import opening
from tests.bench.lines import Line, line, ratios
from tests.bench.results import add_output_arguments, give_out
from tests.bench.tier_hooks import HOST, NEVER, OUTGROWS, hook_seconds, moved, served

_GOAL, _GOAL_FROM_KIB = 0.8, 1024
_PIECE = 2**20
_POOL = 4  # the size of the slot file, as a multiple of the bytes of one repeat
_REGIONS = 8
_PLAYS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dir", metavar="DIR", type=Path, default=Path(), help="a folder on the disk (default: this one)")
    add(
        "--block-kib", type=positive, nargs="+", default=[64, 256, 1024, 4096], help="sizes of blocks, in KiB"
    )
    add("--mib", type=positive, default=256, help="copied in each repeat, in MiB")
    add("--repeats", type=positive, default=9, help="measurements of each size")
    add("--index-blocks", type=positive, default=1_000_000, help="in the index that is opened")
    add("--conversations", type=positive, default=10, help="that return after a restart")
    add(
        "--model",
        choices=("small", "tiny"),
        default="small",
        help="of the engine that starts again; tiny: for a quick look",
    )
    add("--copies-only", action="store_true", help="start no engine")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    method = (
        f"{args.repeats} repeats of {args.mib} MiB each way, in turns with sequential passes over a file with direct I/O in pieces of "
        f"1 MiB, fdatasync included; median [95 % interval]. Hooks: by turn, {_PLAYS} engines each, one after the other. Restart: "
        f"{args.conversations} conversations on the reference engine, killed (SIGKILL) in the third of five turns"
    )
    return give_out("disk", args, method, _measure(args), "numpy", "xxhash")


def _measure(args: argparse.Namespace) -> Iterator[Line]:
    try:
        with tempfile.TemporaryDirectory(prefix="kvoffload-bench-", dir=args.dir) as folder:
            for block_kib in args.block_kib:
                yield from _copies(Path(folder), block_kib, args.mib * 2**20, args.repeats)
            if not args.copies_only:
                yield from opening(Path(folder), args.index_blocks, args.repeats)
                yield from asyncio.run(_hooks(Path(folder)))
                yield from _restart(Path(folder), args)
    except OSError as error:
        raise CommandError(f"--dir {args.dir}: {error.strerror}") from error


def _copies(folder: Path, block_kib: int, size: int, repeats: int) -> Iterator[Line]:
    """Measure spills and fetches of `size` bytes, each after a sequential pass over as many bytes."""
    block, path = block_kib * 1024, folder / "slots0"
    with Rig(block // _REGIONS, size, regions=_REGIONS) as rig:
        with open_folder(folder) as opened:
            file = open_slot_file(opened, SlotShape(0, 1, block, bytes(16)), _POOL * rig.count)
        tier = _Tier(file, rig)
        try:
            yield from _lines(tier, f"blocks of {block_kib} KiB", repeats, block_kib >= _GOAL_FROM_KIB)
        finally:
            tier.close()
            path.unlink()


def _lines(tier: _Tier, what: str, repeats: int, has_goal: bool) -> Iterator[Line]:
    works = {
        "spill": (tier.pass_writing, tier.spill),
        "fetch": (tier.pass_reading, tier.fetch),
    }
    plain: dict[str, list[float]] = {way: [] for way in works}
    through: dict[str, list[float]] = {way: [] for way in works}
    for repeat in range(repeats + 1):
        tier.shuffle()
        for way, (plain_pass, copy) in works.items():
            took = _timed(plain_pass), _timed(copy)
            if repeat:  # The first repeat is a warm-up.
                plain[way].append(tier.size / took[0] / 1e9)
                through[way].append(tier.size / took[1] / 1e9)
        if not repeat:
            tier.check()
    for way in works:
        ratio = ratios(through[way], plain[way])
        goal = _GOAL if has_goal else None
        yield line(f"{way} of {what}, over a sequential pass of direct I/O", ratio, at_least=goal)
        yield line(f"{way} of {what}", through[way], " GB/s")


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class _Tier:
    """Runs one rank's disk copies from and to a rig's host slots, and sequential passes over the same file."""

    def __init__(self, file: SlotFile, rig: Rig) -> None:
        self.size = rig.size
        self._file = file
        self._rig = rig
        self._threads = WatchedExecutor(THREADS)
        opening = SimpleNamespace(open=lambda: file, shape=file.shape, slots=file.slots, closing=Event())
        self._copies = RankDisk(
            cast("FileOpening", opening), rig.arena, self._threads, Clocks(), timeout_s=600
        )
        while self._copies.take() is None:
            os.sched_yield()
        self._draw = random.Random(0)
        self._jobs = 0
        self._slots: list[int] = []
        self._places: list[int] = []
        self._sums: tuple[tuple[int, ...], ...] = ()
        # Write the whole file once, because a file system allocates space at the first write.
        self._pass_over(os.pwritev, _POOL * self.size)
        self._file.sync()

    def shuffle(self) -> None:
        self._slots = self._draw.sample(range(self._rig.blocks), self._rig.count)
        self._places = self._draw.sample(range(self._file.slots), self._rig.count)

    def spill(self) -> None:
        self._sums = tuple((each,) for each in self._job(is_spill=True))
        self._file.sync()

    def fetch(self) -> None:
        self._job(is_spill=False)

    def pass_writing(self) -> None:
        """Write as many bytes as a spill, sequentially, and sync the file."""
        self._pass_over(os.pwritev, self.size)
        self._file.sync()

    def pass_reading(self) -> None:
        """Read as many bytes as a fetch, sequentially."""
        self._pass_over(os.preadv, self.size)

    def _pass_over(self, call: Callable[[int, list[memoryview], int], int], size: int) -> None:
        memory, descriptor = self._rig.host_memory, self._file._descriptor
        for offset in range(0, size, _PIECE):
            start = offset % (len(memory) // _PIECE * _PIECE)
            call(descriptor, [memory[start : start + min(_PIECE, size - offset)]], offset + 4096)

    def check(self) -> None:
        """Spill blocks, clear their host slots, fetch the blocks into the same slots, and compare.

        Raises:
            CommandError: a byte differs.
        """
        self.spill()
        pages = [page for slot in self._slots for page in self._rig.arena.pages(slot)]
        before = [page.tobytes() for page in pages]
        for page in pages:
            page[:] = bytes(len(page))
        self.fetch()
        if [page.tobytes() for page in pages] != before:
            raise CommandError("fetched bytes differ from those that were spilled")

    def close(self) -> None:
        self._copies.close()
        self._threads.shutdown()

    def _job(self, *, is_spill: bool) -> tuple[int, ...]:
        self._jobs += 1
        way = Direction.STORE if is_spill else Direction.LOAD
        slots, places = tuple(map(SlotId, self._slots)), tuple(map(SlotId, self._places))
        sums = () if is_spill else self._sums
        self._copies.submit(CopyJob(JobId(self._jobs), way, Tier.DISK, slots, places, sums))
        self._threads.wait()
        found = self._copies.take()
        assert found is not None
        (report,) = found.jobs
        if report.outcome is not CopyOutcome.DONE:
            raise CommandError(f"a {way.value} of the disk ended as {report.outcome.value}")
        return report.sums


async def _hooks(folder: Path) -> list[Line]:
    """Measure the time in hooks without a disk, with an idle disk, and with a disk in use."""
    disk = {**HOST, "disk_bytes": "64MiB"}
    spent: dict[str, list[float]] = {}
    for play in range(_PLAYS):
        idle = {**disk, "disk_path": str(folder / f"idle-{play}"), "disk_min_hits": NEVER}
        works = {**disk, "disk_path": str(folder / f"working-{play}")}
        async with (
            served(OUTGROWS, HOST) as without,
            served(OUTGROWS, idle) as rests,
            served(OUTGROWS, works) as busy,
        ):
            played = await hook_seconds({"none": without, "idle": rests, "working": busy})
            for name, by_turn in played.items():
                spent.setdefault(name, []).extend(by_turn)
            if not moved(busy[1], "disk", "load"):
                raise CommandError("nothing was fetched from the disk, so the tier did not work")
    what = "time in the scheduler's hooks with the disk, over without; reference engine"
    return [
        line(f"{what}, idle", ratios(spent["idle"], spent["none"]), at_most=1.05),
        line(f"{what}, while it works", ratios(spent["working"], spent["none"]), at_most=1.15),
    ]


def _restart(folder: Path, args: argparse.Namespace) -> Iterator[Line]:
    first, later = (1280, 128) if args.model == "small" else (512, 64)
    command = [sys.executable, "-m", "kvoffload", "demo", "--json", "--disk", str(folder), "--restart"]
    command += ["--model", args.model, "--conversations", str(args.conversations)]
    command += ["--first-tokens", str(first), "--turn-tokens", str(later)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if ended.returncode:
        raise CommandError(f"the demo ended with exit code {ended.returncode}: {shlex.join(command)}")
    result = json.loads(ended.stdout)
    recomputed, fetched = (
        result[name]["first_ttft_s"]["p50"] for name in ("without_offloading", "with_offloading")
    )
    what = "first token of turns that return after a restart"
    yield line(f"{what}: with the disk, sooner than recomputed", [recomputed / fetched], at_least=3)
    yield line(f"{what}: recomputed", [1e3 * recomputed], " ms")
    yield line(f"{what}: with the disk", [1e3 * fetched], " ms")
    after = result["tiers"]["disk"]
    written = (result["before"]["tiers"]["disk"]["written_bytes"] + after["written_bytes"]) / after[
        "read_bytes"
    ]
    yield line("bytes written to the disk for each byte read back, conversations with a restart", [written])
