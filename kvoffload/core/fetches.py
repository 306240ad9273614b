"""Fetches: blocks that a lookup finds below the host are copied to the host, where the next lookup finds them.

    seen, look ─▶ plan ─▶ Jobs.submit ─▶ reported ─▶ _arrived │ _failed
                            overdue ─▶ abandoned ─────────────┘
                   leaves ─▶ taken back, where no other request waits for it

A fetch begins when its request arrives, for what neither the device nor the host has then; a lookup adds what has changed. A key
is fetched once, whichever request asks (R14). Until it has arrived a lookup answers "not yet"; then the host has it like any
other block. Fetches fill at most a quarter of the host at a time, and for one request in all, so what is longer is fetched head
first and the rest is computed. A fetch that fails costs its requests one wait: no other is planned for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from kvoffload.core.job import Job, Offer
from kvoffload.core.layered_index import ON_DEVICE, Block, LayeredIndex
from kvoffload.core.machine import JobState
from kvoffload.core.match import longest_match
from kvoffload.core.request import PendingHit, RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.core.stores import Stores
from kvoffload.core.tier_state import TierState
from kvoffload.model.causes import CopyOutcome, EvictionCause, MissCause, TierOutcome
from kvoffload.model.events import TierCopyEnded, TierCopyScheduled
from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.transfer import Direction, JobReport, Tier


class _Found(NamedTuple):
    """What lower tiers add to a prefix."""

    blocks: Sequence[Block]  #: that only these tiers have, heads first
    tokens: int  #: of the prefix with them
    gain: int  #: tokens of these that they add
    host_slots: Sequence[SlotId]  #: what the host has of the same prefix


_NOTHING = _Found((), 0, 0, ())


class Fetches:
    """Plans fetches and ends them."""

    def __init__(self, state: CoreState, stores: Stores) -> None:
        self._state = state
        self._stores = stores
        self._tiers = {tier.tier: tier for tier in state.below}

    @property
    def budget(self) -> int:
        """Most host slots that fetches may fill at a time, and most blocks that they may bring for one request."""
        return max(self._state.pool.capacity // 4, 1)

    def seen(self, record: RequestRecord) -> None:
        """Fetch what only lower tiers have of an arriving request's prefix."""
        state, tiers = self._state, self._usable()
        if not (tiers and record.persists and record.reads_cache):
            return
        limit = record.prompt_tokens - 1
        if state.shape.is_one_full_group:
            missing = self._first_missing(record.keys[0][: limit // state.shape.alignment])
            if missing is None or not (_have(tiers, missing) or state.device.block_of(missing) is not None):
                return
        on_host = longest_match(state.shape, record.keys, state.pool.index, 0, limit)
        if on_host.missing is None:
            return
        index = LayeredIndex(state.pool.index, tiers, state.device)
        found = self._search(record, index, 0, on_host.tokens)
        if found.blocks:
            self._fetch(record, found, on_host.slots)

    def look(self, record: RequestRecord, hit: PendingHit) -> bool:
        """Fetch what lower tiers add to a lookup's hit; return whether something is on its way that the request could use."""
        state, tiers, missing = self._state, self._usable(), hit.missing
        if not tiers or missing is None:
            return False
        if state.shape.is_one_full_group and not _have(tiers, missing):
            return False
        index = LayeredIndex(state.pool.index, tiers)
        found = self._search(record, index, hit.device_tokens, hit.tokens)
        if not found.blocks:
            return False
        if record.asks_below:
            self._fetch(record, found, hit.slots)
        # A set has another order in each run, and the lookups wait for the last of these jobs.
        jobs = dict.fromkeys([tier.fetching[key] for key, tier, _ in found.blocks if key in tier.fetching])
        for job in jobs:
            job.wanted[record] = None
            record.awaits_fetch = job.job, found.tokens
        return bool(jobs)

    def is_awaited(self, record: RequestRecord, device_tokens: int) -> bool:
        """Return whether a fetch brings what a request can use, so that nothing is searched again; forget one that does not."""
        if record.awaits_fetch is not None:
            job = self._state.jobs.open.get(record.awaits_fetch[0])
            is_useful = record.awaits_fetch[1] > device_tokens and not record.load_failed
            if job is None or job.settled or not is_useful or self._state.stall.is_on:
                record.awaits_fetch = None
        return record.awaits_fetch is not None

    def leaves(self, record: RequestRecord) -> None:
        """A request ends before its allocation: fetches that no other request waits for are taken back."""
        jobs = self._state.jobs
        for job in [job for job in jobs.open.values() if record in job.wanted]:
            del job.wanted[record]
            if job.wanted or job.settled:
                continue
            if job.state is JobState.PLANNED:
                self.cancel(job)
            else:
                self.stop(job)
                jobs.cancel_submitted(job)

    def cause(self, missing: BlockKey | None, cause: MissCause | None) -> MissCause | None:
        """Return why a block misses that is not on the host, given what the host knows of it."""
        for tier in self._state.below:
            if missing is not None and missing in tier.pool.index.parts[missing[0]]:
                if self._state.shape.count_states((missing,)):
                    return MissCause.NO_STATE
                return MissCause.ON_DISK if tier.tier is Tier.DISK else MissCause.IN_REMOTE
        disk = self._state.disk
        is_opening = disk is not None and not (disk.is_open or disk.is_closed)
        if is_opening and cause in (MissCause.NEVER_SEEN, MissCause.EVICTED):
            return MissCause.TIER_OPENING
        return cause

    def plan(
        self,
        tier: TierState,
        keys: list[BlockKey],
        places: list[SlotId],
        record: RequestRecord | None = None,
        tokens: int = 0,
    ) -> Job:
        """Bring blocks from a lower tier to the host, which has room for them; return the job.

        Args:
            tier: which has them.
            keys: of the blocks, heads first.
            places: their slots there.
            record: the request that asks for them, None for a warm start.
            tokens: that they make its hit longer by.
        """
        state = self._state
        slots, evicted = state.pool.reserve(keys)
        job = state.jobs.plan(Direction.LOAD, tier.tier)
        job.keys, job.slots, job.places = keys, list(slots), places
        job.expected, job.namespace = tier.expected(places), tier.namespace
        if record is not None:
            job.wanted[record] = None
        tier.pool.pin(places)
        tier.fetching.update(dict.fromkeys(keys, job))
        state.in_flight.began(keys, job)
        name = None if record is None else record.request
        state.tally.events.append(
            TierCopyScheduled(job.job, job.direction, len(keys), name, tokens, job.tier)
        )
        if evicted:
            self._stores.evicted(evicted)
        return job

    def reported(self, job: Job, part: JobReport) -> None:
        """A rank's copy has ended. What one rank cannot read no rank may use (R4)."""
        job.copy_s = max(job.copy_s, part.copy_s)
        job.stuck.update(part.stuck)
        job.missing.update(part.missing)
        if part.corrupt or part.missing:
            self._strike(job, part.corrupt, MissCause.CORRUPT)
            self._strike(job, part.missing)
        if part.outcome is not CopyOutcome.DONE and not job.settled:
            is_corrupt = part.outcome is CopyOutcome.CORRUPT
            self._failed(job, TierOutcome.CORRUPT if is_corrupt else TierOutcome.FAILED)
        if job.waiting:
            return
        if not job.settled:
            self._arrived(job)
        for position in job.stuck:  # a read that hangs may still fill them (R16)
            self._state.pool.quarantine(job.slots[position])
        self._state.pool.drained(job.slots)
        self._state.jobs.close(job)

    def abandoned(self, job: Job) -> None:
        """A rank does not report: its host slots are never handed out again (R16)."""
        if not job.settled:
            self._failed(job, TierOutcome.ABANDONED)
        for slot in job.slots:
            self._state.pool.quarantine(slot)

    def cancel(self, job: Job) -> None:
        """Take back a fetch that no worker knows of."""
        self.stop(job)
        self._state.pool.drained(job.slots)
        self._state.jobs.cancel(job)

    def stop(self, job: Job) -> None:
        """Do not let the blocks of open fetches be found, however they end."""
        if not job.settled:
            self._failed(job, TierOutcome.CANCELLED)

    def _usable(self) -> list[TierState]:
        """Return the tiers from which something could be fetched now."""
        if self._state.degraded is not None or self._state.stall.is_on:
            return []
        return [tier for tier in self._state.below if tier.is_usable and tier.has_blocks]

    def _first_missing(self, keys: Sequence[BlockKey]) -> BlockKey | None:
        """Return the first of a prefix's keys that the host lacks, by binary search: the host evicts a prefix's head last.

        Where a block before it is missing too, the request's lookup, which looks at each, fetches that.
        """
        parts = self._state.pool.index.parts
        first = bisect_left(keys, True, key=lambda key: key not in parts[key[0]])
        return keys[first] if first < len(keys) else None

    def _search(self, record: RequestRecord, index: LayeredIndex, device_tokens: int, tokens: int) -> _Found:
        """Return what tiers add to a prefix, cut to a usable length if it is longer than may be fetched for one request.

        Args:
            record: whose prefix.
            index: of all that need not be computed.
            device_tokens: tokens before which nothing is looked for.
            tokens: that need no fetch.
        """
        state = self._state
        limit, alignment = record.prompt_tokens - 1, state.shape.alignment
        room = self.budget - record.fetched_blocks
        # With one group the host has all up to there; windows of others may reach back behind it.
        start = tokens if state.shape.is_one_full_group else device_tokens
        least = max(record.least_tokens, state.policy.min_load_tokens)
        while True:
            reached, slots, *_ = longest_match(state.shape, record.keys, index, start, limit)
            blocks = index.below(slots)
            gain = min(reached - tokens, len(blocks) * alignment)
            worth = max([tier.least_tokens for _, tier, _ in blocks], default=0)
            if gain < max(worth, 1) or reached - device_tokens < least:
                return _NOTHING
            if len(blocks) <= room:
                return _Found(blocks, reached, gain, [slot for slot in slots if 0 <= slot < ON_DEVICE])
            surplus = (reached - start) * (len(blocks) - room) // len(blocks)
            limit = reached - max(surplus - surplus % alignment, alignment)

    def _fetch(self, record: RequestRecord, found: _Found, head: Sequence[SlotId]) -> None:
        """Plan what is not under way yet, as far as there is room beside what the host has of the same prefix.

        The request's lookups wait for it unless the device has as much by then.
        """
        state = self._state
        under_way = state.in_flight.keys
        blocks = [block for block in found.blocks if block[0] not in under_way]
        if not blocks:
            return
        kept = list(dict.fromkeys([*head, *found.host_slots]))
        state.pool.use(kept[::-1], {})
        open_fetches = sum([len(tier.fetching) for tier in state.below])
        room = max(min(state.pool.room - len(kept), self.budget - open_fetches), 0)
        for tier in state.below:
            some = [block for block in blocks[:room] if block[1] is tier]
            if some:
                # `zip(*some)` takes four times as long.
                keys, places = [key for key, _, _ in some], [place for _, _, place in some]
                gain = found.gain * len(some) // len(found.blocks)
                job = self.plan(tier, keys, places, record, gain)
                record.awaits_fetch = job.job, found.tokens - found.gain + gain

    def _arrived(self, job: Job) -> None:
        """Every rank has read: the host has the blocks, but for those that some rank could not get (R4)."""
        state, lost = self._state, job.corrupt | job.missing
        self._settle(job)
        keys, slots, places = job.keys, job.slots, job.places
        if lost:
            self._lost(job, sorted(lost), TierOutcome.CORRUPT if job.corrupt else TierOutcome.FAILED)
            came = [position for position in range(len(keys)) if position not in lost]
            keys, slots = [keys[position] for position in came], [slots[position] for position in came]
            places = [places[position] for position in came]
        self._stores.arrived_otherwise(self._end(job, keys, TierOutcome.DONE))
        state.pool.fill(slots[::-1])
        state.misses.arrived(keys)
        for record in job.wanted:
            record.fetched_blocks += len(keys)
            record.fetched_from = job.tier
        if job.wanted:  # a warm start is no use
            self._tiers[job.tier].read(places[::-1])

    def _failed(self, job: Job, outcome: TierOutcome) -> None:
        """The blocks will not come."""
        self._settle(job)
        self._lost(job, range(len(job.keys)), outcome)

    def _settle(self, job: Job) -> None:
        job.settled = True
        self._tiers[job.tier].pool.unpin(job.places)

    def _lost(self, job: Job, positions: Sequence[int], outcome: TierOutcome) -> None:
        """These blocks will not come, and the requests that wait for them ask for no other."""
        self._stores.offer_again(self._end(job, [job.keys[position] for position in positions], outcome))
        for position in positions:
            self._state.pool.invalidate(job.slots[position])
        if outcome is not TierOutcome.CANCELLED:
            for record in job.wanted:
                record.asks_below = False

    def _end(self, job: Job, keys: Sequence[BlockKey], outcome: TierOutcome) -> list[Offer]:
        """Count the outcome of these blocks; return the offers that waited for it."""
        if not keys:
            return []
        fetching = self._tiers[job.tier].fetching
        for key in keys:
            del fetching[key]
        ended = TierCopyEnded(job.job, job.direction, len(keys), outcome, job.copy_s, job.tier)
        self._state.tally.events.append(ended)
        return self._state.in_flight.ended(keys)

    def _strike(self, job: Job, positions: Sequence[int], cause: MissCause | None = None) -> None:
        """These places cannot be read, or do not hold what they should: their blocks are not found there again."""
        tier, removed = self._tiers[job.tier], 0
        for position in positions:
            place, key = job.places[position], job.keys[position]
            if tier.pool.indexed_key(place) != key:
                continue  # another rank has reported it, or a reset came
            tier.strike(place)
            removed += tier.pool.invalidate(place)
            if cause is not None:
                self._state.misses.note((key,), cause)
        if tier.tier is Tier.DISK:
            self._state.tally.evicted_from_disk(EvictionCause.CORRUPT, removed)


def _have(tiers: Sequence[TierState], key: BlockKey) -> bool:
    """Return whether one of these tiers has a block."""
    return any(key in tier.pool.index.parts[key[0]] for tier in tiers)
