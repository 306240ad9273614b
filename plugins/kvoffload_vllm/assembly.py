"""Builds the connector's scheduler side and worker side from vLLM's configuration."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvoffload.checks.check import Setup
from kvoffload.checks.startup import examine, examine_rank, log_warnings
from kvoffload.disk.identity import groups_of
from kvoffload.disk.tier_key import TierKey, read_tier_key
from kvoffload.logs import ROOT
from kvoffload.model.config import OffloadConfig, check_promises, parse_config
from kvoffload.model.engine import EngineIdentity
from kvoffload.model.errors import ConfigError
from kvoffload.model.events import StorePolicyMoved
from kvoffload.model.ids import Rank
from kvoffload.model.wire import Tier
from kvoffload.runtime.disk_catalog import DiskCatalog
from kvoffload.runtime.host_catalog import HostCatalog
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.scheduler_side import SchedulerSide
from kvoffload.runtime.tier_kinds import Places, places_of
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.telemetry.payload import Changes
from kvoffload.telemetry.spans import check_exporter
from kvoffload.transfer.host_memory import advise_host_bytes
from kvoffload.transfer.sharing import ALONE, Sharing
from kvoffload_vllm.doctor import RECOMPUTE, block_hashes, load_failures, recurrent_states
from kvoffload_vllm.events import TierEvents, Wire, find_wire, publishes_events
from kvoffload_vllm.groups import VllmGroups, find_sharers, vllm_groups
from kvoffload_vllm.kept_notes import DiskNotes, KeptNotes
from kvoffload_vllm.kv_identity import Identification, engine_life, engine_name, find_identity, find_problems
from kvoffload_vllm.pool_device import VllmDevice
from kvoffload_vllm.scheduler import VllmScheduler
from kvoffload_vllm.support import find_retention, keeps_replaced_hashes
from kvoffload_vllm.worker import VllmWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvoffload.checks.check import Finding
    from kvoffload.disk.identity import KVIdentity
    from kvoffload.transfer.layout import DeviceLayout

_REPORT_EVERY = 16  # steps between progress reports; a decoding batch completes few blocks in each step


def start_scheduler(
    scheduler: VllmScheduler, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    """Initialize the connector's scheduler side.

    Raises:
        ConfigError: offloading cannot start; the message lists every reason.
    """
    join_logging()
    groups, config = _check(vllm_config, kv_cache_config)
    key = read_tier_key(config.tier_key_file)
    identification = _identification(vllm_config, config, groups, key)
    places: Places = {}
    if identification is not None:
        places = _places(vllm_config, config, identification.identify, groups)
    device, portal = VllmDevice(groups.partly_hashed), Portal("kvoffload")
    offload = SchedulerSide(
        groups.shape,
        config,
        device,
        portal=portal,
        identity=EngineIdentity(
            "vllm", version("vllm"), str(vllm_config.model_config.model), _replica(vllm_config)
        ),
        places=places,
        tier_key=key,
    )
    if groups.shape.state_key_ends:
        interval = find_retention(kv_cache_config, vllm_config.cache_config)
        shape = groups.shape
        check = recurrent_states(shape.alignment, interval, shape.tail_tokens)
        log_warnings(examine([check], Setup(config=config)))
    tier_events = None
    if publishes_events(vllm_config):
        tier_events = _tier_events(offload, device, groups, find_wire(kv_cache_config))
    VllmScheduler.__init__(
        scheduler,
        offload,
        device,
        groups,
        Changes(offload),
        portal.close,
        _report_every(config.store_policy),
        tier_events,
        identification,
        vllm_config.parallel_config.pipeline_parallel_size,
        keeps_replaced_hashes=keeps_replaced_hashes(),
    )
    offload.bus.count(StorePolicyMoved, lambda event: scheduler.set_report_every(_report_every(event.policy)))


def _tier_events(offload: SchedulerSide, device: VllmDevice, groups: VllmGroups, wire: Wire) -> TierEvents:
    """Return what announces the tiers' blocks in vLLM's KV events."""
    state = offload.core.state
    # Other engines of this machine announce their own blocks.
    own = [tier for tier in state.tiers if tier is not state.node]
    return TierEvents(
        groups,
        {Tier.HOST: state.pool.index, **{tier.tier: tier.pool.index for tier in own}},
        wire,
        device,
        offload.observation.removed,
        _kept_notes(offload, groups),
        lambda tier: offload.catalogs[tier].is_restoring or (tier is Tier.HOST and bool(state.growing)),
    )


def _report_every(policy: str) -> int:
    """Return the number of steps between progress reports of decoding requests.

    With lazy stores, the planner needs each step's allocations in the same step.
    """
    return 1 if policy == "lazy" else _REPORT_EVERY


def _kept_notes(offload: SchedulerSide, groups: VllmGroups) -> dict[Tier, KeptNotes]:
    """Return the notes beside the tables of the tiers whose blocks the next engine finds, and let the catalogs open them."""
    tokens = max(group.block_tokens for group in groups.shape.groups)
    kept = dict[Tier, KeptNotes]()
    for tier, catalog in offload.catalogs.items():
        if isinstance(catalog, HostCatalog):
            kept[tier] = notes = KeptNotes(tokens)
            catalog.on_open = notes.open
        elif isinstance(catalog, DiskCatalog):
            kept[tier] = on_disk = DiskNotes(tokens)
            catalog.on_open = on_disk.open
            catalog.on_write = on_disk.flush
    return kept


def start_worker(worker: VllmWorker, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Initialize the connector's worker side.

    vLLM starts workers before the scheduler, so a worker is the first to report invalid settings.

    Raises:
        ConfigError: offloading cannot start; the message lists every reason.
    """
    join_logging()
    policy = find_failure_policy(vllm_config)
    groups, config = _check(vllm_config, kv_cache_config, policy)
    key = read_tier_key(config.tier_key_file)
    parallel, portal = vllm_config.parallel_config, Portal("kvoffload")
    identity: Future[KVIdentity] = Future()
    sharers = groups.shape.sharers
    local_ranks = getattr(parallel, "local_world_size", None)
    offload = WorkerSide(
        Rank(parallel.rank),
        parallel.world_size,
        config,
        portal,
        places=_places(vllm_config, config, identity.result, groups),
        local_ranks=local_ranks,
        sharing=Sharing(sharers, engine_life(vllm_config)) if sharers > 1 else ALONE,
        tier_key=key,
    )

    def examine_layout(layout: DeviceLayout) -> list[Finding]:
        answers = examine_rank(
            parallel.rank,
            parallel.world_size,
            config,
            layout,
            local_ranks=local_ranks,
            sharers=sharers,
        )
        if parallel.rank == 0:
            answers += examine([load_failures(policy)], Setup(config=config))
        return answers

    VllmWorker.__init__(worker, offload, portal.close, examine_layout, identity)


