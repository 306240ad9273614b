"""Outcomes and causes: the label values of the metrics."""

from __future__ import annotations

from enum import Enum


class Cause(Enum):
    """Base of all causes.

    Causes are dict keys on hot paths. They hash by identity, because `Enum.__hash__` is a Python function.
    """

    __hash__ = object.__hash__


class MissCause(Cause):
    """Why a block of a lookup missed. Each missed block has exactly one cause."""

    # only a recurrent state is missing on the host: it was never offered, or the request could not wait for its fetch
    NO_STATE = "no_state"
    NEVER_SEEN = "never_seen"  # no block with this key was offered, or the record of the offer was dropped
    EVICTED = "evicted"  # the block was on the host but was evicted for space
    STORING = "storing"  # the block's store is still open
    DECLINED_HOST_FULL = "declined_host_full"  # offered while every slot was in use
    DECLINED_NOT_READY = "declined_not_ready"  # offered before host memory was ready
    DECLINED_STALE = "declined_stale"  # offered after the engine had reused the device block
    DECLINED_LEASE_LIMIT = "declined_lease_limit"  # offered while a quarter of the device pool was leased
    DECLINED_STALLED = "declined_stalled"  # offered while copies were stalled
    DECLINED_OTHER = "declined_other"  # offered and declined for another reason
    SEEN_ONCE = (
        "seen_once"  # offered for the first time to a full host, which stores only blocks offered again
    )
    LOST = "lost"  # the device evicted the block before it was stored
    STORE_FAILED = "store_failed"  # the block's copy to the host failed
    AFTER_RESET = "after_reset"  # a reset removed the block from the host
    LOAD_FAILED = "load_failed"  # the request's load failed, or the block's last load failed
    CORRUPT = "corrupt"  # the block's checksum did not match when it was last checked
    LOAD_DECLINED = "load_declined"  # the block was found, but the hit was shorter than min_load_tokens
    NOT_ACCEPTED = "not_accepted"  # the block was found, but the engine accepted a shorter hit
    # the block was found, but requests whose loads run or have ended need the device, and this request could not wait
    NO_ROOM = "no_room"
    LAST_TOKEN = "last_token"  # the block ends the prompt, whose last token must always be computed
    LOOKAHEAD = "lookahead"  # the last matched block is computed for a draft model, which looks ahead
    PARTIAL_BLOCK = "partial_block"  # the prompt's last block is not whole
    BEHIND_MISS = "behind_miss"  # the block comes after a missing one, so a prefix cannot contain the block
    LIMITED = "limited"  # the request's own limits exclude the block from loads, its tier from fetches, or its store
    UNSAFE_HASHES = "unsafe_hashes"  # the engine's hashes of this request, or of the one that offered the block, may be wrong
    STALLED = "stalled"  # no load may start while copies are stalled
    ON_NODE = (
        "on_node"  # another engine of this machine has the block, but the request could not wait for a fetch
    )
    ON_DISK = "on_disk"  # the block is on the disk, but the request could not wait for a fetch
    IN_REMOTE = "in_remote"  # the block is in the remote tier, but the request could not wait for a fetch
    TIER_OPENING = "tier_opening"  # the lookup came before the disk's index was read
    DEGRADED = "degraded"  # offloading is off because an invariant was broken


class Deferral(Cause):
    """Why a lookup answered "not yet"."""

    OTHERS_LOAD = "others_load"  # another request is loading the same prefix
    FETCH = "fetch"  # a tier below the host has the request's blocks, or is asked for them
    ROOM = "room"  # requests whose loads run or have ended need so much of the device that no other may load


