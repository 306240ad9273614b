"""Copies between the host and the tiers below it: which blocks are fetched and spilled, when, and how the copies end.

Fetches copy blocks from lower tiers to the host, where the next lookup finds them.

    seen, look ─▶ plan ─▶ submit ─▶ reported ─▶ _arrived │ failed
                            └─ the last request that waits for it leaves: dropped

When a request arrives, a fetch is planned for the blocks of its prefix that neither the device nor the host has. If the
request's lookup finds that more blocks must be fetched, the lookup plans another fetch. A key that several requests
need is fetched once (R14). Lookups that need a block in flight answer "not yet"; once fetched, the block is on the host
like any other.

All open fetches together fill at most a quarter of the host. A longer prefix is fetched in rounds: each lookup plans
the next round after the last one has arrived, until the host has the prefix or lacks room. A round after a request's
first one fills at most an eighth of the host, and leaves an eighth of the host to other requests, so that they can
fetch and store, too. Between rounds, the prefix's blocks are held on the host, so that no block is read twice. Of a
prefix that is longer than the host, only the head is fetched, and the rest is computed; the first such prefix is
reported.

After a failed fetch, no other fetch is planned for the requests that waited for it.

After a restart, a *warm start* fetches the most recently used blocks from the disk before requests ask for them. A warm
start fills only free slots, at most a quarter of the host, a few at a time, and only while no other load or fetch is
open. It fetches the least recently used of its blocks first, so that both pools keep the order of use. The prefix of an
arriving request is removed from the warm start, because the request fetches this prefix: if the warm start fetched a
deeper block after the prefix's head, the block would be evicted after the head (R15).

Spills write blocks to a lower tier after lookups have found these blocks again. Spills are planned after all other
copies.

    reuse ─▶ candidates ─▶ step ─▶ submit ─▶ reported ─▶ _arrived │ failed
                └─ the host has evicted it: skipped (`spill_behind`)

Candidates wait in the order in which the host evicts: least recently used first, and within a prefix the deepest first.
If spills keep up, a block is written before the host evicts it, and the tier also evicts a prefix's head last. A spill
pins its host slots until every rank's copy has ended, even after a reset: if a slot were reused while a rank still
reads it, the rank would write the new block's bytes under the old key. A disk slot is removed from the disk's index
before its bytes are overwritten, and is added again after every rank has written it. If a crash loses the removal, the
checksums in the index do not match the slot's bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Generic, NamedTuple, TypeVar

from kvoffload.core.jobs import Failure, Fetch, InFlight, Offer, Spill
from kvoffload.core.machine import RequestState, SlotState
from kvoffload.core.match import longest_match
from kvoffload.core.request import PendingHit, RequestRecord
from kvoffload.core.slots import SlotPool
from kvoffload.core.state import CoreState
from kvoffload.core.stores import Stores
from kvoffload.core.tiers import ON_DEVICE, Block, LayeredIndex, LowerTier
from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome, EvictionCause, MissCause, TierOutcome
from kvoffload.model.events import (
    DiskClosed,
    DiskOpened,
    PrefixExceedsHost,
    TierCopyEnded,
    TierCopyScheduled,
)
from kvoffload.model.ids import BlockKey, Rank, RequestId, SlotId
from kvoffload.model.wire import JobReport, Tier

JobT = TypeVar("JobT", Fetch, Spill)

MOST_STEPS = 64
"""How many steps a short queue of spills waits for more blocks.

If the process is killed, the tier never gets these blocks.
"""
_ENOUGH = 32
"""A queue of this length is spilled without waiting.

