"""The real scheduler's side without an engine: device blocks are numbers, and copies take the time that bytes would.

The engine's and the copies' clock is a number that each step moves on; what is measured is the time inside the hooks,
and nothing around them.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.config import OffloadConfig
from kvoffload.model.engine import EngineShape
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import BlockKey, DeviceBlockId, GroupId, Rank, RequestId, block_key
from kvoffload.model.transfer import JobReport, TransferJob, TransferPlan, TransferReport
from kvoffload.runtime.awaited_loads import LoadAnswers
from kvoffload.runtime.clocks import Clocks
from kvoffload.runtime.scheduler_side import SchedulerSide

BLOCK_TOKENS = 16
_HASH_BYTES = 32  # as engines hash with SHA-256
_GROUP = GroupId(0)

# What is assumed of the hardware; nothing is copied.
GIB_PER_S = 20.0  # of copies, each way
BLOCK_KIB = 2048
STEP_S = 0.025  # between two steps of the engine
BLOCK_S = BLOCK_KIB / (GIB_PER_S * 2**20)
"""Seconds that one block's copy takes."""

P = ParamSpec("P")
T = TypeVar("T")


class CountedBlocks:
    """Device blocks by number, handed out in the order in which they were given back."""

    def __init__(self, blocks: int) -> None:
        self._free = deque(map(DeviceBlockId, range(1, blocks + 1)))
        self._references = [0] * (blocks + 1)
        self.keys: dict[DeviceBlockId, BlockKey] = {}
        """What each block holds, as far as it was computed."""

    def take(self, count: int) -> tuple[DeviceBlockId, ...]:
        """Hand blocks out; what they held is gone."""
        blocks = tuple([self._free.popleft() for _ in range(count)])
        for block in blocks:
            self.keys.pop(block, None)
        self.lease(blocks)
        return blocks

    def lease(self, blocks: Sequence[DeviceBlockId]) -> None:
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: Sequence[DeviceBlockId]) -> None:
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def next_evictable(self, count: int) -> Iterable[DeviceBlockId]:
        return list(self._free)[:count]

    def free_blocks(self) -> int:
        return len(self._free)

    def keys_of(self, blocks: Sequence[DeviceBlockId]) -> list[BlockKey | None]:
        return [self.keys.get(block) for block in blocks]

    def block_of(self, key: BlockKey) -> DeviceBlockId | None:
        return None


class SimulatedCopies:
    """Two lanes, one each way, on which jobs take their blocks' time one after the other."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._lanes: tuple[deque[tuple[float, TransferJob]], ...] = (deque(), deque())

    @property
    def are_open(self) -> bool:
        return any(self._lanes)

    def submit(self, plan: TransferPlan, now: float) -> None:
        """Queue a step's jobs."""
        for lane, jobs in zip(self._lanes, (plan.loads, plan.stores), strict=True):
            for job in jobs:
                begins = max(now, lane[-1][0]) if lane else now
                lane.append((begins + len(job.slots) * BLOCK_S, job))

    def report(self, now: float) -> TransferReport:
        """Return what has ended by now."""
        ended = []
        for lane in self._lanes:
            while lane and lane[0][0] <= now:
                ended.append(self._ended(lane.popleft()[1]))
        return TransferReport(Rank(0), tuple(ended), self._slots)

    def _ended(self, job: TransferJob) -> JobReport:
        blocks = len(job.slots)
        size, seconds = blocks * BLOCK_KIB * 1024, blocks * BLOCK_S
        return JobReport(job.job, job.direction, CopyOutcome.DONE, size, 0.0, seconds)


