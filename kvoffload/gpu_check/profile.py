"""Measures how the page kernel is best used on this card, and writes the profile that engines read at their start.

The fewest thread blocks that are as fast as any are chosen: all others stay with the engine's own kernels.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from statistics import median

import msgspec

from kvoffload.cli.partial_file import written
from kvoffload.gpu_check.apart import Options
from kvoffload.gpu_check.decode import measure_steps
from kvoffload.gpu_check.lines import Line, NotHere, measured
from kvoffload.gpu_check.rig import Rig
from kvoffload.model.transfer import Direction
from kvoffload.transfer.cuda.copier import GpuProfile, profile_path
from kvoffload.transfer.cuda.crossover import Trial
from kvoffload.transfer.cuda.driver import CudaScratch

_PROGRAMS = (4, 8, 12, 16, 24, 32, 64)
_COUNTS = (2, 4, 8, 16, 32, 64, 128)
_PIECE = 8 << 10
_AS_FAST = 0.95
_STEP = 1.02  # of a step without stores: what the engine may lose
_UNKNOWN = GpuProfile()


def chosen(options: Options) -> Iterator[Line]:
    """Yield what was measured, and write the profile."""
    rig = Rig(options.device, options.size)
    try:
        rig.with_profile(_UNKNOWN, *Direction)
    except NotHere as reason:
        yield Line("how the page kernel is best used", words=f"not asked: {reason}")
        return
    speeds = {}
    for programs in _PROGRAMS:
        rig.with_profile(GpuProfile(programs=programs), Direction.LOAD)
        found = rig.speeds(_PIECE, (Direction.LOAD,), options.repeats)
        speeds[programs] = median(found)
        yield measured(f"loads of {_PIECE >> 10} KiB by {programs} thread blocks", found, " GB/s")
    programs = min(one for one in _PROGRAMS if speeds[one] >= _AS_FAST * max(speeds.values()))
    yield _replaces("thread blocks of the page kernel", programs, _UNKNOWN.programs)
    fewest = yield from _fewest(rig, programs, options.repeats)
    yield _replaces("short copies from which on the kernel is used", fewest, _UNKNOWN.fewest)
    costs = {}
    for name, ways in {"copy engine": (), "page kernel": (Direction.STORE,)}.items():
        rig = Rig(options.device, options.size)
        rig.with_profile(GpuProfile(programs=programs), *ways)
        over = measure_steps(rig, _PIECE, options.repeats).over
        costs[name] = median(over)
        yield measured(f"a step with stores of {_PIECE >> 10} KiB by the {name}, over one without", over, "x")
    stores = costs["page kernel"] <= max(_STEP, costs["copy engine"])
    yield _replaces("stores use the page kernel", stores, _UNKNOWN.stores)
    path = profile_path(rig.driver.name, rig.driver.version)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written(path) as file:
        file.write(msgspec.json.encode(GpuProfile(programs, fewest, stores)).decode())
    yield Line("the profile that engines read at their start", words=str(path))


def _fewest(rig: Rig, programs: int, repeats: int) -> Generator[Line, None, int]:
    """Yield the device's times of small batches; return from how many copies on the kernel is faster."""
    copier = rig.with_profile(GpuProfile(programs=programs), Direction.LOAD)
    trial = Trial(rig.driver, copier.stream(Direction.LOAD), CudaScratch(rig.memory, rig.host))
    trial.begin()
    for number in _COUNTS:
        times = {}
        for by_kernel in (True, False):
            runs = rig.runs(Direction.LOAD, _PIECE, number)
            samples = [trial.seconds(Direction.LOAD, runs, by_kernel=by_kernel) for _ in range(repeats + 1)]
            times[by_kernel] = median(samples[1:])
        ratio = times[True] / times[False]
        yield measured(
            f"{number} loads of {_PIECE >> 10} KiB by the page kernel, time over the copy engine's",
            [ratio],
            "x",
        )
        if ratio < _AS_FAST:
            return number
    return 2 * _COUNTS[-1]


def _replaces(what: str, found: int, constant: int) -> Line:
    return Line(what, words=f"{found}, in place of {constant}")
