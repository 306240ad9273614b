"""Label values that only metrics use. The others are in `kvoffload.model` and `kvoffload.core.machine`."""

from __future__ import annotations

from enum import Enum, StrEnum


class LookupResult(Enum):
    """Results of a looked-up block position."""

    HIT = "hit"
    MISS = "miss"


class HostBytes(Enum):
    """States of host memory."""

    WANTED = "wanted"  # what there will be once all of it is ready
    RESERVED = "reserved"  # ready: pinned, and taken from the machine
    USED = "used"  # the part of it that holds blocks or is being filled


class TierState(Enum):
    """What a tier below the host does."""

    OFF = "off"  # the settings have none
    OPENING = (
        "opening"  # some rank's file is not open, the index was not read yet, or a store was not reached yet
    )
    OPEN = "open"
    FAILING = "failing"  # a call hangs or too many have failed: nothing is copied until it works again
    CLOSED = "closed"  # its index cannot be read or written: it is left alone until the engine starts again


class Answer(Enum):
    """What a store that engines share says of a block."""

    FOUND = "found"
    MISSING = "missing"
    NONE = "none"  # the call failed, took too long, or was not made

    __hash__ = object.__hash__  # as that of a cause


class LoadWait(Enum):
    """What a request waited for before it could compute."""

    OWN_LOAD = "own_load"
    OTHERS_LOAD = "others_load"  # of the same prefix, so that it need not be loaded twice
    FETCH = "fetch"  # from a tier below the host, before the load can begin

    __hash__ = object.__hash__  # as that of a cause


class Hook(StrEnum):
    """The places where an engine calls offloading, the same for every engine. A member or its value may be given."""

    SEEN = "seen"
    LOOKUP = "lookup"
    ALLOCATED = "allocated"
    STEP = "step"
    ENDED = "ended"
    REPORT = "report"
    RESET = "reset"
    OTHER = "other"


class Subscriber(StrEnum):
    """The observers that read the bus through a feed, and the counters on it."""

    LOG = "log"
    JOURNAL = "journal"
    SPANS = "spans"
    COUNTERS = "counters"
    OTHER = "other"


def subscriber_label(name: str) -> str:
    """Return the label of an observer's name. An unknown one is "other", so that names cannot add series."""
    return name if name in _SUBSCRIBERS else Subscriber.OTHER.value


_SUBSCRIBERS = frozenset(member.value for member in Subscriber)


def label_of(member: Enum) -> str:
    """Return an enum member's label: its value, or its name where the value is a number."""
    return member.name.lower() if isinstance(member.value, int) else str(member.value)