In a hook, one more job costs as much time as about 80 more blocks.
"""
_MOST_WARM = 2**16
"""The maximum number of blocks that a warm start remembers."""

# -- jobs -----------------------------------------------------------------------------------------------------------


class _Copies(ABC, Generic[JobT]):
    """The common base of the owners of fetches and spills.

    A job reserves the slots that it writes and pins the slots that it reads. Its keys are in flight until the job's
    outcome is known.

    Args:
        state: the core's state.
        tier: the lower tier.
        read: the pool whose slots the jobs read.
        written: the pool whose slots the jobs write.
        in_flight: the keys being copied to the `written` pool.
    """

    def __init__(
        self, state: CoreState, tier: LowerTier, read: SlotPool, written: SlotPool, in_flight: InFlight
    ) -> None:
        self._state = state
        self._tier = tier
        self._read = read
        self._written = written
        self._in_flight = in_flight

    def _plan(self, job: JobT, name: RequestId | None = None, tokens: int = 0) -> None:
        """Plan a job whose slots have been reserved."""
        self._state.jobs.plan(job)
        event = TierCopyScheduled(job.id, job.direction, len(job.keys), name, tokens, job.tier)
        self._state.tally.events.append(event)
        self._read.pin(job.read)
        self._in_flight.began(job.keys, job)

    def reported(self, job: JobT, rank: Rank, report: JobReport) -> None:
        """Record the end of a rank's copy. The first rank that fails makes the job fail (R4)."""
        if report.stuck or report.missing:
            job.stuck.update(report.stuck)
            job.missing.update(report.missing)
        if report.outcome is not CopyOutcome.DONE and not job.settled:
            is_corrupt = report.outcome is CopyOutcome.CORRUPT
            self.failed(job, Failure.CORRUPT if is_corrupt else Failure.FAILED)

    def failed(self, job: JobT, why: Failure) -> None:
        """Settle a failed job. After a timeout, quarantine the slots that the job writes (R16)."""
        if not job.settled:
            job.settled = True
            self._lose(job, range(len(job.keys)), why.of_tier)
        if why is Failure.TIMED_OUT:
            for slot in job.written:
                self._written.quarantine(slot)

    def ended(self, job: JobT) -> None:
        """Release a job's slots after every rank has ended its copy.

        Slots that a hanging call may still write are quarantined (R16).
        """
        if not job.settled:
            job.settled = True
            self._arrived(job)
        for position in job.stuck:
            self._written.quarantine(job.written[position])
        self._written.drained(job.written)

    def _settle(self, job: JobT, keys: Sequence[BlockKey], outcome: TierOutcome) -> list[Offer]:
        """Report the outcome of some of a job's blocks; return the offers that waited for this outcome."""
        event = TierCopyEnded(job.id, job.direction, len(keys), outcome, job.copy_s, job.tier)
        self._state.tally.events.append(event)
        return self._in_flight.ended(keys)

    def _lose(self, job: JobT, positions: Sequence[int], outcome: TierOutcome) -> list[Offer]:
        """Like `_settle`, but also invalidate the blocks, given by their positions in the job."""
        waited = self._settle(job, [job.keys[position] for position in positions], outcome)
        for position in positions:
            self._written.invalidate(job.written[position])
        return waited

    @abstractmethod
    def _arrived(self, job: JobT) -> None:
        """Let lookups find the blocks that every rank has copied."""


