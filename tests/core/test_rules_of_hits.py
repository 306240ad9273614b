from __future__ import annotations

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.model import facts
from kvoffload.model.causes import LoadOutcome, MissCause, PinDropCause, RejectionCause
from kvoffload.model.engine import Promises
from kvoffload.model.events import (
    FactRejected,
    HitDropped,
    HitPinned,
    LoadScheduled,
    LookupAnswered,
    LookupDeferred,
)
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import DeviceBlockId, Rank, RequestId
from kvoffload.model.wire import NOTHING, Direction, TransferReport
from tests.core.audit import by_key
from tests.core.fingerprint import fingerprint
from tests.core.world import CORRUPT, DONE, FAILED, TEXT, World, cached, full, key_at, keys_of, window
from tests.operations import calls


def violations(world: World) -> list[RejectionCause]:
    return [event.cause for event in world.reported(FactRejected)]


def drops(world: World) -> list[tuple[PinDropCause, int]]:
    return [(event.cause, event.blocks) for event in world.reported(HitDropped)]


# -- R1: pinned from the lookup on ------------------------------------------------------------------------------


def test_r1_many_requests_fill_the_host_between_a_lookup_and_its_allocation() -> None:
    world = cached(host=4)
    late = world.add("late", TEXT)
    assert world.lookup(late) == 12
    # Each request fills the only free slot, which evicts the previous request's block.
    for number in range(6):
        world.serve(f"r{number}", str(number) * 13)
    assert world.evicted() == 5
    assert world.on_host(TEXT) == "xxx"
    world.allocate(late, 12)
    world.step_and_copy()
    assert world.results == [("late", True)]
    assert violations(world) == []


def test_r1_a_repeated_lookup_keeps_its_pins_while_nothing_has_changed() -> None:
    world = cached()
    late = world.add("late", TEXT)
    for _ in range(3):
        assert world.lookup(late) == 12
        assert sum(world.pool.pins.values()) == 3
    assert (drops(world), len(world.reported(HitPinned))) == ([], 1)
    world.admit(late)
    world.load_and_run(late)
    world.end_and_drain(late)


@pytest.mark.parametrize(("groups", "pinned"), [([full()], 3), ([full(), window(6, group=1)], 5)])
def test_r1_a_repeated_lookup_finds_blocks_that_have_arrived_since(
    groups: list[GroupSpec], pinned: int
) -> None:
    world = World(*groups, host=32)
    world.serve("head", TEXT[:9])
    world.device.forget_keys()
    late = world.add("late", TEXT)
    assert world.lookup(late) == 8
    world.serve("whole", TEXT)
    world.device.forget_keys()
    assert world.lookup(late) == 12
    assert drops(world)[-1][0] is PinDropCause.LOOKED_UP_AGAIN
    assert sum(world.pool.pins.values()) == pinned


def test_r1_a_repeated_lookup_searches_again_if_the_device_has_more() -> None:
    world = cached()
    late = world.add("late", TEXT)
    assert world.lookup(late) == 12
    assert world.core.lookup(late.name, 4, may_wait=True) == 8
    assert sum(world.pool.pins.values()) == 2


def test_r14_a_repeated_lookup_waits_for_a_load_that_began_since() -> None:
    world = cached()
    late, first = world.add("late", TEXT), world.add("first", TEXT)
    assert world.lookup(late) == 12
    world.admit(first)
    assert world.lookup(late) is None


def test_r15_repeated_lookups_keep_the_head_that_the_device_has_behind_its_tail() -> None:
    world = cached(host=8)
    late = world.add("late", TEXT)
    assert world.core.lookup(late.name, 4, may_wait=True) == 8
    for number in range(12):
        world.serve(f"r{number}", f"{number:02}" * 3)
        assert world.core.lookup(late.name, 4, may_wait=True) == 8
    assert world.on_host(TEXT) == "xxx"


def test_a_repeated_lookup_of_a_long_prefix_makes_as_many_calls_as_of_a_short_one() -> None:
    counts = []
    for blocks in (2, 50):
        world = World(full(), host=256, device=256)
        text = f"{blocks:08}" + "x" * (4 * blocks)
        world.serve("first", text)
        world.device.forget_keys()
        name = world.add("late", text).name
        assert world.core.lookup(name, 0, may_wait=True)
        counts.append(calls(lambda: world.core.lookup(name, 0, may_wait=True)))  # noqa: B023
    assert counts[0] == counts[1] <= 7


