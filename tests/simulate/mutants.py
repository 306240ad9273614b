"""One line of real code each, taken out or turned round: what a simulation must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from msgspec import structs

from kvoffload.core.block_tables import BlockTables
from kvoffload.core.jobs import Failure, Job, Load, Store
from kvoffload.core.loads import Loads
from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.request import SharedLoads
from kvoffload.core.slots import HostPool
from kvoffload.core.stores import Stores
from kvoffload.model.causes import CopyOutcome, StoreOutcome
from kvoffload.model.facts import StepScheduled
from kvoffload.model.ids import BlockKey, Rank, SlotId
from kvoffload.remote.values import Shard
from kvoffload.runtime.copies import LoadAnswers, OpenCopies
from kvoffload.runtime.disk_catalog import DiskCatalog
from kvoffload.runtime.remote_catalog import RemoteCatalog
from kvoffload.transfer import disk, remote
from kvoffload.transfer.blocking_calls import Breaker, Call
from kvoffload.transfer.lanes import Lane
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.pump import TransferPump, Wakeup
from kvoffload.transfer.remote import RemoteMover
from kvoffload.transfer.tier_jobs import Part
from kvoffload_reference.plugin import ReferenceWorker
from kvoffload_reference.scheduler import PoolDevice

Patch = tuple[Any, str, Any]  # a class or a module


def _nothing(*args: object, **settings: object) -> None:
    """Replaces a method whose effect must be missing."""


def _load_without_pin() -> list[Patch]:
    real = Loads._plan

    def plan(self: Loads, record: Any, slots: Any, blocks: Any, tokens: int) -> None:  # noqa: ANN401
        self._state.pool.unpin(slots)
        real(self, record, slots, blocks, tokens)

    return [(Loads, "_plan", plan)]


def _torn_copy_counts_as_done() -> list[Patch]:
    real = Lane._query

    def query(self: Lane, batch: Any) -> TicketState:  # noqa: ANN401
        state = real(self, batch)
        return TicketState.DONE if state is TicketState.FAILED else state

    return [(Lane, "_query", query)]


def _no_lease() -> list[Patch]:
    return [(PoolDevice, "lease", _nothing), (PoolDevice, "release", _nothing)]


def _one_rank_is_enough() -> list[Patch]:
    real = Job.reported

    def reported(self: Job, *part: Any) -> bool:  # noqa: ANN401
        is_new = real(self, *part)
        self.waiting.clear()
        return is_new

    return [(Job, "reported", reported)]


def _reset_forgets_nothing() -> list[Patch]:
    def forget_all(self: HostPool) -> Mapping[BlockKey, SlotId]:
        return {}

    return [(HostPool, "forget_all", forget_all)]


def _store_of_before_reset_arrives() -> list[Patch]:
    real = Stores.failed

    def failed(self: Stores, job: Store, why: Failure) -> None:
        if why is not Failure.DROPPED:
            real(self, job, why)

    return [(Stores, "failed", failed)]


def _nothing_is_overdue() -> list[Patch]:
    return [(OpenCopies, "overdue", lambda self: [])]


def _failed_load_counts_as_loaded() -> list[Patch]:
    def failed(self: Loads, job: Load, why: Failure) -> None:
        self._arrived(job)

    return [(Loads, "failed", failed)]


def _overdue_load_frees_its_blocks() -> list[Patch]:
    real = Loads.failed

    def failed(self: Loads, job: Load, why: Failure) -> None:
        real(self, job, why)
        if why is Failure.TIMED_OUT:
            self._state.device.release(job.targets)

    return [(Loads, "failed", failed)]


def _stale_ids_stay() -> list[Patch]:
    """With the last check gone too: the engine's own word for what a block holds."""
    real = Stores._by_block

    def by_block(self: Stores, offer: Any, holds: Any) -> Any:  # noqa: ANN401
        verdict = real(self, offer, holds)
        return offer if verdict in (StoreOutcome.STALE, StoreOutcome.NOT_HASHED) and offer.block else verdict

    return [(BlockTables, "handed_out", lambda self, blocks: 0), (Stores, "_by_block", by_block)]


def _coroutine_is_not_woken() -> list[Patch]:
    return [(Wakeup, "set", _nothing)]


def _load_reported_at_once() -> list[Patch]:
    """The pump reports a load as soon as it was submitted."""
    real = TransferPump._reap

    def reap(self: TransferPump) -> bool:
        for batch in self._loads._pending:
            batch.ticket.query = lambda: TicketState.DONE  # type: ignore[method-assign]
        return real(self)

    return [(TransferPump, "_reap", reap)]