class Fetches(_Copies[Fetch]):
    """Plans and owns the fetches from one tier, including a warm start.

    Attributes:
        warm: the keys that the warm start has still to fetch, the most recently used last.
    """

    def __init__(self, state: CoreState, tier: LowerTier, stores: Stores) -> None:
        super().__init__(state, tier, tier.pool, state.pool, stores.in_flight)
        self._stores = stores
        self.warm: deque[BlockKey] = deque(maxlen=_MOST_WARM)
        self._left: set[BlockKey] = set()  # keys that the warm start skips, because requests fetch them

    def plan(
        self,
        keys: list[BlockKey],
        tier_slots: list[SlotId],
        record: RequestRecord | None = None,
        tokens: int = 0,
    ) -> Fetch:
        """Plan a fetch and return the job. The host must have room for the blocks.

        Args:
            keys: the keys of the blocks, heads first.
            tier_slots: the blocks' slots on the tier.
            record: the request that needs the blocks; None for a warm start.
            tokens: how many tokens the blocks add to the request's hit.
        """
        tier = self._tier
        slots, evicted = self._written.reserve(keys)
        targets, extra = tier.targets(keys, tier_slots), tier.extra(tier_slots)
        job = Fetch(self, slots, targets, extra, tier.tier, keys=keys, tier_slots=tier_slots)
        self._plan(job, None if record is None else record.request, tokens)
        if evicted:
            self._stores.evicted(evicted)
        return job

    # -- warm start ---------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Return whether an open warm start needs more steps of the engine."""
        state = self._state
        return bool(self.warm) and self._tier.is_usable and state.degraded is None and not state.stall.is_on

    def restored(self, keys: Iterable[BlockKey]) -> None:
        """Add keys from the disk's index to the warm start, the least recently used first."""
        self.warm.extend(keys)

    def leave_to(self, record: RequestRecord) -> None:
        """Remove an arriving request's prefix from the warm start. The request fetches the prefix itself."""
        self._left.update(*record.keys)

    def stop(self) -> None:
        """End the warm start."""
        self.warm.clear()
        self._left.clear()

    def warm_up(self) -> None:
        """Plan the warm start's next fetch, unless a load or a fetch is open."""
        state, tier = self._state, self._tier
        if not self.is_due or state.growing or tier.fetching or state.jobs.is_loading:
            return
        while len(self.warm) > most_fetched(state):
            self.warm.popleft()
        most = min(state.pool.count(SlotState.EMPTY), tier.spill_slots(state.pool.capacity))
        if not most:
            self.stop()
        keys: list[BlockKey] = []
        while self.warm and len(keys) < most:
            key = self.warm.popleft()
            is_elsewhere = key in state.pool.index or key in self._in_flight.keys or key in self._left
            if key in tier.pool.index and not is_elsewhere:
                keys.append(key)
        if keys:
            keys.reverse()
            self.plan(keys, [tier.pool.index[key] for key in keys])

    # -- endings ------------------------------------------------------------------------------------------------

    def reported(self, job: Fetch, rank: Rank, report: JobReport) -> None:
        """Record the end of a rank's copy. A block that the rank could not read is lost for all ranks (R4)."""
        if report.corrupt or report.missing:
            job.corrupt.update(report.corrupt)
            self._invalidate(job, report.corrupt, MissCause.CORRUPT)
            self._invalidate(job, report.missing)
        super().reported(job, rank, report)

    def failed(self, job: Fetch, why: Failure) -> None:
        if not job.settled:
            self._read.unpin(job.read)
        super().failed(job, why)

    def _arrived(self, job: Fetch) -> None:
        """Let lookups find the fetched blocks on the host, except blocks that a rank could not read (R4)."""
        lost = job.corrupt | job.missing
        self._read.unpin(job.read)
        keys, slots, tier_slots = job.keys, job.slots, job.tier_slots
        if lost:
            self._lose(job, sorted(lost), TierOutcome.CORRUPT if job.corrupt else TierOutcome.FAILED)
            came = [position for position in range(len(keys)) if position not in lost]
            keys = [keys[position] for position in came]
            slots = [slots[position] for position in came]
            tier_slots = [tier_slots[position] for position in came]
        if keys:
            self._stores.arrived_otherwise(self._settle(job, keys, TierOutcome.DONE))
        self._written.fill(slots[::-1])
        self._state.misses.arrived(keys)
        for record in job.wanted:
            record.fetched_blocks += len(keys)
            record.fetched_from |= dict.fromkeys(keys, job.tier)
            if record.waits_for is not None:
                self._state.retention.keep(record, slots)
        if job.wanted:  # A warm start's fetch does not count as a use of the blocks.
            self._tier.read(tier_slots[::-1])

    def _lose(self, job: Fetch, positions: Sequence[int], outcome: TierOutcome) -> list[Offer]:
        """Invalidate blocks of a fetch. Unless the fetch was cancelled, its requests get no other fetch."""
        waited = super()._lose(job, positions, outcome)
        self._stores.offer_again(waited)
        if outcome is not TierOutcome.CANCELLED:
            for record in job.wanted:
                record.asks_tiers = False
        return waited

    def _invalidate(self, job: Fetch, positions: Sequence[int], cause: MissCause | None = None) -> None:
        """Remove from the tier's index blocks that the tier lacks or whose bytes are corrupt."""
        state, tier, removed = self._state, self._tier, 0
        for position in positions:
            tier_slot, key = job.tier_slots[position], job.keys[position]
            if tier.pool.indexed_key(tier_slot) != key:
                continue  # Another rank's report or a reset has already removed the block.
            tier.invalidate(tier_slot)
            removed += tier.pool.invalidate(tier_slot)
            if cause is not None:
                state.misses.note((key,), cause)
        state.tally.evicted_below(tier.tier, EvictionCause.CORRUPT, removed)


