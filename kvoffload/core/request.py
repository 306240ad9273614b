"""The core's records of requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct

from kvoffload.core.claims import Claims
from kvoffload.core.machine import REQUEST, RequestEvent, RequestState
from kvoffload.model.causes import MissCause
from kvoffload.model.engine import EngineShape
from kvoffload.model.facts import NO_LIMITS, Limits
from kvoffload.model.groups import AttentionKind
from kvoffload.model.ids import BlockKey, DeviceBlockId, GroupId, JobId, RequestId, SlotId
from kvoffload.model.wire import LOWER_TIERS, Tier

_FINISHING = RequestState.FINISHING
_HAS_TABLE = (RequestState.LOADING, RequestState.RUNNING)
_END, _LAST_JOB = RequestEvent.END, RequestEvent.LAST_JOB

Position = tuple[GroupId, int]
"""A group, and a position in the block table of that group."""

TupleT = TypeVar("TupleT", bound=NamedTuple)


def from_fields(kind: type[TupleT]) -> Callable[[tuple[Any, ...]], TupleT]:
    """Return a function that builds a named tuple from a tuple of all its fields.

    In CPython the returned function takes a third of the time of a call to the class. The core builds a tuple for each
    lookup and each block.
    """
    return partial(tuple.__new__, kind)


class PendingHit(NamedTuple):
    """The answer to one lookup."""

    device_tokens: int  #: how many tokens the device has
    tokens: int  #: how many tokens the device and the host have together
    slots: tuple[SlotId, ...]  #: the slots that the lookup found and pinned, heads first
    # why the first block position after `tokens` missed; None if every position hit
    cause: MissCause | None
    missing: BlockKey | None = None  #: the key of the first missed block position, if that position has a key
    prompt_tokens: int = 0  #: the request's `prompt_tokens` at the search
    losses: int = 0  #: the host's `SlotPool.losses` at the search
    fills: int = 0  #: the host's `SlotPool.fills` at the search
    rest_tokens: int = 0  #: how many of `tokens` only lower tiers have; see `Rest`


class Watch(Struct, eq=False):
    """Keys that the host had when requests offered them, and the offers to repeat if the host evicts one of the keys.

    Args:
        keys: the keys, in the order of each request's offer.
        offers: for each request that offered exactly these keys, its offer. `EvictionWatch` writes it.
        is_open: True if further requests may join. False once the host has evicted one of the keys.
        places: each key's place among the keys; empty until the host evicts one of them.
    """

    keys: tuple[BlockKey, ...]
    offers: dict[RequestRecord, Any] = {}
    is_open: bool = True
    places: dict[BlockKey, int] = {}


class Rest(Struct):
    """The blocks of a load that no job loads yet, because the host has too few slots for all of them. See `Parts`.

    Args:
        keys: the keys of the blocks, heads first.
        blocks: the device blocks to load them into, in the same order.
        epoch: the number of resets before the load.
        job: the job after which the next part is planned: a load of the part before it, or a fetch.
        load: the load of the part before it.
    """

    keys: list[BlockKey]
    blocks: list[DeviceBlockId]
    epoch: int
    job: JobId = JobId(-1)
    load: JobId = JobId(-1)


class RequestRecord(Struct, eq=False):
    """The core's data about one request. Jobs and offers refer to a record and its incarnation.

    Args:
        request: the request's id.
        prompt_tokens: tokens that must be computed or found before the first new token.
        keys: per group, the keys of the request's whole blocks so far.
        reads_cache: False if the request asked not to read cached blocks.
        persists: True if the request's blocks may be written to lower tiers and looked up there.
        limits: what the client allows for the request.
        hashes: one hash for each `EngineShape.tail_tokens` tokens of the prompt; none if hits end after whole blocks.
        session: a number for the session of which the request is a turn; 0 if unknown.
        is_last_turn: True if the client says that the session ends with this request.
        incarnation: identifies the request's block table. Jobs and offers made for an earlier table do not change the
            record.
        table: per group, the device block of each position; None without a table. `BlockTables` writes it.
        hit: the answer to the last lookup, with pinned slots, until an allocation takes it. `Lookups` writes it.
        rest: what a load in parts still lacks; None without such a load. `Loads` writes it.
        loading: the slots of the request's open load, for which other requests may wait. `Requests` writes it.
        reserved: how many device blocks the request may need in total, from the allocation for its load until it runs;
            0 at all other times. `Requests` writes it.
        found_tokens: the length of the device's own hit in tokens.
        loaded_tokens: the length in tokens of the prefix found on the device and then loaded from the host.
        confirmed_tokens: how many tokens, from the start of the prompt, are known to have KV in the block table.
        tail: the number of tokens in the last tail that the engine handed off for the request; 0 for none.
        offered: per group, the first position not offered yet. The planners write it.
        waiting: the block positions whose offers wait for a decision.
        held: slots that the request stored or loaded, in that order, or that its lookups wait with for a fetch;
            `Retention` keeps them from eviction.
        held_to: the first token of the last block that a store added to `held`.
        shares: True if `held` lacks some blocks that the request used, because another request stored them, or if
            `held` lists a tail before its head. `Retention` writes it.
        watched: the keys that the request offered when the host already had them. If the host evicts such a key, the
            request offers it again. `EvictionWatch` writes it.
        stored_again: keys that the request has offered again after an eviction. No key is offered a third time.
        jobs: the number of open jobs that copy the request's blocks. `Requests` writes it.
        has_timed_out: True if one of the request's jobs timed out. Such a job may never end.
        load_failed: True after one of the request's loads has failed; from then on its lookups return 0.
        may_store: False if any of the request's blocks was computed before the last reset.
        least_tokens: hits shorter than this are recomputed. The first lookup sets this value; it is 0 until then.
        boundary: the number of tokens after which the engine should hand off a recurrent state, because the last lookup
            could not use a longer prefix without this state; 0 for none. `Lookups` writes it.
        fetched_blocks: how many blocks were fetched from lower tiers for this request.
        fetched_from: the tier from which each of these blocks was fetched since the request last had a block table.
        asks_tiers: False after one of the request's fetches has failed. From then on its lookups plan no fetch.
        awaits_answer: True while a query for the request's blocks in the remote tier is open.
        awaits_fetch: the fetch that the request's lookups wait for, and the prefix's length in tokens after this fetch.
            `LowerTiers` writes it.
        waits_for: the reason for the last lookup's "not yet": the request whose load or the job whose fetch brings the
            blocks, HOST for an open query, or DEVICE for room on the device; None if the last lookup returned a number.
    """

    request: RequestId
    prompt_tokens: int
    keys: tuple[list[BlockKey], ...]
    reads_cache: bool = True
    persists: bool = True
    limits: Limits = NO_LIMITS
    hashes: tuple[bytes, ...] = ()
    session: int = 0
    is_last_turn: bool = False
    state: RequestState = RequestState.SEEN
    incarnation: int = 0
    table: list[list[DeviceBlockId]] | None = None
    hit: PendingHit | None = None
    rest: Rest | None = None
    loading: tuple[SlotId, ...] = ()
    reserved: int = 0
    found_tokens: int = 0
    loaded_tokens: int = 0
    confirmed_tokens: int = 0
    tail: int = 0
    offered: list[int] = []
    waiting: dict[Position, None] = {}
    held: list[SlotId] = []
    held_to: int = 0
    shares: bool = False
    watched: list[Watch] = []
    stored_again: set[BlockKey] = set()
    jobs: int = 0
    has_timed_out: bool = False
    load_failed: bool = False
    may_store: bool = True
    least_tokens: int = 0
    boundary: int = 0
    fetched_blocks: int = 0
    fetched_from: dict[BlockKey, Tier] = {}
    asks_tiers: bool = True
    awaits_answer: bool = False
    awaits_fetch: tuple[JobId, int] | None = None
    waits_for: RequestId | JobId | Tier | None = None

    @property
    def is_live(self) -> bool:
        return self.state < _FINISHING

    def __repr__(self) -> str:
        return f"<Request {self.request} [{self.state.name}, table {self.incarnation}]>"

    def longest_hit(self, device_tokens: int, shape: EngineShape) -> int:
        """Return the maximum length of a hit: the last token is always computed, and the client may limit loads."""
        limit = self.prompt_tokens - 1
        load_tokens = self.limits.load_tokens
        if load_tokens is None:
            return limit
        # If a model has other than full-attention groups, vLLM's own connector loads no hit of whole blocks that is as long
        # as the limit.
        is_excluded = not shape.is_full_only and not load_tokens % shape.alignment
        return min(limit, device_tokens + max(load_tokens - is_excluded, 0))

    def fetched_tokens(self, start: int, end: int, shape: EngineShape) -> dict[Tier, int]:
        """Return how many tokens of a hit were fetched for this request, by tier, without tiers that had none.

        If blocks of several tiers contain a token, the token counts for the lowest of these tiers.

        Args:
            start: the length of the device's own hit in tokens.
            end: the length of the prefix that was found, in tokens.
            shape: the engine's groups.
        """
        unit = math.gcd(*[group.block_tokens for group in shape.groups])
        spans = self._fetched_spans(start, end, shape)
        lowest: dict[int, Tier] = {}
        for lower in LOWER_TIERS:
            for tier, first, last in spans:
                if tier is lower:
                    lowest |= dict.fromkeys(range(first // unit, -(-last // unit)), tier)
        tokens = dict.fromkeys([tier for tier in LOWER_TIERS if tier in lowest.values()], 0)
        for part, tier in lowest.items():
            tokens[tier] += min(end, (part + 1) * unit) - max(start, part * unit)
        return tokens

    def _fetched_spans(self, start: int, end: int, shape: EngineShape) -> list[tuple[Tier, int, int]]:
        """Return the tier, first token and end of each fetched block that a hit needs.

        A recurrent state stands for all tokens before it. So does the first block of a window if no group needs the
        blocks before the window.
        """
        is_windowed = all(group.kind is not AttentionKind.FULL for group in shape.groups)
        spans = []
        for group, keys in zip(shape.groups, self.keys, strict=True):
            size = group.block_tokens
            needed = max(group.first_needed_token(end), start) // size
            has_head = is_windowed or group.kind is AttentionKind.RECURRENT
            blocks = list(enumerate(keys[needed : -(-end // size)], needed))
            if (in_tail := shape.tail_key(group, self.hashes, end)) is not None:
                blocks.append((end // size, in_tail))
            for position, key in blocks:
                if (tier := self.fetched_from.get(key)) is not None:
                    is_head = has_head and position == needed
                    first = start if is_head else max(position * size, start)
                    spans.append((tier, first, min((position + 1) * size, end)))
        return spans

    def extend_keys(self, new_keys: Sequence[Sequence[BlockKey]]) -> None:
        """Append the keys of the request's new whole blocks, given per group."""
        for keys, more in zip(self.keys, new_keys, strict=False):
            keys.extend(more)


