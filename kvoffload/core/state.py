"""The state of one engine's scheduler side. Each part of the state has one writer."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from kvoffload.core.block_tables import BlockTables
from kvoffload.core.jobs import Jobs, Leases, Stall
from kvoffload.core.request import Requests
from kvoffload.core.retention import Retention
from kvoffload.core.slots import SlotPool
from kvoffload.core.tally import MissMemory, Tally
from kvoffload.core.tiers import DiskTier, RemoteTier
from kvoffload.model.causes import DegradeCause
from kvoffload.model.engine import BlockPool, EngineShape
from kvoffload.model.ids import DeviceBlockId, Rank, RequestId


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's choices that affect the core's decisions.

    Args:
        store_policy: "eager" or "lazy".
        min_load_tokens: hits shorter than this are recomputed.
        prefix_boundaries: ask the engine for a recurrent state when a longer hit lacks only this state.
        disk_min_hits: how often lookups must find a block before it is written to the disk; None without a disk.
        remote_min_hits: like `disk_min_hits`, for the remote tier; None without a remote tier.
    """

    store_policy: str = "eager"
    min_load_tokens: int = 0
    prefix_boundaries: bool = True
    disk_min_hits: int | None = None
    remote_min_hits: int | None = None


class LoadResults(Struct):
    """Requests whose loads have ended. Each started load is reported exactly once, even if its request has ended."""

    loaded: list[RequestId] = []
    failed: list[RequestId] = []


class CoreState:
    """All state of the core. A request's state is in its record, a job's in the job, and a slot's in its pool.

    Args:
        shape: the engine's fixed properties.
        policy: the operator's choices.
        device: the engine's block pool.
    """

    def __init__(self, shape: EngineShape, policy: Policy, device: BlockPool) -> None:
        self.shape = shape
        self.policy = policy
        self.device = device
        self.none_offered = (0,) * len(shape.groups)
        """The value of `RequestRecord.offered` for a new block table."""
        ranks = [Rank(rank) for rank in range(shape.ranks)]
        self.jobs = jobs = Jobs(shape.ranks)
        self.disk = None if (hits := policy.disk_min_hits) is None else DiskTier(hits, jobs, shape.ranks)
        self.remote = None if (hits := policy.remote_min_hits) is None else RemoteTier(hits, jobs, ranks)
        self.tiers = tuple([tier for tier in (self.disk, self.remote) if tier is not None])
        """The tiers below the host, in the order in which they are searched."""
        self.pool = SlotPool()
        self.requests = Requests()
        self.leases = Leases(device)
        self.retention = Retention(self.pool, shape.groups, self.tiers)
        self.tables = BlockTables(shape.groups)
        self.misses = MissMemory()
        self.tally = Tally(self.jobs.planned)
        self.results = LoadResults()
        self.stall = Stall(shape.stall_limit)
        self.ready = dict.fromkeys(ranks, 0)
        """How many host slots each rank has ready."""
        self.growing = set(self.ready)
        """Ranks that have not yet reported that all of their host memory is ready."""
        self.steps = 0
        """The number of steps so far."""
        self.epoch = 0
        """The number of resets so far."""
        self.computed_since_reset: set[DeviceBlockId] = set()
        """After a reset: device blocks that hold nothing computed before the reset."""
        self.degraded: DegradeCause | None = None
        """Why offloading is switched off until the engine restarts; None while it is on."""
