"""Follows one block through seven steps on the real parts (see ARCHITECTURE.md).

Only the device and the copier are fakes. The device is a few blocks of bytes with the engine's own block
pool. The copier copies real bytes when the test decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvoffload.core.machine import SlotState
from kvoffload.engine.block_pool import BlockPool
from kvoffload.model.engine import EngineShape
from kvoffload.model.facts import BlocksAllocated, Progress, RequestEnded, RequestSeen, StepScheduled
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import DeviceBlockId, GroupId, Rank, RequestId, SlotId
from kvoffload.model.wire import NOTHING, TransferPlan
from kvoffload.runtime.scheduler_side import SchedulerSide
from kvoffload.testing import FakeClock, FakeDevice, GatedCopier, wait_all_blocked
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.host_memory import MmapAllocator
from kvoffload.transfer.pump import TransferPump
from kvoffload_reference.scheduler import PoolDevice
from tests.core.audit import audit_side
from tests.gates import ManualExecutor
from tests.keys import block_key
from tests.settings import make_config

BLOCK_TOKENS = 16
KEY = block_key(b"hash of the first sixteen tokens", GroupId(0))
FIRST, SECOND = RequestId("first"), RequestId("second")


class Story:
    def __init__(self) -> None:
        self.memory = FakeDevice(5, pages=[64])
        self.pool = BlockPool(5)
        groups = (GroupSpec(GroupId(0), AttentionKind.FULL, BLOCK_TOKENS),)
        shape = EngineShape(groups, ranks=1, device_blocks=4, step_tokens=32)
        self.scheduler = SchedulerSide(shape, make_config(), PoolDevice(self.pool))
        self.copier = GatedCopier()
        self.executor = ManualExecutor()
        self.arena = Arena(self.memory.layout, 2, MmapAllocator(self.executor))
        self.pump = TransferPump(
            Rank(0), self.arena, self.copier, FakeClock(), store_bytes_in_flight=1 << 20, timeout_s=30
        )
        self.steps = 0

    def step(self, *progress: Progress) -> TransferPlan:
        """Schedule one step, and give its plan to the worker's hooks, which start the copies."""
        self.steps += 1
        plan = self.scheduler.step(StepScheduled(self.steps, progress))
        self.pump.submit_loads(plan.loads)
        self.pump.submit_stores(plan.stores)
        return plan

    def hear(self) -> list[RequestId]:
        """Let the worker poll and report; return the requests whose load has ended."""
        self.pump.poll()
        report = self.pump.take_report()
        self.scheduler.reported([report] if report is not None else [])
        return self.scheduler.take_answers().loaded

    def slot(self, slot: int = 0) -> SlotState:
        return self.scheduler.core.state.pool.state(SlotId(slot))


@pytest_asyncio.fixture
async def story() -> AsyncIterator[Story]:
    story = Story()
    coroutine = asyncio.create_task(story.pump.run())
    memory = asyncio.create_task(story.arena.prepare())
    await wait_all_blocked()
    story.executor.run_next()
    await memory
    story.hear()
    yield story
    coroutine.cancel()
    with pytest.raises(asyncio.CancelledError):
        await coroutine
    await story.pump.close()


@pytest.mark.asyncio
async def test_a_block_is_stored_on_the_host_and_loaded_back(story: Story) -> None:
    scheduler, pool = story.scheduler, story.pool

    # 1. A request arrives. Its first block is new, so the lookup finds nothing and records that cause.
    scheduler.seen(RequestSeen(FIRST, prompt_tokens=20, keys=((KEY,),)))
    assert scheduler.lookup(FIRST, 0) == 0

    # 2. The engine allocates a device block, and computes KV into this block.
    block, tail = map(DeviceBlockId, pool.allocate(2))
    scheduler.allocated(BlocksAllocated(FIRST, ((block, tail),), device_tokens=0, external_tokens=0))
    assert scheduler.counters.snapshot().count("kvoffload_miss_blocks_total", "never_seen") == 1
    assert story.step(Progress(FIRST, confirmed_tokens=0)) == NOTHING
    computed = bytes(range(64))
    story.memory.write(block, computed)
    pool.index(block, KEY)

    # 3. The step confirms the block, so the block is offered. It gets a slot and a lease, and the plan
    # contains its store.
    (store,) = story.step(Progress(FIRST, confirmed_tokens=20)).stores
    assert (store.targets, store.slots) == ((block,), (0,))
    assert story.slot() is SlotState.FILLING
    scheduler.ended(RequestEnded(FIRST, confirmed_tokens=20))
    pool.release([block, tail])
    assert not pool.is_free(block)  # the request has ended, but the lease keeps the block

    # 4. The transfer coroutine starts the copy. After the copy has ended and the rank has reported, the block
    # can hit and its lease is released.
    await wait_all_blocked()
    story.copier.tickets[0].finish()
    story.hear()
    assert story.slot() is SlotState.READY
    assert bytes(story.arena.pages(0)[0]) == computed
    assert pool.is_free(block)

    # 5. The engine allocates the block to other requests, which overwrite it.
    others = pool.allocate(4)
    assert block in others
    story.memory.write(block, bytes(64))
    assert pool.cached_block(KEY) is None
    pool.release(others)

    # 6. A request with the same prefix arrives. Its lookup finds and pins the block on the host.
    scheduler.seen(RequestSeen(SECOND, prompt_tokens=20, keys=((KEY,),)))
    assert scheduler.lookup(SECOND, 0) == BLOCK_TOKENS
    assert story.slot() is SlotState.PINNED

    # 7. The engine allocates a new block and loads the hit into it. The load is submitted at once; the
    # request runs after the load.
    target, tail = map(DeviceBlockId, pool.allocate(2))
    scheduler.allocated(BlocksAllocated(SECOND, ((target, tail),), device_tokens=0, external_tokens=16))
    (load,) = story.step().loads
    assert (load.targets, load.slots) == ((target,), (0,))
    story.copier.tickets[1].finish()
    assert story.hear() == [SECOND]
    assert story.memory.read(target) == computed
    assert story.slot() is SlotState.READY

    # At the end, no pin, lease or record is left, and every invariant holds.
    scheduler.ended(RequestEnded(SECOND, confirmed_tokens=16))
    pool.release([target, tail])
    assert pool.free_blocks == 4
    assert not scheduler.has_work
    assert audit_side(scheduler) == []