class Engineless:
    """One scheduler's side, driven directly in the way an adapter drives it.

    Args:
        slots: of the host, all ready from the start.
        device_blocks: of the device.
    """

    def __init__(self, slots: int, device_blocks: int = 4096) -> None:
        self.now = 100.0
        """Seconds on the engine's clock."""
        self.device = CountedBlocks(device_blocks)
        self.copies = SimulatedCopies(slots)
        self.hook_s = 0.0
        """Seconds spent in hooks so far."""
        self.steps = 0
        full = GroupSpec(_GROUP, AttentionKind.FULL, BLOCK_TOKENS)
        shape = EngineShape((full,), ranks=1, device_blocks=device_blocks, step_tokens=8192)
        clocks = Clocks(self._clock, self._clock)
        self.side = SchedulerSide(shape, OffloadConfig(), self.device, clocks=clocks)
        self._timed(self.side.reported, [TransferReport(Rank(0), (), slots)])

    # -- hooks, timed -------------------------------------------------------------------------------------------

    def seen(self, name: str, keys: Sequence[BlockKey], tail_tokens: int = 1) -> RequestId:
        """A request comes, its prompt these whole blocks and some tokens."""
        request = RequestId(name)
        fact = facts.RequestSeen(request, len(keys) * BLOCK_TOKENS + tail_tokens, (tuple(keys),))
        self._timed(self.side.seen, fact)
        return request

    def lookup(self, request: RequestId) -> int | None:
        """Return the tokens on the host; the device holds none."""
        return self._timed(self.side.lookup, request, 0)

    def allocated(self, request: RequestId, blocks: int, external_tokens: int) -> tuple[DeviceBlockId, ...]:
        """Give a request its table and return it."""
        table = self.device.take(blocks)
        fact = facts.BlocksAllocated(request, (table,), 0, external_tokens)
        self._timed(self.side.allocated, fact)
        return table

    def step(
        self,
        confirmed: Iterable[tuple[RequestId, int]] = (),
        decode_tokens: int = 0,
    ) -> LoadAnswers:
        """One step: what copies have ended is reported, and what the plan says is submitted. Time goes on."""
        self.now += STEP_S
        self.steps += 1
        report = self.copies.report(self.now)
        # An adapter calls without reports only where something could have ended.
        results = self._timed(self.side.reported, [report]) if report.jobs else LoadAnswers()
        progress = tuple([facts.Progress(request, tokens, ((),), ((),)) for request, tokens in confirmed])
        fact = facts.StepScheduled(self.steps, progress, decode_tokens=decode_tokens)
        plan = self._timed(self.side.step, fact)
        if not plan.is_empty:
            self.copies.submit(plan, self.now)
        return results

    def ended(self, request: RequestId, confirmed_tokens: int, table: Sequence[DeviceBlockId]) -> None:
        """A request ends; then its blocks are given back, the deepest first."""
        self._timed(self.side.ended, facts.RequestEnded(request, confirmed_tokens, ((),)))
        self.device.release(table[::-1])

    # -- around them --------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Step until no copy is open."""
        while self.copies.are_open:
            self.step()

    def hold(self, name: str, keys: Sequence[BlockKey]) -> None:
        """Let a request come and be computed, and run on; the next steps store its blocks."""
        request = self.seen(name, keys)
        table = self.allocated(request, len(keys) + 1, 0)
        self.computed(table, keys)
        self.step([(request, len(keys) * BLOCK_TOKENS)])

    def computed(self, table: Sequence[DeviceBlockId], keys: Sequence[BlockKey]) -> None:
        """The device holds these keys from now on."""
        self.device.keys.update(zip(table, keys, strict=False))

    def fill(self, draw: random.Random, count: int, at_once: int = 64) -> float:
        """Put `count` fresh blocks on the host, in place of the oldest; return the most processor time that `at_once` of them took."""
        longest = 0.0
        for placed in range(0, count, at_once):
            keys = fresh_keys(draw, min(at_once, count - placed))
            begun = time.thread_time()
            self.put(keys)
            longest = max(longest, time.thread_time() - begun)
        return longest

    def put(self, keys: Sequence[BlockKey]) -> None:
        """Put blocks on the host without the hooks, which would take a hundred times as long."""
        pool = self.side.core.state.pool
        pool.fill(pool.reserve(keys)[0])

    def _clock(self) -> float:
        return self.now

    def _timed(self, hook: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        begun = time.perf_counter()
        answer = hook(*args, **named)
        self.hook_s += time.perf_counter() - begun
        return answer


def fresh_keys(draw: random.Random, count: int) -> list[BlockKey]:
    """Return keys that are on no host yet, of the length that engines give them."""
    return [block_key(draw.randbytes(_HASH_BYTES), _GROUP) for _ in range(count)]