class Spills(_Copies[Spill]):
    """Plans and owns the spills to one tier."""

    def __init__(self, state: CoreState, tier: LowerTier) -> None:
        super().__init__(state, tier, state.pool, tier.pool, tier.in_flight)

    @property
    def is_due(self) -> bool:
        """Return whether blocks wait to be spilled and the tier can take them."""
        tier = self._tier
        return bool(tier.candidates and tier.is_usable and tier.pool.room) and self._state.degraded is None

    def step(self) -> bool:
        """Plan a spill, unless a load or a fetch is open; return whether a spill was planned."""
        state, tier = self._state, self._tier
        if not self.is_due or self._is_load_open:
            return False
        spilling = self._in_flight.keys
        limit = tier.spill_slots(state.pool.capacity) - len(spilling)
        on_host, on_tier = state.pool.index.parts, tier.pool.index.parts
        keys = [
            key
            for key in reversed(tier.take_candidates(min(limit, tier.pool.room)))
            if key in on_host[key[0]] and key not in on_tier[key[0]] and key not in spilling
        ]
        if keys:
            self.plan(keys, [on_host[key[0]][key] for key in keys])
        return bool(keys)

    @property
    def _is_load_open(self) -> bool:
        return bool(self._state.jobs.is_loading or self._tier.fetching)

    def plan(self, keys: list[BlockKey], slots: list[SlotId]) -> None:
        """Plan a spill. Keys and host slots are listed heads first, and the tier must have room for all blocks."""
        tier = self._tier
        tier_slots, evicted = self._written.reserve(keys)
        if evicted:
            for tier_slot in tier_slots:
                tier.invalidate(tier_slot)
            tier.unconfirmed.difference_update(evicted)
            self._state.tally.evicted_below(tier.tier, EvictionCause.SPACE, len(evicted))
        targets = tier.targets(keys, tier_slots)
        self._plan(Spill(self, slots, targets, tier.extra(), tier.tier, keys=keys, tier_slots=tier_slots))

    def ended(self, job: Spill) -> None:
        super().ended(job)
        self._read.unpin(job.read)

    def reported(self, job: Spill, rank: Rank, report: JobReport) -> None:
        """Record the end of a rank's copy. Quarantine host slots whose bytes the rank found corrupt."""
        job.sums[rank] = report.sums
        if report.outcome is CopyOutcome.CORRUPT:
            self._quarantine(job, report.corrupt)
        super().reported(job, rank, report)

    def _arrived(self, job: Spill) -> None:
        """Let lookups find the spilled blocks on the tier. The disk's index records them for the next process."""
        tier = self._tier
        tier.spill_ended(job, self._state.jobs.last, is_load_open=self._is_load_open)
        self._settle(job, job.keys, TierOutcome.DONE)
        tier_slots = job.tier_slots[::-1]
        if job.missing:
            lacking = {job.tier_slots[position] for position in job.missing}
            tier_slots = [slot for slot in tier_slots if slot not in lacking]
            for slot in lacking:
                tier.pool.invalidate(slot)
        tier.pool.fill(tier_slots)
        tier.put(job)

    def _quarantine(self, job: Spill, positions: tuple[int, ...]) -> None:
        """Quarantine the host slots at these positions of a spill, except slots that contain another block by now."""
        pool = self._state.pool
        bad = [(job.slots[position], job.keys[position]) for position in positions]
        corrupt = [(slot, key) for slot, key in bad if pool.indexed_key(slot) == key]
        self._state.misses.note([key for _, key in corrupt], MissCause.CORRUPT)
        self._state.tally.evicted(EvictionCause.CORRUPT, sum([pool.quarantine(slot) for slot, _ in corrupt]))


