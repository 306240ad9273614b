"""Counts a pump's work, by reading the pump's private state."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.transfer.pump import TransferPump


class CountedPump(TransferPump):
    """A pump that counts how often its coroutine wakes up."""

    turns = 0

    def _turn(self) -> bool:
        self.turns += 1
        return super()._turn()


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """A pump's counts since its start, and its current state.

    Args:
        wake_ups: how often the coroutine woke up; grows only while copies are pending or jobs arrive.
        open_jobs: jobs that have not ended.
        queued_stores: stores of which a part has not been started.
        pending_batches: batches that have not ended, not counting abandoned batches.
        abandoned_batches: batches that were abandoned and have not ended.
        store_bytes_in_flight: bytes of the pending store batches.
        store_bytes_bound: the current limit on `store_bytes_in_flight`.
    """

    wake_ups: int
    open_jobs: int
    queued_stores: int
    pending_batches: int
    abandoned_batches: int
    store_bytes_in_flight: int
    store_bytes_bound: int


def statistics_of(pump: TransferPump) -> TransferStatistics:
    return TransferStatistics(
        wake_ups=pump.turns if isinstance(pump, CountedPump) else 0,
        open_jobs=len(pump._ledger),
        queued_stores=len(pump._queue),
        pending_batches=sum(map(len, pump._lanes)),
        abandoned_batches=pump._abandoned,
        store_bytes_in_flight=pump._stores.pending_bytes,
        store_bytes_bound=int(pump._queue.limit.value),
    )