def test_r1_a_reset_drops_the_pins_and_the_allocation_survives_it() -> None:
    world = cached()
    late = world.add("late", TEXT)
    world.lookup(late)
    world.reset()
    assert drops(world) == [(PinDropCause.RESET, 3)]
    assert world.count(SlotState.EMPTY) == world.ready
    world.allocate(late, 12)  # The engine uses the answer of an earlier lookup.
    assert violations(world) == [RejectionCause.TOKENS_WITHOUT_PIN]
    assert world.results == [("late", False)]


def test_r1_two_lookups_pin_a_slot_twice() -> None:
    world = cached()
    one, two = world.add("one", TEXT), world.add("two", TEXT)
    assert world.lookup(one) == world.lookup(two) == 12
    world.end(one)
    assert world.count(SlotState.PINNED) == 3
    world.end(two)
    assert drops(world) == [(PinDropCause.REQUEST_ENDED, 3)] * 2
    assert world.count(SlotState.READY) == 3


def test_r1_a_pinned_slot_that_was_invalidated_is_not_loaded() -> None:
    # Regression: a load used slots that an earlier lookup had pinned and another load had invalidated.
    world = cached()
    one, two = world.add("one", TEXT), world.add("two", TEXT)
    world.lookup(two)
    world.admit(one)
    (job,) = world.submit().loads
    world.finish(job.id, outcome=FAILED)
    world.allocate(two, 12)
    assert world.results == [("one", False), ("two", False)]
    assert world.count(SlotState.EMPTY) == world.ready


def test_r1_a_load_whose_device_hit_shrank_after_the_lookup_needs_other_blocks() -> None:
    world = cached()
    world.serve("short", TEXT[:5])
    request = world.add("a", TEXT)
    assert world.lookup(request) == 8
    world.device.forget_keys()
    world.allocate(request, 8)  # as many blocks as the hit has, but the first ones
    world.load_and_run(request)
    world.run(request)
    assert world.results[-1] == ("a", True)


# -- R2: what the engine makes of a hit -------------------------------------------------------------------------


def test_r2_tokens_without_a_pin_are_counted_and_survived() -> None:
    world = World()
    request = world.add("a", TEXT)
    world.allocate(request, 8)
    assert violations(world) == [RejectionCause.TOKENS_WITHOUT_PIN]
    assert world.results == [("a", False)]
    assert world.admit(request) == 0
    world.run(request)


def test_r2_more_tokens_than_were_found_fail_the_load() -> None:
    world = cached(text="abcdefghi")
    request = world.add("a", TEXT)
    assert world.lookup(request) == 8
    world.allocate(request, 12)
    assert violations(world) == [RejectionCause.TOKENS_WITHOUT_PIN]
    assert drops(world) == [(PinDropCause.NOT_ACCEPTED, 2)]
    assert world.results == [("a", False)]


def test_r2_more_tokens_than_were_found_are_loaded_if_the_host_now_has_them() -> None:
    world = cached()
    request = world.add("a", TEXT)
    world.allocate(request, 12)
    assert violations(world) == [RejectionCause.TOKENS_WITHOUT_PIN]
    world.step_and_copy()
    assert world.results == [("a", True)]


def test_r2_a_hit_that_the_engine_declines_is_a_miss_and_no_contract_violation() -> None:
    # Regression: when kvoffload was the second connector in a MultiConnector, each hit of the first connector
    # was counted as a contract violation and as our hit.
    world = cached()
    request = world.add("a", TEXT)
    assert world.lookup(request) == 12
    world.allocate(request, 0)
    assert world.reported(LookupAnswered)[-1] == LookupAnswered(
        request.name, 0, 0, 4, 0, 13, MissCause.NOT_ACCEPTED
    )
    assert violations(world) == []
    assert drops(world) == [(PinDropCause.NOT_ACCEPTED, 3)]
    assert world.count(SlotState.PINNED) == 0
    world.run(request)


def test_r2_the_engine_accepts_fewer_tokens_than_were_found() -> None:
    world = cached()
    request = world.add("a", TEXT)
    assert world.admit(request, accept=4) == 12
    assert world.reported(LookupAnswered)[-1] == LookupAnswered(
        request.name, 0, 1, 3, 4, 9, MissCause.NOT_ACCEPTED
    )
    assert drops(world) == [(PinDropCause.NOT_ACCEPTED, 2)]
    assert world.count(SlotState.PINNED) == 1
    world.step_and_copy()
    assert world.loads() == {LoadOutcome.LOADED: 1}
    world.run(request)
    assert violations(world) == []


