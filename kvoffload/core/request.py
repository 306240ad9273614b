"""Request records: everything that is known of one request is a field of its record."""

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
"""A group and a position in the block table."""

TupleT = TypeVar("TupleT", bound=NamedTuple)


def from_fields(kind: type[TupleT]) -> Callable[[tuple[Any, ...]], TupleT]:
    """Return a function that makes a named tuple of a tuple of all its fields.

    In CPython it takes a third of the time of the class's own call, which counts where a lookup or each block makes one.
    """
    return partial(tuple.__new__, kind)


class PendingHit(NamedTuple):
    """One lookup's answer."""

    device_tokens: int  #: tokens that the device held
    tokens: int  #: tokens that device and host hold together
    slots: tuple[SlotId, ...]  #: what was found, pinned, heads first
    cause: MissCause | None  #: why the first block position behind `tokens` missed; None where nothing missed
    missing: BlockKey | None = None  #: the key of that position, where it has one


class RequestRecord(Struct, eq=False):
    """One request. Jobs and offers name it with the incarnation that they belong to.

    Args:
        request: its name.
        prompt_tokens: tokens before the first new one.
        keys: per group, the keys of its whole blocks so far.
        reads_cache: False when it asked not to read cached blocks.
        persists: its blocks may be written to lower tiers, and found there.
        incarnation: the number of its block tables so far; jobs and offers of an earlier one settle memory only.
        table: per group, the device block of each position; None without a table. `BlockTables` writes it.
        hit: what its last lookup found, pinned until consumed. `PendingHits` writes it.
        loading: slots that it loads, for which other requests wait. `Requests` writes it.
        found_tokens, loaded_tokens: where the device's own hit ended, and where the load behind it ended.
        confirmed_tokens: tokens computed for certain in this incarnation.
        offered: per group, the first position not offered yet. The planners write it.
        waiting: positions offered without an outcome, which may be offered again.
        held: slots that it stored or hit, in the order of use; `Retention` keeps them from eviction.
        held_to: the first token of the block that it holds last.
        shares: `held` does not list all that it used in order, because another request stored some of it or a tail arrived
            before its head. `Retention` writes it.
        watched: keys that it offered while the host had them; it offers them again if they are evicted.
        stored_again: keys offered again after an eviction, once each.
        jobs: open jobs that copy its blocks. `Requests` writes it.
        has_timed_out: one of its jobs timed out and may never end.
        load_failed: one of its loads failed; from now on its lookups return 0.
        may_store: False where its blocks were computed, wholly or in part, before the last reset.
        least_tokens: shorter hits are recomputed; its first lookup decides, 0 before it.
        boundary: tokens after which the engine is asked for a recurrent state, as the lack of it kept the last lookup from
            finding a prefix that device and host hold; 0 for none. `PendingHits` writes it.
        fetched_blocks: blocks that were fetched from lower tiers for it.
        fetched_from: the tier that brought some of them last.
        asks_tiers: False after one of its fetches failed: it gets no other.
        awaits_answer: the remote store was asked for its blocks and has not answered.
        awaits_fetch: a fetch for which its lookups wait, and the tokens of the prefix with what it brings. `LowerTiers` writes it.
        waits_for: what its last lookup was answered "not yet" for: another request, a fetch's job, or the remote store's answer; None
            where it had another answer.
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
    fetched_from: Tier = Tier.DISK
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
        """Add the keys of blocks that became whole."""
        for keys, more in zip(self.keys, new_keys, strict=False):
            keys.extend(more)


class Requests:
    """Every record: live ones by name, and those that ended while jobs were open on their blocks.

    The only writer of a record's `state`, `jobs` and `loading`.

    Requests with one prefix that is on the host load it once; the others wait (R14). A request owns the slots that it loads from
    its allocation until it runs (the device's own prefix cache then has the blocks), fails, or is gone. A slot may have several
    owners, because a request that has waited too long starts its own load.
    """

    def __init__(self) -> None:
        self.live: dict[RequestId, RequestRecord] = {}
        self.finishing: set[RequestRecord] = set()
        self.loading: dict[SlotId, list[RequestRecord]] = {}
        """By slot, the requests that load it."""

    def move(self, record: RequestRecord, event: RequestEvent) -> None:
        """Apply an event to a record. One that loses its block table does not load for others any more.

        Raises:
            IllegalTransition: its state does not take it; nothing has changed.
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
        """Note that a job copies these slots to a request's blocks: others wait for it."""
        record.jobs += 1
        record.loading = tuple(slots)
        for slot in record.loading:
            self.loading.setdefault(slot, []).append(record)

    def stores(
        self, concerns: dict[RequestRecord, None], tables: Iterable[tuple[RequestRecord | None, int]]
    ) -> None:
        """Add to a store's requests those that still have these block tables, which are named by incarnation."""
        for record, incarnation in dict.fromkeys(tables):
            if record is None or record in concerns:
                continue
            if record.incarnation == incarnation and record.state < _FINISHING:
                concerns[record] = None
                record.jobs += 1

    def job_ended(self, record: RequestRecord) -> None:
        """Note that the last copy of a job on this request's blocks has ended."""
        record.jobs -= 1
        if record.state is _FINISHING and not record.jobs:
            record.state = REQUEST.steps[_LAST_JOB][record.state]
            self.finishing.discard(record)

    def loader(self, slots: Iterable[SlotId]) -> RequestId | None:
        """Return the first request that is loading one of these slots, None without one. Reads only.

        It is never the request that asks: only a request with a block table loads, and only one without looks up.
        """
        loading = self.loading.get
        return next((found[0].request for slot in slots if (found := loading(slot))), None)

    def load_is_over(self, record: RequestRecord) -> None:
        """Let no other request wait for what this one loads, if anything."""
        slots, record.loading = record.loading, ()
        for slot in slots:
            loading = self.loading[slot]
            loading.remove(record)
            if not loading:
                del self.loading[slot]