def join_logging() -> None:
    """Make kvoffload log through vLLM's handlers at vLLM's level, unless kvoffload's logger already has handlers."""
    ours, theirs = logging.getLogger(ROOT), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False


def _places(
    vllm_config: VllmConfig, config: OffloadConfig, identify: Callable[[], KVIdentity], groups: VllmGroups
) -> Places:
    name = None if config.host_path is None else engine_name(vllm_config, groups.shape.sharers)
    parallel = vllm_config.parallel_config
    if getattr(parallel, "local_world_size", parallel.world_size) < parallel.world_size:
        config = replace(config, node_share=False)  # the tables lie on the scheduler's machine only
    return places_of(config, identify, _replica(vllm_config), name)


def _replica(vllm_config: VllmConfig) -> int:
    """Return the engine's index among data-parallel engines.

    `data_parallel_rank` does not identify the engine: with a dense model, vLLM gives every engine rank 0.
    """
    return int(vllm_config.parallel_config.data_parallel_index)


def _identification(
    vllm_config: VllmConfig, config: OffloadConfig, groups: VllmGroups, key: TierKey | None = None
) -> Identification | None:
    """Return how the engine's KV is identified for other processes; None if they cannot find it.

    Raises:
        ConfigError: other processes could not find this engine's blocks; the message lists every reason.
    """
    from vllm import envs

    if not config.outlives_engine:
        return None
    by_hand = config.weights_id
    if problems := find_problems(vllm_config, has_identity=by_hand is not None):
        raise ConfigError(problems)
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    log_warnings(examine([block_hashes(algorithm)], Setup(config=config)))
    memory = config.disk_path or config.host_path or Path(envs.VLLM_CACHE_ROOT, "kvoffload")
    return Identification(
        lambda: find_identity(
            vllm_config,
            groups_of(groups.shape),
            groups.hash_tokens,
            memory,
            by_hand,
            key,
            groups.shape.sharers,
        )
    )


def _check(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, policy: str = RECOMPUTE
) -> tuple[VllmGroups, OffloadConfig]:
    """Return the model's groups and the parsed settings. Raise one error that lists all problems with both."""
    problems: list[str] = []
    groups = config = None
    try:
        rank_bytes = sum(one.size for one in kv_cache_config.kv_cache_tensors)
        config = _config(vllm_config, rank_bytes, find_sharers(vllm_config, kv_cache_config))
    except ConfigError as error:
        problems += error.problems
    try:
        groups = vllm_groups(
            vllm_config,
            kv_cache_config,
            recovers_loads=policy == RECOMPUTE,
            shares=config is None or config.host_share,
        )
        if config is not None:
            check_promises(config, groups.shape.promises)
    except ConfigError as error:
        problems += error.problems
    if groups is None or config is None or problems:
        raise ConfigError(problems)
    return groups, config


def _config(vllm_config: VllmConfig, rank_bytes: int, sharers: int) -> OffloadConfig:
    """Parse kvoffload's settings.

    Args:
        vllm_config: the engine's configuration.
        rank_bytes: the size of one rank's KV cache.
        sharers: how many ranks may share one copy of their blocks.
    """
    raw = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    ranks = vllm_config.parallel_config.world_size
    local_ranks = getattr(vllm_config.parallel_config, "local_world_size", None) or ranks
    copies = ranks // sharers
    advice = advise_host_bytes(copies, copies * rank_bytes, local_ranks // sharers, raw)
    config = parse_config(raw, ranks, advice)
    check_exporter(config)
    engine = _replica(vllm_config)
    if config.journal_path is None or engine == 0:
        return config
    # Data-parallel engines start with the same setting, but must not write to the same journal.
    path = Path(f"{config.journal_path}.dp{engine}")
    return replace(config, journal_path=path)


def find_failure_policy(vllm_config: VllmConfig) -> str:
    """Return the `kv_load_failure_policy` of vLLM's scheduler. Call this while vLLM creates a worker's connector.

    vLLM's scheduler reads the policy from the outermost connector's configuration. A MultiConnector gives each child
    a copy of vLLM's configuration with the child's own `kv_transfer_config`. While vLLM creates a worker, the outermost
    configuration is still the process's current one. In the scheduler's process, a child cannot find the outermost
    configuration.
    """
    from vllm.config.vllm import get_current_vllm_config_or_none

    outermost = get_current_vllm_config_or_none() or vllm_config
    return str(outermost.kv_transfer_config.kv_load_failure_policy)
