"""Copies between the host slots of one rank and a remote store, in batches.

A batch goes through a buffer of the calling thread's, which the store's client knows, wherever its process is. So a value is checked
before it comes near a host slot, and a call that hangs has nothing but this buffer under it: its host slots are free for anything else.
With a key it also goes through a second buffer, which only this process can write.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvoffload.disk.system import aligned_buffer
from kvoffload.logs import get_logger
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.errors import RemoteError
from kvoffload.model.transfer import Direction, JobReport
from kvoffload.remote.store import SharedMemory
from kvoffload.remote.values import TRAILER_BYTES, Shard, is_whole, seal
from kvoffload.transfer.layout import digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvoffload.disk.tier_key import TierKey
    from kvoffload.model.transfer import RemoteJob
    from kvoffload.remote.calls import RemoteCalls
    from kvoffload.remote.store import RemoteStore
    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.layout import DeviceLayout
    from kvoffload.transfer.ports import Clock

MOST_BLOCKS = 64
"""Of a batch: more gain nothing."""
_MOST_BYTES = 32 * 2**20  # of a batch: the buffer of a thread
_LINE = 64

log = get_logger("remote")


class RemoteReport(NamedTuple):
    """What a rank reports of a remote store.

    Args:
        jobs: those that ended since the last report.
        works: calls are made.
        is_new: something of this was not reported before.
    """

    jobs: tuple[JobReport, ...]
    works: bool
    is_new: bool


class _Got(NamedTuple):
    """Of a batch, by position: values that are right, wrong, and not there; and host slots that were found corrupt."""

    whole: list[int]
    wrong: list[int]
    missing: list[int]


@dataclass(slots=True, eq=False)
class _OpenJob:
    job: RemoteJob
    accepted_at: float
    open_batches: int
    copy_s: float = 0.0
    whole: int = 0
    wrong: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)


def batch_blocks(layout: DeviceLayout) -> int:
    """Return the most blocks that one call of a store moves."""
    return max(min(MOST_BLOCKS, _MOST_BYTES // (layout.slot_bytes + TRAILER_BYTES + _LINE)), 1)


class RemoteCopies:
    """Fetches from a store and spills to it, of one rank.

    Args:
        rank, ranks: which of how many.
        calls: to the store; `close` closes them.
        arena: the rank's host memory.
        clock: time.
        checksums: of the host slots, None where none are kept.
        key: authenticates values; None for checksums.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        calls: RemoteCalls,
        arena: Arena,
        clock: Clock,
        *,
        checksums: Checksums | None = None,
        key: TierKey | None = None,
    ) -> None:
        self._rank, self._ranks = rank, ranks
        self._calls = calls
        self._arena = arena
        self._clock = clock
        self._checksums = checksums
        self._key = key
        self._layout = digest_of(arena.layout)
        self._value_bytes = arena.layout.slot_bytes + TRAILER_BYTES
        self._pitch = -(-self._value_bytes // _LINE) * _LINE
        self._batch = batch_blocks(arena.layout)
        self._buffers = threading.local()
        self._reports: list[JobReport] = []
        self._reported: bool | None = None

    # -- the hook's thread --------------------------------------------------------------------------------------

    def submit(self, jobs: Iterable[RemoteJob]) -> None:
        """Queue jobs; those that cannot be started end as failed."""
        for job in jobs:
            positions = range(len(job.slots))
            batches = [positions[start : start + self._batch] for start in positions[:: self._batch]]
            opened = _OpenJob(job, self._clock.monotonic(), len(batches))
            is_put = job.direction is Direction.STORE
            work = self._put if is_put else self._get
            use = None if is_put else partial(self._fill, job)
            for batch in batches:
                ended = partial(self._batch_ended, opened, batch)
                self._calls.submit(partial(work, job, batch), ended, use, is_write=is_put)

    def take(self) -> RemoteReport:
        """Return what ended since the last call. Never waits."""
        self._calls.poll()
        reports = tuple(self._reports)
        self._reports = []
        works = self._calls.works
        is_new = bool(reports) or works is not self._reported
        self._reported = works
        return RemoteReport(reports, works, is_new)

    def close(self) -> None:
        """Take no more jobs. Waits for nothing."""
        self._calls.close()

    def _batch_ended(self, opened: _OpenJob, batch: Sequence[int], got: _Got | None, seconds: float) -> None:
        opened.open_batches -= 1
        opened.copy_s += seconds
        if got is None:
            opened.missing += batch
        else:
            opened.whole += len(got.whole)
            opened.wrong += got.wrong
            opened.missing += got.missing
        if not opened.open_batches:
            self._reports.append(self._report(opened))

    def _report(self, opened: _OpenJob) -> JobReport:
        job, is_put = opened.job, opened.job.direction is Direction.STORE
        outcome = CopyOutcome.DONE if opened.whole else CopyOutcome.FAILED
        if opened.wrong and (is_put or not opened.whole):
            outcome = CopyOutcome.CORRUPT
        waited = self._clock.monotonic() - opened.accepted_at - opened.copy_s
        return JobReport(
            job=job.id,
            direction=job.direction,
            outcome=outcome,
            copied_bytes=opened.whole * self._arena.layout.slot_bytes,
            queue_s=max(waited, 0.0),
            copy_s=opened.copy_s,
            corrupt=tuple(sorted(opened.wrong)),
            missing=tuple(sorted(opened.missing)),
        )

    # -- threads that may wait for the store --------------------------------------------------------------------

    def _put(self, job: RemoteJob, batch: Sequence[int], store: RemoteStore) -> _Got:
        """Write host slots, but for those that do not hold what was stored there."""
        shard, buffers, own = self._shard(job), self._values(store, len(batch)), self._own(len(batch))
        wrong = self._gather(job, batch, own)
        self._copy(own, buffers)
        # After the copies: the slots were not other blocks' meanwhile, whose bytes would get these blocks' names.
        self._calls.check_awaited()
        right = [position for position in batch if position not in wrong]
        values = [value for position, value in zip(batch, buffers, strict=True) if position not in wrong]
        taken = store.put(shard, [job.targets[position] for position in right], values) if right else []
        missing = [position for position, is_taken in zip(right, taken, strict=True) if not is_taken]
        return _Got([position for position in right if position not in missing], wrong, missing)

    def _gather(self, job: RemoteJob, batch: Sequence[int], buffers: Sequence[memoryview]) -> list[int]:
        """Make values of host slots; return the positions of those that do not hold what was stored there."""
        shard, wrong = self._shard(job), list[int]()
        with self._arena.held() as is_open:
            if not is_open:
                raise RemoteError("the host's memory is gone")
            for position, value in zip(batch, buffers, strict=True):
                slot = job.slots[position]
                self._arena.read(slot, self._arena.views(value))
                # After the copy: what the slot holds now it held during the copy too.
                if self._checksums is not None and not self._checksums.is_as_stored(slot):
                    wrong.append(position)
                seal(value, shard.name(job.targets[position]), self._layout, self._key)
        if wrong:
            bad = [job.slots[position] for position in wrong]
            log.error("blocks_corrupt", job=job.id, blocks=len(wrong), slots=bad)
        return wrong

    def _get(self, job: RemoteJob, batch: Sequence[int], store: RemoteStore) -> _Got:
        """Read values into the thread's buffer, and see which are right."""
        shard, buffers, own = self._shard(job), self._values(store, len(batch)), self._own(len(batch))
        keys = [job.targets[position] for position in batch]
        got = _Got([], [], [])
        sizes = store.get(shard, keys, buffers)
        self._copy(buffers, own)
        for position, arrived, value in zip(batch, sizes, own, strict=True):
            if arrived < 0:
                got.missing.append(position)
            elif is_whole(value, arrived, shard.name(job.targets[position]), self._layout, self._key):
                got.whole.append(position)
            else:
                got.wrong.append(position)
        return got

    def _fill(self, job: RemoteJob, got: _Got) -> _Got:
        """Copy the values that are right from the thread's memory into their host slots."""
        first = min([*got.whole, *got.wrong, *got.missing])
        buffers = self._own(len(got.whole) + len(got.wrong) + len(got.missing))
        with self._arena.held() as is_open:
            for position in got.whole if is_open else ():
                slot = job.slots[position]
                self._arena.write(slot, self._arena.views(buffers[position - first]))
                if self._checksums is not None:
                    self._checksums.take(slot)
        return got

    def _values(self, store: RemoteStore | None, count: int) -> list[memoryview]:
        """Return memory of the calling thread's for so many values, which `store` knows; None where that was seen to."""
        own = self._buffers
        buffer: memoryview | None = getattr(own, "buffer", None)
        if buffer is None:
            buffer = own.buffer = memoryview(SharedMemory(self._batch * self._pitch))
            own.known_to = None
        if store is not None and own.known_to is not store:
            store.register(buffer)
            own.known_to = store
        return self._parts(buffer, count)

    def _own(self, count: int) -> list[memoryview]:
        """Return the calling thread's memory in which values are sealed and checked.

        With a key it is not the memory that the store knows: Mooncake lets other machines write there at any time, even between a
        check and a copy.
        """
        if self._key is None:
            return self._values(None, count)
        buffer: memoryview | None = getattr(self._buffers, "own", None)
        if buffer is None:
            buffer = self._buffers.own = aligned_buffer(self._batch * self._pitch)
        return self._parts(buffer, count)

    def _copy(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
        if self._key is None:
            return  # they are the same
        for source, target in zip(sources, targets, strict=True):  # by numpy, without the interpreter's lock
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    def _parts(self, buffer: memoryview, count: int) -> list[memoryview]:
        starts = range(0, count * self._pitch, self._pitch)
        return [buffer[start : start + self._value_bytes] for start in starts]

    def _shard(self, job: RemoteJob) -> Shard:
        return Shard(job.extra, self._rank, self._ranks)
