"""Spills: blocks that were used again are written to a tier below the host, behind everything else.

    reuse ─▶ candidates ─▶ step ─▶ Jobs.submit ─▶ reported ─▶ _arrived │ _failed
                │                      overdue ─▶ abandoned ─────────────┘
                └─ the host has evicted it: dropped (`spill_behind`)

Candidates wait in the order in which the host evicts: least recently used first, and within a prefix the deepest first. So the blocks
that the host evicts next have been written by then, if spills keep up, and the tier, too, evicts a prefix's head last. While the
engine has requests, a few candidates wait for others (`LowerTiers`).

A host slot is pinned until every rank's copy has ended, also after a reset: a rank that still reads it writes what it finds under
the old block's name, and on a store others find it there. A place on the disk is removed from the index before it is written again,
and put into it after every rank has written it. If the removal is lost, the checksums show it.
"""

from __future__ import annotations

from kvoffload.core.job import Job
from kvoffload.core.state import CoreState
from kvoffload.core.tier_state import TierState
from kvoffload.model.causes import CopyOutcome, EvictionCause, MissCause, TierOutcome
from kvoffload.model.events import TierCopyEnded, TierCopyScheduled
from kvoffload.model.ids import BlockKey, Rank
from kvoffload.model.transfer import Direction, JobReport, Tier


class Spills:
    """Plans spills and ends them."""

    def __init__(self, state: CoreState, tier: TierState) -> None:
        self._state = state
        self._tier = tier
        self._open_slots = 0

    @property
    def are_due(self) -> bool:
        """Whether steps are needed for something to be spilled."""
        tier = self._tier
        return bool(tier.candidates and tier.is_usable and tier.pool.room) and self._state.degraded is None

    def step(self) -> bool:
        """Plan what may be spilled now, nothing while a load or a fetch is under way; return whether something was planned."""
        if not self._tier.candidates or not self._tier.is_usable or self._is_load_open():
            return False
        limit = self._tier.bound.slots(self._state.pool.capacity)
        room = min(limit - self._open_slots, self._tier.pool.room)
        if keys := self._next_keys(room):
            self._plan(keys)
        return bool(keys)

    def reported(self, job: Job, rank: Rank, part: JobReport) -> None:
        """A rank's copy has ended. One failed rank fails the spill at once; its memory waits for every rank (R4)."""
        job.sums[rank] = part.sums
        job.copy_s = max(job.copy_s, part.copy_s)
        job.stuck.update(part.stuck)
        job.missing.update(part.missing)
        if part.outcome is CopyOutcome.CORRUPT:
            self._quarantine(job, part.corrupt)
        if part.outcome is not CopyOutcome.DONE and not job.settled:
            is_corrupt = part.outcome is CopyOutcome.CORRUPT
            self._failed(job, TierOutcome.CORRUPT if is_corrupt else TierOutcome.FAILED)
        if job.waiting:
            return
        if not job.settled:
            self._arrived(job)
        self._copies_ended(job)
        self._state.jobs.close(job)

    def abandoned(self, job: Job) -> None:
        """A rank does not report: its places are never handed out again (R16)."""
        if not job.settled:
            self._failed(job, TierOutcome.ABANDONED)
        for place in job.places:
            self._tier.pool.quarantine(place)

    def cancel(self, job: Job) -> None:
        """Take back a spill that no worker knows of."""
        if not job.settled:
            self._failed(job, TierOutcome.CANCELLED)
        self._copies_ended(job)
        self._state.jobs.cancel(job)

    def stop(self, job: Job) -> None:
        """Do not let the blocks of open spills be found, however they end."""
        if not job.settled:
            self._failed(job, TierOutcome.CANCELLED)

    def _is_load_open(self) -> bool:
        return bool(self._state.jobs.is_loading or self._tier.fetching)

    def _next_keys(self, count: int) -> list[BlockKey]:
        """Take up to `count` candidates; return those that the host has and the tier lacks, heads first."""
        tier = self._tier
        keys = [tier.candidates.popleft() for _ in range(min(count, len(tier.candidates)))]
        tier.waiting.difference_update(keys)
        on_host, on_tier, spilling = self._state.pool.index.parts, tier.pool.index.parts, tier.spilling
        return [
            key
            for key in reversed(keys)
            if key in on_host[key[0]] and key not in on_tier[key[0]] and key not in spilling
        ]

    def _plan(self, keys: list[BlockKey]) -> None:
        """Write these blocks, heads first, to the tier, which has room for them."""
        state, tier = self._state, self._tier
        places, evicted = tier.pool.reserve(keys)
        if evicted:
            for place in places:
                tier.strike(place)
            if tier.tier is Tier.DISK:
                state.tally.evicted_from_disk(EvictionCause.SPACE, len(evicted))
        job = state.jobs.plan(Direction.STORE, tier.tier)
        job.keys, job.places, job.namespace = keys, list(places), tier.namespace
        on_host = state.pool.index.parts
        job.slots = [on_host[key[0]][key] for key in keys]
        state.pool.pin(job.slots)
        tier.spilling.update(dict.fromkeys(keys, job))
        self._open_slots += len(keys)
        state.tally.events.append(TierCopyScheduled(job.job, job.direction, len(keys), tier=job.tier))

    def _arrived(self, job: Job) -> None:
        """Every rank has written: the blocks can be found on the tier, also by the next process."""
        tier = self._tier
        tier.bound.ended(job, self._state.jobs.last, is_load_open=self._is_load_open())
        self._settle(job, TierOutcome.DONE)
        places = job.places[::-1]
        if job.missing:
            lacking = {job.places[position] for position in job.missing}
            places = [place for place in places if place not in lacking]
            for place in lacking:
                tier.pool.invalidate(place)
        tier.pool.fill(places)
        tier.put(job)

    def _failed(self, job: Job, outcome: TierOutcome) -> None:
        self._settle(job, outcome)
        for place in job.places:
            self._tier.pool.invalidate(place)

    def _quarantine(self, job: Job, positions: tuple[int, ...]) -> None:
        """These host slots do not hold what was stored there: they are lost, as those of a corrupt load are.

        The slots of a spill that failed already may hold other blocks by now, and those may be right.
        """
        pool = self._state.pool
        bad = [(job.slots[position], job.keys[position]) for position in positions]
        corrupt = [(slot, key) for slot, key in bad if pool.indexed_key(slot) == key]
        self._state.misses.note([key for _, key in corrupt], MissCause.CORRUPT)
        self._state.tally.evicted(EvictionCause.CORRUPT, sum([pool.quarantine(slot) for slot, _ in corrupt]))

    def _settle(self, job: Job, outcome: TierOutcome) -> None:
        job.settled = True
        for key in job.keys:
            del self._tier.spilling[key]
        self._open_slots -= len(job.slots)
        ended = TierCopyEnded(job.job, job.direction, len(job.slots), outcome, job.copy_s, job.tier)
        self._state.tally.events.append(ended)

    def _copies_ended(self, job: Job) -> None:
        """No rank reads the host slots any more, or touches the places, except those under a write that hangs."""
        self._state.pool.unpin(job.slots)
        for position in job.stuck:
            self._tier.pool.quarantine(job.places[position])
        self._tier.pool.drained(job.places)
