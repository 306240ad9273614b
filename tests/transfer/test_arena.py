from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import mmap
import os
import re
from pathlib import Path
from typing import Any

import pytest

from kvoffload.model.errors import HostMemoryBusy, HostMemoryError
from kvoffload.runtime import worker_side
from kvoffload.testing import FakeClock, FakeDevice, wait_all_blocked
from kvoffload.transfer import host_memory
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.host_memory import HostChunk, MmapAllocator
from tests.captured_logs import capture_logs
from tests.gates import ManualExecutor

LAYOUT = FakeDevice(4, [4096, 1024]).layout
CHUNK = 3 * LAYOUT.slot_bytes

pytestmark = pytest.mark.asyncio


class CountingPin:
    """Replaces a device's driver. Records pinned memory, and pins at most `limit` chunks."""

    def __init__(self, limit: int = 1000) -> None:
        self.pinned: dict[int, int] = {}
        self._limit = limit

    def register(self, address: int, size: int) -> None:
        if len(self.pinned) == self._limit:
            raise HostMemoryError("the driver refused")
        self.pinned[address] = size

    def unregister(self, address: int) -> bool:
        del self.pinned[address]
        return True


def arena_of(slots: int, executor: ManualExecutor | None = None, **options: Any) -> Arena:  # noqa: ANN401
    """Return an arena with three slots in a chunk. By default, each chunk is allocated at once."""
    allocator = MmapAllocator(executor or ManualExecutor(held=False), options.pop("pin", None))
    return Arena(LAYOUT, slots, allocator, chunk_bytes=CHUNK, **options)


async def test_ready_slots_grow_with_each_chunk_and_keep_their_addresses() -> None:
    executor, pin = ManualExecutor(), CountingPin()
    arena = arena_of(8, executor, pin=pin)
    growth = [arena.ready_slots]
    task = asyncio.create_task(arena.prepare())
    for _ in range(3):
        await wait_all_blocked()
        executor.run_next()
        await wait_all_blocked()
        growth.append(arena.ready_slots)
        if len(growth) == 2:
            arena.pages(2)[1][:4] = b"kept"
    await task
    assert growth == [0, 3, 6, 8]
    assert arena.pages(2)[1][:4].tobytes() == b"kept"
    assert arena.pages(7)[0].tobytes() == bytes(4096)
    with pytest.raises(IndexError, match="slot 8"):
        arena.pages(8)[0]
    assert arena.refusal is None
    # sizes are not rounded to powers of two
    assert sum(pin.pinned.values()) < 8 * LAYOUT.slot_bytes + 3 * 2 * 64
    arena.close()
    arena.close()
    executor.release()  # memory is released on the executor's threads
    assert pin.pinned == {}


