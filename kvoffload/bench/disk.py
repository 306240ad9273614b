"""`kvoffload bench disk`: the disk tier's copies against the disk itself, and an engine that comes back after a crash.

Each repeat passes over a file with plain direct I/O, in order: on one thread and on as many as the tier has, between the file and the
host memory that the blocks lie in; and on one thread through a single buffer, which stays in the processor's cache. Then it spills and
fetches as many bytes through the real `DiskCopies` and slot file, from and to scattered host slots, checksums included. So other load
on the machine affects all of them. Places in the file are scattered; small blocks are measured side by side too, as the core hands
places out while it has neighbours.
Every fetched byte is compared with what was spilled before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.bench.lines import Line, line, ratios
from kvoffload.bench.results import add_output_arguments, give_out
from kvoffload.cli.exits import CommandError
from kvoffload.cli.parser import positive
from kvoffload.cli.signals import run_async

if TYPE_CHECKING:
    from kvoffload.bench.copy_rig import Rig
    from kvoffload.disk.slot_file import SlotFile

HELP = "the disk tier's copies against the disk's own speed, and an engine that starts again after a SIGKILL"

_GOAL, _GOAL_FROM_KIB = 0.8, 1024
_PIECE = 2**20
_POOL = 4  # times the places that one pass names
_GIB = 2**30
_REGIONS = 8  # pages of a block
_WAYS = ("spill", "fetch")
_PASS = "over a sequential pass of direct I/O"
_PLAYS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's options."""
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
    """Measure and print.

    Raises:
        CommandError: the folder cannot be written, or the results cannot.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded; the demo says why
    method = (
        f"{args.repeats} repeats of {args.mib} MiB each way, in turns with sequential passes over a file with direct I/O in pieces of "
        f"1 MiB, fdatasync included; median [95 % interval]. Hooks: by turn, {_PLAYS} engines each, one after the other. Restart: "
        f"{args.conversations} conversations on the reference engine, killed (SIGKILL) in the third of five turns"
    )
    return give_out("disk", args, method, _measure(args), "numpy", "xxhash")


def _measure(args: argparse.Namespace) -> Iterator[Line]:
    from kvoffload.bench.disk_opening import opening

    try:
        with tempfile.TemporaryDirectory(prefix="kvoffload-bench-", dir=args.dir) as folder:
            for block_kib in args.block_kib:
                yield from measure(Path(folder), block_kib, args.mib * 2**20, args.repeats)
            if not args.copies_only:
                yield from opening(Path(folder), args.index_blocks, args.repeats)
                yield from run_async(_hooks(Path(folder)))
                yield from _restart(Path(folder), args)
    except OSError as error:
        raise CommandError(f"--dir {args.dir}: {error.strerror}") from error


def measure(folder: Path, block_kib: int, size: int, repeats: int) -> Iterator[Line]:
    """Spill and fetch `size` bytes of blocks in each repeat, and pass over as many on the disk."""
    from kvoffload.bench.copy_rig import Rig
    from kvoffload.disk.open_folder import open_folder
    from kvoffload.disk.slot_file import SlotShape, open_slot_file

    block, path = block_kib * 1024, folder / "slots0"
    with Rig("cpu", block // _REGIONS, size, regions=_REGIONS) as rig:
        with open_folder(folder) as opened:
            file = open_slot_file(opened, SlotShape(0, 1, block, bytes(16)), _POOL * rig.count)
        tier = _Tier(file, rig)
        try:
            for is_scattered in (True, False) if block_kib < _GOAL_FROM_KIB else (True,):
                tier.is_scattered = is_scattered
                what = f"blocks of {block_kib} KiB" + ("" if is_scattered else " side by side")
                yield from _lines(tier, what, repeats, _GOAL if block_kib >= _GOAL_FROM_KIB else None)
        finally:
            tier.close()
            path.unlink()


def _lines(tier: _Tier, what: str, repeats: int, goal: float | None) -> Iterator[Line]:
    passes: dict[str, Callable[[str], None]] = {
        _PASS: tier.plain_pass,
        f"over the same on {tier.threads} threads": partial(tier.plain_pass, threads=tier.threads),
        "over the same through one buffer": partial(tier.plain_pass, is_cached=True),
    }
    speeds: dict[tuple[str, str], list[float]] = {(way, name): [] for way in _WAYS for name in (*passes, "")}
    cpu: dict[str, list[float]] = {way: [] for way in _WAYS}
    for repeat in range(repeats + 1):
        tier.shuffle()
        for way in _WAYS:
            works: dict[str, Callable[[], None]] = {
                **{name: partial(plain, way) for name, plain in passes.items()},
                "": tier.spill if way == "spill" else tier.fetch,
            }
            took = {name: _timed(work) for name, work in works.items()}
            if repeat:  # the first warms up, and compares every byte
                for name, (seconds, _) in took.items():
                    speeds[way, name].append(tier.size / seconds / 1e9)
                cpu[way].append(took[""][1] / tier.size * _GIB)
        if not repeat:
            tier.check()
    for way in _WAYS:
        for name in passes:
            ratio = ratios(speeds[way, ""], speeds[way, name])
            yield line(f"{way} of {what}, {name}", ratio, at_least=goal if name == _PASS else None)
        yield line(f"{way} of {what}", speeds[way, ""], " GB/s")
        yield line(f"{way} of {what}, processor time a GiB", cpu[way], " s")


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds and the processor seconds that work takes."""
    usage, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return took, after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime


