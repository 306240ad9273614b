"""What the runtime needs to know of each lower tier: its settings, its catalog and its copies. `Tier` has the rest.

ARCHITECTURE.md says what else a new tier needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from kvoffload.core.tiers import DiskTier, LowerTier, NodeTier, RemoteTier
from kvoffload.disk.folder import DiskPlace
from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.slot_file import SlotShape
from kvoffload.disk.tier_key import TierKey
from kvoffload.model import facts
from kvoffload.model.causes import RemoteFault
from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import Rank
from kvoffload.model.wire import Tier, TransferReport
from kvoffload.node.folder import HostPlace
from kvoffload.remote.address import RemotePlace, parse_address
from kvoffload.remote.store import open_store
from kvoffload.runtime.disk_catalog import DiskCatalog
from kvoffload.runtime.host_catalog import HostCatalog
from kvoffload.runtime.node_catalog import NodeCatalog
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.remote_catalog import RemoteCatalog
from kvoffload.transfer.arena import Arena, slots_in_chunk
from kvoffload.transfer.checksums import Checksums
from kvoffload.transfer.disk import THREADS as DISK_THREADS
from kvoffload.transfer.disk import FileOpening, RankDisk
from kvoffload.transfer.host_file import RankShape
from kvoffload.transfer.layout import digest_of
from kvoffload.transfer.node import THREADS as NODE_THREADS
from kvoffload.transfer.node import RankNode
from kvoffload.transfer.ports import Clock, Clocks
from kvoffload.transfer.remote import RemoteMover, remote_calls
from kvoffload.transfer.sharing import ALONE, Sharing
from kvoffload.transfer.tier_jobs import TierJobs

REMOTE_THREADS = 2  # few threads suffice, because the tiers' clients transfer a batch in parallel

Identify = Callable[[], KVIdentity]
"""Returns the identity of the engine's KV. It may read all weights, so each tier calls it on a thread of its own."""


class Catalog(Protocol):
    """The scheduler's part of one lower tier."""

    @property
    def arrived(self) -> Sized:
        """Return a container, always the same. While it is not empty, each step must call `take_facts`."""

    @property
    def awaits_ranks(self) -> bool:
        """Return whether `ranks_reported` must see the ranks' reports."""

    @property
    def faults(self) -> Mapping[RemoteFault, int]:
        """Return for each kind of failure how many of the scheduler's calls to the tier have failed."""

    @property
    def opening(self) -> str | None:
        """Return the current stage of opening; None if the tier is open or cannot be opened."""

    @property
    def is_restoring(self) -> bool:
        """Return whether an engine without requests must keep stepping until the core knows the tier's blocks."""

    @property
    def poll_s(self) -> float:
        """Return after how many seconds a step must call `take_facts` even if nothing has arrived; infinity for never."""

    def take_facts(self) -> list[facts.Fact]:
        """Return facts for the core. Never waits."""

    def ranks_reported(self, reports: Iterable[TransferReport]) -> None:
        """Record which ranks have opened the tier or failed to."""

    def send(self, items: Sequence[Any]) -> None:
        """Handle what the core has added to `LowerTier.for_catalog`."""

    def reset(self) -> bool:
        """Discard all blocks; return True if later processes cannot find them either."""

    def close(self) -> None:
        """Close the tier. If it hangs, return within a few seconds."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    """What the catalogs of one engine share.

    Args:
        config: the operator's settings.
        ranks: the number of ranks.
        portal: provides threads that may wait for a tier.
        clocks: the clocks to read.
        key: authenticates what the tiers hold; None if all writers of these tiers are trusted.
        sharers: how many ranks share one copy of each block.
        host: the catalog of host memory in files; None if it lies in none.
    """

    config: OffloadConfig
    ranks: int
    portal: Portal
    clocks: Clocks
    key: TierKey | None = None
    sharers: int = 1
    host: HostCatalog | None = None


@dataclass(frozen=True, slots=True)
class Worker:
    """What the tiers of one rank share.

    Args:
        config: the operator's settings.
        rank, ranks: the rank's number, and the number of ranks.
        arena: the rank's host memory.
        portal: provides threads that may wait for a tier.
        clock: the clock for time limits and reports.
        checksums: the checksums of the host slots; None if none are kept.
        key: authenticates what the tiers hold; None if all writers of these tiers are trusted.
        sharing: which ranks share one copy of each block.
    """

    config: OffloadConfig
    rank: Rank
    ranks: int
    arena: Arena
    portal: Portal
    clock: Clock
    checksums: Checksums | None = None
    key: TierKey | None = None
    sharing: Sharing = ALONE


class TierKind(NamedTuple):
    """One lower tier.

    Args:
        state: the core's class for the tier's state.
        place: returns where an engine's blocks are on the tier; None if the settings do not name the tier. Raises
            ConfigError.
        min_hits: returns how often lookups must find a block before it is written to the tier.
        catalog: starts the scheduler's part of the tier.
        copies: starts a rank's part of the tier, which opens in the background.
    """

    state: type[LowerTier]
    place: Callable[[OffloadConfig, Identify, int], Any]
    min_hits: Callable[[OffloadConfig], int]
    catalog: Callable[[Any, Scheduler], Catalog]
    copies: Callable[[Any, Worker], TierJobs]


# -- the memory of other engines on this machine ----------------------------------------------------------------------


def _node_place(*_: object) -> None:
    """Return None: `places_of` adds the place, which is that of the engine's own host memory."""


def _node_catalog(_: HostPlace, engine: Scheduler) -> NodeCatalog:
    assert engine.host is not None, "an engine that reads other engines' memory has its own in files"
    return NodeCatalog(
        engine.host, engine.portal, engine.clocks.monotonic, engine.clocks.sleep, engine.sharers
    )


