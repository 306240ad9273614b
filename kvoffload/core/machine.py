"""The three state machines: slot, job and request, each one literal table.

What a table does not hold is illegal: it raises `IllegalTransition` and changes nothing. The machines are three and not
one product because they move for different reasons: a slot by what its bytes are worth, a job by what the workers report,
a request by what the engine does.

Other modules keep the members that they compare often in names of their own, some as plain integers: CPython 3.11 is slow to
reach an enum's member through its class, and to compare members of an `IntEnum`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Generic, TypeVar

from kvoffload.model.errors import IllegalTransition

S = TypeVar("S", bound=IntEnum)
E = TypeVar("E", bound=IntEnum)


class Machine(Generic[S, E]):
    """One table, in the encoding that the product runs on: `steps[event][state]` is the next state, or raises.

    Args:
        name: of the machine, for errors.
        states, events: what the table is made of; members are numbered from 0.
        table: the legal steps.
    """

    def __init__(self, name: str, states: type[S], events: type[E], table: Mapping[tuple[S, E], S]) -> None:
        self.name = name
        self.states = states
        self.events = events
        self.table = table
        self.steps = tuple(_Steps(self, event) for event in events)
        self.only = {event: (bytes((before,)), int(after)) for (before, event), after in table.items()}
        """Per event that one state alone allows, that state as one byte and the next state: for moves of many."""


class _Steps(dict[int, S]):
    """Of one event: the next state by state. Where a call counts, it is read without one."""

    def __init__(self, machine: Machine[S, E], event: E) -> None:
        super().__init__({before: after for (before, on), after in machine.table.items() if on is event})
        self._machine = machine
        self._event = event

    def __missing__(self, state: int) -> S:
        raise IllegalTransition(self._machine.name, self._machine.states(state), self._event)


class SlotState(IntEnum):
    """What a host slot holds, and who releases it."""

    EMPTY = 0  # nothing; the pool hands it out
    FILLING = 1  # a store is writing it; held by the job
    READY = 2  # a whole block that can hit; the eviction policy may take it
    PINNED = 3  # a whole block that a lookup found or a load reads; held by every pin
    DRAINING = 4  # worthless, but a copy or a pin still uses it
    QUARANTINED = (
        5  # not handed out: its bytes were corrupt, a copy on it never ended, or it has no space on disk
    )


class SlotEvent(IntEnum):
    """What happens to a host slot."""

    RESERVE = 0
    FILL = 1
    PIN = 2
    UNPIN = 3
    EVICT = 4
    INVALIDATE = 5
    DRAIN = 6
    QUARANTINE = 7


SLOT = Machine(
    "slot",
    SlotState,
    SlotEvent,
    {
        (SlotState.EMPTY, SlotEvent.RESERVE): SlotState.FILLING,
        (SlotState.FILLING, SlotEvent.FILL): SlotState.READY,
        (SlotState.READY, SlotEvent.PIN): SlotState.PINNED,
        (SlotState.PINNED, SlotEvent.UNPIN): SlotState.READY,
        (SlotState.READY, SlotEvent.EVICT): SlotState.EMPTY,
        (SlotState.FILLING, SlotEvent.INVALIDATE): SlotState.DRAINING,
        (SlotState.PINNED, SlotEvent.INVALIDATE): SlotState.DRAINING,
        (SlotState.DRAINING, SlotEvent.DRAIN): SlotState.EMPTY,
        (SlotState.FILLING, SlotEvent.QUARANTINE): SlotState.QUARANTINED,
        (SlotState.READY, SlotEvent.QUARANTINE): SlotState.QUARANTINED,
        (SlotState.PINNED, SlotEvent.QUARANTINE): SlotState.QUARANTINED,
        (SlotState.DRAINING, SlotEvent.QUARANTINE): SlotState.QUARANTINED,
    },
)


class JobState(IntEnum):
    """Where a transfer job stands, all its ranks together."""

    PLANNED = 0  # not yet handed to the workers; may still be cancelled
    SUBMITTED = 1  # with the workers; a started copy cannot be taken back
    DONE = 2
    FAILED = 3
    CANCELLED = 4
    ABANDONED = 5  # timed out, but a copy may still run


class JobEvent(IntEnum):
    """What happens to a transfer job."""

    SUBMIT = 0
    FINISH = 1
    FAIL = 2
    CANCEL = 3
    ABANDON = 4


JOB = Machine(
    "job",
    JobState,
    JobEvent,
    {
        (JobState.PLANNED, JobEvent.SUBMIT): JobState.SUBMITTED,
        (JobState.PLANNED, JobEvent.CANCEL): JobState.CANCELLED,
        (JobState.SUBMITTED, JobEvent.FINISH): JobState.DONE,
        (JobState.SUBMITTED, JobEvent.FAIL): JobState.FAILED,
        (JobState.SUBMITTED, JobEvent.ABANDON): JobState.ABANDONED,
        (JobState.ABANDONED, JobEvent.FINISH): JobState.DONE,
        (JobState.ABANDONED, JobEvent.FAIL): JobState.FAILED,
    },
)


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


REQUEST = Machine(
    "request",
    RequestState,
    RequestEvent,
    {
        (RequestState.SEEN, RequestEvent.ALLOCATE_AND_LOAD): RequestState.LOADING,
        (RequestState.SEEN, RequestEvent.ALLOCATE): RequestState.RUNNING,
        (RequestState.LOADING, RequestEvent.LOADED): RequestState.RUNNING,
        (RequestState.LOADING, RequestEvent.LOAD_FAILED): RequestState.SEEN,
        (RequestState.RUNNING, RequestEvent.PREEMPT): RequestState.SEEN,
        (RequestState.SEEN, RequestEvent.END): RequestState.FINISHING,
        (RequestState.LOADING, RequestEvent.END): RequestState.FINISHING,
        (RequestState.RUNNING, RequestEvent.END): RequestState.FINISHING,
        (RequestState.FINISHING, RequestEvent.LAST_JOB): RequestState.GONE,
    },
)
