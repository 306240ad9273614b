"""The disk's index on the scheduler's side. A separate thread reads it, appends to it and removes it.

    start ─▶ identify the KV ─▶ lock its folder
    every rank's file is open ─▶ read the index ─▶ facts for the core, a few thousand blocks per step
    records from the core ─▶ written ten times a second, invalidations at once; synced once a second
    reset ─▶ the index is removed before the reset is answered; this process finds its own blocks without an index

The only hook that waits for this thread is a reset, for at most `RESET_S`. If the disk fails, the index stays unchanged
and harmless, because every block that is read must match its checksum. If a reset cannot remove the index, the reset is
incomplete. After a reset nothing is recorded: the folder is named after the weights on disk, which the next process
loads, and the weights in memory may be different ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from itertools import count
from math import inf

from msgspec.structs import replace

from kvoffload.disk.folder import DiskPlace, caution, describe, lock_folder, make_folder
from kvoffload.disk.identity import KVIdentity, index_key
from kvoffload.disk.index import (
    INDEX_NAME,
    Entries,
    IndexContents,
    IndexHeader,
    IndexLog,
    NotAnIndex,
    load_index,
    new_generation,
    remove_index,
    start_index,
)
from kvoffload.disk.open_folder import LOCK_NOTE, LOCK_PAUSE_S, LOCK_TRIES, DiskInUse, OpenFolder
from kvoffload.disk.tier_key import TierKey
from kvoffload.logs import get_logger
from kvoffload.model import facts
from kvoffload.model.causes import RemoteFault
from kvoffload.model.errors import reason_of
from kvoffload.model.ids import Rank, SlotId
from kvoffload.model.wire import DiskRecord, Invalidate, Put, SlotsFile, Tier, TransferReport
from kvoffload.runtime.portal import Portal

RESET_S = 5.0
WRITE_PERIOD_S = 0.1
"""Seconds between two writes to the index. Waking the thread for each report would cost the hooks 40 to 80 us.

