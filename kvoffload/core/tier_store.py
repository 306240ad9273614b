"""The tiers below the host: blocks are fetched from them to the host and spilled from the host to them.

Nothing here knows requests, a device or the shape of an engine: `LowerTiers` decides for requests, and `TierCache` uses
the store alone.

    fetch ─▶ submit ─▶ reported ─▶ _arrived │ failed
                └─ dropped, if nothing needs it any more

Fetches copy blocks to the host, where the next lookup finds them. A key is fetched once (R14).

After a restart, a *warm start* fetches the most recently used blocks from the tiers with slots before requests ask for
them. A warm start fills only free slots, at most a quarter of the host, a few at a time, and only while no other load or
fetch is open. It fetches the least recently used of its blocks first, so that both pools keep the order of use. The
prefix of an arriving request is removed from the warm start, because the request fetches this prefix: if the warm start
fetched a deeper block after the prefix's head, the block would be evicted after the head (R15).

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
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from kvoffload.core.host import HostState
from kvoffload.core.jobs import Failure, Fetch, InFlight, Offer, Spill
from kvoffload.core.machine import SlotState
from kvoffload.core.order import Came
from kvoffload.core.slots import SlotPool
from kvoffload.core.tiers import LowerTier
from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome, EvictionCause, MissCause, TierOutcome
from kvoffload.model.events import TierClosed, TierCopyEnded, TierCopyScheduled, TierReady
from kvoffload.model.ids import BlockKey, Rank, RequestId, SlotId
from kvoffload.model.wire import NOTHING, JobReport, Tier, TransferPlan

JobT = TypeVar("JobT", Fetch, Spill)

_MOST_WARM = 2**16
"""The maximum number of blocks that a warm start remembers."""


class Host(Protocol):
    """Hears what the store does to the host."""

    def evicted(self, keys: Sequence[BlockKey], /) -> None:
        """Handle that blocks left the host to make room for fetched blocks."""

    def fetched(self, job: Fetch, keys: Sequence[BlockKey], slots: Sequence[SlotId], /) -> None:
        """Handle the end of a fetch. Lookups can find these of its blocks."""

    def settled(self, offers: Sequence[Offer], /, job: Fetch, outcome: TierOutcome) -> None:
        """Handle the outcome of some of a fetch's blocks. `offers` waited for it."""


# -- jobs -----------------------------------------------------------------------------------------------------------


