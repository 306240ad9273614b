"""Disables whole rules, which needs more than a change of one line.

`make mutants ARGS="--rules"` expects a test to fail for each disabled rule. The simulation and the exploration
must detect most of them too. Each function returns the patches that disable a rule, and its name begins with the
rule's number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any
from unittest import mock

from msgspec import structs

from kvoffload.core.block_tables import BlockTables
from kvoffload.core.claims import Claims
from kvoffload.core.eviction_watch import EvictionWatch
from kvoffload.core.jobs import Failure, Fetch, InFlight, Job, Jobs, Leases, Load, Spill, Store
from kvoffload.core.loads import Loads
from kvoffload.core.lower_tiers import LowerTiers
from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.order import Came, LruOrder
from kvoffload.core.parts import Parts
from kvoffload.core.request import PendingHit, RequestRecord, Requests
from kvoffload.core.slots import SlotPool, count, uncount
from kvoffload.core.stores import Stores
from kvoffload.core.tier_store import Fetches, Spills, _Copies
from kvoffload.core.tiers import DiskTier, RemoteTier
from kvoffload.model.causes import CopyOutcome, StoreOutcome
from kvoffload.model.facts import StepScheduled, TierAnswered
from kvoffload.model.ids import BlockKey, DeviceBlockId, Rank, RequestId, SlotId
from kvoffload.model.wire import JobReport, NodeSlot, TransferPlan
from kvoffload.node import table
from kvoffload.node.neighbour import TableFile
from kvoffload.node.resets import NO_RESET
from kvoffload.remote.values import Shard
from kvoffload.runtime import host_catalog, node_catalog
from kvoffload.runtime.copies import OpenCopies
from kvoffload.runtime.faults import Faults
from kvoffload.runtime.host_catalog import HostCatalog
from kvoffload.runtime.remote_catalog import RemoteCatalog
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.transfer import disk, host_file, node, remote
from kvoffload.transfer.blocking_calls import Breaker
from kvoffload.transfer.cuda.copier import CudaCopier
from kvoffload.transfer.lanes import Lane
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.pump import TransferPump

# The patched class or module, the name of the attribute, and the attribute's new value.
Patch = tuple[Any, str, Any]


def _nothing(*args: object, **settings: object) -> None:
    """Do nothing, in place of a method that a rule needs."""


def r1_load_without_pin() -> list[Patch]:
    real = Loads._plan

    def plan(self: Loads, record: Any, slots: Any, blocks: Any, tokens: int) -> None:  # noqa: ANN401
        self._state.pool.unpin(slots)
        real(self, record, slots, blocks, tokens)

    return [(Loads, "_plan", plan)]


def r1_slots_of_a_hit_are_not_looked_up_again() -> list[Patch]:
    """A load reads the slots that its lookup pinned, although a failed copy may have invalidated them since."""
    real = Loads._copies_of_hit

    def copies_of_hit(self: Loads, fact: Any, hit: PendingHit, length: int) -> Any:  # noqa: ANN401
        return real(self, fact, hit._replace(losses=self._state.pool.losses), length)

    return [(Loads, "_copies_of_hit", copies_of_hit)]


def r2_tokens_without_a_pin_count_as_loaded() -> list[Patch]:
    def refuse(self: Loads, request: RequestId, external_tokens: int) -> None:
        self._state.results.loaded.append(request)

    return [(Loads, "refuse", refuse)]


def r3_keys_in_flight_are_not_known() -> list[Patch]:
    return [(InFlight, "began", _nothing), (InFlight, "ended", lambda self, keys: [])]


def r3_block_under_a_copy_is_stored_again() -> list[Patch]:
    real = Stores._refuses

    def refuses(self: Stores, offer: Any, holds: Any) -> StoreOutcome | None:  # noqa: ANN401
        found = real(self, offer, holds)
        return None if found is StoreOutcome.FAILED else found

    return [(Stores, "_refuses", refuses)]


def r4_torn_copy_counts_as_done() -> list[Patch]:
    real = Lane._query

    def query(self: Lane, batch: Any) -> TicketState:  # noqa: ANN401
        state = real(self, batch)
        return TicketState.DONE if state is TicketState.FAILED else state

    return [(Lane, "_query", query)]


def r4_one_rank_is_enough() -> list[Patch]:
    real = Job.reported

    def reported(self: Job, *part: Any) -> bool:  # noqa: ANN401
        is_new = real(self, *part)
        self.waiting.clear()
        return is_new

    return [(Job, "reported", reported)]


def r4_late_rank_is_ignored() -> list[Patch]:
    real = Job.reported

    def reported(self: Job, rank: Rank, outcome: CopyOutcome, copy_s: float) -> bool:
        return (rank == 0 or outcome is CopyOutcome.DONE) and real(self, rank, outcome, copy_s)

    return [(Job, "reported", reported)]


def r5_no_lease() -> list[Patch]:
    def take(self: Leases, blocks: Sequence[DeviceBlockId]) -> None:
        count(self.counts, blocks)

    def release(self: Leases, blocks: Sequence[DeviceBlockId]) -> None:
        uncount(self.counts, blocks)

    return [(Leases, "take", take), (Leases, "release", release)]


def r5_overdue_load_frees_its_blocks() -> list[Patch]:
    real = Loads.failed

    def failed(self: Loads, job: Load, why: Failure) -> None:
        real(self, job, why)
        if why is Failure.TIMED_OUT:
            self._state.device.release(job.targets)

    return [(Loads, "failed", failed)]


def r7_stale_ids_stay() -> list[Patch]:
    """Also disable the final check, which compares a block's key with the engine's key."""
    real = Stores._refuses

    def refuses(self: Stores, offer: Any, holds: Any) -> StoreOutcome | None:  # noqa: ANN401
        found = real(self, offer, holds)
        return None if found in (StoreOutcome.STALE, StoreOutcome.NOT_HASHED) else found

    return [(BlockTables, "reallocated", lambda self, blocks: 0), (Stores, "_refuses", refuses)]


def r8_nothing_is_held() -> list[Patch]:
    return [(SlotPool, "hold", _nothing), (SlotPool, "release", _nothing)]


def r8_evictions_are_not_watched() -> list[Patch]:
    return [(EvictionWatch, "add", _nothing)]


def r8_only_the_first_of_several_offers_again() -> list[Patch]:
    real = Claims.pop

    def pop(self: Claims[Any, Any], key: Any) -> Sequence[Any]:  # noqa: ANN401
        return real(self, key)[:1]

    return [(Claims, "pop", pop)]


def r8_a_request_offers_a_block_again_after_each_eviction() -> list[Patch]:
    real = EvictionWatch.add

    def add(self: EvictionWatch, record: RequestRecord, offer: Any) -> None:  # noqa: ANN401
        record.stored_again.clear()
        real(self, record, offer)

    return [(EvictionWatch, "add", add)]


def r9_failed_load_counts_as_loaded() -> list[Patch]:
    def failed(self: Loads, job: Load, why: Failure) -> None:
        self._arrived(job)

    return [(Loads, "failed", failed)]


def r9_loads_are_not_reported() -> list[Patch]:
    return [(OpenCopies, "answer", lambda self, results: None)]


def r10_reset_forgets_nothing() -> list[Patch]:
    def forget_all(self: SlotPool) -> Mapping[BlockKey, SlotId]:
        return {}

    return [(SlotPool, "forget_all", forget_all)]


def r10_store_of_before_reset_arrives() -> list[Patch]:
    real = Stores.failed

    def failed(self: Stores, job: Store, why: Failure) -> None:
        if why is not Failure.DROPPED:
            real(self, job, why)

    return [(Stores, "failed", failed)]


def r10_block_from_before_a_reset_is_stored() -> list[Patch]:
    return [(Stores, "_is_since_reset", lambda self, offer, block: True)]


def r10_a_load_goes_on_after_a_reset() -> list[Patch]:
    """The later parts of a long load are loaded behind a head from before the reset."""
    real = Parts.next

    def next_part(self: Parts, record: RequestRecord) -> Sequence[SlotId] | None:
        if record.rest is not None:
            record.rest.epoch = self._state.epoch
        return real(self, record)

    return [(Parts, "next", next_part)]


def r10_state_offered_before_the_steps_facts() -> list[Patch]:
    advance, offer_states = OffloadCore._advance, OffloadCore._offer_states

    def offer_and_advance(self: OffloadCore, fact: StepScheduled) -> Any:  # noqa: ANN401
        if self.state.degraded is None:
            offer_states(self, fact)
        return advance(self, fact)

    return [(OffloadCore, "_advance", offer_and_advance), (OffloadCore, "_offer_states", _nothing)]


def r10_copies_with_tiers_survive_a_reset() -> list[Patch]:
    return [(_Copies, "failed", _nothing)]


def r11_tables_are_kept() -> list[Patch]:
    return [(BlockTables, "forget", _nothing)]


def r12_what_the_core_raised_is_forgotten() -> list[Patch]:
    return [(Faults, "raised", lambda self, error, doing: [])]


def r13_load_reported_at_once() -> list[Patch]:
    """The pump reports a load as soon as it is submitted, before its copy has ended."""
    real = TransferPump._reap

    def reap(self: TransferPump) -> bool:
        for batch in self._loads._pending:
            batch.ticket.query = lambda: TicketState.DONE  # type: ignore[method-assign]
        return real(self)

    return [(TransferPump, "_reap", reap)]


def r13_stores_start_before_the_forward_pass() -> list[Patch]:
    """When the stores start, the block that gets a recurrent state already has its key, but not its bytes."""
    loads, stores = WorkerSide.start_loads, WorkerSide.start_stores

    def start_loads(self: WorkerSide, plan: TransferPlan) -> None:
        loads(self, plan)
        stores(self, plan)
        self.pump._start_stores()

    return [(WorkerSide, "start_loads", start_loads), (WorkerSide, "start_stores", _nothing)]


def r13_copies_wait_for_nothing() -> list[Patch]:
    real = CudaCopier.submit

    def submit(self: CudaCopier, way: Any, runs: Any, fences: Any) -> Any:  # noqa: ANN401
        return real(self, way, runs, ())

    return [(CudaCopier, "submit", submit)]


def r9_first_part_counts_as_the_load() -> list[Patch]:
    """The engine hears of the end of a long load after its first part."""

    def go_on(self: Loads, record: RequestRecord, job: Job) -> None:
        self._answer(record, record.incarnation, loaded=True)

    return [(Loads, "go_on", go_on)]


def r9_rest_of_a_long_load_never_fails() -> list[Patch]:
    """A load of which a part cannot be had is never answered."""
    return [(Loads, "_fail_rest", _nothing)]


def r14_shared_load_never_ends() -> list[Patch]:
    return [(Requests, "load_is_over", _nothing)]


def r14_every_request_loads() -> list[Patch]:
    return [(Requests, "loader", lambda self, slots: None)]


def r14_the_end_of_one_load_ends_all_waits() -> list[Patch]:
    """Another request that loads the same slots is forgotten."""

    def remove(self: Claims[Any, Any], keys: Sequence[Any], claimant: object) -> None:
        for key in keys:
            self.pop(key)

    return [(Claims, "remove", remove)]


def r14_an_answer_ends_no_wait() -> list[Patch]:
    def answered(self: LowerTiers, fact: TierAnswered) -> None:
        self.store.answered(fact)

    return [(LowerTiers, "answered", answered)]


def r15_the_head_of_a_prefix_is_evicted_first() -> list[Patch]:
    def backwards(real: Callable[..., None]) -> Callable[..., None]:
        return lambda self, slots, *more: real(self, slots[::-1], *more)

    return [(LruOrder, name, backwards(getattr(LruOrder, name))) for name in ("add", "renew")]


def r15_slots_of_ended_sessions_age_like_others() -> list[Patch]:
    real = LruOrder.add

    def add(self: LruOrder, slots: Sequence[SlotId], came: Came, now: float) -> None:
        real(self, slots, Came.RELEASED if came is Came.ENDED else came, now)

    return [(LruOrder, "add", add)]


def r15_slots_of_ended_sessions_always_leave_first() -> list[Patch]:
    """Clients that say that all sessions have ended keep all other blocks on the host for good."""

    def take(self: LruOrder, count: int, now: float) -> Sequence[SlotId]:
        taken = list(islice(self, count))
        self.remove(taken)
        self.age_s = now - max([self.used_at[slot] for slot in taken], default=now - self.age_s)
        return taken

    return [(LruOrder, "take", take)]


def r16_quarantined_slot_comes_back() -> list[Patch]:
    return [(SlotPool, "quarantine", lambda self, slot: self.invalidate(slot))]


def r16_timed_out_job_counts_as_ended() -> list[Patch]:
    """A job's owner ends the job although copies may still run."""
    real = Jobs.time_out

    def time_out(self: Jobs, job: Job) -> None:
        real(self, job)
        job.owner.ended(job)

    return [(Jobs, "time_out", time_out)]


