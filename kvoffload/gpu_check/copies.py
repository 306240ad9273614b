"""Checks that each way of copying moves the right bytes, measures its speed, and tunes the page kernel."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import msgspec

from kvoffload.cli.partial_file import written
from kvoffload.gpu_check.parts import Line, NotHere, Options, asked, measured, ratios
from kvoffload.gpu_check.rig import Rig
from kvoffload.model.errors import CopyError
from kvoffload.model.wire import Direction
from kvoffload.transfer.cuda.copier import ENGINE_ONLY, GpuProfile, profile_path, read_profile
from kvoffload.transfer.cuda.crossover import learn
from kvoffload.transfer.cuda.driver import NvidiaDriver
from kvoffload.transfer.host_memory import read_file
from kvoffload.transfer.runs import CopyRuns

# Piece sizes in bytes: the page kernel copies the first size in one step, the second in eight steps and a remainder.
_PIECES = (4096, 33_808)
_SHORT = tuple(kib << 10 for kib in (4, 8, 16, 24, 32, 64))
_LONG = (256 << 10, 1 << 20)
# For each piece size, the goal for copies in one direction, as a share of a large copy's speed.
_GOALS = {4 << 10: None, 64 << 10: 0.9, 1 << 20: 0.95}
_BOTH_WAYS = 0.9
_AS_FAST = 0.95
_BOTH = Direction.LOAD, Direction.STORE
_WAYS: tuple[tuple[Direction, ...], ...] = ((Direction.LOAD,), (Direction.STORE,), _BOTH)
_PROGRAMS = (4, 8, 12, 16, 24, 32, 64)
_COUNTS = (2, 4, 8, 16, 32, 64, 128)
_PROFILED = 8 << 10
_UNKNOWN = GpuProfile()


_Medians = dict[tuple[Direction, int], float]  # the speed in GB/s, by direction and size of a piece in bytes
_ATTRIBUTES = {
    "capability": 75,
    "copy engines": 40,
    "registers host memory": 99,
    "host addresses hold for registered memory": 91,
    "reaches pageable memory": 88,
    "by the host's page tables": 100,
    "memory pools": 115,
    "stream priorities": 78,
}


def device(options: Options) -> Iterator[Line]:
    """Yield a line with the GPU's name, then lines about its driver and the host.

    Raises:
        EngineContractError: the NVIDIA driver is missing.
        CopyError: the device does not exist.
    """
    driver = NvidiaDriver(options.device)
    yield Line("GPU", words=f"{driver.name}, CUDA {driver.version}, {driver.pci_address}")
    facts = [f"batches {'on' if driver.is_batched else 'off'} by default"]
    facts += [f"{name} {driver.attribute(number)}" for name, number in _ATTRIBUTES.items()]
    yield Line("driver", words=", ".join(facts))
    node = read_file(f"/sys/bus/pci/devices/{driver.pci_address.lower()}/numa_node") or "unknown"
    pages = read_file("/sys/kernel/mm/transparent_hugepage/enabled") or "unknown"
    maps = (read_file("/proc/self/maps") or "").splitlines()
    library = next((line.split()[-1] for line in maps if "libcuda.so" in line), "unknown")
    words = f"NUMA node {node.strip()}, huge pages {pages.strip()}, Linux {os.uname().release}, {library}"
    yield Line("host", words=words)


def compared(options: Options) -> Iterator[Line]:
    """Copy random bytes to the device and back, in each way of copying. A wrong byte ends the whole check."""
    for how, batch_copies, kernel in (
        ("in batches", "on", ()),
        ("one by one", "off", ()),
        ("loads by the page kernel", "on", (Direction.LOAD,)),
        ("stores by the page kernel", "on", (Direction.STORE,)),
    ):
        what = f"wrong bytes, {how}"
        yield from asked(what, _compared(options, what, batch_copies, kernel), is_check=True)


def _compared(
    options: Options, what: str, batch_copies: str, kernel: tuple[Direction, ...]
) -> Iterator[Line]:
    rig = Rig(options, batch_copies=batch_copies)
    if batch_copies == "on" and not rig.driver.is_batched:
        raise NotHere("the driver has no batched copy, which came with CUDA 12.8")
    copier = rig.with_profile(GpuProfile(), *kernel)
    for piece in _PIECES:
        wrong = rig.wrong_bytes(piece)
        if kernel and copier.kernel_below == ENGINE_ONLY:
            raise CopyError("the kernel could not be launched; the log has the error")
        line = measured(f"{what}, pieces of {piece:,} bytes", [wrong], at_most=0, is_check=True)
        yield replace(line, is_last=wrong > 0)


def speeds(options: Options) -> Iterator[Line]:
    """Yield the speed of each way of copying, for each piece size, and the speed of the way that the copier chooses."""
    rig = Rig(options)
    engine: _Medians = {}
    large = {ways: rig.speeds(options.size, ways) for ways in _WAYS}
    for ways, found in large.items():
        yield measured(f"one large copy, {_named(ways)}", found, " GB/s")
    in_batches = _by_size(rig, "in batches", (*_SHORT, *_LONG), engine)
    yield from asked("copies in batches", in_batches)
    yield from asked("copies by the page kernel", _by_kernel(rig, engine))
    yield from asked("copies as served", _as_served(rig, large))
    yield from asked("copies one by one", _one_by_one(options))


def _by_size(rig: Rig, how: str, sizes: tuple[int, ...], medians: _Medians) -> Iterator[Line]:
    for way in _BOTH:
        for size in sizes:
            found = rig.speeds(size, (way,))
            medians[way, size] = median(found)
            yield measured(f"{way.value}s of {size >> 10} KiB {how}", found, " GB/s")


def _by_kernel(rig: Rig, engine: _Medians) -> Iterator[Line]:
    kernel: _Medians = {}
    rig.with_profile(read_profile(rig.driver.name, rig.driver.version), *Direction)
    yield from _by_size(rig, "by the page kernel", _SHORT, kernel)
    for way in _BOTH:
        faster = [size for size in _SHORT if _AS_FAST * kernel[way, size] > engine[way, size]]
        words = ", ".join(f"{size >> 10} KiB" for size in faster) or "none"
        yield Line(f"sizes at which the page kernel is faster, {way.value}s", words=words)


def _as_served(rig: Rig, large: Mapping[tuple[Direction, ...], Sequence[float]]) -> Iterator[Line]:
    copier = rig.with_profile(read_profile(rig.driver.name, rig.driver.version))
    learn(copier, rig.device)
    words = ", ".join(f"{way.value}s {copier.kernel_below[way] >> 10} KiB" for way in _BOTH)
    yield Line("sizes below which the kernel copies, measured as when an engine starts", words=words)
    for piece, goal in _GOALS.items():
        for ways in _WAYS:
            found = ratios(rig.speeds(piece, ways), large[ways])
            at_least = goal if goal is None or len(ways) == 1 else _BOTH_WAYS
            what = f"{_named(ways)} of pages of {piece >> 10} KiB as served, over one large copy"
            yield measured(what, found, "x", at_least=at_least)


def _one_by_one(options: Options) -> Iterator[Line]:
    rig = Rig(options, batch_copies="off")
    yield from _by_size(rig, "one by one", _SHORT, {})


def profile(options: Options) -> Iterator[Line]:
    """Measure how best to use the page kernel on this card, and write the profile that engines read when they start.

    The profile gets the smallest number of thread blocks with nearly the highest speed. This leaves as much of the
    device as possible to the engine's own kernels.
    """
    rig = Rig(options)
    rig.with_profile(_UNKNOWN, *Direction)
    speeds = {}
    for programs in _PROGRAMS:
        rig.with_profile(GpuProfile(programs=programs), Direction.LOAD)
        found = rig.speeds(_PROFILED, (Direction.LOAD,))
        speeds[programs] = median(found)
        yield measured(f"loads of {_PROFILED >> 10} KiB by {programs} thread blocks", found, " GB/s")
    programs = min(one for one in _PROGRAMS if speeds[one] >= _AS_FAST * max(speeds.values()))
    yield _replaces("thread blocks of the page kernel", programs, _UNKNOWN.programs)
    fewest = yield from _fewest(rig, programs)
    yield _replaces("fewest short copies for which the kernel is used", fewest, _UNKNOWN.fewest)
    path = profile_path(rig.driver.name, rig.driver.version)
    path.parent.mkdir(parents=True, exist_ok=True)
    stores = read_profile(rig.driver.name, rig.driver.version).stores  # keep the operator's choice
    with written(path) as file:
        file.write(msgspec.json.encode(GpuProfile(programs, fewest, stores)).decode())
    yield Line("profile that engines read when they start", words=str(path))


def _fewest(rig: Rig, programs: int) -> Generator[Line, None, int]:
    """Yield, for small batches, the page kernel's time relative to the copy engine's.

    Return the smallest number of copies for which the page kernel is faster than the copy engine.
    """
    rig.with_profile(GpuProfile(programs=programs), Direction.LOAD)
    for number in _COUNTS:
        runs = rig.runs(Direction.LOAD, _PROFILED, number)
        times = {}
        for by_kernel in (True, False):
            samples = [_waited(rig, runs, by_kernel=by_kernel) for _ in range(rig.repeats + 1)]
            times[by_kernel] = median(samples[1:])
        ratio = times[True] / times[False]
        yield measured(
            f"{number} loads of {_PROFILED >> 10} KiB by the page kernel, time over the copy engine's",
            [ratio],
            "x",
        )
        if ratio < _AS_FAST:
            return number
    return 2 * _COUNTS[-1]


def _waited(rig: Rig, runs: CopyRuns, *, by_kernel: bool) -> float:
    """Enqueue a small load on an idle stream, wait until it ends, and return how many seconds this took."""
    stream = rig.copier.stream(Direction.LOAD)
    begun = time.perf_counter()
    if by_kernel:
        rig.driver.copy_by_kernel(runs, stream)
    else:
        rig.driver.copy(Direction.LOAD, runs, stream)
    rig.settle(stream)
    return time.perf_counter() - begun


def _replaces(what: str, found: int, constant: int) -> Line:
    return Line(what, words=f"{found}, in place of {constant}")


def _named(ways: tuple[Direction, ...]) -> str:
    return " and ".join(f"{way.value}s" for way in ways)
