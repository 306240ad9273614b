"""What requests do with the tiers below the host: which blocks are fetched for them, and how long they wait.

When a request arrives, a fetch is planned for the blocks of its prefix that neither the device nor the host has. If the
request's lookup finds that more blocks must be fetched, the lookup plans another fetch. A key that several requests
need is fetched once (R14). Lookups that need a block in flight answer "not yet"; once fetched, the block is on the host
like any other.

All open fetches together fill at most a quarter of the host. A longer prefix is fetched in rounds: each lookup plans
the next round after the last one has arrived, until the host has the prefix or lacks room. A round after a request's
first one fills at most an eighth of the host, and leaves an eighth of the host to other requests, so that they can
fetch and store, too. Between rounds, the prefix's blocks are held on the host, so that no block is read twice. Of a
prefix that is longer than the host, lookups fetch only the head. The rest comes during the load (`parts`), if the model has
a single full-attention group and the engine recomputes failed loads. Otherwise the rest is computed, and the first such
prefix is reported.

After a failed fetch, no other fetch is planned for the requests that waited for it. `TierStore` makes the copies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from kvoffload.core.jobs import Fetch, Offer
from kvoffload.core.machine import RequestState
from kvoffload.core.match import longest_match
from kvoffload.core.request import PendingHit, RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.core.stores import Stores
from kvoffload.core.tier_store import TierStore, most_fetched
from kvoffload.core.tiers import ON_DEVICE, Block, HintTier, LayeredIndex, LowerTier, NodeTier
from kvoffload.model import facts
from kvoffload.model.causes import MissCause, TierOutcome
from kvoffload.model.events import PrefixExceedsHost
from kvoffload.model.ids import BlockKey, SlotId

MOST_STEPS = 64
"""How many steps a short queue of spills waits for more blocks.

If the process is killed, the tier never gets these blocks.
"""
_ENOUGH = 32
"""A queue of this length is spilled without waiting.