class _Copies(ABC, Generic[JobT]):
    """The common base of the owners of fetches and spills.

    A job reserves the slots that it writes and pins the slots that it reads. Its keys are in flight until the job's
    outcome is known.

    Args:
        state: the host's state.
        tier: the lower tier.
        read: the pool whose slots the jobs read.
        written: the pool whose slots the jobs write.
        in_flight: the keys being copied to the `written` pool.
    """

    def __init__(
        self, state: HostState, tier: LowerTier, read: SlotPool, written: SlotPool, in_flight: InFlight
    ) -> None:
        self._state = state
        self._tier = tier
        self._read = read
        self._written = written
        self._in_flight = in_flight

    def _plan(self, job: JobT, name: RequestId | None = None, tokens: int = 0) -> None:
        """Plan a job whose slots have been reserved."""
        self._state.jobs.plan(job)
        event = TierCopyScheduled(job.id, job.tier, job.direction, len(job.keys), name, tokens)
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
        event = TierCopyEnded(job.id, job.tier, job.direction, len(keys), outcome, job.copy_s)
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

    def __init__(self, state: HostState, tier: LowerTier, host: Host) -> None:
        super().__init__(state, tier, tier.pool, state.pool, state.in_flight)
        self._host = host
        self.warm: deque[BlockKey] = deque(maxlen=_MOST_WARM)
        self._left: set[BlockKey] = set()  # keys that the warm start skips, because requests fetch them

    def plan(
        self,
        keys: list[BlockKey],
        tier_slots: list[SlotId],
        request: RequestId | None = None,
        tokens: int = 0,
    ) -> Fetch:
        """Plan a fetch and return the job. The host must have room for the blocks.

        Args:
            keys: the keys of the blocks, heads first.
            tier_slots: the blocks' slots on the tier.
            request: the request that needs the blocks; None without one.
            tokens: how many tokens the blocks add to the request's hit.
        """
        tier = self._tier
        slots, evicted = self._written.reserve(keys)
        targets, extra = tier.targets(keys, tier_slots), tier.extra(tier_slots)
        job = Fetch(self, slots, targets, extra, tier.tier, keys=keys, tier_slots=tier_slots)
        self._plan(job, request, tokens)
        if evicted:
            self._state.evicted(evicted)
            self._host.evicted(evicted)
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

    def leave(self, keys: Iterable[Sequence[BlockKey]]) -> None:
        """Remove an arriving request's prefix from the warm start. The request fetches the prefix itself."""
        self._left.update(*keys)

    def stop(self) -> None:
        """End the warm start."""
        self.warm.clear()
        self._left.clear()

    def warm_up(self) -> None:
        """Plan the warm start's next fetch, unless a load or a fetch is open."""
        state, tier = self._state, self._tier
        if not self.is_due or state.growing or tier.fetching or state.jobs.is_loading:
            return
        while len(self.warm) > most_fetched(state.pool):
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
        is_first = not job.settled
        if is_first:
            self._read.unpin(job.read, Came.COPIED)
        super().failed(job, why)
        if is_first:
            self._host.fetched(job, (), ())

    def _arrived(self, job: Fetch) -> None:
        """Let lookups find the fetched blocks on the host, except blocks that a rank could not read (R4)."""
        lost = job.corrupt | job.missing
        self._read.unpin(job.read, Came.COPIED)
        keys, slots, tier_slots = job.keys, job.slots, job.tier_slots
        if lost:
            self._lose(job, sorted(lost), TierOutcome.CORRUPT if job.corrupt else TierOutcome.FAILED)
            came = [position for position in range(len(keys)) if position not in lost]
            keys = [keys[position] for position in came]
            slots = [slots[position] for position in came]
            tier_slots = [tier_slots[position] for position in came]
        if keys:
            self._host.settled(self._settle(job, keys, TierOutcome.DONE), job, TierOutcome.DONE)
        self._written.fill(slots[::-1])
        self._host.fetched(job, keys, slots)
        if job.wanted:  # A warm start's fetch does not count as a use of the blocks.
            self._tier.read(tier_slots[::-1])

    def _lose(self, job: Fetch, positions: Sequence[int], outcome: TierOutcome) -> list[Offer]:
        """Invalidate blocks of a fetch."""
        offers = super()._lose(job, positions, outcome)
        self._host.settled(offers, job, outcome)
        return offers

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

    def __init__(self, state: HostState, tier: LowerTier) -> None:
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
        self._read.unpin(job.read, Came.COPIED)

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


# -- all tiers -----------------------------------------------------------------------------------------------------


