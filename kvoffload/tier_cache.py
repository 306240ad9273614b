"""A disk and a remote tier for engines that already have a host tier. Calls have time limits.

    put   the caller's pages ─▶ staging slots ─▶ disk and remote tier
    get   disk, else the remote tier ─▶ staging slots, verified ─▶ the caller's pages

To the core, the cache is an engine with one rank, without requests and without a device. The core manages slots,
evictions and jobs, and `TiersSide` keeps the tiers' catalogs. The host's pool consists of a few *staging slots*. Calls
to a tier use only staging slots, so even if a call hangs, the caller's pages are free after `get` or `put` returns.

A lock guards the core. The lock is held only for bookkeeping, not while bytes are copied or a tier is called. Whenever
a call to a tier returns, a thread wakes up and processes the result.

Keys and pages come from another project's code, so each call checks them first. A key or page that cannot be used costs
only its own answer.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar, cast

import numpy as np

from kvoffload.bus.bus import Bus
from kvoffload.bus.feed import run_observer
from kvoffload.core.jobs import Store
from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.state import Policy
from kvoffload.core.tiers import LowerTier
from kvoffload.disk.folder import DiskPlace
from kvoffload.disk.identity import KVIdentity, with_key
from kvoffload.disk.index import KEY_BYTES
from kvoffload.disk.tier_key import read_tier_key
from kvoffload.logs import get_logger
from kvoffload.model import facts
from kvoffload.model.causes import DegradeCause
from kvoffload.model.config import OffloadConfig, parse_config
from kvoffload.model.engine import BlockPool, EngineIdentity, EngineShape
from kvoffload.model.errors import ConfigError, HostMemoryError
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import BlockKey, GroupId, Rank, RequestId, SlotId
from kvoffload.model.wire import Tier, TransferReport
from kvoffload.remote.address import RemotePlace, parse_address
from kvoffload.runtime.portal import DaemonExecutor, Portal
from kvoffload.runtime.tiers_side import TiersSide
from kvoffload.runtime.worker_side import merged, open_disk, open_remote
from kvoffload.telemetry.catalogue import CATALOGUE, Kind, Series, Side, read_all
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.logging import AtMostEvery, LogObserver, log_removed
from kvoffload.telemetry.provenance import info_labels
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.host_memory import MmapAllocator
from kvoffload.transfer.layout import DeviceLayout, DeviceRegion, digest_of
from kvoffload.transfer.ports import Clock, Clocks

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

P = ParamSpec("P")
Answer = TypeVar("Answer")

Page: TypeAlias = Sequence[memoryview]
"""A block's bytes on this rank: one contiguous memoryview per region."""

_SETTINGS = {
    *("disk_path", "disk_bytes", "disk_min_hits", "disk_drain_s"),
    *("remote_url", "remote_min_hits", "remote_timeout_s"),
    *("transfer_timeout_s", "tier_key_file", "weights_id"),
}
METRICS = tuple(
    metric
    for metric in CATALOGUE
    if re.fullmatch(
        "kvoffload_(tier_.*|remote_.*|transfer.*|evicted.*|capacity_slots|slots|slot_bytes|degraded|info)",
        metric.name,
    )
)
"""The catalogue's metrics that have a meaning without an engine."""
Taken: TypeAlias = tuple[LowerTier, list[BlockKey]]
"""A tier, and the keys of the blocks to write to it."""

_STAGING_BYTES, _LEAST_SLOTS = 64 * 2**20, 8
_SHARE = 4  # a batch of blocks uses at most a quarter of the staging slots
_PERIOD_S = 0.05  # seconds between two checks of time limits
_MOST_SEEN = 65_536
_RANK = Rank(0)
_SHAPE = EngineShape((GroupSpec(GroupId(0), AttentionKind.FULL, 1),), ranks=1, device_blocks=1, step_tokens=1)

log = get_logger("tiers")


