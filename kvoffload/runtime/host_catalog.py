"""The table of host slots on the scheduler's side, for a host whose memory lies in files.

    every rank's file is open ─▶ claim the folder, read the table of the process before
        nothing in it counts ─▶ all slots are free
        else: identify the KV ─▶ the same as before ─▶ a new table with the old blocks, which the core adopts
    slots of the core changed ─▶ written to the table in the same hook, before a plan leaves it
    reset, or a fault ─▶ the table is closed: it has no blocks any more, and says only which slots copies may write
    reset ─▶ noted for all engines of this kind, because they may have copied blocks from before it

The core gets slots only from here, as memory becomes ready: first all of them whose memory the ranks had prepared by
then, in the order of use. Slots that copies of a killed process may still write are kept back until its processes have
ended.

Only the catalog's own thread waits for files. Writing to the table is a write to memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from itertools import count
from math import inf
from pathlib import Path

import numpy as np

from kvoffload.core.slots import SlotChange
from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.open_folder import OpenFolder, open_folder
from kvoffload.logs import get_logger
from kvoffload.model import facts
from kvoffload.model.causes import Adoption, RemoteFault
from kvoffload.model.errors import reason_of
from kvoffload.model.ids import BlockKey, Rank, SlotId
from kvoffload.model.wire import Put, SlotsFile, Tier, TransferReport
from kvoffload.node.folder import Claim, HostPlace, bound_orphans, describe, list_kept, remove_files
from kvoffload.node.processes import may_run
from kvoffload.node.resets import NO_RESET, last_reset, note_reset, open_resets
from kvoffload.node.table import HostTable, Left, NotATable, TableHeader, read_table, remove_table
from kvoffload.runtime.portal import Portal

_PART = 2048  # the maximum number of blocks, or of free slots, that one step passes to the core
_PATIENCE_S = 10.0
"""How long, from the engine's first step on, slots wait for the identity of the KV that an earlier process left in them."""

_LOOK_S = 1.0  # the time between two looks at processes that must end, and between two writes of times of use
_SETTLED_LOOKS = 600
"""After how many looks the files of stopped engines are bounded. Engines that start together have found theirs by then."""

_CLOSE_S = 5.0  # how long `close` waits
_TIMES = 4096  # the number of times of use that are copied at once

log = get_logger("host")