def r16_file_slot_under_a_hanging_write_comes_back() -> list[Patch]:
    real = Spills.ended

    def ended(self: Spills, job: Spill) -> None:
        job.stuck.clear()
        real(self, job)

    return [(Spills, "ended", ended)]


def r17_file_slot_is_written_while_the_index_names_it() -> list[Patch]:
    return [(DiskTier, "invalidate", lambda self, slot: self.has_block.__setitem__(slot, 0))]


def r17_missing_value_counts_as_fetched() -> list[Patch]:
    real = Fetches.reported

    def reported(self: Fetches, job: Fetch, rank: Rank, report: JobReport) -> None:
        real(self, job, rank, structs.replace(report, outcome=CopyOutcome.DONE, missing=()))

    return [(Fetches, "reported", reported)]


def r17_lost_store_is_used() -> list[Patch]:
    return [(RemoteTier, "is_usable", property(lambda self: self.is_open))]


def r17_disk_is_not_compared() -> list[Patch]:
    return [(disk, "_checksum", lambda pieces, size: 0)]


def r17_remote_value_is_not_compared() -> list[Patch]:
    return [(remote, "is_whole", lambda value, arrived, name, layout, key: arrived == len(value))]


def r17_dead_store_is_called_on() -> list[Patch]:
    return [(Breaker, "failed", _nothing)]