class Requests:
    """The records of live requests, and of ended requests whose blocks open jobs still copy.

    The only writer of a record's `state`, `jobs`, `loading` and `reserved`.

    When several requests need the same prefix from the host, one request loads the prefix, and the other requests wait
    (R14). The wait ends when the loading request ends, when its load fails, or when the loading request runs and the
    device's prefix cache has the blocks. Several requests may load the same slot, because a request whose wait times
    out starts its own load.

    An engine cannot take blocks from a request that loads, or that waits to run after its load. If such requests held
    so many blocks that none of them got the rest that it needs, no request would ever run. So a load may start only if
    all of them fit on the device with all the blocks that they may need (R19).
    """

    def __init__(self) -> None:
        self.live: dict[RequestId, RequestRecord] = {}
        self.finishing: set[RequestRecord] = set()
        self.loading = Claims[SlotId, RequestRecord]()
        """The requests that load each slot."""
        self.reserved = 0
        """How many device blocks all requests reserve together."""
        self.some_private = False
        """Whether there was a request whose blocks must not outlive this process."""
        self.some_limited = False
        """Whether there was a request with a limit on stores."""
        self.is_full = False
        """True after a request did not fit, until no request reserves blocks. Meanwhile no load starts, so that small
        requests do not overtake a large one again and again."""

    def move(self, record: RequestRecord, event: RequestEvent) -> None:
        """Apply an event to a record. If the request loses its block table, other requests stop waiting for its load.

        Raises:
            IllegalTransition: the event is illegal in the record's state; nothing has changed.
        """
        record.state = REQUEST.steps[event][record.state]
        if record.reserved and record.state not in _HAS_TABLE:
            self.needs_no_load(record)
        if event is _END:
            del self.live[record.request]
            if record.jobs:
                self.finishing.add(record)
            else:
                record.state = REQUEST.steps[_LAST_JOB][record.state]

    def reserve(self, record: RequestRecord, blocks: int) -> None:
        """Reserve device blocks for a request that got a block table for a load."""
        record.reserved = blocks
        self.reserved += blocks

    def has_room(self, blocks: int, device_blocks: int) -> bool:
        """Return whether another request may load that needs `blocks` blocks of a device with `device_blocks`.

        If no request reserves blocks, the answer is always yes: the engine refuses requests that never fit.
        """
        if self.reserved and self.reserved + blocks > device_blocks:
            self.is_full = True
        return not self.is_full

    def needs_no_load(self, record: RequestRecord) -> None:
        """Record that a request runs, or has lost its block table: it reserves nothing, and no request waits for its load."""
        self.reserved -= record.reserved
        record.reserved = 0
        if not self.reserved:
            self.is_full = False
        if record.loading:
            self.load_is_over(record)

    def loads(self, record: RequestRecord, slots: Iterable[SlotId]) -> None:
        """Record that a job loads these slots for a request, so that other requests can wait for the load.

        If the load has several parts, others wait for the slots of the first one.
        """
        record.jobs += 1
        if record.loading:
            return
        record.loading = tuple(slots)
        self.loading.add(record.loading, record)

    def stores(self, concerns: dict[RequestRecord, None], offers: Iterable[Any]) -> None:
        """Count a store as a job of each request whose blocks the store copies.

        Args:
            concerns: the requests already counted; the method adds requests that still have the table of an offer.
            offers: the offers (`Offer`) whose blocks the store copies.
        """
        for offer in offers:
            record = offer.record
            if record is None or record in concerns:
                continue
            if record.incarnation == offer.incarnation and record.state < _FINISHING:
                concerns[record] = None
                record.jobs += 1

    def job_ended(self, record: RequestRecord) -> None:
        """Record that a job on this request's blocks has ended on all ranks."""
        record.jobs -= 1
        if record.state is _FINISHING and not record.jobs:
            record.state = REQUEST.steps[_LAST_JOB][record.state]
            self.finishing.discard(record)

    def loader(self, slots: Iterable[SlotId]) -> RequestId | None:
        """Return the first request that is loading one of these slots, or None."""
        loading = self.loading.first
        return next((loading[slot].request for slot in slots if slot in loading), None)

    def load_is_over(self, record: RequestRecord) -> None:
        """Record that other requests need not wait for this request's load any more."""
        slots, record.loading = record.loading, ()
        self.loading.remove(slots, record)
