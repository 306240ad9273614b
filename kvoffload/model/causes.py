"""Why things ended as they did: every label of every metric comes from here."""

from __future__ import annotations

from enum import Enum


class Cause(Enum):
    """Base of all: a member's hash is its identity's. `Enum`'s own is a call of Python, and members are keys of dicts."""

    __hash__ = object.__hash__


class MissCause(Cause):
    """Why a looked-up block did not hit. Exactly one a block; they sum to the missed blocks."""

    NEVER_SEEN = "never_seen"  # no block with this key was ever offered, or so long ago that it is forgotten
    EVICTED = "evicted"  # it was on the host and made room for another
    STORING = "storing"  # its store is still open
    DECLINED_HOST_FULL = "declined_host_full"  # offered, but every slot was in use
    DECLINED_NOT_READY = "declined_not_ready"  # offered before host memory was ready
    DECLINED_STALE = "declined_stale"  # offered after the engine had handed its device block out again
    DECLINED_LEASE_LIMIT = "declined_lease_limit"  # offered while a quarter of the device pool was leased
    DECLINED_STALLED = "declined_stalled"  # offered while copies did not end
    DECLINED_OTHER = "declined_other"  # offered and declined for another reason
    LOST = "lost"  # the device dropped it before it could be stored
    STORE_FAILED = "store_failed"  # its copy to the host failed
    AFTER_RESET = "after_reset"  # it was on the host until the last reset
    LOAD_FAILED = "load_failed"  # a load of this request failed, or the last load of this block did
    CORRUPT = "corrupt"  # its checksum did not match when it was last checked
    LOAD_DECLINED = "load_declined"  # the hit was shorter than min_load_tokens
    NOT_ACCEPTED = "not_accepted"  # it was found, and the engine took less than it was promised
    LAST_TOKEN = "last_token"  # one token of a prompt must always be computed
    READ_AHEAD = "read_ahead"  # a speculative draft reads ahead of the last matched block
    PARTIAL_BLOCK = "partial_block"  # the tokens behind the last whole block
    BEHIND_MISS = "behind_miss"  # behind the first missing block, so it could not be used
    OPTED_OUT = "opted_out"  # the request asked not to read cached blocks
    STALLED = "stalled"  # copies did not end, so no load is begun
    DEGRADED = "degraded"  # offloading was switched off by a broken law


class StoreOutcome(Cause):
    """What became of a computed block that was offered to the host. Exactly one an offer."""

    STORED = "stored"
    ALREADY_CACHED = "already_cached"  # the host has this key
    IN_FLIGHT = "in_flight"  # another device block with this key was being stored, and arrived
    STALE = "stale"  # the engine handed the device block out again
    NOT_HASHED = "not_hashed"  # the engine does not know the block's hash
    HOST_FULL = "host_full"  # no slot was empty or evictable
    NOT_READY = "not_ready"  # no slot was empty or evictable, and host memory was still being made ready
    LEASE_LIMIT = "lease_limit"  # a quarter of the device pool was leased already
    STALLED = "stalled"  # copies did not end, so no store was begun
    REQUEST_GONE = "request_gone"  # the request ended without holding its blocks
    LOST = "lost"  # preempted, or evicted on the device before it could be stored
    BEFORE_RESET = "before_reset"  # computed, wholly or in part, before the last reset
    FAILED = "failed"  # a rank's copy failed
    ABANDONED = "abandoned"  # a rank's copy did not end in time
    CANCELLED = "cancelled"  # a reset came before the copy was submitted
    DEGRADED = "degraded"


class LoadOutcome(Cause):
    """How the load of a block ended."""

    LOADED = "loaded"
    FAILED = "failed"
    CORRUPT = "corrupt"
    ABANDONED = "abandoned"
    CANCELLED = "cancelled"  # the request ended, or its hit was gone, before the copy was submitted


class CopyOutcome(Cause):
    """What one rank says of its part of a job."""

    DONE = "done"
    FAILED = "failed"
    CORRUPT = "corrupt"


class EvictionCause(Cause):
    """Why a block left the host."""

    SPACE = "space"
    RESET = "reset"
    LOAD_FAILED = "load_failed"
    CORRUPT = "corrupt"
    ABANDONED = "abandoned"


class Found(Cause):
    """What a request's last lookup before its first token found of its prompt."""

    HOST = "host"  # whatever the device had too
    DEVICE = "device"
    NOTHING = "nothing"


class PinDropCause(Cause):
    """Why pinned blocks were let go without a load."""

    LOOKED_UP_AGAIN = "looked_up_again"
    NOT_ACCEPTED = "not_accepted"
    REQUEST_ENDED = "request_ended"
    RESET = "reset"


class RejectionCause(Cause):
    """What an engine did that the contract does not foresee. Counted always, logged once, survived."""

    TOKENS_WITHOUT_PIN = "tokens_without_pin"
    UNKNOWN_REQUEST = "unknown_request"
    UNKNOWN_JOB = "unknown_job"


class DegradeCause(Cause):
    """Why offloading was switched off for good."""

    HANDLER_RAISED = "handler_raised"
    LAW_BROKEN = "law_broken"
    TRANSFER_DEAD = "transfer_dead"
