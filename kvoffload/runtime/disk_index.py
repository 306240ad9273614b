"""The disk's index on the scheduler's side: read, appended to and removed on a thread of its own.

    start ─▶ the KV's identity ─▶ its folder, locked
    every rank's file is open ─▶ index ─▶ parts for the core, a few thousand blocks a step
    what the core records ─▶ written ten times a second, strikes at once; synced once a second
    reset ─▶ the index is removed, before the reset is answered; this process finds its own blocks without one

No hook waits for it, except a reset, and that for at most `RESET_S`. If the disk fails, the index stays as it is: its
checksums are compared with the bytes anyway. After a reset it must not stay, so if it cannot be removed, the reset answers
that it is not done. Nothing is recorded from then on: a reset may mean that the engine has other weights in memory than
those on disk, by which the folder is named and which the next process begins with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvoffload.disk.open_folder import LOCK_PAUSE_S, LOCK_TRIES
from kvoffload.logs import get_logger
from kvoffload.model import facts
from kvoffload.model.disk import DiskFile, DiskRecord, Put, Strike
from kvoffload.model.errors import DiskError, reason_of
from kvoffload.model.ids import Rank, SlotId
from kvoffload.model.transfer import TransferReport
from kvoffload.runtime.portal import Portal

if TYPE_CHECKING:
    from kvoffload.disk.folder import DiskPlace, TierFolder
    from kvoffload.disk.identity import KVIdentity
    from kvoffload.disk.index_format import Entries, IndexContents
    from kvoffload.disk.index_log import IndexLog
    from kvoffload.disk.open_folder import OpenFolder
    from kvoffload.disk.tier_key import TierKey

RESET_S = 5.0
WRITE_PERIOD_S = 0.1
"""Waking the thread for each report takes the hooks 40 to 80 us. What a crash finds unwritten is computed again."""
_WRITES_A_SYNC = 10
_PART = 2048  # blocks or slots that the core takes over in a step, which takes some milliseconds
_GROWTH = 2**16  # slots that it makes in a step

log = get_logger("disk")


@dataclass(slots=True)
class _Opened:
    """What the thread has open."""

    index: IndexLog | None  # None after a reset
    entries: int
    is_dirty: bool = False


class DiskIndex:
    """The index of one engine's disk.

    Args:
        place: where it lies.
        ranks: whose files it is about.
        portal: gives the thread that may wait for the disk.
        sleep: waits for seconds, between two writes.
        closes_in_s: seconds that `close` waits for the disk at most.
        key: authenticates the index; None for checksums.

    Attributes:
        identity: of the KV in the folder that this process has locked; None before it is.
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
        self._executor = portal.new_executor("disk-index")
        self._unwritten: deque[DiskRecord] = deque()
        self.due: deque[Callable[[], facts.Fact]] = deque()
        """Functions that make the facts for the core, one a step: `next_fact`."""
        self._is_closed = self._was_reset = self._is_handed_over = False
        self._files: dict[Rank, DiskFile] = {}
        self._stage = "identity of the weights"
        self.identity: KVIdentity | None = None
        self._folder: TierFolder | None = None
        self._opened: _Opened | None = None
        self._failure: str | None = None
        self._writing: Future[None] | None = None
        self._waiting: Future[None] | None = None  # for the folder's lock
        self._lock_tries = 0
        self._do(self._lock)

    # -- the engine's thread ------------------------------------------------------------------------------------

    def ranks_reported(self, reports: Iterable[TransferReport]) -> bool:
        """Ranks may have opened their slot files, or failed to; with the last one the index is read.

        Returns:
            Whether other ranks' files are waited for.
        """
        for report in reports:
            if report.disk_file is None and not report.disk_works:
                self._do(partial(self._miss_file, report.rank))
                return False
            if report.disk_file is None or report.rank in self._files or not 0 <= report.rank < self._ranks:
                continue
            self._files[report.rank] = report.disk_file
            if len(self._files) == self._ranks:
                self._do(self._open)
                self._writing = self._portal.spawn(self._write_now_and_then)
                return False
        return True

    def next_fact(self) -> facts.Fact:
        """Return the next fact of those `due`. After a reset all slots are free, whatever they held."""
        fact = self.due.popleft()()
        self._is_handed_over |= isinstance(fact, facts.DiskRestored) and fact.is_last
        if self._was_reset and isinstance(fact, facts.DiskRestored) and fact.puts:
            return replace(fact, puts=(), free=tuple([put.slot for put in fact.puts]))
        return fact

    @property
    def is_opening(self) -> bool:
        """Whether more facts about the index are to come."""
        return bool(self.due) or not (self._is_handed_over or self._failure is not None)

    @property
    def opening(self) -> str | None:
        """The stage in which the disk still opens; None once its index is being handed over, or if it failed."""
        return None if self.due or not self.is_opening else self._stage

    def append(self, records: Sequence[DiskRecord]) -> None:
        """Queue records for the index. A strike is written immediately, because its slot may be overwritten next."""
        if self._was_reset:
            return
        self._unwritten += records
        if Strike in map(type, records):
            self._do(self._write)

    def reset(self) -> bool:
        """Remove the index; return whether nothing from before can be found any more.

        Before the folder is locked there is nothing to wait for: the index is removed then. This process has put nothing there,
        and what others have put is of the weights on disk, whatever the reset was for.
        """
        self._was_reset = True
        if self._is_closed:
            return True
        done = self._do(self._reset)
        if self.identity is None:
            return True
        with suppress(TimeoutError):
            return bool(done.result(RESET_S))
        return False

    def close(self) -> None:
        """Write what was handed in, sync and close; a disk that hangs is waited for no longer than `closes_in_s`."""
        self._is_closed = True
        for waiting in (self._writing, self._waiting):
            if waiting is not None:
                waiting.cancel()
        self._do(self._write)
        closed = self._do(self._close)
        if self._folder is not None:  # otherwise the weights may still be read
            with suppress(TimeoutError):
                closed.result(self._closes_in_s)
        self._executor.shutdown(wait=False)

    async def _write_now_and_then(self) -> None:
        """Have records written, and what was written synced, until cancelled."""
        for number in count(1):
            await self._sleep(WRITE_PERIOD_S)
            opened, has_more = self._opened, bool(self._unwritten)
            if has_more:
                self._do(self._write)
            if number % _WRITES_A_SYNC == 0 and (has_more or (opened is not None and opened.is_dirty)):
                self._do(self._sync)

    # -- its own thread -----------------------------------------------------------------------------------------

    def _do(self, work: Callable[[], bool]) -> Future[bool]:
        """Run work on the thread; whatever it raises ends the disk for this process."""

        def careful() -> bool:
            try:
                return work()
            except CancelledError:  # the engine stops before its KV is identified
                return False
            except Exception as error:  # or nothing would say that the tier never opens
                self._fail(reason_of(error))
                return False

        return self._executor.submit(careful)

    def _lock(self) -> bool:
        from kvoffload.disk.folder import FolderInUse, caution, lock_folder, make_folder

        identity = self._place.identify()
        self._stage = "lock of the folder"
        try:
            self._folder = lock_folder(make_folder(self._place.root, identity, self._place.replica))
        except FolderInUse as error:
            self._lock_tries += 1
            if self._is_closed or self._lock_tries > LOCK_TRIES:
                raise
            if self._lock_tries == 1:
                log.warning("disk_in_use", reason=str(error), note="it is tried again for a minute")
            self._waiting = self._portal.spawn(self._lock_later)
            return False
        if note := caution(self._place.root):
            log.warning("disk_not_protected", note=note)
        self._stage = "slot files of the ranks"
        self.identity = identity
        return self._open() if len(self._files) == self._ranks else True

    async def _lock_later(self) -> None:
        await self._sleep(LOCK_PAUSE_S)
        self._do(self._lock)

    def _miss_file(self, rank: Rank) -> bool:
        raise DiskError(f"rank {rank} could not open its slot file")

    def _open(self) -> bool:
        from kvoffload.disk.identity import index_key
        from kvoffload.disk.index_format import Entries, IndexHeader
        from kvoffload.disk.index_log import new_generation, start_index

        if self._folder is None or self._opened is not None or self._failure is not None:
            return False
        assert self.identity is not None, "the folder is named by it"
        self._stage = "index"
        key = index_key(self.identity, self._key)
        folder = self._folder.folder
        ids = tuple(self._files[Rank(rank)].file_id for rank in range(self._ranks))
        slots = min(file.slots for file in self._files.values())
        capacity = min(file.capacity for file in self._files.values())
        found = _find_index(folder, ids, slots, key)
        generation = new_generation() if found is None else found.header.generation
        entries = Entries.none(self._ranks) if found is None else found.entries
        were = len(entries)
        entries, free = entries.fit(capacity, slots)
        index = start_index(folder, IndexHeader(generation, ids, slots, key), entries)
        self._opened = _Opened(index, len(entries))
        is_cut = found is not None and found.is_cut
        log.info(
            "disk_opened",
            folder=str(folder.path),
            slots=capacity,
            blocks=len(entries),
            did_not_fit=were - len(entries),
            index_was_cut=is_cut,
        )
        self.due.extend(_parts(entries, free, slots))
        return self._reset() if self._was_reset else True

    def _write(self) -> bool:
        records = [self._unwritten.popleft() for _ in range(len(self._unwritten))]
        opened = self._opened
        if not records or opened is None or opened.index is None or self._failure is not None:
            return False
        opened.index.append(records)
        opened.is_dirty = True
        opened.entries += sum(isinstance(record, Put) for record in records)
        opened.entries -= sum(isinstance(record, Strike) for record in records)
        if opened.index.is_mostly_garbage(opened.entries):
            opened.index = opened.index.rewritten()
        return True

    def _sync(self) -> bool:
        opened = self._opened
        if opened is not None and opened.index is not None:
            opened.is_dirty = False
            opened.index.sync()
        return True

    def _reset(self) -> bool:
        from kvoffload.disk.index_log import remove_index

        if self._folder is None:
            return False
        opened = self._opened
        remove_index(self._folder.folder, None if opened is None else opened.index)
        if opened is not None and opened.index is not None:
            opened.index.close()
            opened.index = None
            opened.is_dirty = False
        return True

    def _close(self) -> bool:
        opened, self._opened = self._opened, None
        folder, self._folder = self._folder, None
        try:
            if opened is not None and opened.index is not None:
                opened.index.sync()
                opened.index.close()
        finally:
            if folder is not None:
                folder.close()
        return True

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            log.error("disk_closed", reason=reason, note="the engine goes on without it")
            self.due.append(facts.DiskClosed)


