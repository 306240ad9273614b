"""A scheduler side with a fake engine and a fake clock, which tests call as an adapter does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvoffload.disk.folder import DiskPlace
from kvoffload.disk.identity import KVIdentity
from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.engine import EngineShape
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import BlockKey, DeviceBlockId, GroupId, Rank, RequestId
from kvoffload.model.wire import JobReport, SlotsFile, Tier, TransferPlan, TransferReport
from kvoffload.remote.address import RemotePlace
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.scheduler_side import SchedulerSide
from kvoffload.telemetry.counters import Snapshot
from kvoffload.testing import FakeClock
from kvoffload.transfer.ports import Clocks
from tests.core.below import statuses
from tests.runtime.manual_portal import ManualPortal
from tests.settings import make_config

BLOCK = 4
RELOAD = 3 * BLOCK  # the number of tokens that `Side.stored` leaves on the host
TIMEOUT_S = 30.0
PER_TOKEN_S = 0.01  # what `measure_prefill` lets a side measure
SHAPE = EngineShape(
    (GroupSpec(GroupId(0), AttentionKind.FULL, BLOCK),), ranks=1, device_blocks=400, step_tokens=64
)
IDENTITY = KVIdentity("parts", "no weights", "keys", {}, {}, ())


class Pool:
    """The engine's block pool, with keys that the test sets."""

    def __init__(self) -> None:
        self.leased: list[DeviceBlockId] = []
        self.names: dict[DeviceBlockId, BlockKey] = {}

    def lease(self, blocks: Sequence[DeviceBlockId]) -> None:
        self.leased += blocks

    def release(self, blocks: Sequence[DeviceBlockId]) -> None:
        for block in blocks:
            self.leased.remove(block)

    def next_evictable(self, count: int) -> Iterable[DeviceBlockId]:
        return ()

    def free_blocks(self) -> int:
        return 0

    def keys_of(self, blocks: Sequence[DeviceBlockId]) -> list[BlockKey | None]:
        return [self.names.get(block) for block in blocks]

    def block_of(self, key: BlockKey) -> DeviceBlockId | None:
        return None


class Side:
    """One scheduler side, by default with 50 host slots. Requests with the same `prefix` share blocks.

    A side with a disk or a remote tier needs a portal.
    """

    def __init__(
        self,
        *,
        portal: Portal | bool = False,
        slots: int = 50,
        ranks: int = 1,
        disk: Path | None = None,
        opens_files: bool = True,
        remote: RemotePlace | None = None,
        **settings: object,
    ) -> None:
        self.clock = FakeClock(100.0)
        self.pool = Pool()
        self.portal: Any = ManualPortal(self.clock) if portal is True else portal or None
        on_disk = None if disk is None else DiskPlace(disk, lambda: IDENTITY)
        places = {Tier.DISK: on_disk, Tier.REMOTE: remote}
        self.side = SchedulerSide(
            replace(SHAPE, ranks=ranks),
            make_config(**{"transfer_timeout_s": TIMEOUT_S, **settings}),
            self.pool,
            portal=self.portal,
            clocks=Clocks(self.clock.monotonic, self.clock.monotonic, self.clock.sleep),
            places={tier: place for tier, place in places.items() if place is not None},
        )
        file = None if disk is None or not opens_files else SlotsFile(b"a file's own id.", 100)
        self._statuses = statuses(file, remote_works=True if remote is not None else None)
        self.steps = 0
        self._blocks = 0
        self._slots, self._ranks = slots, ranks
        for rank in range(ranks):
            self.report(rank=rank)

    def close(self) -> None:
        self.side.close()
        if self.portal is not None:
            self.portal.close()

    def seen(
        self, name: str, prefix: str = "p", blocks: int = 3, trace_parent: str | None = None
    ) -> RequestId:
        keys = tuple(BlockKey(f"{prefix}{position}".encode()) for position in range(blocks))
        fact = facts.RequestSeen(RequestId(name), blocks * BLOCK + 1, (keys,), trace_parent=trace_parent)
        self.side.seen(fact)
        return RequestId(name)

    def allocated(self, name: str, external: int = 0, blocks: int = 3) -> None:
        table = tuple(DeviceBlockId(self._blocks + position + 1) for position in range(blocks))
        self._blocks += blocks
        self.side.allocated(facts.BlocksAllocated(RequestId(name), (table,), 0, external))
        self.last_table = table

    def name_blocks(self, prefix: str) -> None:
        """Give the keys of this prefix to the blocks that were allocated last."""
        for position, block in enumerate(self.last_table):
            self.pool.names[block] = BlockKey(f"{prefix}{position}".encode())

    def step(
        self, *confirmed: tuple[str, int], preempted: Sequence[str] = (), prefill: int = 0, decode: int = 0
    ) -> TransferPlan:
        progress = tuple(facts.Progress(RequestId(name), tokens, ((),), ((),)) for name, tokens in confirmed)
        self.steps += 1
        names = tuple(map(RequestId, preempted))
        fact = facts.StepScheduled(self.steps, progress, names, prefill_tokens=prefill, decode_tokens=decode)
        return self.side.step(fact)

    def ended(self, name: str) -> None:
        self.side.ended(facts.RequestEnded(RequestId(name), 0, ((),), holds_blocks=False))

    def report(self, *jobs: JobReport, rank: int = 0) -> tuple[list[RequestId], list[RequestId]]:
        report = TransferReport(
            Rank(rank),
            jobs,
            self._slots,
            below=self._statuses,
        )
        self.side.reported([report])
        answers = self.side.take_answers()
        return answers.loaded, answers.failed

    def done(
        self,
        plan: TransferPlan,
        outcome: CopyOutcome = CopyOutcome.DONE,
        rank: int = 0,
        queued_s: float = 0.0,
        copy_s: float = 0.0,
    ) -> tuple[list[RequestId], list[RequestId]]:
        jobs = (*plan.loads, *plan.stores)
        reports = (JobReport(job.id, job.direction, outcome, 64, queued_s, copy_s) for job in jobs)
        return self.report(*reports, rank=rank)

    def gauge(self, name: str, *labels: str) -> float:
        return self.side.gauges()[f"kvoffload_{name}"][labels]

    @property
    def counts(self) -> Snapshot:
        return self.side.counters.snapshot()

    def stored(self, prefix: str = "p", blocks: int = 3) -> None:
        name = f"first-{prefix}"
        self.seen(name, prefix, blocks)
        self.allocated(name, blocks=blocks)
        self.name_blocks(prefix)
        plan = self.step((name, blocks * BLOCK))
        for rank in range(self._ranks):
            self.done(plan, rank=rank)
        self.ended(name)
        self.step()


def storing(side: Side, name: str = "s", prefix: str = "s", decode: int = 0) -> TransferPlan:
    """Return the plan that contains the store of a running request."""
    side.seen(name, prefix)
    side.allocated(name)
    side.name_blocks(prefix)
    plan = side.step((name, RELOAD), decode=decode)
    assert plan.stores
    return plan


def loading(side: Side, name: str = "a") -> TransferPlan:
    """Return the plan that contains a request's load."""
    side.stored()
    side.seen(name)
    assert side.side.lookup(RequestId(name), 0) == RELOAD
    side.allocated(name, RELOAD)
    plan = side.step()
    assert plan.loads
    return plan


def measure_prefill(side: Side) -> None:
    """Compute one request alone, then let the engine be idle, so that the side measures the prefill's speed."""
    side.seen("measured", "m")
    side.allocated("measured")
    side.step(prefill=100)
    side.clock.jump(100 * PER_TOKEN_S)
    side.ended("measured")
    side.clock.jump(1000.0)