@pytest.mark.parametrize("is_gone", [False, True])
def test_r2_fewer_tokens_than_found_need_other_blocks_of_a_window(is_gone: bool) -> None:
    text = "abcdefghijklmnopq"
    world = cached(full(), window(5, group=1), text=text)
    if is_gone:
        world.lose(key_at(text, 8, group=1))
    request = world.add("a", text)
    assert world.admit(request, accept=8) == 16
    if not is_gone:
        # two blocks of the full-attention group, and the deepest block of the window group
        assert drops(world) == [(PinDropCause.NOT_ACCEPTED, 3)]
        world.load_and_run(request)
    assert world.results == [("a", not is_gone)]


@pytest.mark.parametrize(
    ("text", "found", "cause"),
    [
        (TEXT[:12], 8, MissCause.LAST_TOKEN),
        (TEXT, 12, MissCause.PARTIAL_BLOCK),
        (TEXT[:9], 8, MissCause.PARTIAL_BLOCK),
        (TEXT[:4], 0, MissCause.LAST_TOKEN),
        (TEXT[:3], 0, MissCause.PARTIAL_BLOCK),
    ],
)
def test_r2_a_hit_leaves_a_token_to_compute(text: str, found: int, cause: MissCause) -> None:
    world = cached()
    assert world.admit(world.add("a", text)) == found
    assert world.miss() is cause


def test_r2_a_drafts_lookahead_costs_the_last_matched_block() -> None:
    world = cached(full(has_lookahead=True))
    assert world.admit(world.add("a", TEXT)) == 8
    assert world.miss() is MissCause.LOOKAHEAD
    assert world.admit(world.add("b", TEXT[:12]), may_wait=False) == 8
    assert world.miss() is MissCause.LAST_TOKEN