A crash loses the blocks whose records are not written yet.
"""
_WRITES_A_SYNC = 10
# The maximum number of blocks, or of free slots, that one step passes to the core. This takes a few milliseconds.
_PART = 2048
_GROWTH = 2**16  # the maximum number of slots by which one step grows the core's pool

log = get_logger("disk")


class DiskCatalog:
    """The scheduler's part of one engine's disk: the slots, and the index of the blocks in the slots.

    Args:
        place: the location of the folder.
        ranks: how many ranks write slot files.
        portal: provides a thread that may wait for the disk.
        sleep: a coroutine function that waits for a number of seconds, between two writes.
        closes_in_s: how many seconds `close` waits for the disk at most.
        key: authenticates the index; None to use only checksums.

    Attributes:
        identity: the identity of the KV in the folder; None until this process has locked the folder.
        arrived: functions that each return one fact for the core. Each call of `take_facts` calls one of them.
        awaits_ranks: True while a rank's report about its slot file is missing.
        opening: the current stage of opening; None after the whole index was added to `due`, or the disk has failed.
        on_open: called on the catalog's thread with the folder and the number of slots, before the core gets slots.
        on_write: called on the catalog's thread with the folder, after records were written to the index.
    """

    def __init__(
        self,
        place: DiskPlace,
        ranks: int,
        portal: Portal,
        sleep: Callable[[float], Awaitable[None]],
        *,
        closes_in_s: float,
        key: TierKey | None = None,
    ) -> None:
        self._place = place
        self._ranks = ranks
        self._portal = portal
        self._sleep = sleep
        self._closes_in_s = closes_in_s
        self._key = key
        self._executor = portal.new_executor("disk-catalog")
        self._unwritten: deque[DiskRecord] = deque()
        self.arrived: deque[Callable[[], facts.Fact]] = deque()
        self.awaits_ranks = True
        self.faults: Mapping[RemoteFault, int] = {}
        self.poll_s = inf
        self.opening: str | None = "identity of the weights"
        self.identity: KVIdentity | None = None
        self.on_open: Callable[[OpenFolder, int], object] = lambda folder, slots: None
        self.on_write: Callable[[OpenFolder], object] = lambda folder: None
        self._is_closed = self._was_reset = self._has_failed = False
        self._files: dict[Rank, SlotsFile] = {}
        self._folder: OpenFolder | None = None
        self._index: IndexLog | None = None  # None until the index is open, and again after a reset
        self._entries = 0  # how many entries the index has
        self._is_dirty = False
        self._writing: Future[None] | None = None
        self._waiting: Future[None] | None = None  # the wait before the next attempt to lock the folder
        self._lock_tries = 0
        self._do(self._lock)

    # -- on the engine's thread ---------------------------------------------------------------------------------

    def ranks_reported(self, reports: Iterable[TransferReport]) -> None:
        """Record which ranks have opened their slot files or failed. When all files are open, read the index."""
        for report in reports:
            status = next((status for status in report.below if status.tier is Tier.DISK), None)
            if status is None or not 0 <= report.rank < self._ranks:
                continue
            if status.file is None and not status.works:
                self._do(partial(self._fail, f"rank {report.rank} could not open its slot file"))
                self.awaits_ranks = False
                return
            if status.file is None or report.rank in self._files:
                continue
            self._files[report.rank] = status.file
            if len(self._files) == self._ranks:
                self._do(self._open)
                self._writing = self._portal.spawn(self._write_now_and_then)
                self.awaits_ranks = False
                return

    def take_facts(self) -> list[facts.Fact]:
        """Return the next fact for the core, if there is one. After a reset, facts report every slot as free."""
        if not self.arrived:
            return []
        fact = self.arrived.popleft()()
        if self._was_reset and isinstance(fact, facts.TierRestored) and fact.puts:
            fact = replace(fact, puts=(), free=tuple([put.slot for put in fact.puts]))
        return [fact]

    @property
    def is_restoring(self) -> bool:
        """Return whether the core has not received all facts about the index yet."""
        return self.opening is not None or bool(self.arrived)

    def send(self, records: Sequence[DiskRecord]) -> None:
        """Queue records for the index. If a slot was invalidated, write at once: the slot may be overwritten next."""
        if self._was_reset:
            return
        self._unwritten += records
        if Invalidate in map(type, records):
            self._do(self._write)

    def write(self) -> Future[object]:
        """Write what was sent so far to the index; the future ends when it is written."""
        return self._do(self._write)

    def reset(self) -> bool:
        """Remove the index; return whether the reset is complete.

        Before this process has locked the folder, this method does not wait for the removal: the process has written
        nothing, and blocks that other processes wrote belong to the weights on disk.
        """
        self._was_reset = True
        if self._is_closed:
            return True
        done = self._do(self._reset)
        if self.identity is None:
            return True
        with suppress(TimeoutError):
            return done.result(RESET_S) is True
        return False

    def close(self) -> None:
        """Write queued records, sync and close. If the disk hangs, return after `closes_in_s`."""
        self._is_closed = True
        for waiting in (self._writing, self._waiting):
            if waiting is not None:
                waiting.cancel()
        self._do(self._write)
        closed = self._do(self._close)
        # Without a folder nothing was written, and the thread may still be busy with reading the weights.
        if self._folder is not None:
            with suppress(TimeoutError):
                closed.result(self._closes_in_s)
        self._executor.shutdown(wait=False)

    async def _write_now_and_then(self) -> None:
        """Write and sync queued records periodically, until cancelled."""
        for number in count(1):
            await self._sleep(WRITE_PERIOD_S)
            has_more = bool(self._unwritten)
            if has_more:
                self._do(self._write)
            if number % _WRITES_A_SYNC == 0 and (has_more or self._is_dirty):
                self._do(self._sync)

    # -- on the catalog's thread --------------------------------------------------------------------------------

    def _do(self, work: Callable[[], object]) -> Future[object]:
        """Run `work` on the catalog's thread. If `work` raises, this process stops using the disk."""

        def careful() -> object:
            try:
                return work()
            except CancelledError:  # The engine stopped before its KV was identified.
                pass
            except Exception as error:
                # Otherwise the disk might stay in its opening stage, without a line in the log.
                self._fail(reason_of(error))
            return None

        return self._executor.submit(careful)

    def _lock(self) -> None:
        if self._has_failed:
            return
        identity = self._place.identify()
        self.opening = "lock of the folder"
        try:
            self._folder = lock_folder(make_folder(self._place.root, identity, self._place.replica))
        except DiskInUse as error:
            self._lock_tries += 1
            if self._is_closed or self._lock_tries > LOCK_TRIES:
                raise
            if self._lock_tries == 1:
                log.warning("disk_in_use", reason=str(error), note=LOCK_NOTE)
            self._waiting = self._portal.spawn(self._lock_later)
            return
        if note := caution(self._place.root):
            log.warning("disk_not_protected", note=note)
        self.opening = "slot files of the ranks"
        self.identity = identity
        if len(self._files) == self._ranks:
            self._open()

    async def _lock_later(self) -> None:
        await self._sleep(LOCK_PAUSE_S)
        self._do(self._lock)

    def _open(self) -> None:
        if self._folder is None or self.opening is None:
            return
        assert self.identity is not None, "the folder is named by it"
        self.opening = "index"
        key = index_key(self.identity, self._key)
        folder = self._folder
        ids = tuple(self._files[Rank(rank)].file_id for rank in range(self._ranks))
        slots = min(file.slots for file in self._files.values())
        found = _find_index(folder, self.identity, ids, slots, key)
        generation = new_generation() if found is None else found.header.generation
        entries = Entries.none(self._ranks) if found is None else found.entries
        self._index = start_index(
            folder, IndexHeader(generation, ids, slots, folder.fingerprint, key), entries
        )
        self._entries = len(entries)
        log.info(
            "disk_opened",
            folder=str(folder.path),
            slots=slots,
            blocks=len(entries),
            index_was_cut=found is not None and found.is_cut,
        )
        self.on_open(folder, slots)
        self.arrived.extend(_parts(entries, entries.free(slots), slots))
        self.opening = None
        if self._was_reset:
            self._reset()

    def _write(self) -> None:
        records = [self._unwritten.popleft() for _ in range(len(self._unwritten))]
        if not records or self._index is None or self._has_failed:
            return
        self._index.append(records)
        self._is_dirty = True
        self._entries += sum(isinstance(record, Put) for record in records)
        self._entries -= sum(isinstance(record, Invalidate) for record in records)
        if self._index.is_mostly_garbage(self._entries):
            self._index = self._index.rewritten()
        if self._folder is not None:
            self.on_write(self._folder)

    def _sync(self) -> None:
        self._is_dirty = False
        if self._index is not None:
            self._index.sync()

    def _reset(self) -> bool:
        if self._folder is None:
            return False
        remove_index(self._folder, self._index)
        index, self._index = self._index, None
        if index is not None:
            index.close()
        return True

    def _close(self) -> None:
        index, self._index = self._index, None
        folder, self._folder = self._folder, None
        try:
            if index is not None:
                index.sync()
                index.close()
        finally:
            if folder is not None:
                folder.close()

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.error("disk_closed", reason=reason, note="the engine continues without the disk")
            self.arrived.append(partial(facts.TierLost, Tier.DISK))
            self.opening = None