class StoreOutcome(Cause):
    """What happened to a computed block that was offered to the host. Each offer has exactly one outcome."""

    STORED = "stored"
    ALREADY_CACHED = "already_cached"  # the host has the block's key
    IN_FLIGHT = "in_flight"  # another job was copying a block with the same key to the host, and succeeded
    STALE = "stale"  # the engine had reused the device block
    NOT_HASHED = "not_hashed"  # the engine has no hash of the block
    HOST_FULL = "host_full"  # no slot was empty or evictable
    NOT_READY = "not_ready"  # no slot was empty or evictable, and host memory was not ready yet
    LEASE_LIMIT = "lease_limit"  # stores already leased a quarter of the device pool
    STALLED = "stalled"  # no store may start while copies are stalled
    LIMITED = "limited"  # the request's own limit excludes the block
    UNSAFE_HASHES = "unsafe_hashes"  # the engine's hash of the block may be of another text
    SEEN_ONCE = "seen_once"  # the host was full, and the block had not been offered before
    REQUEST_GONE = "request_gone"  # the request ended after losing its blocks
    # the block's request was preempted, or the device evicted the block before a store could start
    LOST = "lost"
    BEFORE_RESET = "before_reset"  # the block, or part of its prefix, was computed before the last reset
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
    CANCELLED = "cancelled"  # the load was dropped before its copy was submitted


class TierOutcome(Cause):
    """How a copy of blocks between host and a lower tier ended."""

    DONE = "done"
    FAILED = "failed"
    # the bytes in the tier, or with `verify` those on the host, differ from the bytes written
    CORRUPT = "corrupt"
    ABANDONED = "abandoned"
    # the copy was dropped: by a reset, at the end of the last request that needed it, or when offloading ended
    CANCELLED = "cancelled"


class CopyOutcome(Cause):
    """How a rank's part of a job ended."""

    DONE = "done"
    FAILED = "failed"
    CORRUPT = "corrupt"


class RemoteFault(Cause):
    """Why a call to the remote tier failed, or why the tier refused values."""

    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    DENIED = "denied"  # the tier refused the credentials, or the credentials do not allow writes
    FULL = "full"
    OTHER = "other"


class NodeLoss(Cause):
    """Why a block could not be fetched from the host memory of another engine of this machine."""

    TORN = "torn"  # the engine has written another block over it, or has begun to
    GONE = (
        "gone"  # the engine was reset, its memory was removed, cut or taken over, or no longer has the block
    )


class EvictionCause(Cause):
    """Why the host lost a block."""

    SPACE = "space"
    SPILL_BEHIND = "spill_behind"  # evicted for space before the block could be written to a lower tier
    RESET = "reset"
    LOAD_FAILED = "load_failed"
    CORRUPT = "corrupt"
    ABANDONED = "abandoned"


class Adoption(Cause):
    """What a start with `host_path` did with the blocks that an earlier engine left in host memory."""

    OPENING = "opening"  # not decided yet: the ranks open their files, or the KV is being identified
    ADOPTED = "adopted"
    NOTHING_LEFT = "nothing_left"  # no engine of this kind has left a block in the folder
    RESET = "reset"  # the earlier engine was reset, or it switched offloading off
    # the table is damaged, from before the machine started, or about other files of the ranks
    TABLE_REFUSED = "table_refused"
    OTHER_KV = "other_kv"  # the blocks are of other weights, settings or versions
    NOT_IDENTIFIED = "not_identified"  # the weights were not identified in time
    FAILED = "failed"  # the files cannot be used


class PinDropCause(Cause):
    """Why pinned blocks were released without a load."""

    LOOKED_UP_AGAIN = "looked_up_again"
    NOT_ACCEPTED = "not_accepted"
    REQUEST_ENDED = "request_ended"
    RESET = "reset"


class RejectionCause(Cause):
    """Why an engine's report was ignored. Ignored reports are counted; the first report of each cause is logged."""

    TOKENS_WITHOUT_PIN = "tokens_without_pin"
    UNKNOWN_REQUEST = "unknown_request"
    UNKNOWN_JOB = "unknown_job"


class DegradeCause(Cause):
    """Why offloading was switched off until the engine restarts."""

    HANDLER_RAISED = "handler_raised"
    INVARIANT_BROKEN = "invariant_broken"
    TRANSFER_DEAD = "transfer_dead"
