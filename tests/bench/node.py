"""Measures what it costs to read another engine's memory, and to follow its table.

Copies: the same slots are copied by one thread from another engine's file with `preadv`, and from this process's own memory with the
host copier's function, in turns. The blocks are larger together than the processor's caches. A prefix's blocks lie in adjacent
slots, unless the owner's memory is full and was filled in another order ("scattered").

The table: microseconds of the owner's hook for each changed slot, and of a reader's thread for each change that it follows.

With `--engines`, the bench measures first tokens instead (`node_engines`).

With `--duplicates`, the bench counts instead what engines of one machine find, depending on what becomes of blocks that they have
fetched from each other (`trace_node`).
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvoffload.checks.options import positive
from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.open_folder import open_folder
from kvoffload.model.ids import BlockKey, JobId, SlotId
from kvoffload.model.wire import CopyJob, Direction, NodeSlot, Tier
from kvoffload.node.folder import HostPlace
from kvoffload.node.neighbour import Neighbour, TableFile
from kvoffload.node.table import HostTable, TableHeader
from kvoffload.testing import FakeDevice
from kvoffload.transfer.arena import Arena, slots_in_chunk
from kvoffload.transfer.blocking_calls import Call
from kvoffload.transfer.host_copier import choose_copy
from kvoffload.transfer.host_file import RankShape, open_host_file
from kvoffload.transfer.host_memory import MmapAllocator
from kvoffload.transfer.node import KindFolder, NodeMover
from kvoffload.transfer.runs import CopyRuns
from kvoffload.transfer.tier_jobs import TierPart
from tests.bench import node_engines, trace_node
from tests.bench.copy_rig import WrongBytes
from tests.bench.lines import Line, line, ratios
from tests.bench.results import add_output_arguments, give_out
from tests.gates import ManualExecutor

REGIONS = 32
_POOL = 4  # the owner's memory, as a multiple of one copy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--page-kib", type=positive, nargs="+", default=[4, 16, 64], help="sizes of pages, in KiB"
    )
    parser.add_argument("--mib", type=positive, default=64, help="copied in each repeat, in MiB")
    parser.add_argument("--slots", type=positive, default=20_000, help="the slots of the table")
    parser.add_argument("--repeats", type=positive, default=15, help="measurements of each copy")
    folder = "a folder on a tmpfs (default: /dev/shm); huge pages depend on the mount"
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help=folder)
    first = "measure first tokens of prefixes that another engine holds, beside a Mooncake store; measure no copies"
    parser.add_argument("--engines", action="store_true", help=first)
    parser.add_argument(
        "--prompts", type=positive, default=12, help="with --engines: measurements of each way"
    )
    model = "with --engines; tiny: for a quick look"
    parser.add_argument("--model", choices=("small", "tiny"), default="small", help=model)
    duplicates = "count what engines find, if they keep fetched blocks or not; measure no copies"
    parser.add_argument("--duplicates", action="store_true", help=duplicates)
    trace = "with --duplicates: JSON lines, may be gzipped (default: drawn workloads)"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=trace)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.duplicates:
        method = "the real core; engines take requests in turn, each of which ends before the next one; share of prompt tokens"
        return give_out("node", args, method, trace_node.measure(args.trace))
    if args.engines:
        method = (
            f"{args.prompts} prompts, reference engine, {args.model} model, in turns; medians [95 % interval]"
        )
        packages = "mooncake-transfer-engine-non-cuda", "numpy"
        return give_out("node", args, method, node_engines.measure_engines(args), *packages)
    method = f"{args.repeats} repeats of {args.mib} MiB, blocks of {REGIONS} pages, one thread, in turns; medians [95 % interval]"
    return give_out("node", args, method, _measure(args), "numpy", "xxhash")


def _measure(args: argparse.Namespace) -> Iterator[Line]:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for page_kib in args.page_kib:
            yield from copies(Path(folder), page_kib * 1024, args.mib * 2**20, args.repeats)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        yield from following(Path(folder), args.slots, args.repeats)


class Pair:
    """Another engine's memory in a file, as much memory of this process, and the memory into which both are copied."""

    def __init__(self, root: Path, page: int, size: int) -> None:
        layout = FakeDevice(2, [page] * REGIONS).layout
        self.count = max(size // layout.slot_bytes, 1)
        slots = _POOL * self.count
        place = HostPlace(root, f"kind{page}", "owner", lambda: KVIdentity("", "", "", {}))
        shape = RankShape(0, layout, slots_in_chunk(layout))
        self._file = open_host_file(place.claim(), shape, slots)
        self._file.begin()
        at_once = ManualExecutor(held=False)
        self.owner, self.plain, self.own = [
            Arena(layout, slots, MmapAllocator(at_once, file=file)) for file in (self._file, None, None)
        ]
        for arena in (self.owner, self.plain, self.own):
            asyncio.run(arena.prepare())
        data = np.frombuffer(secrets.token_bytes(page), np.uint8)
        for slot in range(slots):
            for arena in (self.owner, self.plain):
                for region, target in enumerate(arena.pages(slot)):
                    np.frombuffer(target, np.uint8)[:] = data + np.uint8((slot + region) % 256)
        claim = place.claim()
        self.table = HostTable.create(claim.folder, TableHeader(slots, (self._file.id,), "f" * 32))
        for slot in range(slots):
            self.table.publish(SlotId(slot), key(slot), 0.0)
        reader = Neighbour(TableFile.open(claim.folder))
        reader.follow()
        generation = self.table.header.generation
        places = {slot: number for part in reader.parts for slot, number in part.values()}
        self.targets = [
            NodeSlot("0", generation, SlotId(slot), places[SlotId(slot)]) for slot in range(slots)
        ]
        reader.close()
        claim.close()
        self._mover = NodeMover(shape, self.own)
        self._kind = KindFolder(open_folder(root / f"kind{page}"))
        self._copy = choose_copy()

    def from_file(self, sources: Sequence[int], slots: Sequence[int]) -> float:
        targets = tuple([self.targets[source] for source in sources])
        job = CopyJob(JobId(1), Direction.LOAD, Tier.NODE, tuple(map(SlotId, slots)), targets, ())
        begun = time.perf_counter()
        parts = [
            self._mover.get(TierPart(job, positions), Call(_nothing, None, _nothing, 0.0, 1.0), self._kind)
            for positions in self._mover.positions_of(job)
        ]
        took = time.perf_counter() - begun
        if sum(len(part.whole) for part in parts) != len(sources):
            raise WrongBytes("not every block was copied")
        return took

    def from_memory(self, sources: Sequence[int], slots: Sequence[int]) -> float:
        begun = time.perf_counter()
        theirs, ours = [
            arena.geometry.page_addresses(np.array(some))
            for arena, some in ((self.plain, sources), (self.own, slots))
        ]
        self._copy(CopyRuns(theirs.ravel(), ours.ravel(), np.tile(self.own.geometry.page, len(slots))))
        return time.perf_counter() - begun

    def check(self, sources: Sequence[int], slots: Sequence[int]) -> None:
        for source, slot in zip(sources, slots, strict=True):
            if [*map(bytes, self.own.pages(slot))] != [*map(bytes, self.plain.pages(source))]:
                raise WrongBytes("a copy has wrong bytes")

    def close(self) -> None:
        self._kind.close()
        for arena in (self.owner, self.plain, self.own):
            arena.close()
        self._file.close(may_still_write=False)


def _nothing(*_: object) -> None:
    pass


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(4, "little") * 9)