@pytest.mark.parametrize(
    ("reason", "ready"), [("the driver refused", 6), ("bytes are left", 6), ("Cannot allocate memory", 0)]
)
async def test_a_refused_chunk_ends_growth_and_keeps_ready_slots(
    reason: str, ready: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(12, reason)

    pin = CountingPin(limit=2 if reason == "the driver refused" else 1000)
    if reason == "Cannot allocate memory":
        monkeypatch.setattr(mmap, "mmap", refuse)
    if reason == "bytes are left":
        left = iter([2**30, 2**30, 2**28 + 1])
        monkeypatch.setattr(host_memory, "available_bytes", lambda read: next(left))
    arena = arena_of(9, pin=pin)
    with capture_logs() as logs:
        await arena.prepare()
    assert arena.ready_slots == ready
    assert arena.refusal is not None
    assert reason in arena.refusal
    assert [entry["event"] for entry in logs] == ["host_memory_refused"]
    arena.close()
    assert pin.pinned == {}


async def test_an_arena_may_have_no_slots() -> None:
    arena = arena_of(0)
    await arena.prepare()
    assert (arena.ready_slots, arena.refusal) == (0, None)
    arena.close()


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_chunk_that_is_allocated_while_the_growth_ends_is_released(how: str) -> None:
    executor, pin = ManualExecutor(), CountingPin()
    arena = arena_of(8, executor, pin=pin)
    task = asyncio.create_task(arena.prepare())
    await wait_all_blocked()
    if how == "cancelled":
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    else:
        arena.close()
    executor.release()
    await asyncio.gather(task, return_exceptions=True)
    assert (arena.ready_slots, pin.pinned) == (0, {})


class ChargingPin(CountingPin):
    """A driver that takes a second of fake time for each chunk, and is busy for the first `busy` calls."""

    def __init__(self, clock: FakeClock, busy: int = 0) -> None:
        super().__init__()
        self._clock, self.busy = clock, busy

    def register(self, address: int, size: int) -> None:
        if self.busy:
            self.busy -= 1
            raise HostMemoryBusy("a graph is being captured")
        self._clock.jump(size / CHUNK)
        super().register(address, size)


async def test_a_limited_part_is_allocated_at_the_start_and_the_rest_with_pauses() -> None:
    clock = FakeClock()
    pin = ChargingPin(clock)
    arena = arena_of(18, pin=pin, clock=clock)
    await arena.prepare_for(2.5)
    assert arena.ready_slots == 9
    assert clock.monotonic() == pytest.approx(3.0, rel=0.1)
    assert arena.is_growing
    task = asyncio.create_task(arena.prepare(with_pauses=True))
    grown = []
    for _ in range(3):
        await wait_all_blocked()
        grown.append(arena.ready_slots)
        # The last chunk took a second, so the pause after this chunk also takes a second.
        await clock.advance(0.9)
        grown.append(arena.ready_slots)
        await clock.advance(0.7)
    await clock.advance(2)
    await task
    assert grown == [12, 12, 15, 15, 18, 18]
    arena.close()


async def test_pinning_that_is_busy_at_the_start_is_tried_again_later() -> None:
    clock = FakeClock()
    pin = ChargingPin(clock, busy=3)
    arena = arena_of(6, pin=pin, clock=clock)
    with capture_logs() as logs:
        await arena.prepare_for(10)
        assert (arena.ready_slots, arena.is_growing, pin.busy) == (0, True, 2)
        task = asyncio.create_task(arena.prepare())
        await clock.advance(0.5)
        assert arena.ready_slots == 0
        await clock.advance(5)
        await task
    assert (arena.ready_slots, arena.refusal) == (6, None)
    found = [(entry["event"], entry["retry_s"]) for entry in logs]
    assert found == [("host_memory_busy", 1.0), ("host_memory_busy", 2.0)]
    arena.close()


class TouchlessAllocator:
    """Returns addresses that have no memory. Pinning takes the time that it takes at 10 GB/s."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock, self._end = clock, 2**40

    async def allocate(self, size: int, first: int = 0) -> HostChunk:
        self._clock.jump(size / 10e9)
        self._end += size
        return HostChunk(self._end - size, size, lambda: None)


async def test_half_a_tebibyte_delays_the_start_by_seconds_and_no_step() -> None:
    layout = FakeDevice(4, [1 << 20, 1 << 20]).layout
    clock = FakeClock()
    arena = Arena(layout, (512 << 30) // layout.slot_bytes, TouchlessAllocator(clock), clock=clock)
    await arena.prepare_for(worker_side._PINNING_S)
    assert 1 < clock.monotonic() <= 30
    at_start = arena.ready_slots
    assert 0 < at_start < arena.slots
    task = asyncio.create_task(arena.prepare(with_pauses=True))
    await asyncio.sleep(0)
    steps = 0
    while not task.done():
        steps += 1
        await asyncio.sleep(0)
        clock.jump(0.01)
        clock._wake_due()
    assert arena.ready_slots == arena.slots
    assert steps > 1000
    arena.close()


async def test_memory_stays_out_of_forked_children_and_core_dumps() -> None:
    arena = arena_of(3)
    await arena.prepare()
    address = int(arena.geometry.host_base[0, 0])
    maps = await asyncio.to_thread(Path("/proc/self/smaps").read_text)
    # the kernel may have merged the mapping with a neighbour that has the same flags
    mappings = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$", maps, re.M | re.S)
    (flags,) = (flags for first, end, flags in mappings if int(first, 16) <= address < int(end, 16))
    assert set(flags.split()) >= {"dc", "dd"}  # these flags mean: do not copy at a fork, and do not dump
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os._exit(ctypes.c_ubyte.from_address(address).value)  # this access ends the child with a signal
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.WIFSIGNALED(status)
    arena.close()


async def test_a_slots_pages_are_read_and_written_in_the_order_of_the_regions() -> None:
    sizes = [96, 96, 40, 96, 40, 40]
    allocator = MmapAllocator(ManualExecutor(held=False))
    arena = Arena(FakeDevice(4, sizes).layout, 4, allocator, chunk_bytes=3 * 408)
    await arena.prepare()
    contents = [bytes((slot + at) % 256 for at in range(408)) for slot in range(4)]
    for slot, content in enumerate(contents):
        arena.write(slot, arena.views(memoryview(content + b"behind it")))
    for slot, content in enumerate(contents):
        assert b"".join(arena.pages(slot)) == content
        assert [len(page) for page in arena.pages(slot)] == sizes
        found = bytearray(b"." * 410)
        arena.read(slot, arena.views(memoryview(found)))
        assert found == content + b".."
    arena.close()
    with pytest.raises(IndexError, match="slot 3"):
        arena.write(3, arena.views(memoryview(contents[3])))
