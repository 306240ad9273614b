"""Both sides of a rank's copies with random bytes on them, the real copier between them, and one large copy to compare.

The device's memory is one allocation, as engines make it, cut into regions; the host's is an arena. Each copy names other
blocks and slots of a pool that holds several times as much, so nothing is found in a cache.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from concurrent.futures import Executor, Future, wait
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
import torch

from kvoffload.model.errors import KVOffloadError
from kvoffload.model.transfer import Direction
from kvoffload.runtime.portal import DaemonExecutor
from kvoffload.testing import ManualExecutor
from kvoffload.transfer.arena import CHUNK_BYTES, Arena
from kvoffload.transfer.clock import SystemClock
from kvoffload.transfer.cuda_copier import CudaCopier
from kvoffload.transfer.factory import make_allocator, make_copier
from kvoffload.transfer.layout import layout_of
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import merge_runs
from kvoffload.transfer.short_copies import ENGINE_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvoffload.transfer.ports import Ticket
    from kvoffload.transfer.runs import Numbers
    from kvoffload.transfer.short_copies import Limits

    Pages = NDArray[np.uint8]  # [regions, blocks or slots, page]

P = ParamSpec("P")
T = TypeVar("T")

REGIONS = 8
POOL = 4  # times what one copy names
_UNALIGNED = 4096  # where a large copy may start
_ALL = {Direction.LOAD: 2**62, Direction.STORE: 2**62}


class WrongBytes(KVOffloadError):
    """Raised when a copy has moved other bytes than it should; nothing of it is worth timing."""


class WatchedExecutor(Executor):
    """Threads whose work can be waited for without taking time from them."""

    def __init__(self, threads: int) -> None:
        self._inside = DaemonExecutor("bench-copy", threads)
        self._futures: list[Future[object]] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = self._inside.submit(fn, *args, **kwargs)
        self._futures.append(future)  # type: ignore[arg-type]  # whatever it returns
        return future

    def wait(self) -> None:
        """Return when all work has ended."""
        done, self._futures = self._futures, []
        wait(done)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._inside.shutdown()


class Rig:
    """One page size on one device.

    Args:
        device: torch's name of it.
        page: bytes of a block in each region.
        size: about how many bytes one copy moves.
        threads: of the copies, where the device is the CPU.
        regions: pages of a block.
    """

    def __init__(self, device: str, page: int, size: int, threads: int = 1, regions: int = REGIONS) -> None:
        self.count = max(size // (page * regions), 1)
        self.size = self.count * page * regions
        self.blocks = POOL * self.count
        self._page = page
        self._device = torch.empty(regions * self.blocks * page, dtype=torch.uint8, device=device)
        self._tensors = self._device.view(regions, self.blocks, page).unbind()
        self.layout = layout_of(self._tensors)
        self.executor = WatchedExecutor(threads)
        self.copier = make_copier(self.layout, executor=self.executor, clock=SystemClock())
        at_once = ManualExecutor(held=False)
        self.arena = Arena(
            self.layout,
            self.blocks,
            make_allocator(self.layout, executor=at_once),
            chunk_bytes=max(CHUNK_BYTES, POOL * self.size),  # all in one, so that a large copy fits
        )
        asyncio.run(self.arena.prepare())
        bases = [int(base) for base in self.arena.geometry.host_base[0]]
        self._regions = [_bytes_at(base, self.blocks * page) for base in bases]
        self._host = _bytes_at(bases[0], self.blocks * self.layout.slot_bytes)
        self._chosen = self._limits = self._limits_now
        self._draw = np.random.default_rng(0)
        self._threads = threads
        self._streams = [torch.cuda.Stream(self.layout.device) for _ in Direction] if self.is_cuda else []
        self._fill()

    @property
    def is_cuda(self) -> bool:
        return self.layout.device.startswith("cuda")

    @property
    def host_memory(self) -> memoryview:
        """The arena's memory."""
        return self._host.data

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.copier.close()
        self.executor.shutdown()
        self.arena.close()

    def paths(self) -> list[str]:
        """Return the ways that copies can be made to go, on CUDA; the first is as they go by themselves."""
        from importlib.util import find_spec

        return ["", "engine", "kernel"] if find_spec("triton") else ["", "engine"]

    def use(self, path: str) -> None:
        """Make all copies go one way."""
        self._limits = {"": self._chosen, "engine": ENGINE_ONLY, "kernel": _ALL}[path]
        if isinstance(self.copier, CudaCopier):
            self.copier.use_kernel(self._limits)

    @property
    def _limits_now(self) -> Limits:
        return self.copier.kernel_below if isinstance(self.copier, CudaCopier) else ENGINE_ONLY

    def draw(self, copies: int) -> list[tuple[Numbers, Numbers]]:
        """Return slots and blocks for some copies at once, scattered on both sides; no two name the same."""
        slots, blocks = (self._draw.permutation(self.blocks) for _ in range(2))
        parts = [slice(start, start + self.count) for start in range(0, copies * self.count, self.count)]
        return [(slots[part], blocks[part]) for part in parts]

    def threads(self, ways: Sequence[Direction]) -> int:
        """Return how many threads the copier may use at once: stores are copied by one."""
        return 1 if self.is_cuda or Direction.LOAD not in ways else self._threads

    def scattered(self, ways: Sequence[Direction], pairs: Sequence[tuple[Numbers, Numbers]]) -> float:
        """Copy blocks, each way its own, through the copier; return the seconds until all bytes have arrived."""
        begun = time.perf_counter()
        fence = self.copier.fence()
        tickets = [
            self.copier.submit(way, merge_runs(self.arena.geometry, way, slots, blocks), (fence,))
            for way, (slots, blocks) in zip(ways, pairs, strict=True)
        ]
        self._wait(tickets)
        return time.perf_counter() - begun

    def submit_adjacent(self) -> float:
        """Return the seconds that merging and submitting a load of adjacent blocks takes; the copy is waited for."""
        numbers = np.arange(self.count)
        fence = self.copier.fence()
        begun = time.perf_counter()
        runs = merge_runs(self.arena.geometry, Direction.LOAD, numbers, numbers)
        ticket = self.copier.submit(Direction.LOAD, runs, (fence,))
        seconds = time.perf_counter() - begun
        self._wait([ticket])
        return seconds

    def in_one_piece(self, ways: Sequence[Direction]) -> float:
        """Copy as many bytes, each way, in one large piece a thread; return the seconds."""
        starts = [self._start() for _ in ways]
        begun = time.perf_counter()
        if self.is_cuda:
            for way, stream, start in zip(ways, self._streams, starts, strict=False):
                self._one_on_device(way, stream, *start)
            torch.cuda.synchronize(self.layout.device)
        else:
            for way, start in zip(ways, starts, strict=True):
                self._one_on_host(way, *start)
            self.executor.wait()
        return time.perf_counter() - begun

    def check(self, ways: Sequence[Direction]) -> None:
        """Copy once, and compare every byte of both sides with what should be there.

        Raises:
            WrongBytes: one differs, or a kernel that should have copied has not started.
        """
        self._fill()
        pairs = self.draw(len(ways))
        host, device = self._host_pages(), self._device_pages()
        self.scattered(ways, pairs)
        if self._limits_now is not self._limits:
            raise WrongBytes("the kernel has not started")
        for way, (slots, blocks) in zip(ways, pairs, strict=True):
            if way is Direction.STORE:
                host[:, slots] = device[:, blocks]
            else:
                device[:, blocks] = host[:, slots]
        for side, found, wanted in (
            ("host", self._host_pages(), host),
            ("device", self._device_pages(), device),
        ):
            wrong = int((found != wanted).sum())
            if wrong:
                what = " and ".join(way.value for way in ways)
                raise WrongBytes(
                    f"{what}, pages of {self._page} bytes: {wrong} bytes are wrong on the {side}"
                )

    def _wait(self, tickets: Sequence[Ticket]) -> None:
        if not self.is_cuda:
            self.executor.wait()
        for ticket in tickets:
            while (state := ticket.query()) is TicketState.PENDING:
                pass
            if state is not TicketState.DONE:
                raise WrongBytes("a copy has failed")

    def _start(self) -> tuple[int, int]:
        """Return places on the host and the device from which a large copy fits."""
        places = (min(self._host.size, self._device.numel()) - self.size) // _UNALIGNED + 1
        host, device = (int(self._draw.integers(places)) * _UNALIGNED for _ in range(2))
        return host, device

    def _one_on_host(self, way: Direction, host: int, device: int) -> None:
        addresses = [self._host.ctypes.data + host, self._device.data_ptr() + device]
        target, source = addresses if way is Direction.STORE else reversed(addresses)
        threads = self.threads([way])
        part = self.size // threads
        for start in range(0, part * threads, part):
            self.executor.submit(ctypes.memmove, target + start, source + start, part)

    def _one_on_device(self, way: Direction, stream: torch.cuda.Stream, host: int, device: int) -> None:
        pinned = torch.from_numpy(self._host[host : host + self.size])
        memory = self._device[device : device + self.size]
        target, source = (pinned, memory) if way is Direction.STORE else (memory, pinned)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def _fill(self) -> None:
        """Put random bytes on both sides."""
        seed = int(self._draw.integers(2**31))
        _randomize(self._device, seed)
        _randomize(torch.from_numpy(self._host), seed + 1)

    def _host_pages(self) -> Pages:
        return np.stack(self._regions).reshape(len(self._regions), self.blocks, self._page)

    def _device_pages(self) -> Pages:
        pages: Pages = torch.stack(self._tensors).cpu().numpy()
        return pages


def _bytes_at(address: int, size: int) -> NDArray[np.uint8]:
    return np.frombuffer(memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B"), np.uint8)


def _randomize(memory: torch.Tensor, seed: int) -> None:
    generator = torch.Generator(memory.device).manual_seed(seed)
    whole = memory.numel() // 8 * 8
    memory[:whole].view(torch.int64).random_(generator=generator)
    memory[whole:].random_(0, 256, generator=generator)