def copies(root: Path, page: int, size: int, repeats: int) -> Iterator[Line]:
    """Measure the copies of one page size, of adjacent and of scattered slots."""
    pair, draw = Pair(root, page, size), np.random.default_rng(0)
    for order in ("adjacent", "scattered"):
        taken: list[list[float]] = [[], []]
        for repeat in range(repeats + 1):
            first = int(draw.integers(_POOL - 1)) * pair.count
            sources = [*range(first, first + pair.count)]
            if order == "scattered":
                sources = draw.permutation(_POOL * pair.count)[: pair.count].tolist()
            slots = [*range(repeat % _POOL * pair.count, (repeat % _POOL + 1) * pair.count)]
            ways = [pair.from_file, pair.from_memory]
            for way in (0, 1) if repeat % 2 else (1, 0):
                took = ways[way](sources, slots)
                if repeat:  # the first repeat is a warm-up
                    taken[way].append(took)
        pair.check(sources, slots)
        what = f"{order} blocks with pages of {page // 1024} KiB"
        yield line(
            f"speed of copies from another engine over own memory, {what}",
            ratios(taken[1], taken[0]),
            at_least=0.9,
        )
        speeds = [pair.count * REGIONS * page / 2**20 / seconds for seconds in taken[0]]
        yield line(f"speed of copies from another engine, {what}", speeds, " MiB/s")
    pair.close()


def following(root: Path, slots: int, repeats: int) -> Iterator[Line]:
    """Measure the owner's writes to its table, and a reader that follows them."""
    (root / "0").mkdir(mode=0o700)
    with open_folder(root / "0") as folder:
        table = HostTable.create(folder, TableHeader(slots, (b"i" * 16,), "f" * 32))
        for slot in range(slots):
            table.publish(SlotId(slot), key(slot), 0.0)
        reader = Neighbour(TableFile.open(folder))
    begun = time.perf_counter()
    reader.follow()
    yield line(
        "reading another engine's table for the first time, for each slot",
        [(time.perf_counter() - begun) * 1e6 / slots],
        " us",
    )
    writes, reads, idle = list[float](), list[float](), list[float]()
    changes = min(500, slots)
    for repeat in range(repeats):
        some = range(
            repeat * changes % (slots - changes + 1), repeat * changes % (slots - changes + 1) + changes
        )
        begun = time.perf_counter()
        for slot in some:
            table.invalidate(SlotId(slot))
            table.publish(SlotId(slot), key(slots + repeat * changes + slot), 0.0)
        writes.append((time.perf_counter() - begun) * 1e6 / changes)
        begun = time.perf_counter()
        reader.follow()
        reads.append((time.perf_counter() - begun) * 1e6 / changes)
        begun = time.perf_counter()
        reader.follow()
        idle.append((time.perf_counter() - begun) * 1e6)
    wanted = [key(10 * slots + number) for number in range(1000)]
    lookups = list[float]()
    parts = [reader.parts] * 7
    for _ in range(repeats):
        begun = time.perf_counter()
        assert not [each for each in wanted if any(each in part[each[0]] for part in parts)]
        lookups.append((time.perf_counter() - begun) * 1e6 / len(wanted))
    reader.close()
    yield line("the owner's hook, for each slot that is written and published", writes, " us")
    yield line("a reader's thread, for each such slot", reads, " us")
    yield line("a reader's thread, if nothing has changed", idle, " us")
    yield line("the search for a block that none of 7 neighbours has", lookups, " us")
