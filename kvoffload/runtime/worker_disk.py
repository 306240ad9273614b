"""A rank's slot file and the copies to it, from when the file is open."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Executor
from contextlib import suppress
from typing import TYPE_CHECKING

from kvoffload.disk.identity import index_key
from kvoffload.disk.index_format import Entries, NotAnIndex
from kvoffload.disk.index_log import load_index
from kvoffload.disk.open_folder import LOCK_PAUSE_S, LOCK_TRIES
from kvoffload.disk.slot_file import SlotFile, SlotFileInUse, SlotShape, open_slot_file
from kvoffload.disk.system import PAGE
from kvoffload.logs import get_logger
from kvoffload.model.disk import DiskFile
from kvoffload.model.errors import DiskError
from kvoffload.runtime.disk_index import reason_of
from kvoffload.transfer.disk_copies import DiskCopies, DiskReport

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kvoffload.disk.folder import DiskPlace
    from kvoffload.disk.open_folder import OpenFolder
    from kvoffload.disk.tier_key import TierKey
    from kvoffload.model.ids import JobId
    from kvoffload.model.transfer import DiskJob
    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.ports import Clock

log = get_logger("disk")


class WorkerDisk:
    """The disk of one rank. The file is opened on a thread, so nothing waits for a file system that is slow to give space.

    Args:
        place: where the file belongs.
        shape: of its slots.
        size: bytes that it may have.
        arena: the rank's host memory.
        executor: threads that may wait for the disk.
        clock: time.
        timeout_s: seconds after which a call counts as never returning.
        checksums: of the host slots, None where none are kept.
        key: authenticates slots and index; None for checksums.
    """

    def __init__(
        self,
        place: DiskPlace,
        shape: SlotShape,
        size: int,
        arena: Arena,
        executor: Executor,
        clock: Clock,
        *,
        timeout_s: float,
        checksums: Checksums | None = None,
        key: TierKey | None = None,
    ) -> None:
        self._place = place
        self._shape = shape
        self._slots = (size - PAGE) // shape.pitch
        self._arena = arena
        self._executor = executor
        self._clock = clock
        self._timeout_s = timeout_s
        self._checksums = checksums
        self._key = key
        self._copies: DiskCopies | None = None
        self._file: DiskFile | None = None
        self._is_refused = False
        self._closing = threading.Event()
        self._reported: bool | None = None
        executor.submit(self._open)

    def submit(self, jobs: Iterable[DiskJob]) -> None:
        """Queue jobs. The scheduler plans none before it knows of the file."""
        assert self._copies is not None, "the file is not open"
        self._copies.submit(jobs)

    def cancel(self, jobs: Collection[JobId]) -> None:
        """End fetches that no request waits for any more. Before the file is open they are all of another tier."""
        if self._copies is not None:
            self._copies.cancel(jobs)

    def take(self) -> DiskReport | None:
        """Return what the disk reports, None before it is known whether the file can be opened. Never waits."""
        copies = self._copies
        if self._is_refused:
            is_new = self._reported is None
            self._reported = False
            return DiskReport((), works=False, file=None, is_new=is_new)
        if copies is None or self._file is None:
            return None
        copies.poll()
        jobs, works = copies.take_reports(), copies.is_working
        is_new = bool(jobs) or works is not self._reported
        self._reported = works
        return DiskReport(jobs, works, self._file, is_new)

    def close(self) -> None:
        """Take no more jobs; the file is closed when the last call in it has returned."""
        self._closing.set()
        if self._copies is not None:
            self._copies.close()
        self._executor.shutdown(wait=False)

    def _open(self) -> None:
        try:
            file = self._opened()
        except CancelledError:  # the engine stops before its KV is identified
            return
        except Exception as error:  # or the other ranks would wait for this one
            log.error(
                "disk_not_opened",
                rank=self._shape.rank,
                reason=reason_of(error),
                note="the engine goes on without it",
            )
            self._is_refused = True
            return
        if self._closing.is_set():
            file.close()
            return
        if file.page_cache_reason is not None:
            log.warning("disk_through_page_cache", rank=self._shape.rank, reason=file.page_cache_reason)
        rank = self._shape.rank
        copies = DiskCopies(
            rank,
            file,
            self._arena,
            self._executor,
            self._clock,
            timeout_s=self._timeout_s,
            checksums=self._checksums,
            key=self._key,
        )
        self._file = DiskFile(file.id, file.slots, self._slots)
        self._copies = copies  # last: the hook's thread takes it to mean that the file is known

    def _opened(self) -> SlotFile:
        if self._slots < 1:
            raise DiskError(f"disk_bytes gives each rank less than one block of {self._shape.pitch} bytes")
        with self._place.make_folder() as folder:
            file = self._when_unlocked(folder)
            if file.slots > self._slots:
                self._shrink(file, folder)
        return file

    def _when_unlocked(self, folder: OpenFolder) -> SlotFile:
        """Open the slot file. Workers whose engine was killed hold theirs until they notice, so a locked one is tried again."""
        for number in range(LOCK_TRIES):
            try:
                return open_slot_file(folder, self._shape, self._slots)
            except SlotFileInUse as error:
                if not number:
                    note = "it is tried again for a minute"
                    log.warning("disk_in_use", rank=self._shape.rank, reason=str(error), note=note)
                if self._closing.wait(LOCK_PAUSE_S):
                    break
        return open_slot_file(folder, self._shape, self._slots)

    def _shrink(self, file: SlotFile, folder: OpenFolder) -> None:
        """Give the space of blocks back that no longer fit. The index says which; the scheduler's side keeps the same."""
        rank = self._shape.rank
        try:
            found = None
            with suppress(NotAnIndex):  # the scheduler's side says so
                found = load_index(folder, file.slots, index_key(self._place.identify(), self._key))
            is_ours = found is not None and found.header.files[rank : rank + 1] == (file.id,)
            entries = found.entries if found is not None and is_ours else Entries.none(self._shape.ranks)
            kept, free = entries.fit(self._slots, file.slots)
            file.keep_space([*kept.slots.tolist(), *free])
        except (OSError, DiskError) as error:
            log.warning("disk_space_not_fitted", rank=rank, slots=self._slots, reason=str(error))
