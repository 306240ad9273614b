"""Counts a pump's open work, by reading its private state."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.transfer.pump import TransferPump


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    open_jobs: int
    queued_stores: int  # of which a part has not been started
    pending_batches: int  # without the abandoned ones
    abandoned_batches: int
    store_bytes_in_flight: int
    store_bytes_bound: int


def statistics_of(pump: TransferPump) -> TransferStatistics:
    return TransferStatistics(
        open_jobs=len(pump._ledger),
        queued_stores=len(pump._queue),
        pending_batches=sum(map(len, pump._lanes)),
        abandoned_batches=pump._abandoned,
        store_bytes_in_flight=pump._stores.pending_bytes,
        store_bytes_bound=int(pump._queue.limit.value),
    )