def _node_copies(place: HostPlace, worker: Worker) -> RankNode:
    layout = worker.arena.layout
    return RankNode(
        place.root / place.kind,
        # Of ranks that share one copy, the first one's file has it.
        RankShape(
            worker.sharing.first_of(worker.rank),
            layout,
            slots_in_chunk(layout),
            worker.config.verify,
            place.page,
        ),
        worker.arena,
        worker.portal.new_executor("node", threads=NODE_THREADS),
        worker.clock,
        timeout_s=worker.config.transfer_timeout_s,
        checksums=worker.checksums,
    )


# -- the disk ------------------------------------------------------------------------------------------------------


def _disk_place(config: OffloadConfig, identify: Identify, replica: int) -> DiskPlace | None:
    return None if config.disk_path is None else DiskPlace(config.disk_path, identify, replica)


def _disk_catalog(place: DiskPlace, engine: Scheduler) -> DiskCatalog:
    return DiskCatalog(
        place,
        engine.ranks,
        engine.portal,
        engine.clocks.sleep,
        closes_in_s=engine.config.disk_drain_s,
        key=engine.key,
    )


def _disk_copies(place: DiskPlace, worker: Worker) -> RankDisk:
    layout = worker.arena.layout
    shape = SlotShape(worker.rank, worker.ranks, layout.slot_bytes, digest_of(layout))
    return RankDisk(
        FileOpening(place, shape, worker.config.disk_bytes // worker.ranks),
        worker.arena,
        worker.portal.new_executor("disk", threads=DISK_THREADS),
        worker.clock,
        timeout_s=worker.config.transfer_timeout_s,
        checksums=worker.checksums,
        key=worker.key,
    )


# -- the remote tier -----------------------------------------------------------------------------------------------


def _remote_place(config: OffloadConfig, identify: Identify, _: int) -> RemotePlace | None:
    # All data-parallel engines share the tier.
    return None if config.remote_url is None else RemotePlace(parse_address(config.remote_url), identify)


def _remote_catalog(place: RemotePlace, engine: Scheduler) -> RemoteCatalog:
    timeout_s = engine.config.remote_timeout_s
    copies = engine.ranks // engine.sharers
    return RemoteCatalog(place, copies, engine.portal, engine.clocks.monotonic, timeout_s, engine.key)


def _remote_copies(place: RemotePlace, worker: Worker) -> TierJobs:
    executor = worker.portal.new_executor("remote", threads=REMOTE_THREADS)
    timeout_s, monotonic = worker.config.remote_timeout_s, worker.clock.monotonic
    connect = partial(open_store, place.address, timeout_s)
    calls = remote_calls(connect, executor, monotonic, timeout_s, rank=worker.rank)
    sharers = worker.sharing.ranks
    mover = RemoteMover(
        worker.rank // sharers, worker.ranks // sharers, worker.arena, worker.checksums, worker.key
    )
    return TierJobs(Tier.REMOTE, calls, mover, worker.arena.layout.slot_bytes, monotonic)


# -- all tiers -----------------------------------------------------------------------------------------------------

KINDS = (
    TierKind(NodeTier, _node_place, lambda _: 1, _node_catalog, _node_copies),
    TierKind(DiskTier, _disk_place, lambda config: config.disk_min_hits, _disk_catalog, _disk_copies),
    TierKind(
        RemoteTier, _remote_place, lambda config: config.remote_min_hits, _remote_catalog, _remote_copies
    ),
)
"""The lower tiers, in the order in which they are searched."""

Places = Mapping[Tier, Any]
"""Where an engine's blocks are on each of its lower tiers, and in files of host memory."""


class EngineName(NamedTuple):
    """How the processes of one engine find its host memory.

    Args:
        kind: see `HostPlace.kind`.
        life: see `HostPlace.engine`.
    """

    kind: str
    life: str


def places_of(
    config: OffloadConfig, identify: Identify, replica: int = 0, engine: EngineName | None = None
) -> Places:
    """Return the places of the lower tiers that the settings name, and of host memory in files.

    Args:
        config: the operator's settings.
        identify: returns the identity of the engine's KV.
        replica: the index of this engine among the data-parallel engines.
        engine: the engine's names; None for an engine without host memory of ours.

    Raises:
        ConfigError: a tier's address cannot be used.
    """
    found = {kind.state.tier: kind.place(config, identify, replica) for kind in KINDS}
    if engine is not None and config.host_path is not None:
        found[Tier.HOST] = place = HostPlace(
            config.host_path, engine.kind, engine.life, identify, config.host_hugetlbfs
        )
        found[Tier.NODE] = place if config.node_share else None
    return {tier: place for tier, place in found.items() if place is not None}


def states_of(config: OffloadConfig, places: Places) -> tuple[tuple[type[LowerTier], int], ...]:
    """Return the core's classes of these tiers, as in `Policy.tiers`."""
    return tuple([(kind.state, kind.min_hits(config)) for kind in KINDS if kind.state.tier in places])


def catalogs_of(places: Places, engine: Scheduler) -> dict[Tier, Catalog]:
    """Start the scheduler's part of each tier."""
    return {tier: kind.catalog(places[tier], engine) for kind in KINDS if (tier := kind.state.tier) in places}


def copies_of(places: Places, worker: Worker) -> dict[Tier, TierJobs]:
    """Start a rank's part of each tier."""
    return {tier: kind.copies(places[tier], worker) for kind in KINDS if (tier := kind.state.tier) in places}
