"""Copies between the host slots of one rank and a remote tier, in batches.

A batch goes through the calling thread's buffer, which is registered with the remote client. A value is verified before
it is copied from the buffer to a host slot. A hanging call can change only this buffer, so its job's host slots can be
reused. With a key, a batch also goes through a second buffer, which only this process can write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.disk.system import aligned_buffer
from kvoffload.logs import get_logger
from kvoffload.remote.client import SharedMemory
from kvoffload.remote.values import TRAILER_BYTES, Shard, is_whole, seal
from kvoffload.transfer.blocking_calls import BlockingCalls, Breaker
from kvoffload.transfer.layout import digest_of
from kvoffload.transfer.per_thread import PerThread
from kvoffload.transfer.tier_jobs import find_corrupt

if TYPE_CHECKING:
    from kvoffload.disk.tier_key import TierKey
    from kvoffload.model.wire import AnyJob
    from kvoffload.remote.store import RemoteStore
    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.blocking_calls import Call
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.layout import DeviceLayout
    from kvoffload.transfer.tier_jobs import TierPart

MOST_BLOCKS = 64
"""The maximum number of blocks in a batch. Larger batches are not faster."""
_MOST_BYTES = 32 * 2**20  # maximum size of a batch, and therefore of a thread's buffer, in bytes
_LINE = 64

log = get_logger("remote")


def batch_blocks(layout: DeviceLayout) -> int:
    """Return the maximum number of blocks that one call to a remote tier copies."""
    return max(min(MOST_BLOCKS, _MOST_BYTES // (layout.slot_bytes + TRAILER_BYTES + _LINE)), 1)


def remote_calls(
    connect: Callable[[], RemoteStore],
    executor: Executor,
    monotonic: Callable[[], float],
    timeout_s: float,
    **who: object,
) -> BlockingCalls[RemoteStore]:
    """Return an object through which the scheduler's side or a worker calls a remote tier.

    Args:
        connect: opens the connection; may raise, and may block for a while.
        executor: its threads make the calls, and may block for any length of time.
        monotonic: returns the time in seconds; callable from any thread.
        timeout_s: how many seconds a call may wait in the queue, and how many it may then take.
        who: log fields that identify the owner of the calls.
    """
    return BlockingCalls(connect, executor, monotonic, Breaker(log.bind(**who)), timeout_s)


class RemoteMover:
    """Copies between host slots and a remote tier.

    Args:
        rank, ranks: the rank, and the number of ranks.
        arena: the rank's host memory.
        checksums: the checksums of the host slots; None if none are kept.
        key: authenticates values; None if they have checksums instead.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        arena: Arena,
        checksums: Checksums | None = None,
        key: TierKey | None = None,
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._arena = arena
        self._checksums = checksums
        self._key = key
        self._layout = digest_of(arena.layout)
        self._value_bytes = arena.layout.slot_bytes + TRAILER_BYTES
        self._pitch = -(-self._value_bytes // _LINE) * _LINE
        self._batch = batch_blocks(arena.layout)
        size = self._batch * self._pitch
        self._shared = PerThread(lambda: memoryview(SharedMemory(size)))
        self._private = PerThread(lambda: aligned_buffer(size))

    def positions_of(self, job: AnyJob) -> list[Sequence[int]]:
        positions = range(len(job.slots))
        return [positions[start : start + self._batch] for start in positions[:: self._batch]]

    def put(self, part: TierPart, call: Call, store: RemoteStore) -> TierPart:
        """Write host slots to the remote tier, skipping host slots whose bytes have changed."""
        job, batch = part.job, part.positions
        shard = self._shard(job)
        buffers = self._values(store, len(batch))
        own = self._own(len(batch))
        with self._arena.held():
            for position, value in zip(batch, own, strict=True):
                self._arena.read(job.slots[position], self._arena.views(value))
                seal(value, shard.name(job.targets[position]), self._layout, self._key)
            find_corrupt(part, self._checksums, log)
        self._copy(own, buffers)
        # Check this after the copies. If the slots have been reused, the copied bytes must not be written under the
        # names of the part's blocks.
        call.check()
        values = {
            position: value
            for position, value in zip(batch, buffers, strict=True)
            if position not in part.corrupt
        }
        keys = [job.targets[position] for position in values]
        taken = store.put(shard, keys, list(values.values())) if values else []
        part.whole = [position for position, is_taken in zip(values, taken, strict=True) if is_taken]
        part.refused = None if all(taken) else store.refusals.fault
        return part

    def get(self, part: TierPart, _: Call, store: RemoteStore) -> TierPart:
        """Read values into the thread's buffer, and verify them."""
        job, batch = part.job, part.positions
        shard = self._shard(job)
        buffers = self._values(store, len(batch))
        own = self._own(len(batch))
        sizes = store.get(shard, [job.targets[position] for position in batch], buffers)
        self._copy(buffers, own)
        for position, arrived, value in zip(batch, sizes, own, strict=True):
            if arrived < 0:
                continue
            name = shard.name(job.targets[position])
            is_right = is_whole(value, arrived, name, self._layout, self._key)
            (part.whole if is_right else part.corrupt).append(position)
        return part

    def fill(self, part: TierPart) -> TierPart:
        """Copy the correct values from the thread's buffer into their host slots."""
        buffers, slots = self._own(len(part.positions)), part.job.slots
        with self._arena.held():
            for position in part.whole:
                value = buffers[position - part.positions[0]]
                self._arena.write(slots[position], self._arena.views(value))
            if part.whole and self._checksums is not None:
                self._checksums.take(*[slots[position] for position in part.whole])
        return part

    def _values(self, store: RemoteStore, count: int) -> list[memoryview]:
        """Return space for `count` values in the thread's buffer, which is registered with `store`."""
        shared = self._shared
        if getattr(shared, "known_to", None) is not store:
            store.register(shared.own)
            shared.known_to = store
        return self._parts(shared.own, count)

    def _own(self, count: int) -> list[memoryview]:
        """Return memory of the calling thread in which values are sealed and verified.

        With a key, this memory is not registered: Mooncake lets other machines write to registered memory at any time,
        even between the verification and the copy.
        """
        return self._parts((self._shared if self._key is None else self._private).own, count)

    def _copy(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
        if self._key is None:
            return  # Source and target are the same memory.
        for source, target in zip(sources, targets, strict=True):  # numpy releases the GIL while it copies.
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    def _parts(self, buffer: memoryview, count: int) -> list[memoryview]:
        starts = range(0, count * self._pitch, self._pitch)
        return [buffer[start : start + self._value_bytes] for start in starts]

    def _shard(self, job: AnyJob) -> Shard:
        return Shard(job.extra, self._rank, self._ranks)