class HostCatalog:
    """The scheduler's part of host memory in files.

    Args:
        place: the location of the folder.
        ranks: how many ranks have a file.
        portal: provides threads.
        monotonic: returns the time in seconds.
        sleep: a coroutine function that waits for a number of seconds.
        used_at: for each slot of the core, when its block was last used.
        keeps: whether the files stay when this process ends.
        orphan_bytes: how many bytes the files of stopped engines may take.

    Attributes:
        arrived: functions that each return one fact for the core. Each call of `take_facts` calls one of them.
        awaits_ranks: True while a rank prepares memory.
        opening: the current stage of opening; None once it is known what the core adopts.
        adopted: how many blocks the core adopts in all.
        on_open: called on the catalog's thread with the folder and the number of slots, before the core gets slots.
        not_adopted: why the core adopts nothing although an earlier engine left something; None without a reason.
        orphans_size: how many bytes the files of stopped engines took at the last look.
    """

    def __init__(
        self,
        place: HostPlace,
        ranks: int,
        portal: Portal,
        monotonic: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        used_at: Sequence[float],
        *,
        keeps: bool = True,
        orphan_bytes: int = 0,
    ) -> None:
        self._place = place
        self._ranks = ranks
        self._portal = portal
        self._monotonic = monotonic
        self._sleep = sleep
        self._used_at = used_at
        self._keeps = keeps
        self._orphan_bytes = orphan_bytes
        self.arrived: deque[Callable[[], facts.Fact]] = deque()
        self.awaits_ranks = True
        self.faults: Mapping[RemoteFault, int] = {}
        self.poll_s = inf
        self.opening: str | None = "memory of the ranks"
        self.adopted = 0
        self.on_open: Callable[[OpenFolder, int], object] = lambda folder, slots: None
        self.not_adopted: Adoption | None = None
        self.orphans_size = 0
        self._reports: dict[Rank, TransferReport] = {}
        self._files: dict[Rank, SlotsFile] = {}
        self._stepped_at: float | None = None
        self._is_closed = self._was_reset = self._is_complete = False
        self._is_trusted = True
        self._has_forgotten = False
        self._executor = portal.new_executor("host-catalog")
        self._identifier = portal.new_executor("host-identity")
        self._identity: Future[KVIdentity] | None = None
        self._claim: Claim | None = None
        self._resets: int | None = None  # the descriptor that notes a reset; open while the folder is claimed
        self._reset_name = NO_RESET  # names the last reset before this process claimed the folder
        self._table: HostTable | None = None
        self._left: Left | None = None  # what the process before left, until it is known whose KV it is
        self._blocks = _Blocks.none()
        self._ready = 0  # how many slots the core has got so far
        self._end = 0  # all slots from here on are free
        # Slots that the core has not got, because an old copy may write them.
        self._unsettled: list[SlotId] = []
        self._looking: Future[None] | None = None

    # -- on the engine's thread ---------------------------------------------------------------------------------

    def ranks_reported(self, reports: Iterable[TransferReport]) -> None:
        """Record how many slots each rank has ready. When all files are open, look at what is in them."""
        for report in reports:
            self._reports[report.rank] = report
            for status in report.below:
                if status.tier is Tier.HOST and status.file is not None and report.rank not in self._files:
                    self._files[report.rank] = status.file
                    if len(self._files) == self._ranks:
                        self._do(self._open)
                        self._looking = self._portal.spawn(self._look_now_and_then)
        if len(self._files) == self._ranks:
            ready = min(each.ready_slots for each in self._reports.values())
            self.awaits_ranks = any(each.is_growing for each in self._reports.values())
            self._do(partial(self._add, ready, is_last=not self.awaits_ranks))

    def take_facts(self) -> list[facts.Fact]:
        """Return the next fact for the core, if there is one. After a reset, facts report every slot as free."""
        if self.opening is not None:
            now = self._monotonic()
            self._stepped_at = now if self._stepped_at is None else self._stepped_at
            if self._left is not None and now - self._stepped_at > _PATIENCE_S:
                self._do(partial(self._decide, None))
        if not self.arrived:
            return []
        fact = self.arrived.popleft()()
        if self._was_reset and isinstance(fact, facts.TierRestored) and fact.puts:
            slots = tuple([put.slot for put in fact.puts])
            fact = facts.TierRestored(Tier.HOST, fact.slots, free=(*fact.free, *slots))
        return [fact]

    @property
    def is_restoring(self) -> bool:
        """Return whether the core has not received all facts about its slots yet."""
        return self.opening is not None or bool(self.arrived)

    @property
    def adoption(self) -> Adoption:
        """Return what this start did with the blocks that an earlier engine left. Readable from any thread."""
        if self.not_adopted is not None:
            return self.not_adopted
        if self.opening is not None:
            return Adoption.OPENING
        return Adoption.ADOPTED if self.adopted else Adoption.NOTHING_LEFT

    @property
    def shared(self) -> tuple[Path, TableHeader] | None:
        """Return the folder and the header of the table that other engines may read; None if there is none.

        Readable from any thread.
        """
        claim, table = self._claim, self._table
        if claim is None or table is None or not (self._is_trusted and table.header.fingerprint):
            return None
        return claim.folder.path, table.header

    def send(self, changes: Sequence[SlotChange]) -> None:
        """Write changed slots to the table. A plan may leave the engine only after that."""
        table = self._table
        if table is None:
            return
        now = self._monotonic()
        try:
            for slot, key, is_unwritten in reversed(changes):  # parents first
                if key is None and not is_unwritten:
                    table.invalidate(slot)
                elif key is not None and self._is_trusted:
                    table.publish(slot, key, now)
                else:
                    table.free(slot)
        except Exception as error:
            log.error("host_table_closed", reason=reason_of(error), note="the next process finds no blocks")
            self.distrust()
            self._table = None

    def distrust(self) -> None:
        """Close the table for good: no later process may use what is in the slots.

        Copies go on, and the next process must know which slots they may still write if this process is killed.
        """
        self._is_trusted = False
        if self._table is not None:
            self._table.close()

    def reset(self) -> bool:
        """Close the table; return whether that is done. Weights in memory may differ from those that the identity names."""
        self._was_reset = True
        self.distrust()
        if self._is_closed:
            return True
        forgotten = self._do(self._forget)
        with suppress(TimeoutError):
            forgotten.result(_CLOSE_S)
            return self._has_forgotten
        return False

    def close(self) -> None:
        """Stop the threads. The table stays for the next process, unless the files are not kept."""
        self._is_closed = True
        if self._looking is not None:
            self._looking.cancel()
        closed = self._do(self._close)
        with suppress(TimeoutError):
            closed.result(_CLOSE_S)
        for executor in (self._executor, self._identifier):
            executor.shutdown(wait=False)

    # -- on the catalog's thread --------------------------------------------------------------------------------

    def _do(self, work: Callable[[], object]) -> Future[None]:
        """Run `work` on the catalog's thread. If it raises, the core gets its slots without any block."""

        def careful() -> None:
            try:
                work()
            except Exception as error:
                log.error(
                    "host_table_failed", reason=reason_of(error), note="the next process finds no blocks"
                )
                self._fail()

        return self._executor.submit(careful)

    def _fail(self) -> None:
        """Go on without a table: give the core all slots, except those that an old process may still write."""
        self.distrust()
        left, self._left = self._left, None
        if self.opening is not None:
            self.not_adopted = Adoption.FAILED
            self._blocks = _Blocks.none()
            self.adopted = 0
            self._unsettled = self._unsettled if left is None else left.unsettled
            self._end = 1 + max(self._unsettled, default=-1)
        if len(self._files) == self._ranks:
            self.opening = None
            self._add_reported()

    def _forget(self) -> None:
        """Note the reset for all engines of this kind.

        Before the ranks' first reports, also remove the table of the engine before, which no scheduler has taken over
        yet.
        """
        is_first = self._claim is None
        claim = self._claimed()
        assert self._resets is not None
        note_reset(self._resets)
        if is_first:
            remove_table(claim.folder)
        self._has_forgotten = True

    def _claimed(self) -> Claim:
        """Return the engine's folder, which the first call claims."""
        if self._claim is None:
            claim = self._place.claim()
            try:
                with open_folder(claim.folder.path.parent) as kind:
                    self._resets = open_resets(kind)
                    self._reset_name = last_reset(kind)
            except BaseException:
                claim.close()
                raise
            self._claim = claim
        return self._claim

    def _open(self) -> None:
        claim = self._claimed()
        self._identity = self._identifier.submit(self._place.identify)
        # Listing folders may wait for other engines that choose theirs, so adoption does not wait for it.
        self._identifier.submit(self._count_orphans)
        previous = tuple(self._files[Rank(rank)].previous for rank in range(self._ranks))
        try:
            self._left = read_table(claim.folder, previous, self._reset_name)
            self.opening = "identity of the weights"
            if self._left is None:
                self._begin(None)
        except NotATable as error:
            cause = Adoption.RESET if error.was_closed else Adoption.TABLE_REFUSED
            self._say_not_adopted(cause, f"the table does not count: {error}")
            self._begin(None, error.unsettled)
        self._identity.add_done_callback(
            lambda found: self._is_closed or self._do(partial(self._identified, found))
        )

    def _identified(self, found: Future[KVIdentity]) -> None:
        try:
            identity = found.result()
        except CancelledError:  # the engine stopped before its KV was identified
            return
        if self._left is not None:
            self._decide(identity.fingerprint)
        if self._table is not None and self._claim is not None:
            self._table.identify(identity.fingerprint)
            describe(self._claim.folder, identity)

    def _decide(self, fingerprint: str | None) -> None:
        """Decide what the core adopts, once the KV's fingerprint is known, or because it takes too long (None)."""
        left, self._left = self._left, None
        if left is None:
            return
        if fingerprint is None:
            self._say_not_adopted(Adoption.NOT_IDENTIFIED, "the weights were not identified in time")
        elif fingerprint != left.header.fingerprint:
            self._say_not_adopted(Adoption.OTHER_KV, "it is KV of other weights, settings or versions")
        self._begin(
            left if fingerprint is not None and fingerprint == left.header.fingerprint else None,
            left.unsettled,
        )

    def _say_not_adopted(self, cause: Adoption, reason: str) -> None:
        assert self._claim is not None
        self.not_adopted = cause
        folder = str(self._claim.folder.path)
        log.warning("host_memory_not_adopted", folder=folder, cause=cause.value, reason=reason)

    def _bound_orphans(self) -> None:
        bound_orphans(self._place.root, self._orphan_bytes)
        self._count_orphans()

    def _count_orphans(self) -> None:
        """Record and log what other engines keep below `host_path`."""
        claim, root = self._claim, self._place.root
        if claim is None:
            return
        others = [kept for kept in list_kept(root) if kept.path != claim.folder.path]
        orphans = [kept.size for kept in others if kept.is_orphan]
        self.orphans_size = sum(orphans)
        if others:
            log.info(
                "host_memory_of_others",
                path=str(root),
                orphans=len(orphans),
                orphan_bytes=self.orphans_size,
                may_stay=self._orphan_bytes,
                in_use_bytes=sum(kept.size for kept in others) - self.orphans_size,
            )

    def _begin(self, left: Left | None, unsettled: Sequence[SlotId] = ()) -> None:
        """Begin this process's table, with the blocks of the process before or none."""
        assert self._claim is not None
        slots = min(each.wanted_slots for each in self._reports.values())
        kept, written = [pick(file.slots for file in self._files.values()) for pick in (min, max)]
        # Old copies may write to any rank's file, also to one that is still used where another rank's is not.
        self._unsettled = [slot for slot in unsettled if slot < written]
        self._blocks = _Blocks.none() if left is None else _Blocks.of(left, kept)
        self.adopted = len(self._blocks.slots)
        self._end = 1 + max([*self._unsettled, *self._blocks.slots.tolist()], default=-1)
        files = tuple(self._files[Rank(rank)].file_id for rank in range(self._ranks))
        # Adopted blocks must count from the start: this process may be killed before it calls `identify`.
        fingerprint = "" if left is None else left.header.fingerprint
        header = TableHeader(slots, files, fingerprint, reset=self._reset_name)
        blocks = self._blocks if self._is_trusted else _Blocks.none()
        self._table = HostTable.create(self._claim.folder, header, blocks.left(header, self._unsettled))
        if self._is_trusted:
            self.on_open(self._claim.folder, slots)
        if not self._is_trusted:  # there was a reset meanwhile, on the engine's thread
            self.distrust()
        self.opening = None
        log.info("host_table_opened", folder=str(self._claim.folder.path), slots=slots, blocks=self.adopted)
        self._add_reported()

    def _add_reported(self) -> None:
        ready = min(each.ready_slots for each in self._reports.values())
        self._add(ready, is_last=not any(each.is_growing for each in self._reports.values()))

    def _add(self, ready: int, *, is_last: bool) -> None:
        """Give the core the slots that have become ready, with their blocks."""
        if self.opening is not None or self._is_complete or (ready <= self._ready and not is_last):
            return
        self._is_complete = is_last
        first, end = self._ready, min(ready, self._end)
        self._ready = ready
        if first < end:
            slots, keys = self._blocks.within(first, end)
            taken = {*slots, *self._unsettled}
            # The last free slots are used first. Low slots are used first, because they stay if `host_bytes` shrinks.
            free = [SlotId(slot) for slot in range(end - 1, first - 1, -1) if slot not in taken]
            for start in range(0, max(len(slots), 1), _PART):
                some = slice(start, start + _PART)
                self.arrived.append(partial(_restored, end, slots[some], keys[some]))
            for start in range(0, len(free), _PART):
                some_free = tuple(free[start : start + _PART])
                self.arrived.append(partial(facts.TierRestored, Tier.HOST, end, free=some_free))
        self.arrived.append(partial(facts.HostGrown, ready, is_last))

    def _look(self) -> None:
        """Write times of use, and give the core the unsettled slots once no old process can write them."""
        table = self._table
        if table is not None:
            for first in range(0, min(len(self._used_at) - 1, table.header.slots), _TIMES):
                table.use(first, np.array(self._used_at[first : first + _TIMES]))
        if self._unsettled and self.opening is None and self._claim is not None:
            states = {may_run(process) for process in self._claim.former}
            free = tuple([slot for slot in self._unsettled if slot < self._ready])
            if states <= {False} and free:
                self._unsettled = [slot for slot in self._unsettled if slot >= self._ready]
                self.arrived.append(partial(facts.TierRestored, Tier.HOST, self._ready, free=free))

    async def _look_now_and_then(self) -> None:
        for number in count(1):
            await self._sleep(_LOOK_S)
            self._do(self._look)
            if number == _SETTLED_LOOKS:
                self._do(self._bound_orphans)

    def _close(self) -> None:
        claim, self._claim = self._claim, None
        if claim is None:
            return
        if not self._keeps:
            self.distrust()
            remove_files(claim.folder)
        claim.close()
        if self._resets is not None:
            os.close(self._resets)


