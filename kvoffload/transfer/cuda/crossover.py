"""Measures the size below which the page kernel copies faster than the copy engine.

The size differs by device and direction. The size is measured when the copier is made, before the engine warms up, on a
few megabytes of scratch memory, for a few seconds at most. Ranks that start together measure at the same time. If the
kernel is not available, copies a wrong byte, or is never faster, all copies go through the copy engine.

A batch takes as long as the slower of its two halves: enqueueing, and the device's copies. The two halves overlap in
long batches. An H200's copy engine copied pieces of 8 KiB at 49 GB/s, but the driver needed 0.5 to 1 us to enqueue each
piece, which limited the batch to 8 to 15 GB/s.

The device's own events time the copies. Large copies before the first event keep the device busy until the timed copies
have been enqueued, so that the events do not measure the enqueueing.

    large copies ── [start] ── timed copies ── [end]
    enqueue  ──────────────────────────────▶│ from here on the device needs nothing from the host

    piece      2 KiB    4 KiB   ...   32 KiB   64 KiB    the search ends at the first size at which the engine
    faster     kernel   kernel        kernel   engine    is as fast: here the kernel gets pieces below 64 KiB
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
# The kernel counts as faster if its time is below this share of the copy engine's time; smaller gains are noise.
_WINS = 0.95
_LONGEST_S = 5.0  # time limit for all measurements, not counting the kernel's compilation
_PATIENCE_S = 10.0  # time limit for one batch
# large copies before a measurement must last this many times as long as the last enqueuing took
_MARGIN = 1.5
_MOST_COVERS = 64


def learn(copier: CudaCopier, device: str) -> None:
    """Measure the device, and set the copier's limits. Never raises.

    Args:
        copier: the copier, whose driver makes the measured copies.
        device: the device's name, for the log.
    """
    begun, driver = time.perf_counter(), copier.driver
    try:
        # The load stream is still idle, and loads will use the kernel prepared on it.
        stream = copier.stream(Direction.LOAD)
        copier.prepare_kernel(Direction.LOAD)
        with driver.scratch(SCRATCH_BYTES, stream) as scratch:
            limits = Trial(driver, stream, scratch).limits(stores=copier.profile.stores)
        copier.use_kernel(limits)
    except Exception as error:  # After an error, the copy engine makes all copies.
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
    """Uses the device's own events to time batches made by the page kernel or the copy engine.

    Args:
        driver: the driver that makes the copies.
        stream: a stream that nothing else uses, prepared for the kernel.
        scratch: memory that nothing else uses.
    """

    driver: NvidiaDriver
    stream: int
    scratch: CudaScratch
    deadline: float = math.inf
    # seconds that one large copy takes, which keeps the device busy before a measurement
    cover_s: float = math.inf
    # How long it took to enqueue the last batch for the kernel (True) and for the copy engine (False).
    enqueue_s: dict[bool, float] = field(default_factory=lambda: dict.fromkeys((True, False), 0.0))

    def limits(self, *, stores: bool = True) -> Limits:
        """Return, for each direction, the size of a run in bytes below which the kernel is faster; 0 if it never is.

        Args:
            stores: whether stores may use the kernel.

        Raises:
            CopyError: the kernel copies wrong bytes, a batch does not end, or measuring has taken too long.
            Exception: the kernel cannot be launched.
        """
        self._check()
        self.begin()
        return {way: self.limit(way) if stores or way is Direction.LOAD else 0 for way in Direction}

    def begin(self) -> None:
        """Start the time limit, and time one of the large copies that keep the device busy."""
        self.deadline = time.monotonic() + _LONGEST_S
        self.cover_s = self._copying_s(Direction.LOAD, self._cover(), by_kernel=False)

    def _check(self) -> None:
        """Let the kernel copy random bytes to the device and from there to other host memory, and compare the bytes."""
        size = len(self.scratch.host) // 2
        there, back = self.scratch.host[:size], self.scratch.host[size:]
        there[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        back[:] = 0
        for direction, host in ((Direction.LOAD, there), (Direction.STORE, back)):
            self.seconds(direction, self._runs(direction, _PIECES[0], host), by_kernel=True)
        if not np.array_equal(there, back):
            raise CopyError("the page kernel has moved wrong bytes")

    def limit(self, direction: Direction) -> int:
        """Return the size of a run in bytes below which the kernel is faster in `direction`; 0 if it never is."""
        for number, piece in enumerate(_PIECES):
            runs = self._runs(direction, piece, self.scratch.host)
            times: dict[bool, list[float]] = {True: [], False: []}
            for repeat in range(_REPEATS + 1):
                for by_kernel in (True, False):
                    seconds = self.seconds(direction, runs, by_kernel=by_kernel)
                    if repeat:  # The first repeat is a warm-up.
                        times[by_kernel].append(seconds)
            if median(times[True]) > _WINS * median(times[False]):
                return piece if number else 0
        return 2 * _PIECES[-1]

    def seconds(self, direction: Direction, runs: CopyRuns, *, by_kernel: bool) -> float:
        """Return how many seconds a batch takes: the device's copies or the enqueueing, whichever takes longer.

        Raises:
            CopyError: the batch does not end, or measuring has taken too long.
        """
        copying_s = self._copying_s(direction, runs, by_kernel=by_kernel)
        return max(copying_s, self.enqueue_s[by_kernel])

    def _copying_s(self, direction: Direction, runs: CopyRuns, *, by_kernel: bool) -> float:
        """Return how many seconds the device takes to copy a batch, and note how long enqueueing it took."""
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
        """Return a single copy from host to device, of half the scratch memory. Its contents do not matter."""
        numbers = (self.scratch.host.ctypes.data, self.scratch.device, len(self.scratch.host) // 2)
        return CopyRuns(*(np.array([number], np.int64) for number in numbers))

    def _runs(self, direction: Direction, piece: int, host: NDArray[np.uint8]) -> CopyRuns:
        """Return copies between consecutive pieces of the device's scratch memory and shuffled pieces of `host`."""
        places = len(self.scratch.host) // 2 // piece
        order = np.random.default_rng(1).permutation(places).astype(np.int64)
        on_host = host.ctypes.data + order * piece
        on_device = self.scratch.device + np.arange(places, dtype=np.int64) * piece
        return CopyRuns.between(direction, on_host, on_device, np.full(places, piece, np.int64))
