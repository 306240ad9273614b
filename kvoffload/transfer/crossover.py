"""Which copies go through a kernel instead of the copy engine: those shorter than where the engine begins to win.

Where that is differs from device to device and from one direction to the other, so it is measured, once in a process: after
start, on a thread of its own, on a few megabytes of scratch memory, while everything goes through the copy engine. If the
kernel cannot be had, moves a wrong byte, or does not win, nothing changes.

    piece      2 KiB    4 KiB   ...   32 KiB   64 KiB         the first size at which the engine is as fast ends the search:
    faster     kernel   kernel        kernel   engine         here pieces below 64 KiB go through the kernel
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from kvoffload.logs import get_logger
from kvoffload.model.errors import CopyError
from kvoffload.model.transfer import Direction
from kvoffload.transfer.runs import CopyRuns
from kvoffload.transfer.short_copies import ENGINE_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvoffload.transfer.cuda_copier import CudaCopier, CudaDriver, Scratch
    from kvoffload.transfer.short_copies import Limits

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")

log = get_logger("transfer")

SCRATCH_BYTES = 8 * 2**20
_PIECES: tuple[int, ...] = tuple(2**power for power in range(11, 19))  # 2 KiB to 256 KiB
_REPEATS = 5
_WINS = 0.95  # of the engine's time: what is less is noise
_PATIENCE_S = 10.0

_known: dict[str, Limits] = {}
_learning = Lock()


def learn(copier: CudaCopier[StreamT, EventT], device: str) -> None:
    """Measure the device, unless this process has, and let the copier use what was found. Never raises.

    Args:
        copier: whose driver measures; it may be at work.
        device: its name.
    """
    with _learning:
        if device not in _known:
            _known[device] = _measured(copier.driver, device)
    copier.kernel_below = _known[device]


def _measured(driver: CudaDriver[StreamT, EventT], device: str) -> Limits:
    begun = time.perf_counter()
    try:
        stream = driver.stream(urgent=False)
        with driver.scratch(SCRATCH_BYTES, stream) as scratch:
            limits = measure(driver, stream, scratch)
    except Exception as error:  # no triton, no memory, no mapping: the engine copies everything
        log.info("page_kernel_unavailable", device=device, reason=repr(error))
        return ENGINE_ONLY
    log.info(
        "copy_crossover_measured",
        device=device,
        load_below_bytes=limits[Direction.LOAD],
        store_below_bytes=limits[Direction.STORE],
        seconds=round(time.perf_counter() - begun, 3),
    )
    return limits


def measure(
    driver: CudaDriver[StreamT, EventT],
    stream: StreamT,
    scratch: Scratch,
    rest: Callable[[], None] = lambda: time.sleep(2e-4),
) -> Limits:
    """Return for each direction the bytes of a run below which the kernel is faster, 0 where it never is.

    Args:
        driver: copies both ways.
        stream: that nothing else uses.
        scratch: memory that nothing else uses.
        rest: waits a moment.

    Raises:
        CopyError: the kernel moves wrong bytes, or nothing ends.
        Exception: there is no kernel.
    """
    trial = _Trial(driver, stream, scratch, rest)
    trial.check()
    return {direction: trial.limit(direction) for direction in Direction}


@dataclass(frozen=True)
class _Trial(Generic[StreamT, EventT]):
    driver: CudaDriver[StreamT, EventT]
    stream: StreamT
    scratch: Scratch
    rest: Callable[[], None]

    def check(self) -> None:
        """Have the kernel carry random bytes to the device and back, elsewhere."""
        size = len(self.scratch.host) // 2
        there, back = self.scratch.host[:size], self.scratch.host[size:]
        there[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        back[:] = 0
        for direction, host in ((Direction.LOAD, there), (Direction.STORE, back)):
            self.seconds(direction, self._runs(direction, _PIECES[0], host), by_kernel=True)
        if not np.array_equal(there, back):
            raise CopyError("the page kernel has moved wrong bytes")

    def limit(self, direction: Direction) -> int:
        for number, piece in enumerate(_PIECES):
            runs = self._runs(direction, piece, self.scratch.host)
            times: dict[bool, list[float]] = {True: [], False: []}
            for repeat in range(_REPEATS + 1):
                for by_kernel in (True, False):
                    seconds = self.seconds(direction, runs, by_kernel=by_kernel)
                    if repeat:  # the first warms up
                        times[by_kernel].append(seconds)
            if median(times[True]) > _WINS * median(times[False]):
                return piece if number else 0
        return 2 * _PIECES[-1]

    def seconds(self, direction: Direction, runs: CopyRuns, *, by_kernel: bool) -> float:
        start, end = self.driver.event(timed=True), self.driver.event(timed=True)
        self.driver.record(start, self.stream)
        kept: object = None
        if by_kernel:
            kept = self.driver.copy_by_kernel(runs, self.stream)
        else:
            self.driver.copy(direction, runs, self.stream)
        self.driver.record(end, self.stream)
        self._wait(end)
        del kept  # not sooner
        return self.driver.seconds_between(start, end)

    def _wait(self, end: EventT) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not self.driver.has_passed(end):
            if time.monotonic() > deadline:
                raise CopyError("a copy of scratch memory does not end")
            self.rest()

    def _runs(self, direction: Direction, piece: int, host: NDArray[np.uint8]) -> CopyRuns:
        """Return copies of all of the scratch memory, scattered on the host."""
        places = len(self.scratch.host) // 2 // piece
        order = np.random.default_rng(1).permutation(places).astype(np.int64)
        on_host = host.ctypes.data + order * piece
        on_device = self.scratch.device + np.arange(places, dtype=np.int64) * piece
        size = np.full(places, piece, np.int64)
        if direction is Direction.STORE:
            return CopyRuns(source=on_device, target=on_host, size=size)
        return CopyRuns(source=on_host, target=on_device, size=size)