def _find_index(
    folder: OpenFolder, files: tuple[bytes, ...], slots: int, key: TierKey | None
) -> IndexContents | None:
    """Return the folder's index of these slot files; None if there is none, or, with a warning, if it cannot be used."""
    from kvoffload.disk.index_format import NotAnIndex
    from kvoffload.disk.index_log import INDEX_NAME, load_index

    try:
        found = load_index(folder, slots, key)
        if found is not None and found.header.files != files:
            raise NotAnIndex(f"it is about other slot files, which had {len(found.entries)} blocks")
    except NotAnIndex as error:
        path = str(folder.path / INDEX_NAME)
        log.warning("disk_index_dropped", file=path, reason=str(error), note="the disk starts empty")
        return None
    return found


def _parts(entries: Entries, free: Sequence[SlotId], slots: int) -> Iterator[Callable[[], facts.Fact]]:
    """Yield functions that make the facts for the core: slots, blocks, free slots, and the end.

    They are made one by one: with a million records alive the garbage collector would stop the engine for longer.
    """
    for some in range(_GROWTH, slots, _GROWTH):
        yield partial(facts.DiskRestored, some)
    for start in range(0, len(entries), _PART):
        yield partial(_blocks, entries, start, slots)
    for start in range(0, len(free), _PART):
        yield partial(facts.DiskRestored, slots, free=tuple(free[start : start + _PART]))
    yield partial(facts.DiskRestored, slots, is_last=True)


def _blocks(entries: Entries, start: int, slots: int) -> facts.Fact:
    return facts.DiskRestored(slots, tuple(entries.puts(start, start + _PART)))
