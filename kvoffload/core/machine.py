"""The state machines of slots, jobs and requests, each written as a literal table.

A transition that a table does not list raises `IllegalTransition` and changes nothing. There are three machines because
slots, jobs and requests change for different reasons: a slot when its bytes become valid or invalid, a job when workers
report, a request when the engine acts.

Other modules copy the members that they compare often to module-level names, some as plain integers: in CPython 3.11,
accessing an enum member through its class and comparing `IntEnum` members are slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Generic, TypeVar

from kvoffload.model.errors import IllegalTransition

S = TypeVar("S", bound=IntEnum)
E = TypeVar("E", bound=IntEnum)


class Machine(Generic[S, E]):
    """A state machine defined by a table. `steps[event][state]` gives the next state, or raises `IllegalTransition`.

    Args:
        name: the machine's name, for errors.
        states, events: the enums of the table; their members are numbered from 0.
        table: the legal transitions.
    """

    def __init__(self, name: str, states: type[S], events: type[E], table: Mapping[tuple[S, E], S]) -> None:
        self.name = name
        self.states = states
        self.events = events
        self.table = table
        self.steps = tuple(_Steps(self, event) for event in events)
        self.only = {event: (bytes((before,)), int(after)) for (before, event), after in table.items()}
        """For each event that is legal in exactly one state: this state as one byte, and the next state.

        The pool uses these entries to move many slots at once.
        """


class _Steps(dict[int, S]):
    """Maps each state to the next state for one event. It is a dict because a dict lookup runs no Python function."""

    def __init__(self, machine: Machine[S, E], event: E) -> None:
        super().__init__({before: after for (before, on), after in machine.table.items() if on is event})
        self._machine = machine
        self._event = event

    def __missing__(self, state: int) -> S:
        raise IllegalTransition(self._machine.name, self._machine.states(state), self._event)


class SlotState(IntEnum):
    EMPTY = 0  # the slot contains nothing and can be allocated
    FILLING = 1  # a job is writing to the slot
    READY = 2  # the slot contains a whole block that can hit, and can be evicted
    PINNED = 3  # like READY, but pinned by a lookup or by a job that reads the slot
    DRAINING = 4  # the slot's block is invalid, but a copy or a pin still uses the slot
    # never allocated: the slot's bytes are corrupt, a copy into the slot did not end, or the disk lacks space for it
    QUARANTINED = 5


class SlotEvent(IntEnum):
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
    """The state of a transfer job, across all ranks."""

    PLANNED = 0  # the job has not been sent to the workers, so it can be cancelled
    SUBMITTED = 1  # the job has been sent to the workers, which finish every copy that they have started
    DONE = 2
    FAILED = 3
    CANCELLED = 4
    ABANDONED = 5  # the job timed out, but a rank may still be copying


class JobEvent(IntEnum):
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
    """The state of a request and its block table."""

    SEEN = 0  # the request has no block table yet
    LOADING = 1  # a load is filling the request's block table
    RUNNING = 2  # the engine computes into the request's block table
    FINISHING = 3  # the request has ended, but jobs on its blocks are open
    GONE = 4


class RequestEvent(IntEnum):
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
