"""Fetches: a lookup that goes on below the host brings what it finds there to the host, which answers from then on.

    seen, look ─▶ plan ─▶ Jobs.submit ─▶ reported ─▶ _arrived │ _failed
                            overdue ─▶ abandoned ─────────────┘
                   leaves ─▶ taken back, where no other request waits for it

A fetch begins when its request arrives, for what neither the device nor the host has then; a lookup adds what has changed. A key
is fetched once, whichever request asks (R14). Until it has arrived a lookup answers "not yet"; then the host has it like any
other block. Fetches fill at most a quarter of the host at a time, and for one request in all, so what is longer is fetched head
first and the rest is computed. A fetch that fails costs its requests one wait: they ask for no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvoffload.core.disk_state import DiskState
from kvoffload.core.job import Job, Offer
from kvoffload.core.layered_index import ON_DEVICE, LayeredIndex, as_negative
from kvoffload.core.machine import JobState
from kvoffload.core.match import longest_match
from kvoffload.core.request import PendingHit, RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.core.stores import Stores
from kvoffload.model.causes import CopyOutcome, DiskOutcome, EvictionCause, MissCause, StoreOutcome
from kvoffload.model.disk import Use
from kvoffload.model.events import DiskCopyEnded, DiskCopyScheduled
from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.transfer import Direction, JobReport, Tier


class _Found(NamedTuple):
    """What the disk adds to a prefix."""

    keys: list[BlockKey]  #: that only the disk has, heads first
    tokens: int  #: that they make the hit longer by
    host_slots: Sequence[SlotId]  #: what the host has of the same prefix


_NOTHING = _Found([], 0, ())


class Fetches:
    """Plans fetches and ends them."""

    def __init__(self, state: CoreState, disk: DiskState, stores: Stores) -> None:
        self._state = state
        self._disk = disk
        self._stores = stores

    @property
    def budget(self) -> int:
        """Host slots that fetches may fill, and blocks that they may bring for one request."""
        return max(self._state.pool.capacity // 4, 1)

    def seen(self, record: RequestRecord) -> None:
        """Fetch what only the disk has of an arriving request's prefix."""
        state, disk = self._state, self._disk
        if not (disk.sums and self._can_fetch and record.persists and record.reads_cache):
            return
        limit = record.prompt_tokens - 1
        on_host = longest_match(state.shape, record.keys, state.pool.index, 0, limit)
        if on_host.missing is None:
            return
        index = LayeredIndex(state.pool.index, disk.pool.index, state.device)
        found = self._search(record, index, 0, on_host.tokens)
        if found.keys:
            self._fetch(record, found, on_host.slots)

    def look(self, record: RequestRecord, hit: PendingHit) -> bool:
        """Fetch what the disk adds to a lookup's hit; return whether something is on its way that the request could use."""
        state, disk = self._state, self._disk
        if not (disk.sums and self._can_fetch) or hit.missing is None:
            return False
        if state.shape.is_one_full_group and hit.missing not in disk.pool.index:
            return False
        index = LayeredIndex(state.pool.index, disk.pool.index)
        found = self._search(record, index, hit.device_tokens, hit.tokens)
        if not found.keys:
            return False
        if record.asks_disk:
            self._fetch(record, found, hit.slots)
        jobs = {disk.fetching[key] for key in found.keys if key in disk.fetching}
        for job in jobs:
            job.wanted[record] = None
        return bool(jobs)

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
                jobs.withdrawn.append(job.job)

    def cause(self, missing: BlockKey | None, cause: MissCause | None) -> MissCause | None:
        """Return why a block misses that is not on the host, given what the host knows of it."""
        if missing is not None and missing in self._disk.pool.index:
            return MissCause.NO_STATE if self._state.shape.count_states((missing,)) else MissCause.ON_DISK
        if cause in (MissCause.NEVER_SEEN, MissCause.EVICTED) and not (
            self._disk.is_open or self._disk.is_closed
        ):
            return MissCause.TIER_OPENING
        return cause

    def plan(self, keys: list[BlockKey], record: RequestRecord | None = None, tokens: int = 0) -> None:
        """Bring blocks from the disk to the host, which has room for them.

        Args:
            keys: of blocks on the disk, heads first.
            record: the request that asks for them, None for a warm start.
            tokens: that they make its hit longer by.
        """
        state, disk = self._state, self._disk
        places = [disk.pool.index[key] for key in keys]
        slots, evicted = state.pool.reserve(keys)
        job = state.jobs.plan(Direction.LOAD, Tier.DISK)
        job.keys, job.slots, job.places = keys, list(slots), places
        job.expected = tuple([disk.sums[place] for place in places])
        if record is not None:
            job.wanted[record] = None
        disk.pool.pin(places)
        started = dict.fromkeys(keys, job)
        disk.fetching.update(started)
        state.in_flight.keys.update(started)
        name = None if record is None else record.request
        state.tally.events.append(DiskCopyScheduled(job.job, job.direction, len(keys), name, tokens))
        if evicted:
            self._stores.evicted(evicted)

    def reported(self, job: Job, part: JobReport) -> None:
        """A rank's copy has ended. What one rank cannot read no rank may use (R4)."""
        job.copy_s = max(job.copy_s, part.copy_s)
        if part.outcome is CopyOutcome.CORRUPT:
            self._strike(job, part.corrupt)
        if part.outcome is not CopyOutcome.DONE and not job.settled:
            is_corrupt = part.outcome is CopyOutcome.CORRUPT
            self._failed(job, DiskOutcome.CORRUPT if is_corrupt else DiskOutcome.FAILED)
        if job.waiting:
            return
        if not job.settled:
            self._arrived(job)
        self._state.pool.drained(job.slots)
        self._state.jobs.close(job)

    def abandoned(self, job: Job) -> None:
        """A rank does not report: its host slots are never handed out again (R16)."""
        if not job.settled:
            self._failed(job, DiskOutcome.ABANDONED)
        for slot in job.slots:
            self._state.pool.quarantine(slot)

    def cancel(self, job: Job) -> None:
        """Take back a fetch that no worker knows of."""
        self.stop(job)
        self._state.pool.drained(job.slots)
        self._state.jobs.cancel(job)

    def stop(self, job: Job) -> None:
        """What is under way is not to be found, however it ends."""
        if not job.settled:
            self._failed(job, DiskOutcome.CANCELLED)

    @property
    def _can_fetch(self) -> bool:
        return self._disk.is_usable and self._state.degraded is None and not self._state.stall.is_on

    def _search(self, record: RequestRecord, index: LayeredIndex, device_tokens: int, tokens: int) -> _Found:
        """Return what the disk adds to a prefix. A longer one than may be fetched for one request is cut to a length of use.

        Args:
            record: whose prefix.
            index: of all that need not be computed.
            device_tokens: tokens before which nothing is looked for.
            tokens: that need no fetch.
        """
        state, disk = self._state, self._disk
        limit, alignment = record.prompt_tokens - 1, state.shape.alignment
        room = self.budget - record.fetched_blocks
        # With one group the host has all up to there; windows of others may reach back behind it.
        start = tokens if state.shape.is_one_full_group else device_tokens
        least = max(record.least_tokens, state.policy.min_load_tokens)
        while True:
            reached, slots, *_ = longest_match(state.shape, record.keys, index, start, limit)
            places = [as_negative(slot) for slot in slots if slot < 0]
            gain = min(reached - tokens, len(places) * alignment)
            if gain < max(disk.least_tokens, 1) or reached - device_tokens < least:
                return _NOTHING
            if len(places) <= room:
                keys = [key for place in places if (key := disk.pool.key(place)) is not None]
                return _Found(keys, gain, [slot for slot in slots if 0 <= slot < ON_DEVICE])
            surplus = (reached - start) * (len(places) - room) // len(places)
            limit = reached - max(surplus - surplus % alignment, alignment)

    def _fetch(self, record: RequestRecord, found: _Found, head: Sequence[SlotId]) -> None:
        """Plan what is not under way yet, as far as there is room beside what the host has of the same prefix."""
        state = self._state
        keys = [key for key in found.keys if key not in state.in_flight.keys]
        if not keys:
            return
        kept = list(dict.fromkeys([*head, *found.host_slots]))
        state.pool.use(kept[::-1], {})
        room = min(state.pool.room - len(kept), self.budget - len(self._disk.fetching))
        if room > 0:
            some = keys[:room]
            self.plan(some, record, found.tokens * len(some) // len(found.keys))

    def _arrived(self, job: Job) -> None:
        """Every rank has read: the host has the blocks."""
        state = self._state
        for duplicate in self._settle(job, DiskOutcome.DONE):
            state.tally.count_stores(StoreOutcome.IN_FLIGHT)
            state.evictions.add(duplicate)
        state.pool.fill(job.slots[::-1])
        state.misses.arrived(job.keys)
        for record in job.wanted:
            record.fetched_blocks += len(job.keys)
        if job.wanted:  # a warm start is no use
            self._disk.records += [Use(place) for place in reversed(job.places)]

    def _failed(self, job: Job, outcome: DiskOutcome) -> None:
        """The blocks will not come."""
        self._stores.again += self._settle(job, outcome)
        for slot in job.slots:
            self._state.pool.invalidate(slot)
        if outcome is not DiskOutcome.CANCELLED:
            for record in job.wanted:
                record.asks_disk = False

    def _settle(self, job: Job, outcome: DiskOutcome) -> list[Offer]:
        job.settled = True
        self._disk.pool.unpin(job.places)
        for key in job.keys:
            del self._disk.fetching[key]
        ended = DiskCopyEnded(job.job, job.direction, len(job.slots), outcome, job.copy_s)
        self._state.tally.events.append(ended)
        return self._state.in_flight.forget(job.keys)

    def _strike(self, job: Job, positions: tuple[int, ...]) -> None:
        """These places cannot be read, or do not hold what they should: they are not found again."""
        disk, struck = self._disk, 0
        for position in positions:
            place, key = job.places[position], job.keys[position]
            if disk.pool.indexed_key(place) != key:
                continue  # another rank has reported it, or a reset came
            disk.strike(place)
            struck += disk.pool.invalidate(place)
            self._state.misses.note((key,), MissCause.CORRUPT)
        self._state.tally.evicted_from_disk(EvictionCause.CORRUPT, struck)
