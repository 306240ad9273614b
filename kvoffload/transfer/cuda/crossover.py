"""Measures below which size copies go through a kernel instead of the copy engine.

The size differs by device and direction. It is measured when the copier is made, before the engine warms up, on a few
megabytes of scratch memory, for some seconds at most. Ranks that start together measure together. If the kernel is not
available, moves a wrong byte, or is not faster, everything goes through the copy engine.

The device's own events time the copies. Large copies that lie before the first event keep it busy until the
timed copies have been enqueued, so no pause of the enqueuing thread shows in their time.

    large copies ── [start] ── timed copies ── [end]
    enqueue  ──────────────────────────────▶│ from here on the device needs nothing more

    piece      2 KiB    4 KiB   ...   32 KiB   64 KiB         the first size at which the engine is as fast ends the search:
    faster     kernel   kernel        kernel   engine         here pieces below 64 KiB go through the kernel
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.logs import get_logger
from kvoffload.model.errors import CopyError
from kvoffload.model.wire import Direction
from kvoffload.transfer.runs import CopyRuns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvoffload.transfer.cuda.copier import CudaCopier, Limits
    from kvoffload.transfer.cuda.driver import CudaScratch, NvidiaDriver

log = get_logger("transfer")

SCRATCH_BYTES = 8 * 2**20
_PIECES: tuple[int, ...] = tuple(2**power for power in range(11, 19))  # 2 KiB to 256 KiB
_REPEATS = 5
_WINS = 0.95  # of the engine's time: what is less is noise
_LONGEST_S = 5.0  # of measuring, without compiling the kernel
_PATIENCE_S = 10.0  # with one batch
_MARGIN = 1.5  # of the time that enqueuing took before, for the copies that cover it
_MOST_COVERS = 64


def learn(copier: CudaCopier, device: str) -> None:
    """Measure the device, and let the copier use what was found. Never raises.

    Args:
        copier: uses what was found; its driver measures.
        device: its name.
    """
    begun, driver = time.perf_counter(), copier.driver
    try:
        stream = copier.stream(Direction.LOAD)  # nothing is copied yet, and it keeps what the kernel takes
        driver.prepare_kernel(stream, copier.profile.programs)
        with driver.scratch(SCRATCH_BYTES, stream) as scratch:
            limits = Trial(driver, stream, scratch).limits(stores=copier.profile.stores)
        copier.use_kernel(limits)
    except Exception as error:  # no triton, no memory, no mapping: the engine copies everything
        log.info("page_kernel_unavailable", device=device, reason=repr(error))
        return
    log.info(
        "copy_crossover_measured",
        device=device,
        load_below_bytes=limits[Direction.LOAD],
        store_below_bytes=limits[Direction.STORE],
        seconds=round(time.perf_counter() - begun, 3),
    )


@dataclass
class Trial:
    """Times batches of the page kernel and of the copy engine by the device's own events.

    Args:
        driver: copies both ways.
        stream: that nothing else uses, prepared for the kernel.
        scratch: memory that nothing else uses.
    """

    driver: NvidiaDriver
    stream: int
    scratch: CudaScratch
    deadline: float = math.inf
    cover_s: float = math.inf  # that one covering copy takes
    # Of the batch before, by whether the kernel made it.
    enqueue_s: dict[bool, float] = field(default_factory=lambda: dict.fromkeys((True, False), 0.0))

    def limits(self, *, stores: bool = True) -> Limits:
        """Return for each direction the bytes of a run below which the kernel is faster, 0 where it never is.

        Args:
            stores: whether stores may use the kernel.

        Raises:
            CopyError: the kernel moves wrong bytes, or nothing ends.
            Exception: there is no kernel.
        """
        self._check()
        self.begin()
        return {way: self.limit(way) if stores or way is Direction.LOAD else 0 for way in Direction}

    def begin(self) -> None:
        """Time one covering copy, and start the clock."""
        self.deadline = time.monotonic() + _LONGEST_S
        self.cover_s = self.seconds(Direction.LOAD, self._cover(), by_kernel=False)

    def _check(self) -> None:
        """Copy random bytes to the device and back to another place by the kernel, and compare them."""
        size = len(self.scratch.host) // 2
        there, back = self.scratch.host[:size], self.scratch.host[size:]
        there[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        back[:] = 0
        for direction, host in ((Direction.LOAD, there), (Direction.STORE, back)):
            self.seconds(direction, self._runs(direction, _PIECES[0], host), by_kernel=True)
        if not np.array_equal(there, back):
            raise CopyError("the page kernel has moved wrong bytes")

    def limit(self, direction: Direction) -> int:
        """Return the bytes of a run below which the kernel is faster in one direction, 0 where it never is."""
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
        """Return the device's seconds for a batch.

        Raises:
            CopyError: it does not end, or measuring has taken too long.
        """
        if time.monotonic() > self.deadline:
            raise CopyError("measuring takes too long on this machine")
        start, end = self.driver.event(timed=True), self.driver.event(timed=True)
        covers = min(math.ceil(_MARGIN * self.enqueue_s[by_kernel] / self.cover_s), _MOST_COVERS)
        for _ in range(covers):
            self.driver.copy(Direction.LOAD, self._cover(), self.stream)
        begun = time.perf_counter()
        self.driver.record(start, self.stream)
        if by_kernel:
            self.driver.copy_by_kernel(runs, self.stream)
        else:
            self.driver.copy(direction, runs, self.stream)
        self.driver.record(end, self.stream)
        self.enqueue_s[by_kernel] = time.perf_counter() - begun
        deadline = time.monotonic() + _PATIENCE_S
        while not self.driver.has_passed(end):
            if time.monotonic() > deadline:
                raise CopyError("a copy of scratch memory does not end")
            time.sleep(1e-4)
        return self.driver.seconds_between(start, end)

    def _cover(self) -> CopyRuns:
        """Return one copy of half of the host's scratch memory to the device; its bytes do not matter."""
        numbers = (self.scratch.host.ctypes.data, self.scratch.device, len(self.scratch.host) // 2)
        return CopyRuns(*(np.array([number], np.int64) for number in numbers))

    def _runs(self, direction: Direction, piece: int, host: NDArray[np.uint8]) -> CopyRuns:
        """Return copies of all of the scratch memory, scattered on the host."""
        places = len(self.scratch.host) // 2 // piece
        order = np.random.default_rng(1).permutation(places).astype(np.int64)
        on_host = host.ctypes.data + order * piece
        on_device = self.scratch.device + np.arange(places, dtype=np.int64) * piece
        return CopyRuns.between(direction, on_host, on_device, np.full(places, piece, np.int64))