class TierStore:
    """Fetches, spills and their ends, for all tiers below the host. Handles facts about these tiers.

    Args:
        state: the host's state.
        host: hears what the store does to the host.

    Attributes:
        spills, fetches: for each tier, the owner of its spills or fetches.
        queues: the candidates for spills and the keys of warm starts.
    """

    def __init__(self, state: HostState, host: Host) -> None:
        self._state = state
        self.spills: dict[LowerTier, Spills] = {tier: Spills(state, tier) for tier in state.tiers}
        self.fetches: dict[LowerTier, Fetches] = {tier: Fetches(state, tier, host) for tier in state.tiers}
        self._owners: list[Fetches | Spills] = [*self.fetches.values(), *self.spills.values()]
        self.queues = [
            *[tier.candidates for tier in state.tiers],
            *[each.warm for each in self.fetches.values()],
        ]

    @property
    def is_due(self) -> bool:
        """Return whether a warm start or spills need more steps of the engine."""
        return any(each.is_due for each in self._owners)

    def warm_up(self) -> None:
        """Plan the next fetches of the warm starts."""
        for fetches in self.fetches.values():
            if fetches.warm:
                fetches.warm_up()

    def spill(self) -> bool:
        """Plan spills of blocks that were found again; return whether any was planned."""
        planned = [spills.step() for spills in self.spills.values()]  # every tier gets its spill
        return True in planned

    def plan(self) -> TransferPlan:
        """Return the copies planned since the last call, and mark their jobs as submitted."""
        jobs = self._state.jobs
        return jobs.submit() if jobs.planned or jobs.cancelled else NOTHING

    # -- blocks that the caller copies to the host ---------------------------------------------------------------

    def reserve(self, keys: Sequence[BlockKey]) -> list[SlotId]:
        """Return a host slot for each key, for blocks that the caller copies there. The host must have room.

        The keys are in flight until `filled` or `discard`.
        """
        slots, evicted = self._state.pool.reserve(keys)
        self._state.in_flight.began(keys, None)
        if evicted:
            self._state.evicted(evicted)
        return slots

    def filled(self, keys: Sequence[BlockKey], slots: Sequence[SlotId]) -> None:
        """Let lookups find blocks that the caller has copied. Heads come first."""
        self._state.in_flight.ended(keys)
        self._state.pool.fill(slots[::-1])

    def discard(self, keys: Sequence[BlockKey], slots: Sequence[SlotId]) -> None:
        """Free the slots of blocks that the caller could not copy."""
        self._state.in_flight.ended(keys)
        for slot in slots:
            self._state.pool.invalidate(slot)
        self._state.pool.drained(slots)

    def use(self, keys: Sequence[BlockKey]) -> None:
        """Mark blocks on tiers with slots as used. Keys are listed deepest first (R15)."""
        for tier in self._state.tiers:
            if tier.tier.has_slots:
                index = tier.pool.index
                slots = [index[key] for key in dict.fromkeys(keys) if key in index]
                tier.pool.use(slots)
                tier.read(slots)

    # -- facts --------------------------------------------------------------------------------------------------

    def handle(self, fact: facts.Fact) -> None:
        """Pass a fact to the method for its class. `OffloadCore` handles some of these facts in its own way."""
        _HANDLERS[type(fact)](self, fact)

    def restored(self, fact: facts.TierRestored) -> None:
        """Add a part of the index of a tier's slots. The last part opens the tier."""
        if fact.tier is Tier.HOST:
            self._state.restored(fact)
            return
        tier = self._state.by_name[fact.tier]
        tier.restore(fact.slots, fact.puts, fact.free, is_last=fact.is_last)
        self.fetches[tier].restored([put.key for put in fact.puts])
        if tier.is_open:
            self._state.tally.events.append(TierReady(fact.tier, tier.capacity, len(tier.pool.index)))

    def opened(self, fact: facts.TierOpened) -> None:
        """Open a tier. If its namespace has changed, discard the hints from the old namespace."""
        tier = self._state.by_name[fact.tier]
        if tier.namespace not in ("", fact.namespace):
            self._drop(fact.tier)
            tier.forget_all()
        tier.open(fact.namespace)

    def lost(self, fact: facts.TierLost) -> None:
        """Stop using a tier. A tier that manages its blocks itself can open again."""
        tier = self._state.by_name.get(fact.tier)
        if tier is None or tier.is_closed:
            return
        tier.close()
        if fact.tier.has_slots:
            self._state.tally.events.append(TierClosed(fact.tier))

    def answered(self, fact: facts.TierAnswered) -> bool:
        """Record which blocks a tier has; return whether the answer is from the tier's present namespace."""
        tier = self._state.asked
        if tier is None or fact.namespace != tier.namespace:
            return False
        tier.note(fact.found, fact.missing)
        return True

    def reset(self) -> None:
        """Discard all blocks on the host and on the lower tiers (R10)."""
        self.stop()
        self._state.forget_all()

    def stop(self) -> None:
        """End warm starts."""
        for fetches in self.fetches.values():
            fetches.stop()

    def _drop(self, tier: Tier) -> None:
        jobs = self._state.jobs
        for job in [job for job in jobs.open.values() if job.tier is tier]:
            jobs.drop(job)


_HANDLERS: Mapping[type[facts.Fact], Callable[[TierStore, Any], object]] = {
    facts.TierRestored: TierStore.restored,
    facts.HostGrown: lambda store, fact: store._state.grown(fact),
    facts.TierOpened: TierStore.opened,
    facts.TierLost: TierStore.lost,
    facts.TierAnswered: TierStore.answered,
    facts.TransferReported: lambda store, fact: store._state.reported(fact.report),
    facts.JobOverdue: lambda store, fact: store._state.overdue(fact.job),
    facts.CacheReset: lambda store, _: store.reset(),
}


def most_fetched(host: SlotPool) -> int:
    """Return how many host slots all open fetches may fill together."""
    return max(host.capacity // 4, 1)