def tier_config(raw: Mapping[str, object]) -> OffloadConfig:
    """Return the settings of a `TierCache`. With the default settings, a block is written at its first `put`.

    Raises:
        ConfigError: a key is unknown or does not concern a disk or a remote tier, a value is not allowed, or neither
            tier is configured.
    """
    # The engine has its own host tier, but the parser requires `host_bytes`.
    config = parse_config({"host_bytes": 1, "disk_min_hits": 0, "remote_min_hits": 0, **raw})
    problems = [f"{name} does not concern a disk or a remote tier" for name in raw if name not in _SETTINGS]
    if config.disk_path is None and config.remote_url is None:
        problems.append("neither disk_path nor remote_url is set, so there is no tier")
    if problems:
        raise ConfigError(problems)
    return config


class TierCache:
    """The blocks of one rank on a disk and in a remote tier. Any thread may call the methods.

    A tier that fails, hangs or returns wrong data only costs hits: calls neither raise nor exceed their time limits
    because of such a tier. A key that is no `bytes` object of 1 to 64 bytes, and a page that does not have the regions
    of `page_bytes`, are answered with False; the first of a kind is logged. The cache runs daemon threads. A forked child
    has none of them, so all its calls answer False.

    Args:
        identify: returns the identity of the KV; called once, on another thread. The call may take long, and may raise.
        page_bytes: for each region of a page, the bytes of a block in this region.
        config: the settings, from `tier_config`.
        replica: this process's number among the processes with the same identity and `disk_path`, from 0.
        engine: the engine's names, for `kvoffload_info`.
        clock: the clock for time limits of calls to the tiers.

    Attributes:
        counters: the values of the catalogue's counters, for exporters.
        degraded: why the cache is off until the process restarts; None while the cache works.

    Raises:
        ConfigError: the tiers' key or address cannot be used.
        HostMemoryError: there is no memory for the staging slots.
    """

    def __init__(
        self,
        identify: Callable[[], KVIdentity],
        page_bytes: Sequence[int],
        config: OffloadConfig,
        *,
        replica: int = 0,
        engine: EngineIdentity | None = None,
        clock: Clock | None = None,
    ) -> None:
        key = read_tier_key(config.tier_key_file)
        address = None if config.remote_url is None else parse_address(config.remote_url)
        clock = clock or Clocks()
        self._config = config
        self._monotonic = clock.monotonic
        self._page_bytes = tuple(page_bytes)
        self._pid = os.getpid()
        self._once = AtMostEvery(inf, clock.monotonic)  # for lines that are logged once
        self._min_hits = {Tier.DISK: config.disk_min_hits, Tier.REMOTE: config.remote_min_hits}
        self._wake = threading.Event()
        self._portal = portal = _Threads(self._wake)
        self._arena = arena = _staging(page_bytes, portal)
        policy = Policy(
            disk_min_hits=None if config.disk_path is None else config.disk_min_hits,
            remote_min_hits=None if address is None else config.remote_min_hits,
        )
        # Without a device, the core never uses the block pool.
        self.core = core = OffloadCore(_SHAPE, policy, cast("BlockPool", None))
        self._state = core.state
        self._stores = core.stores
        self._tiers = core.state.tiers
        self._pool = core.state.pool
        self.degraded: DegradeCause | None = None
        self._changed = threading.Condition()
        self._one_reset = threading.Lock()
        self._is_closed = False
        self._is_resetting = False
        self._numbers = count()
        self._asked: set[RequestId] = set()  # queries that the remote tier has not answered
        # for each of the most recently put blocks, how many times it was put
        self._seen: OrderedDict[BlockKey, int] = OrderedDict()
        self._changes: list[tuple[BlockKey, bool]] | None = None
        self.bus = Bus()
        self.counters = Counters({tier.tier for tier in self._tiers})
        self._report = TransferReport(
            _RANK,
            (),
            arena.ready_slots,
            slot_bytes=arena.layout.slot_bytes,
            wanted_slots=arena.slots,
        )
        self.reports = {_RANK: self._report}
        self.observation = SimpleNamespace(info=info_labels(engine or EngineIdentity(), config))
        identifying = portal.new_executor("identity")
        identified = identifying.submit(lambda: with_key(_with_pages(identify(), arena.layout), key))
        identifying.shutdown(wait=False)
        disk = remote = None
        if config.disk_path is not None:
            disk = DiskPlace(config.disk_path, identified.result, replica)
        if address is not None:
            remote = RemotePlace(address, lambda: identified.result().fingerprint)
        clocks = Clocks(clock.monotonic, sleep=clock.sleep)
        self._side = TiersSide(core, self, config, portal, clocks, disk, remote, key)
        self.observation.remote_faults = self._side.remote_faults
        self.bus.on_removed = log_removed
        self.counters.subscribe(self.bus)
        self._handle(facts.TransferReported(self._report))
        shared = _RANK, 1, config, arena, portal, clock, None, key
        self._disk = None if disk is None else open_disk(disk, *shared)
        self._remote = None if address is None else open_remote(address, *shared)
        observer = LogObserver(clock.monotonic)
        portal.spawn(run_observer, observer.subscribe(self.bus), observer, log_removed)
        threading.Thread(target=self._run, name=f"{portal.name}-ends", daemon=True).start()

    def _handle(self, *received: facts.Fact) -> None:
        """Pass facts to the core, and then the facts and the core's events to observers in one batch."""
        batch = list[object]()
        for fact in received:
            batch.append(fact)
            self.ask(type(fact).__name__, partial(self.core.handle, fact), None)
            batch += self._state.tally.take()
            if isinstance(fact, facts.RemoteAnswered):
                self._asked.discard(fact.request)
        self.bus.dispatch(batch)

    # -- calls --------------------------------------------------------------------------------------------------

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a forked child of the process that created the cache."""
        return self._pid != os.getpid()

    def wait_open(self, timeout_s: float) -> bool:
        """Wait until every tier is open or has failed; return whether all tiers can be used."""
        if self.is_forked:
            return False
        with self._changed:
            self._wait(
                lambda: all(tier.is_usable or tier.is_closed for tier in self._tiers), _until(timeout_s)
            )
            return all(tier.is_usable for tier in self._tiers)

    def exists(self, keys: Sequence[bytes], timeout_s: float | None = None) -> list[bool]:
        """Return for each key whether a tier has its block. The remote tier's answer is only a hint.

        Args:
            keys: the blocks' keys, 1 to 64 bytes each; digests, because the first bytes must be spread evenly.
            timeout_s: seconds to wait for the remote tier, by default `remote_timeout_s`; 0 skips the query.
        """
        until = _until(timeout_s, self._config.remote_timeout_s)
        places, wanted = self._usable("exists", keys)
        if not places:
            return [False] * len(keys)
        with self._changed:
            if timeout_s != 0:
                self.ask("exists", lambda: self._ask_remote(wanted, until, are_hints_enough=False), None)
            return _spread(places, [self._has(key) for key in wanted], len(keys))

    def get(self, keys: Sequence[bytes], pages: Sequence[Page], timeout_s: float | None = None) -> list[bool]:
        """Copy blocks into pages.

        Args:
            keys: the blocks' keys, the head of a prefix first.
            pages: a page for each key.
            timeout_s: seconds after which the call returns in any case; by default `transfer_timeout_s`.

        Returns:
            For each key, whether its page has the block's verified bytes. The bytes of other pages are undefined.
        """
        until = _until(timeout_s, self._config.transfer_timeout_s)
        places, wanted = self._usable("get", keys, pages)
        if not places:
            return [False] * len(keys)
        targets = [pages[place] for place in places]
        found = [False] * len(places)
        with self._changed:
            epoch = self._state.epoch
            self.ask("get", lambda: self._ask_remote(wanted, until, are_hints_enough=True), None)
        for some in self._batches(len(wanted)):
            slots: dict[BlockKey, SlotId] = {}
            with self._changed:
                self.ask("get", partial(self._fetch, [wanted[place] for place in some], slots, until), None)
            try:
                with suppress(HostMemoryError), self._arena.held():
                    # `held` raises after `close`, which has freed the memory.
                    for place in some:
                        if (slot := slots.get(wanted[place])) is not None:
                            _copy(self._arena.pages(slot), targets[place])
                            found[place] = True
            finally:
                with self._changed:
                    self.ask("get", partial(self._pool.unpin, [*slots.values()]), None)
        return _spread(places, self._answer(wanted, found, epoch), len(keys))

    def put(self, keys: Sequence[bytes], pages: Sequence[Page], timeout_s: float | None = None) -> list[bool]:
        """Write blocks to every tier that lacks them; see `get` for the arguments.

        Returns:
            For each key, whether a tier has its block.
        """
        until = _until(timeout_s, self._config.transfer_timeout_s)
        places, wanted = self._usable("put", keys, pages)
        if not places:
            return [False] * len(keys)
        sources = [pages[place] for place in places]
        stored = [False] * len(places)
        with self._changed:
            epoch = self._state.epoch
        for some in self._batches(len(wanted)):
            given = {wanted[place]: sources[place] for place in some}
            self._put(given, until, epoch)
            with self._changed:
                for place in some:
                    stored[place] = self._has(wanted[place])
        return _spread(places, self._answer(wanted, stored, epoch), len(keys))

    def reset(self) -> bool:
        """Discard all blocks, so that no later call finds a block that was put before.

        Returns:
            True if later processes cannot find the discarded blocks either. After False, call `reset` again when the
            tiers answer.
        """
        if self.is_forked:
            return False
        with self._one_reset:
            with self._changed:
                # The flag keeps other calls out while the catalogs wait for their tiers without the lock.
                self._is_resetting = True
                self._handle(facts.CacheReset())
                self._changed.notify_all()
            try:
                return self._side.reset()
            finally:
                with self._changed:
                    self._is_resetting = False

    def take_changes(self) -> list[tuple[BlockKey, bool]]:
        """Return in order which blocks were written to the disk (True) or evicted (False) since the last call.

        The first call returns an empty list, and starts recording the changes.
        """
        if self.is_forked:
            return []
        with self._changed:
            if self._changes is None:
                self._changes = [] if self._state.disk is None else self._state.disk.pool.index.watch()
            changes = self._changes.copy()
            self._changes.clear()
            return changes

    def gauges(self) -> Mapping[str, Series]:
        """Return the series of the metrics that apply to a `TierCache`, by name; only counters after `close`."""
        metrics = [metric for metric in METRICS if not self._is_closed or metric.kind is Kind.COUNTER]
        return read_all(cast("Side", self), self.counters.tiers, self._reader_failed, metrics)

    def _reader_failed(self, metric: str, error: Exception) -> None:
        if self._once.due(metric) is not None:
            log_removed(metric, error)

    def close(self) -> None:
        """Close the tiers. Wait for the disk for at most `disk_drain_s`, and never for the remote tier."""
        if self.is_forked:
            return
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            for copies in (self._disk, self._remote):
                if copies is not None:
                    copies.close()
        self._wake.set()
        self._side.close()
        self._arena.close()
        self.bus.close()
        self._portal.close()

    # -- at the entrance ----------------------------------------------------------------------------------------

    def _usable(
        self, call: str, keys: Sequence[bytes], pages: Sequence[Page] | None = None
    ) -> tuple[list[int], list[BlockKey]]:
        """Return the positions of the keys that can be used with their pages, and these keys."""
        if self.is_forked:
            self._refuse(call, "fork", "a forked child has none of the cache's threads")
            return [], []
        if pages is not None and len(pages) != len(keys):
            self._refuse(call, "count", f"{len(keys)} keys came with {len(pages)} pages")
            return [], []
        places = list[int]()
        for place, key in enumerate(keys):
            if problem := _problem_of_key(key):
                self._refuse(call, "key", problem)
            elif pages is not None and (
                problem := _problem_of_page(pages[place], self._page_bytes, is_read=call == "put")
            ):
                self._refuse(call, "page", problem)
            else:
                places.append(place)
        return places, [BlockKey(keys[place]) for place in places]

    def _refuse(self, call: str, kind: str, reason: str) -> None:
        """Log the first problem of its kind. Each further line would say the same."""
        if self._once.due(kind) is not None:
            note = "such blocks are neither found nor stored, and this is logged once"
            log.warning("tier_call_refused", call=call, reason=reason, note=note)

    # -- with the lock ------------------------------------------------------------------------------------------

    def ask(self, name: str, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Call `question` and return its result, or `otherwise` if the core raises now or has raised before (R12)."""
        if self.degraded is None:
            try:
                return question()
            except Exception as error:
                self._broke(error, name)
        return otherwise

    def _broke(self, error: Exception, doing: str) -> None:
        self.degraded = DegradeCause.HANDLER_RAISED
        note = "the engine continues without these tiers"
        log.error("core_raised", error=repr(error), doing=doing, note=note, exc_info=error)

    @property
    def _is_off(self) -> bool:
        return self._is_closed or self._is_resetting or self.degraded is not None

    def _wait(self, is_done: Callable[[], bool], until: float) -> bool:
        """Release the lock and wait, at most until `until`; return whether `is_done` is true and the cache works."""
        self._changed.wait_for(lambda: self._is_off or is_done(), max(until - time.monotonic(), 0.0))
        return not self._is_off and is_done()

    def _has(self, key: BlockKey) -> bool:
        return not self._is_off and any(tier.is_usable and key in tier.pool.index for tier in self._tiers)

    def _ask_remote(self, keys: Sequence[BlockKey], until: float, *, are_hints_enough: bool) -> None:
        """Query the remote tier for blocks that were not found elsewhere, and wait for the answer."""
        state, remote = self._state, self._state.remote
        if remote is None or not remote.is_usable:
            return
        known = [tier.pool.index for tier in self._tiers if are_hints_enough or tier is not remote]
        if are_hints_enough:
            known.append(state.pool.index)
        unknown = [key for key in keys if not any(key in index for index in known)]
        if unknown:
            name = RequestId(str(next(self._numbers)))
            self._asked.add(name)
            remote.ask(name, unknown)
            self._side.ask()
            self._wait(lambda: name not in self._asked, until)
            self._asked.discard(name)

    def _fetch(self, keys: Sequence[BlockKey], slots: dict[BlockKey, SlotId], until: float) -> None:
        """Fetch blocks to staging slots from the first tier that has them. Pin the slots and add them to `slots`."""
        pool, on_way, remote = self._pool, self._stores.in_flight.keys, self._state.remote
        failed = set[BlockKey]()

        def pin() -> None:
            there = {key: pool.index[key] for key in keys if key not in slots and key in pool.index}
            pool.pin([*there.values()])
            slots.update(there)

        pin()
        # Fetch from each tier twice, because a fetch with a corrupt block also fails for its intact blocks.
        for tier in (*self._tiers, *self._tiers):
            if not self._wait(lambda: pool.room >= len(keys), until):
                return
            index = tier.pool.index
            lacking = [key for key in dict.fromkeys(keys) if not (key in pool.index or key in on_way)]
            if tier is remote:
                self._ask_remote([key for key in lacking if key in failed], until, are_hints_enough=True)
            there = [key for key in lacking if key in index]
            failed.update(there)
            if there and tier.is_usable:
                self.core.lower_tiers.fetches[tier].plan(there, [index[key] for key in there])
                self._submit()
            self._wait(lambda: on_way.keys().isdisjoint(keys), until)
            pin()

    def _reserve(
        self, keys: Sequence[BlockKey], slots: dict[BlockKey, SlotId], until: float, epoch: int
    ) -> list[Taken]:
        """Return the blocks to write to each tier. Reserve staging slots for new blocks, and add them to `slots`."""
        pool, on_way = self._pool, self._stores.in_flight
        is_ready = self._wait(lambda: on_way.keys.keys().isdisjoint(keys) and pool.room >= len(keys), until)
        if not is_ready or self._state.epoch != epoch:
            return []
        before = {key: self._count(key) for key in keys}
        taken: list[Taken] = [
            (
                tier,
                [
                    key
                    for key in keys
                    if before[key] >= self._min_hits[tier.tier] and key not in tier.pool.index
                ],
            )
            for tier in self._tiers
            if tier.is_usable
        ]
        new = [key for key in keys if key not in pool.index and any(key in some for _, some in taken)]
        reserved, evicted = pool.reserve(new)
        if evicted:
            self._stores.evicted(evicted)
        on_way.began(new, Store(self._stores, reserved, []))
        slots.update(zip(new, reserved, strict=True))
        return taken

    def _spill(
        self,
        taken: Sequence[Taken],
        slots: Mapping[BlockKey, SlotId],
        until: float,
        *,
        are_whole: bool,
    ) -> None:
        """Write blocks from staging slots to the tiers, and wait until the writes have ended or `until` has passed."""
        pool = self._pool
        self._stores.in_flight.ended([*slots])
        if not are_whole:
            for slot in slots.values():
                pool.invalidate(slot)
            pool.drained(slots.values())
            return
        pool.fill([*slots.values()][::-1])
        for tier, keys in taken:
            there, on_way = tier.pool.index, tier.in_flight.keys
            new = [key for key in keys if key in pool.index and not (key in there or key in on_way)]
            if new := new[: tier.pool.room]:
                self.core.lower_tiers.spills[tier].plan(new, [pool.index[key] for key in new])
        self._submit()
        self._wait(lambda: all(tier.in_flight.keys.keys().isdisjoint(keys) for tier, keys in taken), until)

    def _submit(self) -> None:
        plan = self.core.plan()
        if self._disk is not None:
            self._disk.submit(plan.disk)
        if self._remote is not None:
            self._remote.submit(plan.remote)
        self._side.moved(self._monotonic())

    def _count(self, key: BlockKey) -> int:
        """Count a `put` of a block; return how many times the block was put before."""
        before = self._seen.pop(key, 0)
        self._seen[key] = before + 1
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return before

    # -- without the lock ---------------------------------------------------------------------------------------

    def _put(self, given: Mapping[BlockKey, Page], until: float, epoch: int) -> None:
        keys, slots, are_whole = [*given], dict[BlockKey, SlotId](), False
        with self._changed:
            taken = self.ask("put", lambda: self._reserve(keys, slots, until, epoch), list[Taken]())
        try:
            with suppress(HostMemoryError), self._arena.held():
                # `held` raises after `close`, which has freed the memory.
                for key, slot in slots.items():
                    _copy(given[key], self._arena.pages(slot))
                are_whole = True
        finally:
            with self._changed:
                are_whole = are_whole and self._state.epoch == epoch
                self.ask("put", lambda: self._spill(taken, slots, until, are_whole=are_whole), None)

    def _answer(self, keys: Sequence[BlockKey], answers: list[bool], epoch: int) -> list[bool]:
        """Return a call's answers, or only False if there was a reset since the call began.

        Mark the blocks on the disk as used, deepest first (R15).
        """
        with self._changed:
            if self._is_off or self._state.epoch != epoch:
                return [False] * len(keys)
            if (disk := self._state.disk) is not None:
                index = disk.pool.index
                slots = [index[key] for key in dict.fromkeys(reversed(keys)) if key in index]
                self.ask("use", lambda: disk.pool.use(slots, {}), 0)
                disk.read(slots)
            return answers

    def _batches(self, number: int) -> Iterator[range]:
        """Yield ranges of block positions; the blocks of one range are copied together."""
        most = max(self._arena.slots // _SHARE, 1)
        for start in range(0, number, most):
            yield range(start, min(start + most, number))

    # -- the thread that ends calls to the tiers ----------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(_PERIOD_S)
            self._wake.clear()
            with self._changed:
                if not self._is_off:
                    self.ask("end", self._advance, None)
                self._changed.notify_all()

    def _advance(self) -> None:
        """Process ended calls to the tiers, and time out calls that take too long."""
        now, jobs = self._monotonic(), self._state.jobs
        if batch := self._side.take_facts(now):
            self._handle(*batch)
            self.core.lower_tiers.stop()  # A warm start would fill the staging slots.
        parts = [None if copies is None else copies.take() for copies in (self._disk, self._remote)]
        report, before = merged(self._report, *parts), jobs.open_on_tiers
        if any(part is not None and part.is_new for part in parts):
            self.reports[_RANK] = report
            self._handle(facts.TransferReported(report))
        self._side.reported([report], now, has_moved=jobs.open_on_tiers != before)
        if events := self._state.tally.take():
            self.bus.dispatch([*events])
        if self._side.due:
            self._wake.set()


class _Threads(Portal):
    """A portal whose executors set `event` after each call."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__("kvoffload-tiers")
        self._event = event

    def new_executor(self, purpose: str, threads: int = 1) -> Executor:
        return _Waking(f"{self.name}-{purpose}", threads, self._event)


class _Waking(DaemonExecutor):
    def __init__(self, name: str, threads: int, event: threading.Event) -> None:
        super().__init__(name, threads)
        self._event = event

    def submit(self, fn: Callable[P, Answer], /, *args: P.args, **kwargs: P.kwargs) -> Future[Answer]:
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self._event.set())
        return future


def _staging(page_bytes: Sequence[int], portal: Portal) -> Arena:
    """Allocate the memory of the staging slots.

    Raises:
        HostMemoryError: the machine has too little memory left.
    """
    # The regions describe the caller's pages; there is no device.
    regions = [DeviceRegion(number, size, size, 1) for number, size in enumerate(page_bytes)]
    layout = DeviceLayout(tuple(regions))
    slots = max(_STAGING_BYTES // layout.slot_bytes, _LEAST_SLOTS)
    arena = Arena(layout, slots, MmapAllocator(portal.executor))
    portal.spawn(arena.prepare).result()
    if arena.refusal is not None:
        portal.close()
        raise HostMemoryError(arena.refusal)
    return arena


def _with_pages(identity: KVIdentity, layout: DeviceLayout) -> KVIdentity:
    """Return the identity with the pages' layout added, so that lookups find only blocks of the same layout."""
    return replace(identity, settings={**identity.settings, "pages": digest_of(layout).hex()})


def _problem_of_key(key: object) -> str:
    """Return why a key cannot be used; "" if it can."""
    if not isinstance(key, bytes):
        return f"a key is of the type {type(key).__name__}, not bytes"
    return "" if 0 < len(key) <= KEY_BYTES else f"a key has {len(key)} bytes, not 1 to {KEY_BYTES}"


def _problem_of_page(page: Page, sizes: Sequence[int], *, is_read: bool) -> str:
    """Return why a page cannot be copied from, or also not to if not `is_read`; "" if it can."""
    try:
        views = [memoryview(region) for region in page]
        found = tuple([view.nbytes for view in views])
    except (TypeError, ValueError) as error:  # it has no memory, or memory that was released
        return f"a page has no usable memory: {error}"
    if found != sizes:
        return f"a page has regions of {found} bytes, not of {sizes}"
    if not all(view.c_contiguous and (is_read or not view.readonly) for view in views):
        return "a page's memory is not contiguous, or cannot be written"
    return ""


def _spread(places: Sequence[int], answers: Sequence[bool], count: int) -> list[bool]:
    """Return `count` answers: these answers at their positions, and False elsewhere."""
    spread = [False] * count
    for place, answer in zip(places, answers, strict=True):
        spread[place] = answer
    return spread


def _copy(sources: Page, targets: Page) -> None:
    for source, target in zip(sources, targets, strict=True):  # numpy releases the GIL while it copies.
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _until(timeout_s: float | None, otherwise_s: float = 0.0) -> float:
    return time.monotonic() + (otherwise_s if timeout_s is None else timeout_s)