In a hook, one more job costs as much time as about 80 more blocks.
"""


class _Found(NamedTuple):
    """The blocks that lower tiers add to a prefix."""

    blocks: Sequence[Block]  #: the prefix's blocks that only lower tiers have, heads first
    tokens: int  #: the length of the prefix in tokens, including `blocks`
    gain: int  #: how many tokens `blocks` add to the prefix
    host_slots: Sequence[SlotId]  #: the slots of the prefix's blocks that the host has, heads first


_NOTHING = _Found((), 0, 0, ())


class LowerTiers:
    """Decides which blocks are copied between the host and lower tiers, and when.

    The only writer of `RequestRecord.awaits_fetch`.

    Attributes:
        store: makes the copies. While one of its queues is not empty, the core calls `step`.
        go_on: called with a request whose load may wait for a fetch, and with the fetch, after the fetch has ended.
    """

    def __init__(self, state: CoreState, stores: Stores) -> None:
        self._state = state
        self._stores = stores
        self._in_flight = state.in_flight
        self.store = TierStore(state, self)
        self.go_on: Callable[[RequestRecord, Fetch], object] = lambda record, job: None
        # A list, because hooks iterate over it, and iterating over a dict takes longer.
        self._fetches = list(self.store.fetches.values())
        self._spilled_at = 0  # the last step in which a spill was planned
        self._has_reported_long = False
        self._enough = 1  # the queue length at which `step` plans copies without waiting for more blocks

    # -- for requests -------------------------------------------------------------------------------------------

    def request_seen(self, record: RequestRecord) -> None:
        """Fetch an arriving request's blocks.

        Other engines of this machine are searched for them first. The remote tier is asked for those that no tier has.
        """
        for fetches in self._fetches:
            if fetches.warm:
                fetches.leave(record.keys)
        node, asked = self._state.node, self._state.asked
        if self._state.degraded is None and record.reads_cache and record.persists:
            if node is not None and node.is_usable and self._may_share(record, node):
                node.look_for(self._wanted(record, node))
            if asked is not None and asked.is_usable and (keys := self._wanted(record, asked)):
                record.awaits_answer = True
                asked.ask(record.request, keys)
        self._seen(record)

    def _may_share(self, record: RequestRecord, node: NodeTier) -> bool:
        """Return whether other engines may have blocks that an arriving request can use.

        With one full-attention group, no block is of use after the first one that is nowhere. So most prompts that other
        engines have not seen cost a single search.
        """
        state = self._state
        if node.neighbours.is_empty:
            if node.has_blocks:
                node.forget_all()  # a fetch of these hints would find nothing
            return False
        if not state.shape.is_one_full_group:
            return True
        missing = self._first_missing(record.keys[0][: (record.prompt_tokens - 1) // state.shape.alignment])
        if missing is None:
            return False
        is_here = state.device.block_of(missing) is not None or have(state.tiers, missing)
        return is_here or bool(node.neighbours.find((missing,)))

    def _wanted(self, record: RequestRecord, asked: HintTier) -> list[BlockKey]:
        """Return which of an arriving request's blocks a tier must be asked for, unless a tier above has them.

        Mooncake protects each block that it is asked for from eviction, so only blocks that a fetch could use are
        asked for: not the blocks above the tier or after the last token that a lookup can find, and none at all
        if a fetch of all of them would be too short.
        """
        state = self._state
        limit = record.prompt_tokens - 1
        first = 0
        if record.limits.load_tokens == 0 or not _allows(record, asked):
            return []
        if state.shape.is_one_full_group:
            # With more groups, a hit may need blocks of one group that the device has.
            on_device = (state.device.block_of(key) is not None for key in record.keys[0])
            first = sum(takewhile(bool, on_device))
        lacking: list[BlockKey] = []
        for group, keys in zip(state.shape.groups, record.keys, strict=True):
            last = limit // group.block_tokens + group.has_lookahead
            lacking += [key for key in keys[first:last] if key not in state.pool.index]
        is_short = len(lacking) * state.shape.alignment < asked.least_tokens
        if is_short or limit < max(record.least_tokens, state.policy.min_load_tokens):
            return []
        above = state.tiers[: state.tiers.index(asked)]
        return [key for key in lacking if not have(above, key)]

    def _seen(self, record: RequestRecord) -> None:
        """Fetch the blocks of an arriving request's prefix that only lower tiers have."""
        state, tiers = self._state, self.usable(record)
        if not (tiers and record.persists and record.reads_cache):
            return
        if record.limits.load_tokens is not None:
            return  # Only a lookup knows after how many tokens the request's limit begins.
        limit = record.prompt_tokens - 1
        if state.shape.is_one_full_group:
            missing = self._first_missing(record.keys[0][: limit // state.shape.alignment])
            if missing is None or not (have(tiers, missing) or state.device.block_of(missing) is not None):
                return
        on_host = longest_match(state.shape, record.keys, state.pool.index, 0, limit, hashes=record.hashes)
        if on_host.missing is None:
            return
        index = LayeredIndex(state.pool.index, tiers, state.device)
        found = self._search(record, index, PendingHit(0, on_host.tokens, on_host.slots, None))
        if found.blocks:
            self._fetch(record, found)

    def look(self, record: RequestRecord, hit: PendingHit) -> bool:
        """Fetch the blocks that lower tiers add to a hit; return whether the request should wait for a fetch.

        While the request waits, the prefix's blocks on the host are held.
        """
        state, tiers, missing = self._state, self.usable(record), hit.missing
        if not tiers or missing is None:
            return False
        if state.shape.is_one_full_group and not have(tiers, missing):
            return False
        index = LayeredIndex(state.pool.index, tiers)
        found = self._search(record, index, hit)
        if not found.blocks:
            return False
        if record.asks_tiers:
            self._fetch(record, found)
        job = self._awaited(record, found)
        if job is None:
            return False
        record.awaits_fetch = job.id, found.tokens
        if not record.held:
            state.retention.keep(record, found.host_slots)
        return True

    def _awaited(self, record: RequestRecord, found: _Found) -> Fetch | None:
        """Return the fetch that a request should wait for, or None if no fetch can help the request.

        This is the last of the fetches that copy the `found` blocks. If there are none, because other requests' fetches
        leave no room for the request's next round, it is the oldest open fetch.
        """
        on_way = self._in_flight.keys
        # A dict instead of a set keeps the order.
        jobs = dict.fromkeys([on_way[key] for key, *_ in found.blocks if key in on_way])
        fetches = [job for job in jobs if isinstance(job, Fetch)]
        for job in fetches:
            job.wanted[record] = None
        if fetches:
            return fetches[-1]
        if not (record.fetched_blocks and record.asks_tiers):
            return None
        opened = self._state.jobs.open.values()
        return next((job for job in opened if isinstance(job, Fetch) and not job.settled), None)

    def may_have(self, record: RequestRecord, missing: BlockKey) -> bool:
        """Return whether a lookup may find a block on a lower tier, or must wait for the answer of one."""
        return record.persists and (record.awaits_answer or have(self._state.tiers, missing))

    def is_awaited(self, record: RequestRecord, device_tokens: int) -> bool:
        """Return whether a request still waits for a fetch that adds tokens to the device's hit.

        If not, the request stops waiting.
        """
        if record.awaits_fetch is not None:
            job = self._state.jobs.open.get(record.awaits_fetch[0])
            is_useful = record.awaits_fetch[1] > device_tokens and not record.load_failed
            if job is None or job.settled or not is_useful or self._state.stall.is_on:
                record.awaits_fetch = None
                if record.held:
                    self._state.retention.release_if_over(record)
        return record.awaits_fetch is not None

    def leaves(self, record: RequestRecord) -> None:
        """Cancel the fetches for which no other request waits. Call this method if a request ends before it runs."""
        jobs = self._state.jobs
        for job in [job for job in jobs.open.values() if isinstance(job, Fetch) and record in job.wanted]:
            del job.wanted[record]
            if job.wanted or job.settled:
                continue
            jobs.cancel(job)

    def cause(self, record: RequestRecord, tier: LowerTier, missing: BlockKey) -> MissCause | None:
        """Return why a block that a lower tier has was not fetched."""
        if not _allows(record, tier):
            return MissCause.LIMITED
        return MissCause.NO_STATE if self._state.shape.count_states((missing,)) else tier.tier.miss_cause

    def usable(self, record: RequestRecord) -> list[LowerTier]:
        """Return the tiers from which a fetch for a request may start now.

        While a tier is asked for the request's blocks, its earlier answers do not count.
        """
        if self._state.degraded is not None or self._state.stall.is_on:
            return []
        unsure = self._state.asked if record.awaits_answer else None
        return [
            tier
            for tier in self._state.tiers
            if tier.is_usable and tier.has_blocks and tier is not unsure and _allows(record, tier)
        ]

    def _first_missing(self, keys: Sequence[BlockKey]) -> BlockKey | None:
        """Return the first of a prefix's keys that the host lacks, or None if the host has all keys.

        The search is binary, because the host evicts a prefix's head last. The search can skip an earlier missing key,
        whose fetch the request's lookup then plans.
        """
        parts = self._state.pool.index.parts
        first = bisect_left(keys, True, key=lambda key: key not in parts[key[0]])
        return keys[first] if first < len(keys) else None

    def _search(self, record: RequestRecord, index: LayeredIndex, hit: PendingHit) -> _Found:
        """Return the blocks that lower tiers can add to a hit, as far as the host has room for them.

        Args:
            record: the request.
            index: finds the blocks that any tier has.
            hit: the blocks that need no fetch.
        """
        state, on_way = self._state, self._in_flight.keys
        limit = record.longest_hit(hit.device_tokens, state.shape)
        alignment = state.shape.alignment
        # With one full-attention group, no block before `hit.tokens` is missing. With windows, blocks may be missing
        # there.
        start = hit.tokens if state.shape.is_one_full_group else hit.device_tokens
        least = max(record.least_tokens, state.policy.min_load_tokens)
        while True:
            reached, slots, *_ = longest_match(
                state.shape, record.keys, index, start, limit, hashes=record.hashes
            )
            blocks = index.on_tiers(slots)
            gain = min(reached - hit.tokens, len(blocks) * alignment)
            worth = max([tier.least_tokens for _, tier, _ in blocks], default=0)
            if gain < max(worth, 1) or reached - hit.device_tokens < least:
                return _NOTHING
            on_host = [slot for slot in slots if 0 <= slot < ON_DEVICE]
            on_host = list(dict.fromkeys([*hit.slots, *on_host]))
            lacking = [key for key, *_ in blocks if key not in on_way]
            surplus = len(lacking) - self._room(record, on_host)
            if surplus <= 0:
                return _Found(blocks, reached, gain, on_host)
            self._report_long(record, len(on_host) + len(blocks))
            cut = (reached - start) * surplus // len(blocks)
            limit = reached - max(cut - cut % alignment, alignment)

    @property
    def loads_in_parts(self) -> bool:
        """Return whether the rest of a prefix that is longer than the host is loaded, too, in parts."""
        shape = self._state.shape
        return shape.is_one_full_group and shape.promises.recovers_loads and not self._state.growing

    def _report_long(self, record: RequestRecord, blocks: int) -> None:
        """Report the first prefix that has more blocks than the host has slots."""
        slots = self._state.pool.capacity
        if blocks > slots and not (self.loads_in_parts or self._has_reported_long or self._state.growing):
            self._has_reported_long = True
            self._state.tally.events.append(PrefixExceedsHost(record.request, blocks, slots))

    def _room(self, record: RequestRecord, on_host: Sequence[SlotId]) -> int:
        """Return how many blocks may be fetched for a request without evicting the `on_host` slots of its prefix.

        Rounds after the first one leave an eighth of the host to other requests, if there are any. Over its life, a
        request fetches no more blocks than the host has slots.
        """
        pool = self._state.pool
        unused = pool.room - pool.count_evictable(on_host)
        if record.fetched_blocks and len(self._state.requests.live) > 1:
            unused -= pool.capacity // 8
        return max(min(unused, pool.capacity - record.fetched_blocks), 0)

    def _fetch(self, record: RequestRecord, found: _Found) -> None:
        """Plan the next round of fetches: the first of the `found` blocks that are not in flight.

        The prefix's blocks on the host are not evicted to make room. The request's lookups then wait for the fetches.
        """
        state = self._state
        on_way = self._in_flight.keys
        blocks = [block for block in found.blocks if block[0] not in on_way]
        if not blocks:
            return
        state.pool.use(found.host_slots[::-1])
        most = most_fetched(state.pool)
        if record.fetched_blocks:
            most = max(most // 2, 1)
        room = max(most - sum([tier.fetching for tier in state.tiers]), 0)
        for tier in state.tiers:
            some = [block for block in blocks[:room] if block[1] is tier]
            if some:
                keys, tier_slots = [key for key, _, _ in some], [slot for _, _, slot in some]
                gain = found.gain * len(some) // len(found.blocks)
                job = self.store.fetches[tier].plan(keys, tier_slots, record.request, gain)
                job.wanted[record] = None
                record.awaits_fetch = job.id, found.tokens - found.gain + gain

    # -- without a request --------------------------------------------------------------------------------------

    def step(self) -> None:
        """Plan copies that no request waits for: the warm start, then spills.

        While the engine has requests, plan copies only if a queue is long enough, or if the last spill was planned
        `MOST_STEPS` steps ago.
        """
        state, store = self._state, self.store
        is_early = state.steps - self._spilled_at < MOST_STEPS
        if state.requests.live and is_early and max(map(len, store.queues)) < self._enough:
            return
        store.warm_up()
        if store.spill():
            self._spilled_at = state.steps
        limits = [tier.spill_slots(state.pool.capacity) for tier in state.tiers]
        self._enough = min(_ENOUGH, *limits)

    def answered(self, fact: facts.TierAnswered) -> None:
        """Record which of a request's blocks a tier has, and fetch them."""
        record = self._state.requests.live.get(fact.request)
        if record is not None:
            record.awaits_answer = False
        if self.store.answered(fact) and record is not None and record.state is RequestState.SEEN:
            self._seen(record)

    # -- what the store does to the host ------------------------------------------------------------------------

    def evicted(self, keys: Sequence[BlockKey]) -> None:
        if self._stores.evictions.watches:
            self._stores.evicted(keys)

    def fetched(self, job: Fetch, keys: Sequence[BlockKey], slots: Sequence[SlotId]) -> None:
        for record in job.wanted:
            record.fetched_blocks += len(keys)
            record.fetched_from |= dict.fromkeys(keys, job.tier)
            if record.waits_for is not None:
                self._state.retention.keep(record, slots)
            if record.rest is not None:
                self.go_on(record, job)

    def settled(self, offers: Sequence[Offer], job: Fetch, outcome: TierOutcome) -> None:
        """Settle the offers that waited for a fetch. Unless it was cancelled, its requests get no other fetch.

        A load in parts gets none after a cancelled fetch either, because the tier's blocks may be another engine's by now.
        """
        if outcome is TierOutcome.DONE:
            self._stores.arrived_otherwise(offers)
            return
        self._stores.offer_again(offers)
        for record in job.wanted:
            if outcome is not TierOutcome.CANCELLED or record.rest is not None:
                record.asks_tiers = False


def _allows(record: RequestRecord, tier: LowerTier) -> bool:
    return record.limits.tiers is None or tier.tier in record.limits.tiers


def have(tiers: Sequence[LowerTier], key: BlockKey) -> bool:
    return any(key in tier.pool.index.parts[key[0]] and key not in tier.unconfirmed for tier in tiers)
