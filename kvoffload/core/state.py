"""The state of one engine's scheduler side. Each part of the state has one writer."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from kvoffload.core.block_tables import BlockTables
from kvoffload.core.host import HostState
from kvoffload.core.jobs import Leases
from kvoffload.core.request import Requests
from kvoffload.core.retention import Retention
from kvoffload.core.tiers import LowerTier
from kvoffload.model.engine import BlockPool, EngineShape
from kvoffload.model.groups import AttentionKind
from kvoffload.model.ids import DeviceBlockId, RequestId


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's choices that affect the core's decisions.

    Args:
        store_policy: "eager", "lazy", "twice", or "auto", which begins as "eager".
        min_load_tokens: hits shorter than this are recomputed.
        prefix_boundaries: ask the engine for a recurrent state when a longer hit lacks only this state.
        tiers: the classes of the lower tiers in the order in which they are searched, each with the number of times
            that lookups must find a block before it is written to the tier.
        keeps_host: whether later processes may find the host's blocks, so that the host has a catalog.
    """

    store_policy: str = "eager"
    min_load_tokens: int = 0
    prefix_boundaries: bool = True
    tiers: tuple[tuple[type[LowerTier], int], ...] = ()
    keeps_host: bool = False


class LoadResults(Struct):
    """Requests whose loads have ended. Each started load is reported exactly once, even if its request has ended."""

    loaded: list[RequestId] = []
    failed: list[RequestId] = []


class CoreState(HostState):
    """All state of the core. A request's state is in its record, a job's in the job, and a slot's in its pool.

    Args:
        shape: the engine's fixed properties.
        policy: the operator's choices.
        device: the engine's block pool.
    """

    def __init__(self, shape: EngineShape, policy: Policy, device: BlockPool) -> None:
        super().__init__(shape.ranks, policy.tiers, shape.stall_limit)
        if policy.keeps_host:
            self.pool.for_catalog = []
        self.shape = shape
        self.policy = policy
        self.device = device
        self.none_offered = (0,) * len(shape.groups)
        """The value of `RequestRecord.offered` for a new block table."""
        recurrent = AttentionKind.RECURRENT
        self.offered_groups = [
            (group.group, group.block_tokens) for group in shape.groups if group.kind is not recurrent
        ]
        """The number of each group whose blocks a planner offers once their tokens are confirmed, and a block's tokens."""
        self.requests = Requests()
        self.leases = Leases(device)
        self.retention = Retention(self.pool, shape, self.tiers, self.tally)
        self.tables = BlockTables(shape.groups)
        self.results = LoadResults()
        self.steps = 0
        """The number of steps so far."""
        self.computed_since_reset: set[DeviceBlockId] = set()
        """After a reset: device blocks that hold nothing computed before the reset."""
