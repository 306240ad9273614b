"""The reference engine's plugin: creates the scheduler side and each rank's worker side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING
from uuid import uuid4

import kvoffload
from kvoffload.checks import memory
from kvoffload.checks.startup import examine_rank, log_warnings
from kvoffload.disk.identity import KVIdentity, groups_of, with_key
from kvoffload.disk.tier_key import TierKey, read_tier_key
from kvoffload.engine.plugin import EngineFacts, GroupFacts, SchedulerPlugin, WorkerPlugin
from kvoffload.model.config import OffloadConfig, parse_config
from kvoffload.model.engine import EngineIdentity, EngineShape, Promises
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import GroupId, Rank
from kvoffload.model.wire import TransferPlan
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.scheduler_side import SchedulerSide
from kvoffload.runtime.tier_kinds import EngineName, Places, places_of
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.transfer.host_memory import advise_host_bytes
from kvoffload.transfer.layout import layout_of
from kvoffload.transfer.ports import Clocks
from kvoffload.transfer.sharing import ALONE, Sharing
from kvoffload_reference.scheduler import PoolDevice, ReferenceScheduler

if TYPE_CHECKING:
    import torch

    from kvoffload.checks.check import Finding
    from kvoffload.transfer.layout import DeviceLayout
    from kvoffload.transfer.ports import Clock, Copier

_IDENTITY = EngineIdentity("reference", kvoffload.__version__, "random weights")


class ReferencePlugin:
    """Offloading for one reference engine. All ranks run in the engine's process and share one portal.

    The engine must call `scheduler_side` before `worker_side`.

    Args:
        portal: runs the background work, and is closed when the engine shuts down; by default a new portal.
        clocks: the clocks that the scheduler side reads; by default the real clocks.
        clock: the clock that the transfer coroutines read; by default the real clock.
        make_copier: makes each rank's copier; by default a copier for the engine's device.
        promises: the engine's promises; by default all promises, which the reference engine keeps.
    """

    def __init__(
        self,
        *,
        portal: Portal | None = None,
        clocks: Clocks | None = None,
        clock: Clock | None = None,
        make_copier: Callable[[Rank], Copier] | None = None,
        promises: Promises | None = None,
    ) -> None:
        self._clocks = clocks
        self._clock = clock
        self._make_copier = make_copier
        self._promises = promises or Promises(hands_off_states=True)
        self._portal = portal or Portal("kvoffload")
        self._places: Places = {}
        self._sharing = ALONE
        self._tier_key: TierKey | None = None
        self.offload: SchedulerSide | None = None
        self.workers: list[WorkerSide] = []

    def scheduler_side(self, engine: EngineFacts) -> SchedulerPlugin:
        """Create the scheduler side.

        Raises:
            ConfigError: `plugin_config` has unknown keys or invalid values, or `tier_key_file` cannot be used.
        """
        ranks = engine.config.ranks
        self._config = parse_config(engine.config.plugin_config, ranks, advise_host_bytes(ranks))
        sharers = engine.config.replicas if self._config.host_share else 1
        shape = shape_of(engine, self._promises, sharers)
        self._tier_key = read_tier_key(self._config.tier_key_file)
        identity = with_key(_identity_of(engine, shape, self._config), self._tier_key)
        life = uuid4().hex
        self._sharing = Sharing(sharers, life)
        self._places = places_of(self._config, lambda: identity, engine=EngineName(_kind_of(identity), life))
        self.offload = SchedulerSide(
            shape,
            self._config,
            PoolDevice(engine.pool),
            portal=self._portal,
            clocks=self._clocks,
            identity=_IDENTITY,
            places=self._places,
            tier_key=self._tier_key,
        )
        return ReferenceScheduler(self.offload, self._portal.close)

    def worker_side(self, engine: EngineFacts, rank: int) -> WorkerPlugin:
        copier = self._make_copier(Rank(rank)) if self._make_copier is not None else None
        worker = WorkerSide(
            Rank(rank),
            engine.config.ranks,
            self._config,
            self._portal,
            clock=self._clock,
            copier=copier,
            places=self._places,
            sharing=self._sharing,
            tier_key=self._tier_key,
        )
        self.workers.append(worker)

        def examine_layout(layout: DeviceLayout) -> list[Finding]:
            # `memory.CHECKS` lacks the check of the copy speed: the demo's models have small pages on purpose.
            ranks, sharers = engine.config.ranks, self._sharing.ranks
            return examine_rank(rank, ranks, self._config, layout, sharers=sharers, checks=memory.CHECKS)

        return ReferenceWorker(worker, examine_layout)


class ReferenceWorker(WorkerPlugin):
    """The worker side of the plugin on one rank.

    Args:
        offload: the runtime's worker side.
        examine: runs the doctor's checks, before the worker allocates host memory.
    """

    def __init__(self, offload: WorkerSide, examine: Callable[[DeviceLayout], Sequence[Finding]]) -> None:
        self.offload = offload
        self._examine = examine

    def register_kv_caches(self, tensors: Sequence[torch.Tensor]) -> None:
        layout = layout_of(tensors)
        findings = self._examine(layout)
        self.offload.register(layout)
        log_warnings(findings)

    def start_loads(self, plan: object) -> None:
        assert isinstance(plan, TransferPlan), plan
        self.offload.begin_step(plan)
        self.offload.start_loads(plan)

    def start_stores(self, plan: object) -> None:
        assert isinstance(plan, TransferPlan), plan
        self.offload.start_stores(plan)

    def take_output(self) -> object:
        return self.offload.take_report()

    def shutdown(self) -> None:
        self.offload.close()


def shape_of(engine: EngineFacts, promises: Promises, sharers: int = 1) -> EngineShape:
    """Return the engine's shape, of which `sharers` ranks share a copy. `device_blocks` excludes the null block."""
    return EngineShape(
        groups=tuple(map(_group, engine.groups)),
        ranks=engine.config.ranks,
        device_blocks=engine.pool.usable_blocks,
        step_tokens=engine.config.step_tokens,
        promises=promises,
        sharers=sharers,
    )


def _group(group: GroupFacts) -> GroupSpec:
    reach = group.window_tokens if group.window_tokens is not None else group.chunk_tokens
    return GroupSpec(GroupId(group.index), AttentionKind(group.kind), group.block_tokens, reach)


def _identity_of(engine: EngineFacts, shape: EngineShape, config: OffloadConfig) -> KVIdentity:
    """Return the KV identity. The identity includes the seed of the model's random weights."""
    model = f"{engine.config.model}, drawn by torch {version('torch')}"
    return KVIdentity(
        engine=f"{_IDENTITY.name} {_IDENTITY.version}",
        weights=model if config.weights_id is None else f"{model}, {config.weights_id}",
        keys="sha256 kv-block-chain",
        parallel={"ranks": engine.config.ranks, "sharers": shape.sharers},
        settings={"device": engine.config.device},
        groups=groups_of(shape),
    )


def _kind_of(identity: KVIdentity) -> str:
    return f"reference-{identity.fingerprint[:16]}"


def plugin() -> ReferencePlugin:
    """Return a plugin for one engine. The package's entry point names this function."""
    return ReferencePlugin()
