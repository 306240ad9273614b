"""Fetches: a lookup that goes on into the disk brings what lies there to the host first, and is answered by the host then.

    look ─▶ _plan ─▶ Jobs.submit ─▶ reported ─▶ _arrived │ _failed
                         overdue ─▶ abandoned ─────────────┘

A key is fetched once, whoever asks (R14). Until it has arrived a lookup answers "not yet"; then the host has it like any other
block. Fetches fill at most a quarter of the host at a time, and for one request in all, so what is longer is fetched head first
and the rest is computed. A fetch that fails costs its request one wait: it asks for no other.
"""

from __future__ import annotations

from kvoffload.core.disk_state import DiskState, HostAndDisk, as_negative
from kvoffload.core.job import Job, Offer
from kvoffload.core.match import longest_match
from kvoffload.core.request import RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.core.stores import Stores
from kvoffload.model.causes import CopyOutcome, DiskOutcome, EvictionCause, MissCause, StoreOutcome
from kvoffload.model.disk import Use
from kvoffload.model.events import DiskCopyEnded, DiskCopyScheduled
from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.transfer import Direction, JobReport, Tier


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

    def look(self, record: RequestRecord, device_tokens: int, host_slots: tuple[SlotId, ...]) -> bool:
        """Fetch what the disk adds to a request's hit; return whether something is on its way that the request could use.

        Args:
            record: the request.
            device_tokens: tokens that the device holds.
            host_slots: what the host has of its prefix, which must not be evicted for the rest of it.
        """
        keys = self._on_disk(record, device_tokens)
        missing = [key for key in keys if key not in self._state.in_flight.keys]
        if missing and record.asks_disk:
            self._plan(record, missing, host_slots)
        return any(key in self._disk.fetching for key in keys)

    def cause(self, missing: BlockKey | None, cause: MissCause | None) -> MissCause | None:
        """Return why a block misses that is not on the host, given what the host knows of it."""
        if missing is not None and missing in self._disk.pool.index:
            return MissCause.NO_STATE if self._state.shape.count_states((missing,)) else MissCause.ON_DISK
        if cause in (MissCause.NEVER_SEEN, MissCause.EVICTED) and not self._disk.is_open:
            return MissCause.TIER_OPENING
        return cause

    def reported(self, job: Job, part: JobReport) -> None:
        """A rank's copy has ended. What one rank cannot read no rank may use (R4)."""
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

    def _on_disk(self, record: RequestRecord, device_tokens: int) -> list[BlockKey]:
        """Return the keys that only the disk has, heads first, of the longest prefix that host and disk have together.

        A prefix of which more is to be fetched than may be for one request is cut to a length of use.
        """
        state, disk = self._state, self._disk
        both = HostAndDisk(state.pool.index, disk.pool.index)
        limit, alignment = record.prompt_tokens - 1, state.shape.alignment
        room = self.budget - record.fetched_blocks
        while True:
            tokens, slots, *_ = longest_match(state.shape, record.keys, both, device_tokens, limit)
            found = tokens - device_tokens
            if found < max(record.least_tokens, 1):
                return []
            places = [as_negative(slot) for slot in slots if slot < 0]
            if len(places) <= room:
                return [key for place in places if (key := disk.pool.key(place)) is not None]
            surplus = found * (len(places) - room) // len(places)
            limit = tokens - max(surplus - surplus % alignment, alignment)

    def _plan(self, record: RequestRecord, keys: list[BlockKey], host_slots: tuple[SlotId, ...]) -> None:
        state, disk = self._state, self._disk
        state.pool.use(host_slots[::-1], {})
        room = min(state.pool.room - len(host_slots), self.budget - len(disk.fetching))
        keys = keys[: max(room, 0)]
        if not keys:
            return
        places = [disk.pool.index[key] for key in keys]
        slots, evicted = state.pool.reserve(keys)
        job = state.jobs.plan(Direction.LOAD, Tier.DISK)
        job.keys, job.slots, job.places = keys, list(slots), places
        job.expected = tuple([disk.sums[place] for place in places])
        job.asks = record
        disk.pool.pin(places)
        started = dict.fromkeys(keys, job)
        disk.fetching.update(started)
        state.in_flight.keys.update(started)
        state.tally.events.append(DiskCopyScheduled(job.job, job.direction, len(keys), record.request))
        if evicted:
            self._stores.evicted(evicted)

    def _arrived(self, job: Job) -> None:
        """Every rank has read: the host has the blocks."""
        state = self._state
        for duplicate in self._settle(job, DiskOutcome.DONE):
            state.tally.count_stores(StoreOutcome.IN_FLIGHT)
            state.evictions.add(duplicate)
        state.pool.fill(job.slots[::-1])
        if job.asks is not None:
            job.asks.fetched_blocks += len(job.keys)
        state.misses.arrived(job.keys)
        self._disk.records += [Use(place) for place in reversed(job.places)]

    def _failed(self, job: Job, outcome: DiskOutcome) -> None:
        """The blocks will not come."""
        self._stores.again += self._settle(job, outcome)
        for slot in job.slots:
            self._state.pool.invalidate(slot)
        if job.asks is not None and outcome is not DiskOutcome.CANCELLED:
            job.asks.asks_disk = False

    def _settle(self, job: Job, outcome: DiskOutcome) -> list[Offer]:
        job.settled = True
        self._disk.pool.unpin(job.places)
        for key in job.keys:
            del self._disk.fetching[key]
        self._state.tally.events.append(DiskCopyEnded(job.job, job.direction, len(job.slots), outcome))
        return self._state.in_flight.forget(job.keys)

    def _strike(self, job: Job, positions: tuple[int, ...]) -> None:
        """These places cannot be read, or do not hold what they should: nobody finds them again."""
        disk, struck = self._disk, 0
        for position in positions:
            place, key = job.places[position], job.keys[position]
            if disk.pool.indexed_key(place) != key:
                continue  # another rank has said so, or a reset came
            disk.strike(place)
            struck += disk.pool.invalidate(place)
            self._state.misses.note((key,), MissCause.CORRUPT)
        self._state.tally.evicted_from_disk(EvictionCause.CORRUPT, struck)