NOBODY, RUNS, WAITS = map(RequestId, ("nobody", "runs", "waits"))
BLOCK = ((DeviceBlockId(1),),)
UNKNOWN = RejectionCause.UNKNOWN_REQUEST
WRONG: dict[str, tuple[facts.Fact, RejectionCause | None]] = {
    "a table of an unknown request": (facts.BlocksAllocated(NOBODY, BLOCK, 0, 0), UNKNOWN),
    "the end of an unknown request": (facts.RequestEnded(NOBODY), UNKNOWN),
    "progress of an unknown request": (facts.StepScheduled(0, (facts.Progress(NOBODY, 4, BLOCK),)), UNKNOWN),
    "progress of a waiting request": (facts.StepScheduled(0, (facts.Progress(WAITS, 4),)), UNKNOWN),
    "fewer tokens than before": (facts.StepScheduled(0, (facts.Progress(RUNS, 4),)), None),
    "the arrival of a known request": (facts.RequestSeen(RUNS, 1, ((),)), UNKNOWN),
    "a report of an unknown rank": (
        facts.TransferReported(TransferReport(Rank(7), (), 1_000)),
        RejectionCause.UNKNOWN_JOB,
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_r2_a_fact_that_breaks_the_contract_is_counted_and_changes_nothing(what: str) -> None:
    fact, cause = WRONG[what]
    world = World()
    running, waiting = world.computed("runs"), world.add("waits", "01234")
    world.finish()
    world.idle_step()
    before = fingerprint(world.core)
    world.tell(fact)
    assert violations(world) == ([cause] if cause else [])
    world.core.state.steps -= isinstance(fact, facts.StepScheduled)  # the only change
    assert fingerprint(world.core) == before
    world.run(running)
    assert world.admit(waiting) == 0


def test_r2_an_unknown_request_finds_nothing_and_does_not_wait_for_tokens() -> None:
    world = World()
    assert world.core.lookup(NOBODY, 0, may_wait=True) == 0
    world.core.handle(facts.BlocksAllocated(NOBODY, BLOCK, 0, 4))
    assert world.core.take_results().failed == [NOBODY]


def test_r2_allocating_a_running_request_again_changes_nothing() -> None:
    world = World()
    request = world.admitted("a", TEXT)
    world.step()
    tables = tuple(map(tuple, request.tables))
    world.tell(facts.BlocksAllocated(request.name, tables, 8, 0))
    world.run(request)
    world.end_and_drain(request)
    assert world.on_host(TEXT) == "xxx"
    assert violations(world) == []


def test_r2_a_loading_request_that_is_allocated_or_looked_up_again_continues_loading() -> None:
    world = cached()
    request = world.admitted("a", TEXT)
    tables = tuple(map(tuple, request.tables))
    world.tell(facts.BlocksAllocated(request.name, tables, 0, 12))
    assert world.lookup(request) == 0
    world.step_and_copy()
    assert world.results == [("a", True)]


# -- lookups ----------------------------------------------------------------------------------------------------


def test_each_admission_counts_one_lookup_with_its_last_answer() -> None:
    world = cached()
    request = world.add("a", TEXT + "nopq")
    for _ in range(3):
        world.lookup(request)
    world.allocate(request, 12)
    assert world.reported(LookupAnswered)[1:] == [
        LookupAnswered(request.name, 0, 3, 2, 12, 5, MissCause.NEVER_SEEN)
    ]


def test_a_hit_shorter_than_the_policys_minimum_is_declined() -> None:
    world = cached(least=16)
    assert world.lookup(world.add("asks for less", TEXT), least=4) == 0
    assert world.admit(world.add("a", TEXT)) == 0
    assert world.miss() is MissCause.LOAD_DECLINED
    assert world.count(SlotState.PINNED) == 0


@pytest.mark.parametrize(("first", "later", "answer"), [(16, 4, 0), (12, 16, 12), (0, 16, 12)])
def test_a_requests_first_lookup_fixes_its_minimum_hit(first: int, later: int, answer: int) -> None:
    world = cached(least=4)
    request = world.add("a", TEXT)
    assert world.lookup(request, least=first) == answer
    assert world.lookup(request, least=later) == answer
    world.allocate(request, answer)
    assert (world.miss() is MissCause.LOAD_DECLINED) is (answer == 0)


def test_a_request_that_opted_out_reads_nothing() -> None:
    world = cached()
    request = world.add("a", TEXT, reads_cache=False)
    assert world.admit(request) == 0
    answer = world.reported(LookupAnswered)[-1]
    assert answer == LookupAnswered(request.name, 0, 0, 4, 0, 13, None, opted_out=True)


def test_a_miss_names_an_open_store_as_its_cause() -> None:
    world = World()
    world.computed("a", TEXT)
    assert world.next_miss() is MissCause.STORING


def test_a_preempted_request_also_looks_up_its_generated_tokens() -> None:
    world = World()
    request = world.admitted("a", TEXT)
    for _ in range(6):
        world.step_and_copy()
    world.preempt(request)
    world.device.forget_keys()
    assert len(request.text) == 18
    assert world.admit(request) == 16  # the hit is longer than the prompt, which has 13 tokens


# -- R9: loads that fail ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [FAILED, CORRUPT])
def test_r9_a_failed_load_is_recomputed_and_never_tried_again(outcome: object) -> None:
    world = cached()
    request = world.loading()
    world.finish(outcome=outcome)  # type: ignore[arg-type]
    assert world.results == [("a", False)]
    assert world.on_host(TEXT) == "..."
    is_corrupt = outcome is CORRUPT
    assert world.loads() == {LoadOutcome.CORRUPT if is_corrupt else LoadOutcome.FAILED: 3}
    world.admit(world.add("another", TEXT))
    assert world.miss() is (MissCause.CORRUPT if is_corrupt else MissCause.LOAD_FAILED)
    assert world.count(SlotState.EMPTY) == world.ready - 3 * is_corrupt
    world.only_on_host(TEXT)
    assert world.admit(request) == 0
    assert world.miss() is MissCause.LOAD_FAILED
    world.run(request)


@pytest.mark.parametrize(("rotten", "left"), [([1], "x.x"), ([0, 1, 2], "...")])
def test_r9_only_a_loads_corrupt_blocks_are_quarantined(rotten: list[int], left: str) -> None:
    world = cached()
    slots = sorted(world.pool.index.values())
    for position in rotten:
        world.rot(0, slots[position])
    world.loading()
    world.finish()
    assert world.results == [("a", False)]
    others = {LoadOutcome.FAILED: 3 - len(rotten)} if len(rotten) < 3 else {}
    assert world.loads() == {LoadOutcome.CORRUPT: len(rotten), **others}
    assert world.on_host(TEXT) == left
    assert world.count(SlotState.QUARANTINED) == len(rotten)
    assert world.admit(world.add("b", TEXT)) == 4 * left.index(".")
    assert world.miss() is MissCause.CORRUPT


def test_r9_a_request_that_ends_cancels_only_its_own_load() -> None:
    world = cached()
    one, two = world.add("one", TEXT), world.add("two", TEXT)
    world.admit(one)
    world.admit(two, may_wait=False)
    world.end(one)
    assert world.loads() == {LoadOutcome.CANCELLED: 3}
    world.step_and_copy()
    assert world.results == [("one", False), ("two", True)]


@pytest.mark.parametrize("order", [(CORRUPT, FAILED), (FAILED, CORRUPT)])
def test_r9_a_failed_rank_invalidates_all_blocks_of_a_load(order: tuple) -> None:
    # Regression: only the first failing rank's report counted. If that rank reported one corrupt block, the
    # slots that another rank failed to copy stayed in the index.
    world = cached(ranks=2)
    world.loading()
    (job,) = world.open_jobs(Direction.LOAD)
    for rank, outcome in enumerate(order):
        world.report(rank, job, outcome, (1,) if outcome is CORRUPT else ())
    assert world.on_host(TEXT) == "..."
    assert world.count(SlotState.QUARANTINED) == 1


def test_r9_destinations_stay_leased_until_every_rank_has_ended() -> None:
    world = cached(ranks=2)
    request = world.loading()
    (job,) = world.open_jobs(Direction.LOAD)
    blocks = request.held()
    world.report(0, job, FAILED)
    assert world.results == []
    assert all(world.device.leased[block] == 1 for block in blocks)
    world.report(1, job, DONE)
    assert world.results == [("a", False)]
    assert world.device.leased.total() == 0


def test_r9_blocks_of_an_abandoned_load_are_not_reused() -> None:
    world = cached(device=16)
    request = world.loading()
    (job,) = world.open_jobs(Direction.LOAD)
    blocks = request.held()
    world.overdue(job)
    assert world.results == [("a", False)]
    world.admit(request)
    world.run(request)
    for number in range(4):
        world.serve(f"r{number}", str(number) * 30)  # These requests use every block of the device.
    assert all(world.device.leased[block] == 1 for block in blocks)
    world.finish(job)  # The late copy writes to blocks that no other request has.
    assert not any(world.device.leased[block] for block in blocks)


# -- R14: one load for many requests ----------------------------------------------------------------------------


def test_r14_fifty_requests_with_one_prefix_load_it_once() -> None:
    world = cached(device=400)
    crowd = [world.add(f"r{number}", TEXT + str(number)) for number in range(50)]
    answers = [world.admit(request) for request in crowd]
    assert answers == [12, *[None] * 49]
    assert sum(world.pool.pins.values()) == 3
    assert len(world.reported(LookupDeferred)) == 49
    world.step()
    assert [world.admit(request) for request in crowd[1:]] == [None] * 49
    # each request's wait is reported once, however often the engine asks
    assert len(world.reported(LookupDeferred)) == 49
    world.finish()
    assert world.results == [("r0", True)]
    world.device.forget_keys()
    assert world.admit(crowd[1]) is None  # the load has ended, but the request that loaded does not run yet
    world.step()
    assert [world.admit(request) for request in crowd[1:]] == [0] * 49
    assert all(request.brought == (12, 0) for request in crowd[1:])
    assert len(world.reported(LoadScheduled)) == 1


@pytest.mark.parametrize("how", ["fails", "ends", "abandoned", "reset"])
def test_r14_a_waiting_request_continues_when_the_owner_of_the_load_ends(how: str) -> None:
    world = cached()
    owner = world.loading()
    waits = world.add("b", TEXT)
    assert world.admit(waits) is None
    (job,) = world.open_jobs(Direction.LOAD)
    if how == "fails":
        world.finish(outcome=FAILED)
    elif how == "abandoned":
        world.overdue(job)
    elif how == "reset":
        world.reset()
    else:
        world.end(owner)
    assert world.admit(waits) == (12 if how == "ends" else 0)


@pytest.mark.parametrize("how", ["it failed", "the cache was reset"])
def test_r14_no_request_waits_for_an_ended_load_when_its_slots_are_filled_again(how: str) -> None:
    # Regression: slots emptied by a reset still belonged to the old load's request after they were reused.
    world, text = cached(host=3), "0123456789abc"
    world.loading()
    if how == "the cache was reset":
        world.reset()
    world.finish(outcome=FAILED if how == "it failed" else DONE)
    world.computed("newer", text)
    world.finish()
    assert world.on_host(text) == "xxx"
    world.device.forget_keys()
    assert world.admit(world.add("b", text)) == 12


def test_r14_no_request_waits_for_a_load_whose_owner_runs() -> None:
    world = cached()
    world.loading()
    waits = world.add("b", TEXT)
    world.finish()
    world.device.forget_keys()
    assert world.admit(waits) is None
    world.step()
    # The device has lost the loaded blocks, so the next request must load them again.
    world.device.forget_keys()
    assert world.admit(waits) == 12


def test_r14_no_request_waits_for_an_owner_that_was_allocated_again() -> None:
    # Regression: when a request was preempted and readmitted within a step, without a lookup, its loaded
    # blocks had no owner.
    world = cached()
    owner = world.loading()
    world.finish()
    owners = {
        record.request for each in by_key(world.core.state.requests.loading).values() for record in each
    }
    assert owners == {owner.name}
    world.preempt(owner)
    world.device.forget_keys()
    world.allocate(owner, 0)
    assert world.admit(world.add("b", TEXT)) == 12


@pytest.mark.parametrize("engine_can_wait", [True, False])
def test_r14_a_request_that_may_not_wait_loads_the_blocks_itself(engine_can_wait: bool) -> None:
    world = cached(promises=Promises(can_wait=engine_can_wait))
    world.loading()
    assert world.admit(world.add("b", TEXT), may_wait=not engine_can_wait) == 12
    world.step_and_copy()
    assert world.results == [("a", True), ("b", True)]


@pytest.mark.parametrize("ends", ["first", "second"])
def test_r14_requests_wait_for_whichever_of_two_owners_remains(ends: str) -> None:
    # Regression: only the first request that loaded a slot was remembered. A third request therefore loaded
    # the blocks of the second request again.
    world = cached()
    owners = {name: world.loading(name) for name in ("first", "second")}
    waits = world.add("waits", TEXT)
    world.end(owners.pop(ends))
    [owner] = owners.values()
    assert world.admit(waits) is None
    assert world.reported(LookupDeferred)[-1].owner == owner.name
    world.end(owner)
    assert world.admit(waits) == 12


def test_r14_a_request_that_shares_only_a_loads_tail_waits_too() -> None:
    world = cached()
    owner = world.add("owner", TEXT)
    world.lookup(owner)
    head = world.device.hand_out(2)
    tables = ((*head, *world.device.hand_out(1)),)
    world.tell(facts.BlocksAllocated(owner.name, tables, 8, 4))
    assert world.admit(world.add("waits", TEXT)) is None


def test_a_load_without_blocks_ends_at_once() -> None:
    world = cached()
    name = RequestId("a")
    request = world.add("a", TEXT)
    world.lookup(request)
    world.core.handle(facts.BlocksAllocated(name, ((DeviceBlockId(0),) * 3,), 0, 12))
    assert world.core.take_results().loaded == [name]
    assert world.submit() == NOTHING
    assert world.count(SlotState.PINNED) == 0


def test_a_prompt_entirely_on_the_device_counts_no_miss() -> None:
    world = cached()
    request = world.add("a", TEXT[:12])
    assert world.core.lookup(request.name, 12, may_wait=True) == 0
    world.tell(facts.BlocksAllocated(request.name, (tuple(world.device.hand_out(3)),), 12, 0))
    assert world.reported(LookupAnswered)[-1] == LookupAnswered(request.name, 12, 0, 0, 0, 0, None)


@pytest.mark.parametrize("state", ["waiting", "loading"])
def test_a_preemption_of_a_request_without_a_running_table_changes_nothing(state: str) -> None:
    world = cached()
    request = world.add("a", TEXT)
    if state == "loading":
        world.admit(request)
        world.step()
    world.tell(facts.StepScheduled(99, preempted=(request.name,)))
    assert request.state == state
    if state == "waiting":
        assert world.admit(request) == 12
    world.step_and_copy()
    assert world.results == [("a", True)]
    assert violations(world) == []


def test_r20_the_next_engine_does_not_find_a_block_that_a_load_found_corrupt() -> None:
    world = cached(keeps=True)
    assert len(world.table) == 3
    request = world.admitted("b", TEXT)
    world.idle_step()
    [job] = world.open_jobs(Direction.LOAD)
    world.report(0, job, CORRUPT, (1,))
    assert [key for key in keys_of(TEXT, full()) if key not in world.table.values()] == [
        keys_of(TEXT, full())[1]
    ]
    world.end(request)
