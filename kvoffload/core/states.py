"""The three state machines, each a literal table. What is not in a table is illegal, raises, and changes nothing.

They are three and not one product because they move for different reasons: a slot by what its bytes are worth, a job
by what the workers say, a request by what the engine does. The rules that join them are in `core.desk`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from kvoffload.model.errors import IllegalTransition


class SlotState(IntEnum):
    """What a host slot holds, and who gives it up."""

    EMPTY = 0  # nothing; the pool hands it out
    FILLING = 1  # a store is writing it; held by the job
    READY = 2  # a whole block that can hit; the eviction policy may take it
    PINNED = 3  # a whole block that a lookup found or a load reads; held by every pin
    DRAINING = 4  # worthless, but a copy or a pin still touches it
    QUARANTINED = 5  # never handed out again: its bytes were corrupt, or a copy on it never ended


class SlotEvent(IntEnum):
    """What happens to a host slot."""

    RESERVE = 0
    FILL = 1
    PIN = 2
    UNPIN = 3
    EVICT = 4
    DOOM = 5
    DRAIN = 6
    QUARANTINE = 7


SLOT: Mapping[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.EMPTY, SlotEvent.RESERVE): SlotState.FILLING,
    (SlotState.FILLING, SlotEvent.FILL): SlotState.READY,
    (SlotState.READY, SlotEvent.PIN): SlotState.PINNED,
    (SlotState.PINNED, SlotEvent.UNPIN): SlotState.READY,
    (SlotState.READY, SlotEvent.EVICT): SlotState.EMPTY,
    (SlotState.FILLING, SlotEvent.DOOM): SlotState.DRAINING,
    (SlotState.PINNED, SlotEvent.DOOM): SlotState.DRAINING,
    (SlotState.DRAINING, SlotEvent.DRAIN): SlotState.EMPTY,
    (SlotState.FILLING, SlotEvent.QUARANTINE): SlotState.QUARANTINED,
    (SlotState.READY, SlotEvent.QUARANTINE): SlotState.QUARANTINED,
    (SlotState.PINNED, SlotEvent.QUARANTINE): SlotState.QUARANTINED,
    (SlotState.DRAINING, SlotEvent.QUARANTINE): SlotState.QUARANTINED,
}


class JobState(IntEnum):
    """Where a transfer job stands, all its ranks together."""

    PLANNED = 0  # not yet handed to the workers; may still be cancelled
    SUBMITTED = 1  # on its way; a started copy cannot be taken back
    DONE = 2
    FAILED = 3
    CANCELLED = 4
    ABANDONED = 5  # given up, but a copy may still run


class JobEvent(IntEnum):
    """What happens to a transfer job."""

    SUBMIT = 0
    FINISH = 1
    FAIL = 2
    CANCEL = 3
    ABANDON = 4


JOB: Mapping[tuple[JobState, JobEvent], JobState] = {
    (JobState.PLANNED, JobEvent.SUBMIT): JobState.SUBMITTED,
    (JobState.PLANNED, JobEvent.CANCEL): JobState.CANCELLED,
    (JobState.SUBMITTED, JobEvent.FINISH): JobState.DONE,
    (JobState.SUBMITTED, JobEvent.FAIL): JobState.FAILED,
    (JobState.SUBMITTED, JobEvent.ABANDON): JobState.ABANDONED,
    (JobState.ABANDONED, JobEvent.FINISH): JobState.DONE,
    (JobState.ABANDONED, JobEvent.FAIL): JobState.FAILED,
}


class RequestState(IntEnum):
    """Where a request stands, as far as its blocks go."""

    SEEN = 0  # no block table
    LOADING = 1  # a block table that a load is filling
    RUNNING = 2  # a block table that the engine computes into
    FINISHING = 3  # ended, but jobs on its blocks are open
    GONE = 4


class RequestEvent(IntEnum):
    """What happens to a request."""

    ALLOCATE_AND_LOAD = 0
    ALLOCATE = 1
    LOADED = 2
    LOAD_FAILED = 3
    PREEMPT = 4
    END = 5
    LAST_JOB = 6


REQUEST: Mapping[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.SEEN, RequestEvent.ALLOCATE_AND_LOAD): RequestState.LOADING,
    (RequestState.SEEN, RequestEvent.ALLOCATE): RequestState.RUNNING,
    (RequestState.LOADING, RequestEvent.LOADED): RequestState.RUNNING,
    (RequestState.LOADING, RequestEvent.LOAD_FAILED): RequestState.SEEN,
    (RequestState.RUNNING, RequestEvent.PREEMPT): RequestState.SEEN,
    (RequestState.SEEN, RequestEvent.END): RequestState.FINISHING,
    (RequestState.LOADING, RequestEvent.END): RequestState.FINISHING,
    (RequestState.RUNNING, RequestEvent.END): RequestState.FINISHING,
    (RequestState.FINISHING, RequestEvent.LAST_JOB): RequestState.GONE,
}


SLOT_STEPS = tuple(tuple(SLOT.get((state, event)) for state in SlotState) for event in SlotEvent)
"""The same table by number, event first: it is asked for every block of every copy, and hashing members takes longer."""


def next_slot_state(state: SlotState, event: SlotEvent) -> SlotState:
    """Return the state that follows.

    Raises:
        IllegalTransition: the table has no such step.
    """
    after = SLOT_STEPS[event][state]
    if after is None:
        raise IllegalTransition("slot", state, event)
    return after


def next_job_state(state: JobState, event: JobEvent) -> JobState:
    """Return the state that follows.

    Raises:
        IllegalTransition: the table has no such step.
    """
    try:
        return JOB[state, event]
    except KeyError:
        raise IllegalTransition("job", state, event) from None


def next_request_state(state: RequestState, event: RequestEvent) -> RequestState:
    """Return the state that follows.

    Raises:
        IllegalTransition: the table has no such step.
    """
    try:
        return REQUEST[state, event]
    except KeyError:
        raise IllegalTransition("request", state, event) from None