class _Tier:
    """Copies of one rank between a rig's host slots and a file; and the file's disk alone."""

    def __init__(self, file: SlotFile, rig: Rig) -> None:
        from kvoffload.bench.copy_rig import WatchedExecutor
        from kvoffload.disk.system import aligned_buffer
        from kvoffload.transfer.clock import SystemClock
        from kvoffload.transfer.disk_copies import THREADS, DiskCopies

        self.size = rig.size
        self.threads = THREADS
        self.is_scattered = True
        self._file = file
        self._rig = rig
        self._threads = WatchedExecutor(THREADS)
        self._copies = DiskCopies(0, file, rig.arena, self._threads, SystemClock(), timeout_s=600)
        self._buffer = aligned_buffer(_PIECE)
        self._host = rig.host_memory
        self._draw = random.Random(0)
        self._jobs = 0
        self._slots: list[int] = []
        self._places: list[int] = []
        self._sums: tuple[tuple[int, ...], ...] = ()
        # A file system makes space ready when it is first written.
        self._pass_over("spill", _POOL * self.size, self._host, self.threads)

    def shuffle(self) -> None:
        """Choose other slots and places for the next copies."""
        count, draw = self._rig.count, self._draw
        self._slots = draw.sample(range(self._rig.blocks), count)
        first = draw.randrange(self._file.slots - count + 1)
        self._places = (
            draw.sample(range(self._file.slots), count)
            if self.is_scattered
            else [*range(first, first + count)]
        )

    def spill(self) -> None:
        """Write the slots to their places, and have them on the disk."""
        self._sums = tuple((each,) for each in self._job(is_spill=True))
        self._file.sync()

    def fetch(self) -> None:
        """Read the places into their slots."""
        self._job(is_spill=False)

    def plain_pass(self, way: str, *, threads: int = 1, is_cached: bool = False) -> None:
        """Write or read as many bytes of the file in order on so many threads, with direct I/O and nothing else.

        Args:
            way: "spill" writes, "fetch" reads.
            threads: how many.
            is_cached: all bytes go through one buffer, not between the file and as many bytes of the rig's host memory.
        """
        memory = self._buffer if is_cached else self._host
        self._pass_over(way, self.size, memory, threads)

    def _pass_over(self, way: str, size: int, memory: memoryview, threads: int) -> None:
        descriptor = self._file.fileno()
        call = os.pwritev if way == "spill" else os.preadv

        def share(thread: int) -> None:
            for offset in range(thread * _PIECE, size, threads * _PIECE):
                start = offset % (len(memory) // _PIECE * _PIECE)
                piece = memory[start : start + min(_PIECE, size - offset)]
                call(descriptor, [piece], offset + 4096)

        for done in [self._threads.submit(share, thread) for thread in range(threads)]:
            done.result()
        self._threads.wait()
        if way == "spill":
            self._file.sync()

    def check(self) -> None:
        """Fetch into cleared slots, and compare every byte with what was spilled.

        Raises:
            CommandError: one differs; nothing of it is worth timing.
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
        """Close the file."""
        self._copies.close()
        self._threads.shutdown()

    def _job(self, *, is_spill: bool) -> tuple[int, ...]:
        from kvoffload.model.causes import CopyOutcome
        from kvoffload.model.ids import JobId, SlotId
        from kvoffload.model.transfer import Direction, DiskJob

        self._jobs += 1
        way = Direction.STORE if is_spill else Direction.LOAD
        slots, places = tuple(map(SlotId, self._slots)), tuple(map(SlotId, self._places))
        self._copies.submit([DiskJob(JobId(self._jobs), way, slots, places, () if is_spill else self._sums)])
        self._threads.wait()
        (report,) = self._copies.take_reports()
        if report.outcome is not CopyOutcome.DONE:
            raise CommandError(f"a {way.value} of the disk ended as {report.outcome.value}")
        return report.sums


async def _hooks(folder: Path) -> list[Line]:
    """Measure hooks without a disk, with one that writes nothing, and with one that works."""
    from kvoffload.bench.tier_hooks import HOST, NEVER, OUTGROWS, hook_seconds, moved, served

    disk = {**HOST, "disk_bytes": "64MiB"}
    spent: dict[str, list[float]] = {}
    for play in range(_PLAYS):
        idle = {**disk, "disk_path": str(folder / f"idle-{play}"), "spill_after_hits": NEVER}
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
    command = [sys.executable, "-m", "kvoffload.cli", "demo", "--json", "--disk", str(folder), "--restart"]
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
