"""What `kvoffload gpu-check` checks and measures on one GPU. Times of copies are the device's own."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.bench.gpu_decode import Decode, measure_decoding
from kvoffload.bench.lines import Line, line, not_run, ratios
from kvoffload.model.errors import CopyError, KVOffloadError
from kvoffload.model.transfer import Direction
from kvoffload.transfer.crossover import SCRATCH_BYTES, learn, measure
from kvoffload.transfer.cuda_copier import CudaCopier
from kvoffload.transfer.cuda_driver import NvidiaDriver
from kvoffload.transfer.layout import DeviceLayout, DeviceRegion
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns, geometry_of, merge_runs
from kvoffload.transfer.short_copies import ENGINE_ONLY

if TYPE_CHECKING:
    from numpy.typing import NDArray


_PAGES = {4 << 10: None, 64 << 10: 0.9, 1 << 20: 0.95}  # and the goal: part of a large copy's speed one way
_BOTH_WAYS = 0.9
_DESCRIPTORS: tuple[int, ...] = (1024, 16_384, 262_144)
_PIECE = 64  # bytes of a descriptor's copy, fewer where there is less memory
_PINNED = 64 << 20
_GLOBAL_CAPTURE = 0
_PATIENCE_S = 60.0


class CheckFailed(CopyError):
    """Raised when something is wrong, so that nothing after it is worth measuring."""


class GpuLines:
    """Twice `size` bytes on both sides, and what is measured on them.

    Args:
        driver: of the GPU, with batched copies wherever it has them.
        device: the GPU's name.
        size: bytes of one large copy.
        repeats: of each measurement.
    """

    def __init__(self, driver: NvidiaDriver, device: str, size: int, repeats: int) -> None:
        self._driver, self._device, self._size, self._repeats = driver, device, size, repeats
        self.copier = CudaCopier(driver)
        self._stream = driver.stream(urgent=False)
        self._host = driver.pinned(2 * size)
        self._memory = driver.allocate(2 * size, self._stream)
        self._draw = np.random.default_rng(0)

    def all(self) -> Iterator[Line]:
        """Yield everything; what fails is the last line."""
        try:
            yield from self._checks()
            yield from self._measurements()
        except KVOffloadError as error:
            yield Line(str(error), None, is_met=False, is_check=True)

    def _checks(self) -> Iterator[Line]:
        yield self._bytes("batches" if self._driver.is_batched else "one by one", self.copier)
        yield self._bytes("one by one", CudaCopier(NvidiaDriver(self._device, batch_copies="off")))
        learn(self.copier, self._device)
        below = self.copier.kernel_below
        if any(below.values()):
            self.copier.use_kernel(dict.fromkeys(Direction, self._size))
            yield self._bytes("the page kernel", self.copier)
            self.copier.use_kernel(below)
        for count in _DESCRIPTORS:
            yield from self._descriptors(count)
        yield from self._captures()

    def _measurements(self) -> Iterator[Line]:
        for page, goal in _PAGES.items():
            yield from self._copies(page, goal)
        yield self._submission()
        yield from self._pinning()
        yield self._busy()
        decode = Decode(self._driver, self._device, self._size)
        yield from self._crossover("on an idle device")
        with _repeated(decode.step):
            yield from self._crossover("beside decoding")
        yield from measure_decoding(decode, self._repeats)

    # -- what is measured ---------------------------------------------------------------------------------------

    def _bytes(self, path: str, copier: CudaCopier, page: int = 4096, size: int = 0) -> Line:
        """Carry random bytes to the device and back to another place.

        Raises:
            CheckFailed: others came back.
        """
        size = size or self._size
        there, back = self._host[:size], self._host[self._size : self._size + size]
        there[:], back[:] = self._draw.integers(0, 256, size, np.uint8), 0
        load = self._pages(Direction.LOAD, page, size, there)
        store = CopyRuns(load.target, load.source + self._size, load.size)
        self._seconds([(Direction.LOAD, load)], copier)
        self._seconds([(Direction.STORE, store)], copier)
        if wrong := int((there != back).sum()):
            problem = f"{wrong} of {size} bytes are wrong after copies by {path}"
            raise CheckFailed(f"{problem}; do not offload on this machine")
        return line(f"wrong bytes after copies by {path}", [0.0], "", at_most=0, is_check=True)

    def _copies(self, page: int, goal: float | None) -> Iterator[Line]:
        for ways in ((Direction.LOAD,), (Direction.STORE,), (Direction.LOAD, Direction.STORE)):
            found = [(self._speed(page, ways), self._speed(self._size, ways)) for _ in range(self._repeats)]
            pages, large = zip(*found, strict=True)
            name = " and ".join(f"{way.value}s" for way in ways)
            at_least = goal if goal is None or len(ways) == 1 else _BOTH_WAYS
            what = f"{name} of pages of {page >> 10} KiB, speed over that of one large copy"
            yield line(what, ratios(pages, large), at_least=at_least)
            if page == max(_PAGES):
                yield line(f"{name}, one large copy", [speed / 1e9 for speed in large], " GB/s")

    def _descriptors(self, count: int) -> Iterator[Line]:
        """Carry that many pieces there and back, by the copy engine alone, and time a load of them."""
        piece = min(_PIECE, self._size // count)
        below, self.copier.kernel_below = self.copier.kernel_below, ENGINE_ONLY
        yield self._bytes(f"{count:,} pieces of {piece} bytes", self.copier, piece, count * piece)
        runs = self._pages(Direction.LOAD, piece, count * piece, self._host)
        begun = time.perf_counter()
        self._seconds([(Direction.LOAD, runs)], self.copier)
        found = 1e3 * (time.perf_counter() - begun)
        self.copier.kernel_below = below
        yield line(f"a load of {count:,} pieces of {piece} bytes, enqueued and done", [found], " ms")

    def _crossover(self, when: str) -> Iterator[Line]:
        """Measure from which size on the copy engine is as fast as the page kernel."""
        what = f"the page kernel takes pieces below, {when}"
        try:
            stream = self._driver.stream(urgent=False)
            self._driver.prepare_kernel(stream)
            with self._driver.scratch(min(SCRATCH_BYTES, self._size), stream) as scratch:
                limits = measure(self._driver, stream, scratch)
        except (ImportError, CopyError) as error:
            yield not_run(what, error)
            return
        for way, limit in limits.items():
            yield line(f"{what}: {way.value}s", [limit / 1024], " KiB")

    def _submission(self) -> Line:
        """Time what a hook does for a load of adjacent blocks."""
        blocks = self._size // 4096
        region = DeviceRegion(self._memory, 4096, 4096, blocks, self._device)
        geometry = geometry_of(DeviceLayout.of([region]), blocks).with_chunk([self._host.ctypes.data])
        numbers = np.arange(blocks, dtype=np.int64)
        found = []
        for _ in range(self._repeats):
            begun = time.perf_counter()
            runs = merge_runs(geometry, Direction.LOAD, numbers, numbers)
            self.copier.submit(Direction.LOAD, runs, ())
            found.append(1e6 * (time.perf_counter() - begun) / blocks)
            self._seconds([(Direction.LOAD, runs)], self.copier)  # behind it
        return line(f"submitting {blocks:,} adjacent blocks, a block", found, " us", at_most=0.05)

    def _pinning(self) -> Iterator[Line]:
        """Time recording an event, as each launch of an engine takes the driver's locks, alone and beside pinning."""
        memory = np.zeros(min(_PINNED, 4 * self._size), np.uint8)

        def pin() -> None:
            self._driver.register(memory.ctypes.data, len(memory))
            self._driver.unregister(memory.ctypes.data)

        alone = self._latencies()
        with _repeated(pin):
            beside = self._latencies()
        yield line("recording an event", [1e6 * float(np.median(alone))], " us")
        yield line(
            f"recording an event while pieces of {len(memory) >> 20} MiB are pinned",
            [1e6 * float(np.median(beside))],
            " us",
        )
        yield line("the longest of them", [1e3 * max(beside)], " ms")

    def _busy(self) -> Line:
        """Time copies by the device's clock beside a thread that never rests, over copies without it."""
        idle = [self._speed(64 << 10, (Direction.STORE,)) for _ in range(self._repeats)]
        with _repeated(lambda: sum(range(1000))):
            busy = [self._speed(64 << 10, (Direction.STORE,)) for _ in range(self._repeats)]
        return line(
            "a store's time beside a busy interpreter, over one without", ratios(idle, busy), at_most=1.2
        )

    def _captures(self) -> Iterator[Line]:
        """Register memory on another thread while a graph is captured, with its capture mode relaxed and without."""
        library, unchecked = self._driver.library, ctypes.CDLL("libcuda.so.1")
        graph, mode = ctypes.c_void_p(), ctypes.c_int(_GLOBAL_CAPTURE)
        memory = np.zeros(1 << 20, np.uint8)

        def pin(*, is_relaxed: bool) -> None:
            self._driver.has_passed(self._driver.event(timed=False))  # relaxes the thread
            if not is_relaxed:
                unchecked.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            self._driver.register(memory.ctypes.data, len(memory))
            self._driver.unregister(memory.ctypes.data)

        for is_relaxed, goal in ((True, 1.0), (False, None)):
            library.cuStreamBeginCapture_v2(self._stream, _GLOBAL_CAPTURE)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(pin, is_relaxed=is_relaxed).exception()
            code = unchecked.cuStreamEndCapture(ctypes.c_void_p(self._stream), ctypes.byref(graph))
            how = "relaxed" if is_relaxed else "not relaxed"
            what = f"a capture survives pinning on a thread that is {how} (1: yes)"
            yield line(what, [float(code == 0)], "", at_least=goal, is_check=True)

    # -- inside -------------------------------------------------------------------------------------------------

    def _latencies(self) -> list[float]:
        event, found = self._driver.event(timed=False), []
        for _ in range(200):
            begun = time.perf_counter()
            self._driver.record(event, self._stream)
            found.append(time.perf_counter() - begun)
        return found

    def _speed(self, page: int, ways: tuple[Direction, ...]) -> float:
        """Return the bytes a second of copies of `size` bytes each way, which overlap."""
        halves = (self._host[: self._size], self._host[self._size :])
        copies = [
            (way, self._pages(way, page, self._size, host)) for way, host in zip(ways, halves, strict=False)
        ]
        return len(ways) * self._size / self._seconds(copies, self.copier)

    def _seconds(self, copies: Sequence[tuple[Direction, CopyRuns]], copier: CudaCopier) -> float:
        """Return the device's seconds of the longest of some batches that run together.

        Raises:
            CheckFailed: one fails or does not end.
        """
        tickets = [copier.submit(way, runs, ()) for way, runs in copies]
        deadline = time.monotonic() + _PATIENCE_S
        for ticket in tickets:
            while (state := ticket.query()) is TicketState.PENDING:
                if time.monotonic() > deadline:
                    raise CheckFailed(f"a copy has not ended after {_PATIENCE_S:g} seconds")
            if state is TicketState.FAILED:
                raise CheckFailed("the driver has refused copies; the log has its error")
        return max(ticket.copy_seconds or 0.0 for ticket in tickets)

    def _pages(self, way: Direction, page: int, size: int, host: NDArray[np.uint8]) -> CopyRuns:
        """Return copies of `size` bytes in pages that are scattered on the device."""
        count = size // page
        places = np.arange(count, dtype=np.int64) * page
        on_host, on_device = host.ctypes.data + places, self._memory + self._draw.permutation(places)
        if way is Direction.STORE:
            on_device += self._size  # both ways at once do not meet
            return CopyRuns(on_device, on_host, np.full(count, page, np.int64))
        return CopyRuns(on_host, on_device, np.full(count, page, np.int64))


@contextmanager
def _repeated(work: Callable[[], object]) -> Iterator[None]:
    """Do something over and over on another thread, until the block ends or raises."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            work()

    with ThreadPoolExecutor(1) as pool:
        repeating = pool.submit(repeat)
        try:
            yield
        finally:
            stop.set()
        repeating.result()
