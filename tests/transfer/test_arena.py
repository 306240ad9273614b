"""The arena grows in the background, chunk by chunk, and stops where memory is refused."""

from __future__ import annotations

import asyncio
import mmap

import pytest

from kvoffload.model.errors import HostMemoryError
from kvoffload.testing import FakeDevice, ManualExecutor, wait_all_blocked
from kvoffload.testing.logs import capture_logs
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.host_memory import MmapAllocator

LAYOUT = FakeDevice(4, [4096, 1024]).layout
CHUNK = 3 * LAYOUT.slot_bytes

pytestmark = pytest.mark.asyncio


class CountingPin:
    """Stands for a device's driver: knows what is pinned, and refuses after `limit` registrations."""

    def __init__(self, limit: int = 1000) -> None:
        self.pinned: dict[int, int] = {}
        self._left = limit

    def register(self, address: int, size: int) -> None:
        if self._left == 0:
            raise HostMemoryError("the driver refused")
        self._left -= 1
        self.pinned[address] = size

    def unregister(self, address: int) -> None:
        del self.pinned[address]


async def test_ready_slots_grow_with_each_chunk() -> None:
    executor, pin = ManualExecutor(), CountingPin()
    arena = Arena(LAYOUT, 8, MmapAllocator(executor, pin), chunk_bytes=CHUNK)
    growth = [arena.ready_slots]
    task = asyncio.create_task(arena.prepare())
    for _ in range(3):
        await wait_all_blocked()
        executor.run_next()
        await wait_all_blocked()
        growth.append(arena.ready_slots)
    await task
    assert growth == [0, 3, 6, 8]
    assert arena.refusal is None
    assert sum(pin.pinned.values()) < 8 * LAYOUT.slot_bytes + 3 * 2 * 64  # no rounding to a power of two
    arena.close()
    arena.close()
    assert pin.pinned == {}


async def test_what_was_ready_stays_where_it_is() -> None:
    executor = ManualExecutor()
    arena = Arena(LAYOUT, 6, MmapAllocator(executor), chunk_bytes=CHUNK)
    task = asyncio.create_task(arena.prepare())
    await wait_all_blocked()
    executor.run_next()
    await wait_all_blocked()
    arena.page(2, 1)[:4] = b"kept"
    executor.run_next()
    await task
    assert arena.page(2, 1)[:4].tobytes() == b"kept"
    assert arena.page(5, 0).tobytes() == bytes(4096)
    with pytest.raises(IndexError, match="slot 6"):
        arena.page(6, 0)
    arena.close()


async def test_a_refused_chunk_ends_growth_and_keeps_what_is_ready() -> None:
    pin = CountingPin(limit=2)
    arena = Arena(LAYOUT, 9, MmapAllocator(ManualExecutor(held=False), pin), chunk_bytes=CHUNK)
    with capture_logs() as logs:
        await arena.prepare()
    assert arena.ready_slots == 6
    assert arena.refusal == "the driver refused"
    assert [entry["event"] for entry in logs] == ["host_memory_refused"]
    arena.close()
    assert pin.pinned == {}


async def test_memory_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    arena = Arena(LAYOUT, 3, MmapAllocator(ManualExecutor(held=False)))
    with capture_logs():
        await arena.prepare()
    assert arena.ready_slots == 0
    assert arena.refusal is not None
    assert "Cannot allocate memory" in arena.refusal


async def test_no_slots_at_all_is_legal() -> None:
    arena = Arena(LAYOUT, 0, MmapAllocator(ManualExecutor(held=False)))
    await arena.prepare()
    assert (arena.ready_slots, arena.refusal) == (0, None)
    arena.close()


async def test_cancelling_while_a_chunk_is_made_loses_nothing() -> None:
    """The thread cannot be stopped: what it makes afterwards must be given back."""
    executor, pin = ManualExecutor(), CountingPin()
    arena = Arena(LAYOUT, 8, MmapAllocator(executor, pin), chunk_bytes=CHUNK)
    task = asyncio.create_task(arena.prepare())
    await wait_all_blocked()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    executor.run_all()
    assert (arena.ready_slots, pin.pinned) == (0, {})


async def test_closing_while_a_chunk_is_made() -> None:
    executor, pin = ManualExecutor(), CountingPin()
    arena = Arena(LAYOUT, 8, MmapAllocator(executor, pin), chunk_bytes=CHUNK)
    task = asyncio.create_task(arena.prepare())
    await wait_all_blocked()
    arena.close()
    executor.run_all()
    await task
    assert (arena.ready_slots, pin.pinned) == (0, {})