def _find_index(
    folder: OpenFolder, identity: KVIdentity, files: tuple[bytes, ...], slots: int, key: TierKey | None
) -> IndexContents | None:
    """Return the folder's index of these slot files, or None if it is missing or unusable. Log why it is unusable."""
    others = describe(folder, identity)
    try:
        found = load_index(folder, slots, key)
        if found is not None and found.header.files != files:
            raise NotAnIndex(f"it belongs to other slot files, which had {len(found.entries)} blocks")
    except NotAnIndex as error:
        path = str(folder.path / INDEX_NAME)
        reason = str(error)
        if others:
            reason += f"; its identity.json names other {', '.join(others)}"
        log.warning("disk_index_dropped", file=path, reason=reason, note="the disk starts empty")
        return None
    return found


def _parts(entries: Entries, free: Sequence[SlotId], slots: int) -> Iterator[Callable[[], facts.Fact]]:
    """Yield functions that return the facts for the core: slot counts, blocks, free slots, and the end of the index.

    Functions delay the creation of the facts, because a million records would lengthen the garbage collector's pauses.
    """
    for some in range(_GROWTH, slots, _GROWTH):
        yield partial(facts.TierRestored, Tier.DISK, some)
    for start in range(0, len(entries), _PART):
        yield partial(_blocks, entries, start, slots)
    for start in range(0, len(free), _PART):
        yield partial(facts.TierRestored, Tier.DISK, slots, free=tuple(free[start : start + _PART]))
    yield partial(facts.TierRestored, Tier.DISK, slots, is_last=True)


def _blocks(entries: Entries, start: int, slots: int) -> facts.Fact:
    return facts.TierRestored(Tier.DISK, slots, tuple(entries.puts(start, start + _PART)))
