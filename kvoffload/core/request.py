"""Request records, with everything that the core stores about a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct

from kvoffload.core.machine import REQUEST, RequestEvent, RequestState
from kvoffload.model.causes import MissCause
from kvoffload.model.ids import BlockKey, DeviceBlockId, GroupId, JobId, RequestId, SlotId
from kvoffload.model.wire import Tier

_FINISHING = RequestState.FINISHING
_HAS_TABLE = (RequestState.LOADING, RequestState.RUNNING)
_END, _LAST_JOB = RequestEvent.END, RequestEvent.LAST_JOB

Position = tuple[GroupId, int]
"""A group, and a position in the block table of that group."""

TupleT = TypeVar("TupleT", bound=NamedTuple)


def from_fields(kind: type[TupleT]) -> Callable[[tuple[Any, ...]], TupleT]:
    """Return a function that builds a named tuple from a tuple of all its fields.

    In CPython this function takes a third of the time that calling the class takes. A tuple is built for each lookup
    and each block.
    """
    return partial(tuple.__new__, kind)


class PendingHit(NamedTuple):
    """The answer to one lookup."""

    device_tokens: int  #: tokens on the device
    tokens: int  #: tokens on the device or the host
    slots: tuple[SlotId, ...]  #: the slots that the lookup found and pinned, heads first
    # why the first block position after `tokens` missed; None if there is no such position
    cause: MissCause | None
    missing: BlockKey | None = None  #: the key of the first missed position, if that position has a key


class RequestRecord(Struct, eq=False):
    """What the core stores about one request. Jobs and offers refer to a record and its incarnation.

    Args:
        request: the request's id.
        prompt_tokens: tokens that must be computed or found before the first new token.
        keys: per group, the keys of the request's whole blocks so far.
        reads_cache: False if the request asked not to read cached blocks.
        persists: True if the request's blocks may be written to lower tiers and looked up there.
        incarnation: identifies the request's block table. Jobs and offers made for an earlier table do not change the
            record.
        table: per group, the device block of each position; None without a table. `BlockTables` writes it.
        hit: the answer to the last lookup, with pinned slots, until an allocation takes it. `PendingHits` writes it.
        loading: the slots of the request's open load, for which other requests may wait. `Requests` writes it.
        found_tokens, loaded_tokens: where the device's own hit ended, and where the load after it ended.
        confirmed_tokens: tokens that this incarnation is known to have computed.
        offered: per group, the first position not offered yet. The planners write it.
        waiting: positions whose offers are not decided yet.
        held: slots that the request stored or hit, in the order of use; `Retention` keeps them from eviction.
        held_to: the first token of the last block that a store added to `held`.
        shares: True if `held` does not list every block that the request used, in order: another request stored some of
            these blocks, or a tail was stored before its head. `Retention` writes it.
        watched: keys that the request offered although the host already had them. If the host evicts such a key, it is
            offered again.
        stored_again: keys that the request offered again after an eviction, each only once.
        jobs: the number of open jobs that copy the request's blocks. `Requests` writes it.
        has_timed_out: True if one of the request's jobs timed out; the job may never end.
        load_failed: True after one of the request's loads has failed; from then on its lookups return 0.
        may_store: False if any of the request's blocks was computed before the last reset.
        least_tokens: hits shorter than this are recomputed. The first lookup sets this value; it is 0 until then.
        boundary: after how many tokens the engine is asked for a recurrent state, because the last lookup could not use
            a longer prefix without this state; 0 for never. `PendingHits` writes it.
        fetched_blocks: how many blocks were fetched from lower tiers for this request.
        fetched_from: the tier of the last of these fetches; None before the first.
        asks_tiers: False after one of the request's fetches has failed; then no other fetch is planned.
        awaits_answer: True while a query of the request's blocks in the remote tier is not answered.
        awaits_fetch: the fetch that the request's lookups wait for, and how many tokens the prefix will have with the
            fetched blocks. `LowerTiers` writes it.
        waits_for: why the last lookup was answered "not yet": the request that loads, the job that fetches, or REMOTE
            for the remote tier's answer; None after any other answer.
    """

    request: RequestId
    prompt_tokens: int
    keys: tuple[list[BlockKey], ...]
    reads_cache: bool = True
    persists: bool = True
    state: RequestState = RequestState.SEEN
    incarnation: int = 0
    table: list[list[DeviceBlockId]] | None = None
    hit: PendingHit | None = None
    loading: tuple[SlotId, ...] = ()
    found_tokens: int = 0
    loaded_tokens: int = 0
    confirmed_tokens: int = 0
    offered: list[int] = []
    waiting: dict[Position, None] = {}
    held: list[SlotId] = []
    held_to: int = 0
    shares: bool = False
    watched: set[BlockKey] = set()
    stored_again: set[BlockKey] = set()
    jobs: int = 0
    has_timed_out: bool = False
    load_failed: bool = False
    may_store: bool = True
    least_tokens: int = 0
    boundary: int = 0
    fetched_blocks: int = 0
    fetched_from: Tier | None = None
    asks_tiers: bool = True
    awaits_answer: bool = False
    awaits_fetch: tuple[JobId, int] | None = None
    waits_for: RequestId | JobId | Tier | None = None

    @property
    def is_live(self) -> bool:
        return self.state < _FINISHING

    def __repr__(self) -> str:
        return f"<Request {self.request} [{self.state.name}, table {self.incarnation}]>"

    def extend_keys(self, new_keys: Sequence[Sequence[BlockKey]]) -> None:
        """Add the keys of new whole blocks."""
        for keys, more in zip(self.keys, new_keys, strict=False):
            keys.extend(more)


class Requests:
    """All records: live ones by id, and ended ones whose blocks open jobs still copy.

    The only writer of a record's `state`, `jobs` and `loading`.

    When several requests need the same prefix from the host, one request loads the prefix, and the other requests wait
    (R14) until the loading request runs (from then on the device's prefix cache has the blocks), until its load fails,
    or until the loading request ends. Several requests may load the same slot, because a request that has waited too
    long starts its own load.
    """

    def __init__(self) -> None:
        self.live: dict[RequestId, RequestRecord] = {}
        self.finishing: set[RequestRecord] = set()
        self.loading: dict[SlotId, list[RequestRecord]] = {}
        """The requests that load each slot."""

    def move(self, record: RequestRecord, event: RequestEvent) -> None:
        """Apply an event to a record. If the request loses its block table, other requests stop waiting for its load.

        Raises:
            IllegalTransition: the event is illegal in the record's state; nothing has changed.
        """
        record.state = REQUEST.steps[event][record.state]
        if record.loading and record.state not in _HAS_TABLE:
            self.load_is_over(record)
        if event is _END:
            del self.live[record.request]
            if record.jobs:
                self.finishing.add(record)
            else:
                record.state = REQUEST.steps[_LAST_JOB][record.state]

    def loads(self, record: RequestRecord, slots: Iterable[SlotId]) -> None:
        """Record that a job loads these slots for a request, so that other requests can wait for the load."""
        record.jobs += 1
        record.loading = tuple(slots)
        for slot in record.loading:
            self.loading.setdefault(slot, []).append(record)

    def stores(
        self, concerns: dict[RequestRecord, None], tables: Iterable[tuple[RequestRecord | None, int]]
    ) -> None:
        """Add to `concerns` the requests that still have these block tables. Count the store as a job of each request.

        Args:
            concerns: the requests whose blocks the store copies; changed in place.
            tables: block tables, each given by a request and an incarnation. The request is None for an offer that no
                request made.
        """
        for record, incarnation in dict.fromkeys(tables):
            if record is None or record in concerns:
                continue
            if record.incarnation == incarnation and record.state < _FINISHING:
                concerns[record] = None
                record.jobs += 1

    def job_ended(self, record: RequestRecord) -> None:
        """Record that a job on this request's blocks has ended on all ranks."""
        record.jobs -= 1
        if record.state is _FINISHING and not record.jobs:
            record.state = REQUEST.steps[_LAST_JOB][record.state]
            self.finishing.discard(record)

    def loader(self, slots: Iterable[SlotId]) -> RequestId | None:
        """Return the first request that is loading one of these slots, or None. Changes nothing.

        The result is never the request that looks up: only requests with a block table load, and only requests without
        one look up.
        """
        loading = self.loading.get
        return next((found[0].request for slot in slots if (found := loading(slot))), None)

    def load_is_over(self, record: RequestRecord) -> None:
        """Stop letting other requests wait for this request's load."""
        slots, record.loading = record.loading, ()
        for slot in slots:
            loading = self.loading[slot]
            loading.remove(record)
            if not loading:
                del self.loading[slot]