class _Blocks:
    """The blocks that the core adopts: arrays of slots and keys, the least recently used first."""

    def __init__(self, slots: list[SlotId], keys: list[BlockKey], used_at: list[float]) -> None:
        self.slots = np.array(slots, np.int64)
        self.keys = keys
        self.used_at = used_at

    @classmethod
    def none(cls) -> _Blocks:
        return cls([], [], [])

    @classmethod
    def of(cls, left: Left, kept: int) -> _Blocks:
        """Return the blocks in the first `kept` slots."""
        places = [place for place, slot in enumerate(left.slots) if slot < kept]
        return cls(*[[column[place] for place in places] for column in (left.slots, left.keys, left.used_at)])  # type: ignore[arg-type]

    def left(self, header: TableHeader, unsettled: list[SlotId]) -> Left:
        """Return what the new table has from the start."""
        return Left(header, self.slots.tolist(), self.keys, self.used_at, unsettled)

    def within(self, first: int, end: int) -> tuple[list[SlotId], list[BlockKey]]:
        """Return the slots from `first` to `end`, and their keys."""
        places = np.flatnonzero((self.slots >= first) & (self.slots < end)).tolist()
        return self.slots[places].tolist(), [self.keys[place] for place in places]


def _restored(ready: int, slots: Sequence[SlotId], keys: Sequence[BlockKey]) -> facts.Fact:
    puts = tuple([Put(slot, key, ()) for slot, key in zip(slots, keys, strict=True)])
    return facts.TierRestored(Tier.HOST, ready, puts)
