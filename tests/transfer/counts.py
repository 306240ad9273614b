"""What a pump has done, read from its private counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvoffload.transfer.pump import TransferPump


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """Counts since the start, then what is true now.

    Args:
        wake_ups: turns of the coroutine; grows only while something is pending or comes in.
        queries: questions put to tickets.
        batches: submissions to the copier.
        copies: contiguous copies in them.
        open_jobs: jobs that have not ended.
        queued_stores: stores of which a part has not been started.
        pending_batches: batches that have not ended, those written off apart.
        written_off_batches: batches that were abandoned and have not ended.
        store_bytes_in_flight: bytes of the pending store batches.
        store_bytes_bound: the bound on them now.
    """

    wake_ups: int
    queries: int
    batches: int
    copies: int
    open_jobs: int
    queued_stores: int
    pending_batches: int
    written_off_batches: int
    store_bytes_in_flight: int
    store_bytes_bound: int


def statistics_of(pump: TransferPump) -> TransferStatistics:
    """Return the counts as they are now."""
    lanes, ledger = pump._lanes, pump._ledger
    return TransferStatistics(
        wake_ups=pump._wake_ups,
        queries=sum(lane.queries for lane in lanes.all),
        batches=sum(lane.batches for lane in lanes.copies),
        copies=sum(lane.copies for lane in lanes.copies),
        open_jobs=len(ledger),
        queued_stores=len(pump._queue),
        pending_batches=sum(map(len, lanes.all)),
        written_off_batches=lanes.written_off,
        store_bytes_in_flight=lanes.store_bytes,
        store_bytes_bound=int(pump._queue.limit.value),
    )