def r18_generation_is_not_in_the_name() -> list[Patch]:
    return [(Shard, "name", lambda self, key: f"{key.hex()}/{self.part}")]


def r18_hints_outlive_their_generation() -> list[Patch]:
    return [(RemoteTier, "forget_all", lambda self: 0)]


def r18_generation_stays_at_a_reset() -> list[Patch]:
    return [(RemoteCatalog, "reset", lambda self: True)]


def r19_every_load_has_room() -> list[Patch]:
    return [(Requests, "has_room", lambda self, blocks, device_blocks: True)]


def r20_slot_is_not_invalidated() -> list[Patch]:
    real = SlotPool.reserve

    def reserve(self: SlotPool, keys: Sequence[BlockKey]) -> tuple[list[SlotId], Sequence[BlockKey]]:
        noted, self.for_catalog = self.for_catalog, None
        try:
            return real(self, keys)
        finally:
            self.for_catalog = noted

    return [(SlotPool, "reserve", reserve)]


def r20_published_before_the_last_rank() -> list[Patch]:
    def take(self: SlotPool) -> list[tuple[SlotId, BlockKey | None, bool]]:
        slots = dict.fromkeys(self.for_catalog or ())
        if self.for_catalog is not None:
            self.for_catalog.clear()
        return [(slot, self.key(slot), True) for slot in slots]

    return [(SlotPool, "take_for_catalog", take)]


