"""Checks the core's totals, to find slots, leases and index entries that were never released.

The audit runs in a hook whenever the engine becomes idle, so its cost must not grow with the pool. The tests use a
slower audit, `tests/core/audit.py`, which recomputes every count from the records.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.core.host import HostState
from kvoffload.core.jobs import DeviceJob, Spill
from kvoffload.core.machine import SlotState
from kvoffload.core.state import CoreState
from kvoffload.core.stores import Stores

_CAN_HIT = (SlotState.READY, SlotState.PINNED)
_IN_USE = (SlotState.FILLING, SlotState.PINNED, SlotState.DRAINING)


Total = tuple[str, int, int]
"""A total's name, its counted value and its expected value."""


def audit(state: CoreState, stores: Stores) -> list[str]:
    """Return one line of text for each wrong total. Changes nothing.

    While a request is live or a job is pending, only the totals of slots and of index keys are checked.
    """
    if state.requests.live or state.jobs.pending:
        return wrong(totals(state))
    return wrong(totals(state) + totals_at_rest(state) + _totals_of_requests(state, stores))


def wrong(totals: Iterable[Total]) -> list[str]:
    """Return one line of text for each total that is not as expected."""
    return [
        f"{what}: {found} counted, {expected} expected"
        for what, found, expected in totals
        if found != expected
    ]


def totals(state: HostState) -> list[Total]:
    """Return the totals that always hold."""
    pool = state.pool
    return [
        ("slots in all states", sum(map(pool.count, SlotState)), pool.capacity),
        ("keys of slots that can hit", len(pool.index), sum(map(pool.count, _CAN_HIT))),
    ]


def totals_at_rest(state: HostState) -> list[Total]:
    """Return the totals of a host whose open jobs have all timed out. A timed-out spill keeps its pins."""
    pool, opened = state.pool, state.jobs.open.values()
    spilled = [slot for job in opened if isinstance(job, Spill) for slot in job.slots]
    in_use = [slot for slot in pool.pins if pool.state(slot) in _IN_USE]
    totals = [
        ("pins of slots", sum(pool.pins.values()), len(spilled)),
        ("slots that are FILLING, PINNED or DRAINING", sum(map(pool.count, _IN_USE)), len(in_use)),
        ("slots that can be evicted", pool.room - pool.count(SlotState.EMPTY), pool.count(SlotState.READY)),
        ("keys in flight", len(state.in_flight.keys), 0),
    ]
    for tier in state.tiers:
        name = tier.tier.value
        totals += [
            (f"keys being written to the {name}", len(tier.in_flight.keys), 0),
            (f"blocks being read from the {name}", tier.fetching, 0),
            (f"filling slots of the {name}", tier.pool.count(SlotState.FILLING), 0),
        ]
    return totals


def _totals_of_requests(state: CoreState, stores: Stores) -> list[Total]:
    """Return the totals of an engine at rest. A timed-out job keeps its leases and its requests' records."""
    opened = state.jobs.open.values()
    ended = {record for job in opened if isinstance(job, DeviceJob) for record in job.concerns}
    return [
        ("slots that requests hold", len(state.pool.holds), 0),
        ("leases", sum(state.leases.counts.values()), state.stall.blocks),
        ("ended requests", len(state.requests.finishing), len(ended)),
        ("device blocks in tables", len(state.tables.entries) + len(state.tables.shared), 0),
        ("offers without an outcome", state.tally.open_offers, len(stores.again)),
        ("slots that others wait for", len(state.requests.loading), 0),
        ("device blocks reserved for requests with loads", state.requests.reserved, 0),
        ("keys watched for eviction", len(stores.evictions.watches), 0),
    ]
