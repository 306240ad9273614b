"""A rig with an arena and the real copier, and with host memory in place of a device.

The device's memory is one allocation that is cut into regions, as in an engine. Each copy uses other blocks
and slots of a pool several times as large, so that the processor's caches do not contain the bytes.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from concurrent.futures import Future, wait
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
import torch

from kvoffload.model.errors import KVOffloadError
from kvoffload.model.wire import Direction
from kvoffload.runtime.portal import DaemonExecutor
from kvoffload.transfer.arena import CHUNK_BYTES, Arena
from kvoffload.transfer.factory import make_allocator, make_copier
from kvoffload.transfer.layout import layout_of
from kvoffload.transfer.ports import Clocks, Threads, TicketState
from kvoffload.transfer.runs import merge_runs
from tests.gates import ManualExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvoffload.transfer.runs import Numbers

    Pages = NDArray[np.uint8]  # of shape [regions, blocks or slots, bytes of a page]

P = ParamSpec("P")
T = TypeVar("T")

REGIONS = 8
POOL = 4  # the size of the pool of blocks, as a multiple of the bytes of one copy
_ALIGNMENT = 4096


class WrongBytes(KVOffloadError):
    """Raised if a copy failed or copied wrong bytes."""


class WatchedExecutor(Threads):
    """An executor whose `wait` returns when the threads have no work left."""

    def __init__(self, threads: int) -> None:
        self._inside = DaemonExecutor("bench-copy", threads)
        self._futures: list[Future[object]] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = self._inside.submit(fn, *args, **kwargs)
        self._futures.append(future)  # type: ignore[arg-type]  # whatever it returns
        return future

    def wait(self) -> None:
        done, self._futures = self._futures, []
        wait(done)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._inside.shutdown()


class Rig:
    def __init__(self, page: int, size: int, threads: int = 1, regions: int = REGIONS) -> None:
        self.count = max(size // (page * regions), 1)
        self.size = self.count * page * regions
        self.blocks = POOL * self.count
        self._page = page
        self._threads = threads
        self._device = torch.empty(regions * self.blocks * page, dtype=torch.uint8)
        self._tensors = self._device.view(regions, self.blocks, page).unbind()
        self.layout = layout_of(self._tensors)
        self.executor = WatchedExecutor(threads)
        self.copier = make_copier(self.layout, threads=self.executor, clock=Clocks())
        at_once = ManualExecutor(held=False)
        self.arena = Arena(
            self.layout,
            self.blocks,
            make_allocator(self.layout, executor=at_once),
            chunk_bytes=max(CHUNK_BYTES, POOL * self.size),  # a large copy must fit in one chunk
        )
        asyncio.run(self.arena.prepare())
        bases = [int(base) for base in self.arena.geometry.host_base[0]]
        self._regions = [_bytes_at(base, self.blocks * page) for base in bases]
        self._host = _bytes_at(bases[0], self.blocks * self.layout.slot_bytes)
        self._draw = np.random.default_rng(0)
        self._fill()

    @property
    def host_memory(self) -> memoryview:
        return self._host.data

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.copier.close()
        self.executor.shutdown()
        self.arena.close()

    def draw(self) -> tuple[Numbers, Numbers]:
        slots, blocks = (self._draw.permutation(self.blocks)[: self.count] for _ in range(2))
        return slots, blocks

    def scattered(self, way: Direction, slots: Numbers, blocks: Numbers) -> float:
        """Copy blocks with the copier, and return the seconds until the copy is complete."""
        begun = time.perf_counter()
        runs = merge_runs(self.arena.geometry, way, slots, blocks)
        ticket = self.copier.submit(way, runs, (self.copier.fence(),))
        self.executor.wait()
        while (state := ticket.query()) is TicketState.PENDING:
            pass
        if state is not TicketState.DONE:
            raise WrongBytes("a copy has failed")
        return time.perf_counter() - begun

    def in_one_piece(self, way: Direction) -> float:
        """Copy as many bytes as `scattered`, in one large piece per thread, and return the seconds."""
        places = (min(self._host.size, self._device.numel()) - self.size) // _ALIGNMENT + 1
        host, device = (int(self._draw.integers(places)) * _ALIGNMENT for _ in range(2))
        addresses = [self._host.ctypes.data + host, self._device.data_ptr() + device]
        target, source = addresses if way is Direction.STORE else reversed(addresses)
        threads = 1 if way is Direction.STORE else self._threads  # the copier uses one thread for stores
        part = self.size // threads
        begun = time.perf_counter()
        for start in range(0, part * threads, part):
            self.executor.submit(ctypes.memmove, target + start, source + start, part)
        self.executor.wait()
        return time.perf_counter() - begun

    def check(self, way: Direction) -> None:
        """Copy blocks once, and compare every byte of both sides to the expected bytes.

        Raises:
            WrongBytes: a byte differs.
        """
        self._fill()
        slots, blocks = self.draw()
        host, device = self._host_pages(), self._device_pages()
        self.scattered(way, slots, blocks)
        if way is Direction.STORE:
            host[:, slots] = device[:, blocks]
        else:
            device[:, blocks] = host[:, slots]
        sides = (("host", self._host_pages(), host), ("device", self._device_pages(), device))
        for side, found, wanted in sides:
            if wrong := int((found != wanted).sum()):
                raise WrongBytes(
                    f"{way.value}, pages of {self._page} bytes: {wrong} bytes are wrong on the {side}"
                )

    def _fill(self) -> None:
        seed = int(self._draw.integers(2**31))
        _randomize(self._device, seed)
        _randomize(torch.from_numpy(self._host), seed + 1)

    def _host_pages(self) -> Pages:
        return np.stack(self._regions).reshape(len(self._regions), self.blocks, self._page)

    def _device_pages(self) -> Pages:
        pages: Pages = torch.stack(self._tensors).numpy()
        return pages


def _bytes_at(address: int, size: int) -> NDArray[np.uint8]:
    return np.frombuffer(memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B"), np.uint8)


def _randomize(memory: torch.Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = memory.numel() // 8 * 8
    memory[:whole].view(torch.int64).random_(generator=generator)
    memory[whole:].random_(0, 256, generator=generator)