def _loads_are_not_reported() -> list[Patch]:
    return [(OpenCopies, "answer", lambda self, results: LoadAnswers())]


def _late_rank_is_ignored() -> list[Patch]:
    real = Job.reported

    def reported(self: Job, rank: Rank, outcome: CopyOutcome) -> bool:
        return (rank == 0 or outcome is CopyOutcome.DONE) and real(self, rank, outcome)

    return [(Job, "reported", reported)]


def _shared_load_never_ends() -> list[Patch]:
    return [(SharedLoads, "ended", _nothing)]


def _quarantined_slot_comes_back() -> list[Patch]:
    return [(HostPool, "quarantine", lambda self, slot: self.invalidate(slot))]


def _disk_is_not_compared() -> list[Patch]:
    return [(disk, "_checksum", lambda pieces, size: 0)]


def _reset_leaves_the_index() -> list[Patch]:
    return [(DiskCatalog, "_reset", lambda self: True)]


def _store_is_not_compared() -> list[Patch]:
    return [(remote, "is_whole", lambda value, arrived, name, layout, key: arrived == len(value))]


def _hint_is_believed() -> list[Patch]:
    real = RemoteMover.get

    def get(self: RemoteMover, part: Part, call: Call, store: Any) -> Part:  # noqa: ANN401
        real(self, part, call, store)
        return Part(part.job, part.positions, whole=list(part.positions))

    return [(RemoteMover, "get", get)]


def _generation_is_not_in_the_name() -> list[Patch]:
    return [(Shard, "name", lambda self, key: f"{key.hex()}/{self.part}")]


def _generation_stays_at_a_reset() -> list[Patch]:
    return [(RemoteCatalog, "reset", _nothing)]


def _dead_store_is_called_on() -> list[Patch]:
    return [(Breaker, "failed", _nothing)]


def _state_offered_before_the_steps_facts() -> list[Patch]:
    real = OffloadCore.step_scheduled

    def step_scheduled(self: OffloadCore, fact: StepScheduled) -> None:
        if self.state.degraded is None:
            self._offer_states(fact.states)
        real(self, structs.replace(fact, states=()))

    return [(OffloadCore, "step_scheduled", step_scheduled)]


def _state_stored_before_the_forward_pass() -> list[Patch]:
    """Its block has its key by then, but not its bytes."""
    loads, stores = ReferenceWorker.start_loads, ReferenceWorker.start_stores

    def start_loads(self: ReferenceWorker, plan: object) -> None:
        loads(self, plan)
        stores(self, plan)
        self.offload._live_pump._start_stores()

    return [(ReferenceWorker, "start_loads", start_loads), (ReferenceWorker, "start_stores", _nothing)]


def _state_of_a_preempted_request_waits_on() -> list[Patch]:
    real = Stores.settle_waiting

    def settle_waiting(self: Stores, record: Any, outcome: StoreOutcome) -> None:  # noqa: ANN401
        if outcome is not StoreOutcome.LOST or record not in self.states_for_room:
            real(self, record, outcome)

    return [(Stores, "settle_waiting", settle_waiting)]


MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    name.removeprefix("_"): make
    for name, make in list(globals().items())
    if callable(make) and getattr(make, "__annotations__", {}).get("return") == "list[Patch]"
}

SHOWN_BY = {
    "load_without_pin": 1,
    "loads_are_not_reported": 1,
    "shared_load_never_ends": 1,
    "torn_copy_counts_as_done": 8,
    "no_lease": 10,
    "one_rank_is_enough": 8,
    "reset_forgets_nothing": 1,
    "store_of_before_reset_arrives": 203,
    "nothing_is_overdue": 24,
    "failed_load_counts_as_loaded": 8,
    "overdue_load_frees_its_blocks": 10,
    "stale_ids_stay": 84,
    "load_reported_at_once": 5,
    "disk_is_not_compared": 275,
    "reset_leaves_the_index": 270,
    "store_is_not_compared": 207,
    "hint_is_believed": 26,
    "generation_is_not_in_the_name": 21,
    "generation_stays_at_a_reset": 72,
    "dead_store_is_called_on": 37,
    "late_rank_is_ignored": 8,
    "quarantined_slot_comes_back": 53,
    "state_offered_before_the_steps_facts": 13,
    "state_stored_before_the_forward_pass": 13,
    "state_of_a_preempted_request_waits_on": 33,
}
"""A seed that showed it when this was written; seed 0 shows the others. Only to spare the search."""


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Run with a mutant in place of the real code."""
    patches = [mock.patch.object(owner, attribute, new) for owner, attribute, new in MUTANTS[name]()]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
