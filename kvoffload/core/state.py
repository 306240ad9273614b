"""All state of one engine's scheduler side: every piece with its one owner."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvoffload.core.checked_slots import CheckedSlots
from kvoffload.core.eviction import EVICTION_POLICIES
from kvoffload.core.holds import Holds
from kvoffload.core.host_pool import HostPool
from kvoffload.core.in_flight_stores import InFlightStores
from kvoffload.core.jobs import Jobs
from kvoffload.core.leases import Leases
from kvoffload.core.miss_memory import MissMemory
from kvoffload.core.outbox import Outbox
from kvoffload.core.pending_hits import PendingHits
from kvoffload.core.requests import Requests
from kvoffload.core.restores import Restores
from kvoffload.core.shared_loads import SharedLoads
from kvoffload.core.stale_blocks import StaleBlocks
from kvoffload.core.stall import Stall
from kvoffload.model.causes import DegradeCause
from kvoffload.model.engine import Device, EngineShape
from kvoffload.model.ids import DeviceBlockId, Rank, RequestId


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator chose, as far as decisions go.

    Args:
        store_policy: "eager" or "lazy".
        eviction_policy: a name in `EVICTION_POLICIES`.
        min_load_tokens: shorter hits are recomputed instead.
        merge_steps: the few blocks that a decoding batch completes may wait for those of so many steps in all.
        check_first: a hit is promised when its blocks were checked, and not before.
    """

    store_policy: str = "eager"
    eviction_policy: str = "lru"
    min_load_tokens: int = 0
    merge_steps: int = 1
    check_first: bool = False


@dataclass(slots=True)
class LoadResults:
    """Loads that ended, each started load named exactly once, also of requests that are gone."""

    loaded: list[RequestId] = field(default_factory=list)
    failed: list[RequestId] = field(default_factory=list)


class CoreState:
    """The owners. Nothing here decides anything; each owner is the only writer of what it holds."""

    def __init__(self, shape: EngineShape, policy: Policy, device: Device) -> None:
        self.shape = shape
        self.policy = policy
        self.device = device
        self.pool = HostPool(EVICTION_POLICIES[policy.eviction_policy]())
        self.leases = Leases(device)
        self.holds = Holds(self.pool, shape.groups)
        self.jobs = Jobs(shape.ranks)
        self.requests = Requests()
        self.tables = StaleBlocks(shape.groups)
        self.checked = CheckedSlots(is_needed=policy.check_first)
        self.hits = PendingHits(self.checked)
        self.stores = InFlightStores()
        self.shared = SharedLoads()
        self.restores = Restores()
        self.misses = MissMemory()
        self.outbox = Outbox()
        self.results = LoadResults()
        self.ready = [0] * shape.ranks
        self.stall = Stall(shape.stall_limit)
        self.growing = set(map(Rank, range(shape.ranks)))
        """Ranks that are making more host memory ready, as far as they have told."""
        self.generation = 0
        self.computed_since_reset: set[DeviceBlockId] = set()
        self.degraded: DegradeCause | None = None