# -- decisions -----------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """The blocks that lower tiers add to a prefix."""

    blocks: Sequence[Block]  #: the prefix's blocks that only lower tiers have, heads first
    tokens: int  #: the length of the prefix in tokens, including `blocks`
    gain: int  #: how many tokens `blocks` add to the prefix
    host_slots: Sequence[SlotId]  #: the slots of the prefix's blocks that the host has, heads first


_NOTHING = _Found((), 0, 0, ())


class LowerTiers:
    """Decides which blocks are copied between the host and lower tiers, and when. Handles facts about lower tiers.

    The only writer of `RequestRecord.awaits_fetch`.

    Attributes:
        spills, fetches: for each tier, the owner of its spills or fetches.
        queues: the candidates for spills and the keys of warm starts. The core calls `step` when a queue is not empty.
    """

    def __init__(self, state: CoreState, stores: Stores) -> None:
        self._state = state
        self._in_flight = stores.in_flight
        self.spills: dict[LowerTier, Spills] = {tier: Spills(state, tier) for tier in state.tiers}
        self.fetches: dict[LowerTier, Fetches] = {tier: Fetches(state, tier, stores) for tier in state.tiers}
        # A list, because hooks iterate over the owners of fetches, and iterating over a dict takes longer.
        self._fetches = list(self.fetches.values())
        self._spills = list(self.spills.values())
        self._owners: list[Fetches | Spills] = [*self._fetches, *self._spills]
        self.queues = [tier.candidates for tier in state.tiers] + [each.warm for each in self._fetches]
        self._spilled_at = 0  # the last step in which a spill was planned
        self._has_reported_long = False
        self._enough = 1  # the queue length at which `step` plans copies without waiting for more blocks

    # -- for requests -------------------------------------------------------------------------------------------

    def request_seen(self, record: RequestRecord) -> None:
        """Fetch an arriving request's blocks, and query the remote tier for blocks that no other tier has."""
        for fetches in self._fetches:
            if fetches.warm:
                fetches.leave_to(record)
        remote = self._state.remote
        is_open = remote is not None and remote.is_usable and self._state.degraded is None
        if is_open and record.reads_cache and record.persists and (keys := self._wanted(record)):
            assert remote is not None
            record.awaits_answer = True
            remote.ask(record.request, keys)
        self._seen(record)

    def _wanted(self, record: RequestRecord) -> list[BlockKey]:
        """Return which of an arriving request's blocks the remote tier must be asked for.

        Mooncake protects each block that it is asked for from eviction, so only blocks that a fetch could use are
        asked for: not the blocks above the remote tier or after the last token that a lookup can find, and none at all
        if a fetch of all of them would be too short.
        """
        state = self._state
        limit = record.prompt_tokens - 1
        first = 0
        *above, remote = state.tiers
        if record.limits.load_tokens == 0 or not _allows(record, remote):
            return []
        if state.shape.is_one_full_group:
            # With more groups, a hit may need blocks of one group that the device has.
            on_device = (state.device.block_of(key) is not None for key in record.keys[0])
            first = sum(takewhile(bool, on_device))
        lacking = list[BlockKey]()
        for group, keys in zip(state.shape.groups, record.keys, strict=True):
            last = limit // group.block_tokens + group.has_lookahead
            lacking += [key for key in keys[first:last] if key not in state.pool.index]
        is_short = len(lacking) * state.shape.alignment < remote.least_tokens
        if is_short or limit < max(record.least_tokens, state.policy.min_load_tokens):
            return []
        return [key for key in lacking if not _have(above, key)]

    def _seen(self, record: RequestRecord) -> None:
        """Fetch the blocks of an arriving request's prefix that only lower tiers have."""
        state, tiers = self._state, self._usable(record)
        if not (tiers and record.persists and record.reads_cache):
            return
        if record.limits.load_tokens is not None:
            return  # Only a lookup knows after how many tokens the request's limit begins.
        limit = record.prompt_tokens - 1
        if state.shape.is_one_full_group:
            missing = self._first_missing(record.keys[0][: limit // state.shape.alignment])
            if missing is None or not (_have(tiers, missing) or state.device.block_of(missing) is not None):
                return
        on_host = longest_match(state.shape, record.keys, state.pool.index, 0, limit)
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
        state, tiers, missing = self._state, self._usable(record), hit.missing
        if not tiers or missing is None:
            return False
        if state.shape.is_one_full_group and not _have(tiers, missing):
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

    def cause(self, record: RequestRecord, missing: BlockKey, cause: MissCause | None) -> MissCause | None:
        """Return why a block is missing on the host. `cause` is the answer if lower tiers do not explain the miss."""
        for tier in self._state.tiers:
            if missing in tier.pool.index.parts[missing[0]]:
                if not _allows(record, tier):
                    return MissCause.LIMITED
                if self._state.shape.count_states((missing,)):
                    return MissCause.NO_STATE
                return MissCause.ON_DISK if tier.tier is Tier.DISK else MissCause.IN_REMOTE
        disk = self._state.disk
        is_opening = disk is not None and not (disk.is_open or disk.is_closed)
        if is_opening and cause in (MissCause.NEVER_SEEN, MissCause.EVICTED):
            return MissCause.TIER_OPENING
        return cause

    def _usable(self, record: RequestRecord) -> list[LowerTier]:
        """Return the tiers from which a fetch for a request may start now.

        While the remote tier is asked for the request's blocks, its earlier answers do not count.
        """
        if self._state.degraded is not None or self._state.stall.is_on:
            return []
        unsure = self._state.remote if record.awaits_answer else None
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
            reached, slots, *_ = longest_match(state.shape, record.keys, index, start, limit)
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

    def _report_long(self, record: RequestRecord, blocks: int) -> None:
        """Report the first prefix that has more blocks than the host has slots."""
        slots = self._state.pool.capacity
        if blocks > slots and not (self._has_reported_long or self._state.growing):
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
        return min(unused, pool.capacity - record.fetched_blocks)

    def _fetch(self, record: RequestRecord, found: _Found) -> None:
        """Plan the next round of fetches: the first of the `found` blocks that are not in flight.

        The prefix's blocks on the host are not evicted to make room. The request's lookups then wait for the fetches.
        """
        state = self._state
        on_way = self._in_flight.keys
        blocks = [block for block in found.blocks if block[0] not in on_way]
        if not blocks:
            return
        state.pool.use(found.host_slots[::-1], {})
        most = most_fetched(state)
        if record.fetched_blocks:
            most = max(most // 2, 1)
        room = max(most - sum([tier.fetching for tier in state.tiers]), 0)
        for tier in state.tiers:
            some = [block for block in blocks[:room] if block[1] is tier]
            if some:
                keys, tier_slots = [key for key, _, _ in some], [slot for _, _, slot in some]
                gain = found.gain * len(some) // len(found.blocks)
                job = self.fetches[tier].plan(keys, tier_slots, record, gain)
                job.wanted[record] = None
                record.awaits_fetch = job.id, found.tokens - found.gain + gain

    # -- without a request --------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Return whether a warm start or spills need more steps of the engine."""
        return any(each.is_due for each in self._owners)

    def step(self) -> None:
        """Plan copies that no request waits for: the warm start, then spills.

        While the engine has requests, plan copies only if a queue is long enough, or if the last spill was planned
        `MOST_STEPS` steps ago.
        """
        state = self._state
        is_early = state.steps - self._spilled_at < MOST_STEPS
        if state.requests.live and is_early and max(map(len, self.queues)) < self._enough:
            return
        for fetches in self._fetches:
            if fetches.warm:
                fetches.warm_up()
        for spills in self._spills:
            if spills.step():
                self._spilled_at = state.steps
        limits = [tier.spill_slots(state.pool.capacity) for tier in state.tiers]
        self._enough = min(_ENOUGH, *limits)

    # -- facts --------------------------------------------------------------------------------------------------

    def disk_restored(self, fact: facts.DiskRestored) -> None:
        """Add a part of the disk's index. The last part opens the disk."""
        disk = self._state.disk
        assert disk is not None, fact
        disk.restore(fact.slots, fact.puts, fact.free, is_last=fact.is_last)
        self.fetches[disk].restored([put.key for put in fact.puts])
        if disk.is_open:
            self._state.tally.events.append(DiskOpened(disk.capacity, len(disk.pool.index)))

    def disk_closed(self, _: facts.DiskClosed) -> None:
        """Stop using the disk."""
        disk = self._state.disk
        if disk is not None and not disk.is_closed:
            disk.close()
            self._state.tally.events.append(DiskClosed())

    def remote_opened(self, fact: facts.RemoteOpened) -> None:
        """Open the remote tier. If its namespace has changed, discard the hints from the old namespace."""
        jobs, remote = self._state.jobs, self._state.remote
        assert remote is not None, fact
        if remote.namespace not in ("", fact.namespace):
            for job in [job for job in jobs.open.values() if job.tier is Tier.REMOTE]:
                jobs.drop(job)
            remote.forget_all()
        remote.open(fact.namespace)

    def remote_lost(self, _: facts.RemoteLost) -> None:
        """Close the remote tier while it does not answer. The tier can open again."""
        if self._state.remote is not None:
            self._state.remote.close()

    def remote_answered(self, fact: facts.RemoteAnswered) -> None:
        """Record which of a request's blocks the remote tier has, and fetch them."""
        remote, record = self._state.remote, self._state.requests.live.get(fact.request)
        if record is not None:
            record.awaits_answer = False
        if remote is not None and fact.namespace == remote.namespace:
            remote.note(fact.found, fact.missing)
            if record is not None and record.state is RequestState.SEEN:
                self._seen(record)

    def forget_all(self) -> None:
        """Empty the indexes of all lower tiers. Call this method after dropping the tiers' jobs."""
        self.stop()
        for tier in self._state.tiers:
            self._state.tally.evicted_below(tier.tier, EvictionCause.RESET, tier.forget_all())

    def stop(self) -> None:
        """End warm starts."""
        for fetches in self._fetches:
            fetches.stop()


def most_fetched(state: CoreState) -> int:
    """Return how many host slots all open fetches may fill together."""
    return max(state.pool.capacity // 4, 1)


def _allows(record: RequestRecord, tier: LowerTier) -> bool:
    return record.limits.tiers is None or tier.tier in record.limits.tiers


def _have(tiers: Sequence[LowerTier], key: BlockKey) -> bool:
    return any(key in tier.pool.index.parts[key[0]] and key not in tier.unconfirmed for tier in tiers)
