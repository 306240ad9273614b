"""Checks the core's totals, to find slots, leases and index entries that were never released.

The audit runs in a hook whenever the engine becomes idle, so its cost must not grow with the pool. The tests use a
slower audit, `tests/core/audit.py`, which recomputes every count from the records.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.core.jobs import DeviceJob, Spill
from kvoffload.core.machine import SlotState
from kvoffload.core.state import CoreState
from kvoffload.core.stores import Stores

_CAN_HIT = (SlotState.READY, SlotState.PINNED)
_IN_USE = (SlotState.FILLING, SlotState.PINNED, SlotState.DRAINING)


def audit(state: CoreState, stores: Stores) -> list[str]:
    """Return one line of text for each wrong total. Changes nothing.

    While a request is live or a job is pending, only the totals of slots and of index keys are checked.
    """
    totals = _totals(state, stores)
    return [
        f"{what}: {found} counted, {expected} expected"
        for what, found, expected in totals
        if found != expected
    ]


def _totals(state: CoreState, stores: Stores) -> Iterator[tuple[str, int, int]]:
    """Yield each total's name, counted value and expected value."""
    pool, opened = state.pool, state.jobs.open.values()
    yield "slots in all states", sum(map(pool.count, SlotState)), pool.capacity
    yield "keys of slots that can hit", len(pool.index), sum(map(pool.count, _CAN_HIT))
    if state.requests.live or state.jobs.pending:
        return
    # No job is pending, so every open job has timed out. A timed-out job keeps its leases, its requests' records and,
    # if it is a spill, its pins.
    spilled = [slot for job in opened if isinstance(job, Spill) for slot in job.slots]
    ended = {record for job in opened if isinstance(job, DeviceJob) for record in job.concerns}
    in_use = [slot for slot in pool.pins if pool.state(slot) in _IN_USE]
    yield "pins of slots", sum(pool.pins.values()), len(spilled)
    yield "slots that are FILLING, PINNED or DRAINING", sum(map(pool.count, _IN_USE)), len(in_use)
    yield "slots that can be evicted", pool.room - pool.count(SlotState.EMPTY), pool.count(SlotState.READY)
    yield "slots that requests hold", len(pool.holds), 0
    yield "leases", sum(state.leases.counts.values()), state.stall.blocks
    yield "ended requests", len(state.requests.finishing), len(ended)
    yield "device blocks in tables", len(state.tables.entries) + len(state.tables.shared), 0
    yield "keys in flight", len(stores.in_flight.keys), 0
    yield "offers without an outcome", state.tally.open_offers, len(stores.again)
    yield "slots that others wait for", len(state.requests.loading), 0
    yield "device blocks reserved for requests with loads", state.requests.reserved, 0
    yield "keys watched for eviction", len(stores.evictions.offers), 0
    for tier in state.tiers:
        name = tier.tier.value
        yield f"keys being written to the {name}", len(tier.in_flight.keys), 0
        yield f"blocks being read from the {name}", tier.fetching, 0
        yield f"filling slots of the {name}", tier.pool.count(SlotState.FILLING), 0
