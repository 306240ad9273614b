"""The audit: totals that show what requests and jobs have left behind.

It runs in a hook whenever the engine becomes idle, so it compares totals and looks at no slot. `tests/core/audit.py` derives
every count and index from the records again.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.core.jobs import DeviceJob, Spill
from kvoffload.core.machine import SlotState
from kvoffload.core.state import CoreState
from kvoffload.core.stores import Stores

_CAN_HIT = (SlotState.READY, SlotState.PINNED)
_Total = tuple[str, int, int]


def audit(state: CoreState, stores: Stores) -> list[str]:
    """Return the totals that are wrong as one line of text each. Reads only.

    Few of them hold at any time. The others do while no request is known and no copy is waited for.
    """
    totals = [*_at_any_time(state)]
    if not (state.requests.live or state.jobs.pending):
        totals += _at_rest(state, stores)
        for tier in state.tiers:
            name = tier.tier.value
            totals += [
                (f"keys being written to the {name}", len(tier.in_flight.keys), 0),
                (f"blocks being read from the {name}", tier.fetching, 0),
                (f"filling slots of the {name}", tier.pool.count(SlotState.FILLING), 0),
            ]
    return [
        f"{what}: {found} counted, {expected} expected"
        for what, found, expected in totals
        if found != expected
    ]


def _at_any_time(state: CoreState) -> Iterator[_Total]:
    pool = state.pool
    yield "slots in all states", sum(map(pool.count, SlotState)), pool.capacity
    yield "keys of slots that can hit", len(pool.index), sum(map(pool.count, _CAN_HIT))


def _at_rest(state: CoreState, stores: Stores) -> Iterator[_Total]:
    """Yield what only jobs that timed out may still have: leases, and pins and requests of theirs."""
    pool, opened = state.pool, state.jobs.open.values()
    spilled = [slot for job in opened if isinstance(job, Spill) for slot in job.slots]
    ended = {record for job in opened if isinstance(job, DeviceJob) for record in job.concerns}
    in_use = [slot for slot in pool.pins if pool.state(slot) in (SlotState.PINNED, SlotState.DRAINING)]
    busy = sum(map(pool.count, (SlotState.FILLING, SlotState.PINNED, SlotState.DRAINING)))
    yield "pins of slots", sum(pool.pins.values()), len(spilled)
    yield "slots that are FILLING, PINNED or DRAINING", busy, len(in_use)
    yield "slots that can be evicted", pool.room - pool.count(SlotState.EMPTY), pool.count(SlotState.READY)
    yield "slots that requests hold", len(pool.holds), 0
    yield "leases", sum(state.leases.counts.values()), state.stall.blocks
    yield "ended requests", len(state.requests.finishing), len(ended)
    yield "device blocks in tables", len(state.tables.entries) + len(state.tables.shared), 0
    yield "keys in flight", len(stores.in_flight.keys), 0
    yield "offers without an outcome", state.tally.open_offers, len(stores.again)
    yield "slots that others wait for", len(state.requests.loading), 0
    yield "keys watched for eviction", len(stores.evictions.offers), 0