def r20_corrupt_slot_stays_in_the_table() -> list[Patch]:
    real = SlotPool.quarantine

    def quarantine(self: SlotPool, slot: SlotId) -> bool:
        noted, self.for_catalog = self.for_catalog, None
        try:
            return real(self, slot)
        finally:
            self.for_catalog = noted

    return [(SlotPool, "quarantine", quarantine)]


def r20_reset_leaves_the_table() -> list[Patch]:
    return [(HostCatalog, "reset", lambda self: True)]


def r20_table_of_other_weights_counts() -> list[Patch]:
    real = HostCatalog._decide

    def decide(self: HostCatalog, fingerprint: str | None) -> None:
        left = self._left
        real(self, fingerprint if left is None else left.header.fingerprint)

    return [(HostCatalog, "_decide", decide)]


def r20_unsettled_slots_are_given_out_at_once() -> list[Patch]:
    return [(host_catalog, "may_run", lambda process: False)]


def r20_files_keep_their_ids() -> list[Patch]:
    return [(host_file, "_new_id", lambda: bytes([1]) * 16)]


def r20_table_before_doubt_counts() -> list[Patch]:
    return [(HostCatalog, "distrust", _nothing)]


def r20_a_closed_table_says_no_more() -> list[Patch]:
    real = HostCatalog.distrust

    def distrust(self: HostCatalog) -> None:
        real(self)
        self._table = None

    return [(HostCatalog, "distrust", distrust)]


def r21_no_second_look_at_the_number() -> list[Patch]:
    return [(TableFile, "have", lambda self, targets: [True] * len(targets))]


def r21_no_second_look_at_the_owner() -> list[Patch]:
    return [(node._Memory, "look_again", _nothing)]


def r21_generation_is_not_compared() -> list[Patch]:
    real = node._is_meant

    def is_meant(table: TableFile, header: Any, target: NodeSlot, shape: Any) -> bool:  # noqa: ANN401
        return real(table, header, target._replace(generation=table.header.generation), shape)

    return [(node, "_is_meant", is_meant)]


def r21_resets_of_others_do_not_count() -> list[Patch]:
    return [(node, "last_reset", lambda kind: NO_RESET), (node_catalog, "last_reset", lambda kind: NO_RESET)]


def r21_a_reset_is_not_noted() -> list[Patch]:
    return [(host_catalog, "note_reset", _nothing)]


def r21_slots_that_were_cut_off_count() -> list[Patch]:
    real = host_file.FileHeader.read

    def read(descriptor: int) -> host_file.FileHeader | None:
        found = real(descriptor)
        return None if found is None else found._replace(kept=found.slots)

    return [(host_file.FileHeader, "read", read)]


def r21_records_are_not_checked() -> list[Patch]:
    return [(table, "_check", lambda key, slot, generation: 0)]


RULES: dict[str, Callable[[], list[Patch]]] = {
    name: make for name, make in globals().items() if re.match(r"r\d+_", name)
}


@contextmanager
def undone(name: str) -> Iterator[None]:
    """Disable a rule inside a `with` block."""
    with ExitStack() as stack:
        for owner, attribute, new in RULES[name]():
            stack.enter_context(mock.patch.object(owner, attribute, new))
        yield


def undo(name: str) -> None:
    for owner, attribute, new in RULES[name]():
        setattr(owner, attribute, new)
