"""A disk and a remote tier for engines that already have a host tier. Calls have time limits.

    put   the caller's pages ─▶ staging slots ─▶ disk and remote tier
    get   disk, else the remote tier ─▶ staging slots, verified ─▶ the caller's pages

`TierStore` manages slots, evictions and jobs, and `TiersSide` keeps the tiers' catalogs. The host's pool consists of a
few *staging slots*. Calls to a tier use only staging slots, so even if a call hangs, the caller's pages are free after
`get` or `put` returns.

A lock guards the state. The lock is held only for bookkeeping, not while bytes are copied or a tier is called. Whenever
a call to a tier returns, a thread wakes up and processes the result.

Keys and pages come from another project's code, so each call checks them first. A key or page that cannot be used costs
only its own answer.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

import numpy as np

from kvoffload.bus.bus import Bus
from kvoffload.bus.feed import run_observer
from kvoffload.core.host import HostState
from kvoffload.core.jobs import Fetch, Offer
from kvoffload.core.tier_store import TierStore
from kvoffload.core.tiers import LowerTier
from kvoffload.disk.identity import KVIdentity, with_key
from kvoffload.disk.index import KEY_BYTES
from kvoffload.disk.tier_key import TierKey, read_tier_key
from kvoffload.logs import get_logger
from kvoffload.model import facts
from kvoffload.model.causes import DegradeCause, TierOutcome
from kvoffload.model.config import OffloadConfig, parse_config
from kvoffload.model.engine import EngineIdentity
from kvoffload.model.errors import ConfigError, HostMemoryError
from kvoffload.model.ids import BlockKey, Rank, RequestId, SlotId
from kvoffload.model.wire import Tier, TransferReport
from kvoffload.runtime.portal import DaemonExecutor, Portal
from kvoffload.runtime.tier_kinds import (
    Places,
    Scheduler,
    Worker,
    catalogs_of,
    copies_of,
    places_of,
    states_of,
)
from kvoffload.runtime.tiers_side import TiersSide
from kvoffload.runtime.worker_side import with_tiers
from kvoffload.telemetry.catalogue import CATALOGUE, Kind, Labels, Metric, Series, read_all
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.logging import AtMostEvery, LogObserver, log_removed
from kvoffload.telemetry.provenance import info_labels
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.host_memory import MmapAllocator
from kvoffload.transfer.layout import DeviceLayout, DeviceRegion, digest_of
from kvoffload.transfer.ports import Clock, Clocks
from kvoffload.transfer.tier_jobs import TierReport

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
_RANK = Rank(0)

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
    if not config.has_tiers:
        problems.append("neither disk_path nor remote_url is set, so there is no tier")
    if problems:
        raise ConfigError(problems)
    return config


class _Books:
    """The state of the tiers, their catalogs and the calls to them. The caller holds the lock.

    Args:
        config: the settings.
        places: where the blocks are on each tier.
        arena: the memory of the staging slots.
        portal: provides threads that may wait for a tier.
        clock: the clock for time limits of calls to the tiers.
        key: authenticates what the tiers hold; None if all writers of the tiers are trusted.
        info: the labels of `kvoffload_info`.

    Attributes:
        state, store, side: the tiers' state, copies and catalogs.
        copies: makes the calls of each tier.
        reports: the last report about the calls.
        asked: queries that a tier has not answered.
        degraded: why the cache is off until the process restarts; None while the cache works.
    """

    def __init__(
        self,
        config: OffloadConfig,
        places: Places,
        arena: Arena,
        portal: Portal,
        clock: Clock,
        key: TierKey | None,
        info: Labels,
    ) -> None:
        # The setting is the number of puts before the one that writes the block.
        kinds = [(kind, min_hits + 1) for kind, min_hits in states_of(config, places)]
        self.state = HostState(1, kinds)
        self.store = TierStore(self.state, self)
        self.info = info
        self.bus = Bus()
        self.bus.on_removed = log_removed
        self.counters = Counters(self.state.by_name.keys())
        self.counters.subscribe(self.bus)
        self.degraded: DegradeCause | None = None
        self.asked: set[RequestId] = set()
        self._arena = arena
        clocks = Clocks(clock.monotonic, sleep=clock.sleep)
        self.catalogs = catalogs_of(places, Scheduler(config, 1, portal, clocks, key))
        self.side = TiersSide(
            self.state,
            self.store,
            self.catalogs,
            self,
            clock.monotonic,
            timeout_s=config.transfer_timeout_s,
            drain_s=config.disk_drain_s,
        )
        self.reports = {_RANK: self._report(())}
        self.handle(facts.TransferReported(self.reports[_RANK]))
        self.copies = copies_of(places, Worker(config, _RANK, 1, arena, portal, clock, None, key))
        observer = LogObserver(clock.monotonic)
        portal.spawn(run_observer, observer.subscribe(self.bus), observer, log_removed)

    def handle(self, fact: facts.Fact) -> None:
        """Handle a fact, and then pass it and the events to observers in one batch."""
        self.ask(type(fact).__name__, lambda: self.store.handle(fact), None)
        if isinstance(fact, facts.TierAnswered):
            self.asked.discard(fact.request)
        self.bus.dispatch([fact, *self.state.tally.take()])

    def ask(self, name: str, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Call `question` and return its result, or `otherwise` if the core raises now or has raised before (R12)."""
        if self.degraded is None:
            try:
                return question()
            except Exception as error:
                self.degraded = DegradeCause.HANDLER_RAISED
                note = "the engine continues without these tiers"
                log.error("core_raised", error=repr(error), doing=name, note=note, exc_info=error)
        return otherwise

    def submit(self) -> None:
        """Start the copies that were planned."""
        for job in self.store.plan().below:
            self.copies[job.tier].submit(job)
        self.side.moved(self.side.now())

    def query(self, keys: Sequence[BlockKey]) -> RequestId:
        """Ask the remote tier for blocks, and return the name of the query."""
        assert self.state.asked is not None
        name = RequestId(secrets.token_hex(8))
        self.asked.add(name)
        self.state.asked.ask(name, keys)
        self.side.send()
        return name

    def advance(self) -> None:
        """Process ended calls to the tiers, and time out calls that take too long."""
        now, jobs = self.side.now(), self.state.jobs
        if batch := self.side.take_facts(now):
            for fact in batch:
                self.handle(fact)
            self.store.stop()  # A warm start would fill the staging slots.
        taken = [copies.take() for copies in self.copies.values()]
        below = [report for report in taken if report is not None]
        report, before = self._report(below), jobs.open_on_tiers
        if any(each.is_new for each in below):
            self.reports[_RANK] = report
            self.handle(facts.TransferReported(report))
        self.side.reported([report], now, has_moved=jobs.open_on_tiers != before)
        if events := self.state.tally.take():
            self.bus.dispatch([*events])

    def _report(self, below: Sequence[TierReport]) -> TransferReport:
        size, slots = self._arena.layout.slot_bytes, self._arena.slots
        ready = self._arena.ready_slots
        return with_tiers(TransferReport(_RANK, (), ready, slot_bytes=size, wanted_slots=slots), below)

    # The store's `Host`. Nothing waits for a block outside the store.

    def evicted(self, keys: Sequence[BlockKey]) -> None: ...

    def fetched(self, job: Fetch, keys: Sequence[BlockKey], slots: Sequence[SlotId]) -> None: ...

    def settled(self, offers: Sequence[Offer], job: Fetch, outcome: TierOutcome) -> None: ...


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
        key, clock = read_tier_key(config.tier_key_file), clock or Clocks()
        layout = _layout_of(page_bytes)
        places = places_of(config, lambda: identified.result(), replica)
        self._config = config
        self._entrance = _Entrance(tuple(page_bytes), AtMostEvery(inf, clock.monotonic))
        self._portal = portal = _Threads()
        self._arena = _staging(layout, portal)
        identifying = portal.new_executor("identity")
        identified = identifying.submit(lambda: with_key(_with_pages(identify(), layout), key))
        identifying.shutdown(wait=False)
        info = info_labels(engine or EngineIdentity(), config)
        self._books = _Books(config, places, self._arena, portal, clock, key, info)
        self._state = self._books.state
        self.counters = self._books.counters
        self._changed = threading.Condition()
        self._is_closed = self._is_resetting = False
        self._changes: list[tuple[BlockKey, bool]] | None = None
        threading.Thread(target=self._run, name=f"{portal.name}-ends", daemon=True).start()

    # -- calls --------------------------------------------------------------------------------------------------

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a forked child of the process that created the cache."""
        return self._entrance.is_forked

    @property
    def degraded(self) -> DegradeCause | None:
        """Return why the cache is off until the process restarts; None while the cache works."""
        return self._books.degraded

    def wait_open(self, timeout_s: float) -> bool:
        """Wait until every tier is open or has failed; return whether all tiers can be used."""
        if self.is_forked:
            return False
        with self._changed:
            self._wait(
                lambda: all(tier.is_usable or tier.is_closed for tier in self._state.tiers), _until(timeout_s)
            )
            return all(tier.is_usable for tier in self._state.tiers)

    def exists(self, keys: Sequence[bytes], timeout_s: float | None = None) -> list[bool]:
        """Return for each key whether a tier has its block. The remote tier's answer is only a hint.

        Args:
            keys: the blocks' keys, 1 to 64 bytes each; digests, because the first bytes must be spread evenly.
            timeout_s: seconds to wait for the remote tier, by default `remote_timeout_s`; 0 skips the query.
        """
        until = _until(timeout_s, self._config.remote_timeout_s)
        places, wanted = self._entrance.usable("exists", keys)
        if not places:
            return [False] * len(keys)
        with self._changed:
            if timeout_s != 0:
                self._books.ask(
                    "exists", lambda: self._ask_remote(wanted, until, are_hints_enough=False), None
                )
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
        places, wanted = self._entrance.usable("get", keys, pages)
        if not places:
            return [False] * len(keys)
        targets = [pages[place] for place in places]
        found = [False] * len(places)
        with self._changed:
            epoch = self._state.epoch
            self._books.ask("get", lambda: self._ask_remote(wanted, until, are_hints_enough=True), None)
        for some in self._batches(len(wanted)):
            slots: dict[BlockKey, SlotId] = {}
            with self._changed:
                self._books.ask(
                    "get", partial(self._fetch, [wanted[place] for place in some], slots, until), None
                )
            try:
                with suppress(HostMemoryError), self._arena.held():
                    # `held` raises after `close`, which has freed the memory.
                    for place in some:
                        if (slot := slots.get(wanted[place])) is not None:
                            _copy(self._arena.pages(slot), targets[place])
                            found[place] = True
            finally:
                with self._changed:
                    self._books.ask("get", partial(self._state.pool.unpin, [*slots.values()]), None)
        return _spread(places, self._answer(wanted, found, epoch), len(keys))

    def put(self, keys: Sequence[bytes], pages: Sequence[Page], timeout_s: float | None = None) -> list[bool]:
        """Write blocks to every tier that lacks them; see `get` for the arguments.

        Returns:
            For each key, whether a tier has its block.
        """
        until = _until(timeout_s, self._config.transfer_timeout_s)
        places, wanted = self._entrance.usable("put", keys, pages)
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
        with self._changed:
            self._changed.wait_for(lambda: not self._is_resetting)
            # The flag keeps other calls out while the catalogs wait for their tiers without the lock.
            self._is_resetting = True
            self._books.handle(facts.CacheReset())
            self._changed.notify_all()
        try:
            return self._books.side.reset()
        finally:
            with self._changed:
                self._is_resetting = False
                self._changed.notify_all()

    def take_changes(self) -> list[tuple[BlockKey, bool]]:
        """Return in order which blocks were written to the disk (True) or evicted (False) since the last call.

        The first call returns an empty list, and starts recording the changes.
        """
        if self.is_forked:
            return []
        with self._changed:
            if self._changes is None:
                disk = self._state.by_name.get(Tier.DISK)
                self._changes = [] if disk is None else disk.pool.index.watch()
            changes = self._changes.copy()
            self._changes.clear()
            return changes

    def gauges(self, metrics: Iterable[Metric] = METRICS, /) -> Mapping[str, Series]:
        """Return the series of the metrics that apply to a `TierCache`, by name; only counters after `close`."""
        readable = [
            metric
            for metric in metrics
            if metric in METRICS and (not self._is_closed or metric.kind is Kind.COUNTER)
        ]
        return read_all(self._books, self.counters.tiers, self._entrance.reader_failed, readable)

    def close(self) -> None:
        """Close the tiers. Wait for the disk for at most `disk_drain_s`, and never for the remote tier."""
        if self.is_forked:
            return
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            for copies in self._books.copies.values():
                copies.close()
        self._portal.event.set()
        self._books.side.close()
        self._arena.close()
        self._books.bus.close()
        self._portal.close()

    # -- with the lock ------------------------------------------------------------------------------------------

    @property
    def _is_off(self) -> bool:
        return self._is_closed or self._is_resetting or self._books.degraded is not None

    def _wait(self, is_done: Callable[[], bool], until: float) -> bool:
        """Release the lock and wait, at most until `until`; return whether `is_done` is true and the cache works."""
        self._changed.wait_for(lambda: self._is_off or is_done(), max(until - time.monotonic(), 0.0))
        return not self._is_off and is_done()

    def _has(self, key: BlockKey) -> bool:
        return not self._is_off and any(
            tier.is_usable and key in tier.pool.index for tier in self._state.tiers
        )

    def _ask_remote(self, keys: Sequence[BlockKey], until: float, *, are_hints_enough: bool) -> None:
        """Query the remote tier for blocks that were not found elsewhere, and wait for the answer."""
        state, remote = self._state, self._state.asked
        if remote is None or not remote.is_usable:
            return
        known = [tier.pool.index for tier in state.tiers if are_hints_enough or tier is not remote]
        if are_hints_enough:
            known.append(state.pool.index)
        unknown = [key for key in keys if not any(key in index for index in known)]
        if unknown:
            asked, name = self._books.asked, self._books.query(unknown)
            self._wait(lambda: name not in asked, until)
            asked.discard(name)

    def _fetch(self, keys: Sequence[BlockKey], slots: dict[BlockKey, SlotId], until: float) -> None:
        """Fetch blocks to staging slots from the first tier that has them. Pin the slots and add them to `slots`."""
        state, store, pool = self._state, self._books.store, self._state.pool
        on_way, failed = state.in_flight.keys, set[BlockKey]()

        def pin() -> None:
            there = {key: pool.index[key] for key in keys if key not in slots and key in pool.index}
            pool.pin([*there.values()])
            slots.update(there)

        pin()
        # Fetch from each tier twice, because a fetch with a corrupt block also fails for its intact blocks.
        for tier in (*state.tiers, *state.tiers):
            if not self._wait(lambda: pool.room >= len(keys), until):
                return
            index = tier.pool.index
            lacking = [key for key in dict.fromkeys(keys) if not (key in pool.index or key in on_way)]
            if tier is state.asked:
                self._ask_remote([key for key in lacking if key in failed], until, are_hints_enough=True)
            there = [key for key in lacking if key in index]
            failed.update(there)
            if there and tier.is_usable:
                store.fetches[tier].plan(there, [index[key] for key in there])
                self._books.submit()
            self._wait(lambda: on_way.keys().isdisjoint(keys), until)
            pin()

    def _reserve(
        self, keys: Sequence[BlockKey], slots: dict[BlockKey, SlotId], until: float, epoch: int
    ) -> list[Taken]:
        """Return the blocks to write to each tier. Reserve staging slots for new blocks, and add them to `slots`."""
        pool, on_way = self._state.pool, self._state.in_flight.keys
        is_ready = self._wait(lambda: on_way.keys().isdisjoint(keys) and pool.room >= len(keys), until)
        if not is_ready or self._state.epoch != epoch:
            return []
        usable = [tier for tier in self._state.tiers if tier.is_usable]
        taken: list[Taken] = [
            (tier, [key for key in keys if key not in tier.pool.index and tier.is_wanted(key)])
            for tier in usable
        ]
        new = [key for key in keys if key not in pool.index and any(key in some for _, some in taken)]
        slots.update(zip(new, self._books.store.reserve(new), strict=True))
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
        store, pool = self._books.store, self._state.pool
        if not are_whole:
            store.discard([*slots], [*slots.values()])
            return
        store.filled([*slots], [*slots.values()])
        for tier, keys in taken:
            there, on_way = tier.pool.index, tier.in_flight.keys
            new = [key for key in keys if key in pool.index and not (key in there or key in on_way)]
            if new := new[: tier.pool.room]:
                store.spills[tier].plan(new, [pool.index[key] for key in new])
        self._books.submit()
        self._wait(lambda: all(tier.in_flight.keys.keys().isdisjoint(keys) for tier, keys in taken), until)

    # -- without the lock ---------------------------------------------------------------------------------------

    def _put(self, given: Mapping[BlockKey, Page], until: float, epoch: int) -> None:
        keys, slots, are_whole = [*given], dict[BlockKey, SlotId](), False
        with self._changed:
            taken = self._books.ask("put", lambda: self._reserve(keys, slots, until, epoch), list[Taken]())
        try:
            with suppress(HostMemoryError), self._arena.held():
                # `held` raises after `close`, which has freed the memory.
                for key, slot in slots.items():
                    _copy(given[key], self._arena.pages(slot))
                are_whole = True
        finally:
            with self._changed:
                are_whole = are_whole and self._state.epoch == epoch
                self._books.ask("put", lambda: self._spill(taken, slots, until, are_whole=are_whole), None)

    def _answer(self, keys: Sequence[BlockKey], answers: list[bool], epoch: int) -> list[bool]:
        """Return a call's answers, or only False if there was a reset since the call began.

        Mark the blocks on the disk as used, deepest first (R15).
        """
        with self._changed:
            if self._is_off or self._state.epoch != epoch:
                return [False] * len(keys)
            self._books.ask("use", lambda: self._books.store.use(keys[::-1]), None)
            return answers

    def _batches(self, number: int) -> Iterator[range]:
        """Yield ranges of block positions; the blocks of one range are copied together."""
        most = max(self._arena.slots // _SHARE, 1)
        for start in range(0, number, most):
            yield range(start, min(start + most, number))

    # -- the thread that ends calls to the tiers ----------------------------------------------------------------

    def _run(self) -> None:
        event = self._portal.event
        while not self._is_closed:
            event.wait(_PERIOD_S)
            event.clear()
            with self._changed:
                if not self._is_off:
                    self._books.ask("end", self._books.advance, None)
                    if any(self._books.side.arrived):
                        event.set()
                self._changed.notify_all()


class _Threads(Portal):
    """A portal whose executors set `event` after each call."""

    def __init__(self) -> None:
        super().__init__("kvoffload-tiers")
        self.event = threading.Event()

    def new_executor(self, purpose: str, threads: int = 1) -> Executor:
        return _Waking(f"{self.name}-{purpose}", threads, self.event)


class _Waking(DaemonExecutor):
    def __init__(self, name: str, threads: int, event: threading.Event) -> None:
        super().__init__(name, threads)
        self._event = event

    def submit(self, fn: Callable[P, Answer], /, *args: P.args, **kwargs: P.kwargs) -> Future[Answer]:
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self._event.set())
        return future


class _Entrance:
    """Checks what callers pass. Each further line about a problem of the same kind would say the same.

    Args:
        page_bytes: for each region of a page, the bytes of a block in this region.
        once: limits the log to the first problem of each kind.
    """

    def __init__(self, page_bytes: tuple[int, ...], once: AtMostEvery) -> None:
        self._page_bytes = page_bytes
        self._once = once
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        return self._pid != os.getpid()

    def usable(
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
        if self._once.due(kind) is not None:
            note = "such blocks are neither found nor stored, and this is logged once"
            log.warning("tier_call_refused", call=call, reason=reason, note=note)

    def reader_failed(self, metric: str, error: Exception) -> None:
        """Log a metric that cannot be read."""
        if self._once.due(metric) is not None:
            log_removed(metric, error)


def _layout_of(page_bytes: Sequence[int]) -> DeviceLayout:
    """Return a layout whose regions are those of the caller's pages; there is no device."""
    return DeviceLayout(
        tuple([DeviceRegion(number, size, size, 1) for number, size in enumerate(page_bytes)])
    )


def _staging(layout: DeviceLayout, portal: Portal) -> Arena:
    """Allocate the memory of the staging slots.

    Raises:
        HostMemoryError: the machine has too little memory left.
    """
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
