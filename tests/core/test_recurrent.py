from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.core.planners import LazyPlanner
from kvoffload.model import facts
from kvoffload.model.causes import MissCause, StoreOutcome
from kvoffload.model.engine import EngineShape, Promises
from kvoffload.model.events import BoundaryAsked, BoundaryMade, LookupAnswered
from kvoffload.model.ids import GroupId, JobId, RequestId
from kvoffload.model.wire import Direction
from tests.core.disk_world import DiskWorld
from tests.core.world import FAILED, TEXT, Req, World, cached, full, key_at, keys_of, recurrent, window

OTHER = "nopqrstuvwxyz"
PROMISES = Promises(hands_off_states=True)


def make(**chosen: bool | int | str) -> World:
    """Return a world whose group 0 is recurrent, as in most hybrid models."""
    return World(recurrent(), full(group=1), promises=PROMISES, **chosen)  # type: ignore[arg-type]  # each by its name


def compute(world: World, request: Req, until: int) -> None:
    while request.computed < until:
        world.step(request, tokens=4)


def complete(world: World, request: Req) -> None:
    """Let a request compute its text, one block per step; end the request and all copies."""
    compute(world, request, len(request.text))
    world.step(request, tokens=1)
    world.drain()
    world.end_and_drain(request)


def with_states(*ends: int, **chosen: bool | int | str) -> World:
    """Return a world with an empty device. Its host has the text's blocks, and states at the lengths `ends`."""
    world = make(**chosen)
    world.states_end = ends
    complete(world, world.admitted("first", TEXT))
    world.device.forget_keys()
    return world


def test_blocks_of_a_recurrent_group_are_not_offered_without_a_state() -> None:
    world = with_states()
    assert world.on_host(TEXT) == "..."
    assert world.on_host(TEXT, group=1) == "xxx"
    assert world.admit(world.add("a", TEXT)) == 0


def test_a_hit_ends_at_the_last_state() -> None:
    world = with_states(4, 8)
    assert world.on_host(TEXT) == "xx."
    request = world.add("a", TEXT)
    assert world.admit(request) == 8
    world.load_and_run(request)  # The world checks that the request continues from the right state.
    assert world.results == [("a", True)]


def test_r10_a_state_is_offered_after_the_steps_allocations() -> None:
    world = make()
    world.reset()
    request = world.admitted("a", TEXT)
    world.step(request, tokens=4)
    world.finish()
    assert world.on_host(TEXT) == "x.."


def test_a_state_is_in_the_plan_of_the_step_that_completes_it() -> None:
    world = make()
    request = world.admitted("a", TEXT)
    plan = world.step(request, tokens=4)
    assert [job.targets for job in plan.stores] == [(request.tables[0][0],)]


def test_r8_a_state_waits_for_host_memory() -> None:
    world = make(host=0, is_growing=True)
    request = world.admitted("a", TEXT)
    compute(world, request, 12)
    assert not world.stores()
    world.ready_up_to(4)
    world.copy_all()
    assert world.on_host(TEXT) == "xxx"
    assert world.on_host(TEXT, group=1) == "x.."


def test_r5_a_state_that_waited_for_leases_comes_before_blocks_that_waited_longer() -> None:
    world = make(device=16)  # stores may lease four of these blocks
    one, two = world.add("one", "nopqrstuvwxyzabcdefg"), world.add("two", TEXT)
    world.states_end = ()
    for request in (one, two):
        world.admit(request)
    compute(world, one, 20)
    world.states_end = (12,)
    compute(world, two, 12)
    assert [len(places) for places in world.core.stores.for_room.values()] == [2]
    assert [len(places) for places in world.core.stores.states_for_room.values()] == [1]
    world.finish(world.submitted()[0])
    plan = world.idle_step()
    assert [job.targets for job in plan.stores] == [(two.tables[0][2],)]


def test_r8_a_state_is_held_while_its_request_runs() -> None:
    world = make(host=2)
    world.states_end = (4,)
    request = world.admitted("a", TEXT)
    compute(world, request, 8)
    world.finish()
    world.states_end = ()
    other = world.admitted("other", "nopqrstuvwxyz")
    compute(world, other, 12)
    world.finish()
    assert world.on_host(TEXT) == "x.."
    assert world.on_host(TEXT, group=1) == "x.."


def test_r7_a_state_whose_block_was_reallocated_while_it_waited_is_not_stored() -> None:
    world = make(host=0, is_growing=True)
    world.states_end = (4,)
    request = world.admitted("a", TEXT)
    compute(world, request, 12)
    (block,) = [block for block, key in world.device.keys.items() if key == key_at(TEXT, 4)]
    world.device.forget_keys()
    while block in world.device.free:
        world.tell(facts.StepScheduled(world.steps, reallocated=tuple(world.device.hand_out(1))))
    world.ready_up_to(8)
    world.copy_all()
    assert world.on_host(TEXT) == "..."
    assert world.stores()[StoreOutcome.STALE] == 1


def test_r7_a_waiting_state_of_a_preempted_request_is_lost() -> None:
    world = make(host=0, is_growing=True)
    request = world.admitted("a", TEXT)
    world.step(request, tokens=4)
    world.preempt_and_step(request)
    assert world.stores() == {StoreOutcome.LOST: 1}
    world.ready_up_to(4)
    world.idle_step()
    assert world.on_host(TEXT) == "..."


@pytest.mark.parametrize("name", ["unknown", "preempted"])
def test_r2_a_state_of_no_running_request_is_not_stored(name: str) -> None:
    world = make()
    request = world.admitted("preempted", TEXT)
    compute(world, request, 4)
    state = facts.StateHandedOff(RequestId(name), GroupId(0), 0, key_at(TEXT, 4), request.tables[0][0])
    world.preempt(request)
    world.preempted.clear()  # the test reports the preemption itself
    world.tell(facts.StepScheduled(9, preempted=(request.name,), states=(state,)))
    assert world.stores()[StoreOutcome.REQUEST_GONE] == 1


def test_r2_a_state_of_another_text_is_not_stored() -> None:
    world = make()
    request = world.admitted("a", TEXT)
    compute(world, request, 8)
    (block,) = world.device.hand_out(1)
    world.device.name(block, key_at("wxyz", 4))
    state = facts.StateHandedOff(request.name, GroupId(0), 0, key_at("wxyz", 4), block)
    world.tell(facts.StepScheduled(9, states=(state,)))
    assert world.stores()[StoreOutcome.STALE] == 1


def test_a_state_handed_off_twice_uses_one_slot() -> None:
    world = with_states(4, 8)
    request = world.admitted("a", TEXT)
    world.step_and_copy()
    world.step(request, tokens=4)
    for block in world.device.hand_out(2):
        world.device.name(block, key_at(TEXT, 12))
        state = facts.StateHandedOff(request.name, GroupId(0), 2, key_at(TEXT, 12), block)
        world.tell(facts.StepScheduled(9, states=(state,)))


def test_states_of_all_lengths_are_evicted_with_their_blocks() -> None:
    world = with_states(4, 8, 12)
    depth = {key: place for group in world.groups for place, key in enumerate(keys_of(TEXT, group))}
    assert [depth[key] for key in world.eviction_order()] == [2, 2, 1, 1, 0, 0]


# -- looking ahead ---------------------------------------------------------------------------------------


def test_a_recurrent_group_does_not_prevent_lazy() -> None:
    groups = recurrent(), recurrent(group=1), full(group=2)
    shape = EngineShape(groups, 1, 64, step_tokens=16, promises=PROMISES)
    assert shape.turnover_blocks == 2 + 2 + 5
    world = World(*groups, device=64, step_tokens=16, policy="lazy", promises=PROMISES)
    assert isinstance(world.core._planner, LazyPlanner)


def test_lazy_stores_states_that_the_device_evicts_next() -> None:
    world = make(policy="lazy", device=40)
    request = world.admitted("a", TEXT)
    compute(world, request, 12)
    assert not world.stores()
    world.end_and_drain(request)
    for number in range(6):
        world.serve(f"other {number}", f"{number}bcdefghijkl")
    assert world.on_host(TEXT)[-1] == "x"
    world.device.forget_keys()
    assert world.admit(world.add("again", TEXT)) == 12


def test_lazy_stores_the_states_of_an_ending_request_if_few_blocks_are_free() -> None:
    world = make(policy="lazy", device=40)
    request = world.admitted("a", TEXT)
    compute(world, request, 12)
    world.device.hold(list(world.device.free)[:-1])
    world.end(request)
    world.submit()
    world.finish()
    assert world.on_host(TEXT) == "xxx"


# -- prefix boundaries ----------------------------------------------------------------------------------------------------

SHARED = "abcdefghnopqr"
"""the first two blocks are those of `TEXT`"""


def boundary(world: World, name: str) -> int:
    return world.core.state.requests.live[RequestId(name)].boundary


def test_a_missing_state_is_requested_from_the_engine_and_found_by_the_next_request() -> None:
    world = with_states(12)
    world.states_end = (8,)
    for name, found in (("second", 0), ("third", 8)):
        request = world.add(name, SHARED)
        assert world.lookup(request) == found
        assert boundary(world, name) == (0 if found else 8)
        world.allocate(request, found)
        if found:
            assert world.miss() is MissCause.NEVER_SEEN
            break
        assert world.miss() is MissCause.NO_STATE
        assert world.reported(BoundaryAsked) == [BoundaryAsked(request.name, 8)]
        compute(world, request, 8)
        assert world.reported(BoundaryMade) == [BoundaryMade(request.name, 8)]
        world.finish()
        world.end(request)
        world.device.forget_keys()


@pytest.mark.parametrize(
    ("ends", "boundaries", "found", "cause"),
    [((12,), False, 0, MissCause.NO_STATE), ((4, 8, 12), True, 8, MissCause.NEVER_SEEN)],
)
def test_no_boundary_is_requested_within_a_hit_or_when_boundaries_are_off(
    ends: tuple[int, ...], boundaries: bool, found: int, cause: MissCause
) -> None:
    world = with_states(*ends)
    world.core.state.policy = replace(world.core.state.policy, prefix_boundaries=boundaries)
    assert world.admit(world.add("second", SHARED)) == found
    assert world.miss() is cause
    assert not world.reported(BoundaryAsked)
    assert not boundary(world, "second")


def test_a_boundary_is_at_the_end_of_the_prefix_on_device_and_host() -> None:
    world = with_states(12)
    world.lose(key_at(TEXT, 4, 1))
    world.add("second", SHARED)
    for full_tokens, wanted in ((0, 0), (4, 8)):
        found = world.core.lookup(RequestId("second"), 0, may_wait=True, full_tokens=full_tokens)
        assert found == 0
        assert boundary(world, "second") == wanted


def test_a_miss_tells_an_evicted_state_from_one_never_kept() -> None:
    world = with_states(4)
    world.reset()
    assert not world.pool.index
    world.admit(world.add("a", TEXT))
    assert world.miss() is MissCause.AFTER_RESET


def test_a_missing_window_block_does_not_count_as_a_missing_state() -> None:
    world = cached(full(), window(5, group=1))
    for end in (8, 12):
        world.lose(key_at(TEXT, end, 1))
    world.admitted("a", TEXT)
    assert world.miss() is not MissCause.NO_STATE
    assert not world.reported(BoundaryAsked)


def test_a_failed_store_of_a_state_affects_only_hits_that_end_there() -> None:
    world = make()
    request = world.admitted("a", TEXT)
    world.step(request, tokens=4)
    world.finish(outcome=FAILED)
    complete(world, request)
    world.device.forget_keys()
    assert world.on_host(TEXT) == ".xx"
    assert world.admit(world.add("b", TEXT)) == 12


@pytest.mark.parametrize("is_loaded", [True, False])
def test_r15_a_load_marks_a_state_as_used_and_a_device_hit_does_not(is_loaded: bool) -> None:
    world = make(host=24)
    world.states_end = (8,)
    for name, text in (("first", TEXT), ("between", OTHER)):
        served(world, name, text)
    if is_loaded:
        world.device.forget_keys()
    world.states_end = (12,)
    again = served(world, "again", TEXT)
    assert again.computed > 8
    order = world.eviction_order()
    state, state_between, head, head_between = (
        order.index(key_at(text, end, group)) for group, end in ((0, 8), (1, 4)) for text in (TEXT, OTHER)
    )
    assert (state > state_between) == is_loaded
    assert head > head_between


def served(world: World, name: str, text: str) -> Req:
    """Serve a request, computing one block per step after a load."""
    request = world.admitted(name, text)
    world.step_and_copy()
    complete(world, request)
    return request


# -- on the disk ----------------------------------------------------------------------------------------------------------


def on_disk(end: int = 8) -> DiskWorld:
    """Return a world with an empty device and host. Its disk has all whole blocks of the text and one state."""
    world = DiskWorld(recurrent(), full(group=1), promises=PROMISES, min_hits=0, host=32, disk=400)
    world.states_end = (end,)
    complete(world, world.admitted("first", TEXT))
    world.settle()
    world.empty_host()
    assert world.below(TEXT)[end // 4 - 1] == "x"
    assert world.below(TEXT, group=1) == "xxx"
    assert (world.on_host(TEXT), world.on_host(TEXT, group=1)) == ("...", "...")
    return world


def fetch(world: DiskWorld, request: Req) -> JobId:
    assert world.lookup(request) is None
    world.idle_step()
    [job] = world.tier_jobs(Direction.LOAD)
    return job


def test_only_the_state_that_a_lookup_found_is_spilled() -> None:
    world = DiskWorld(recurrent(), full(group=1), promises=PROMISES, min_hits=1, host=32, disk=400)
    world.states_end = (4, 8)
    served(world, "first", TEXT)
    world.states_end = ()
    served(world, "again", TEXT)
    world.settle()
    assert (world.below(TEXT), world.below(TEXT, group=1)) == (".x.", "xx.")


def test_a_state_and_the_attention_before_it_are_fetched_together() -> None:
    world = on_disk()
    request = world.add("late", TEXT)
    job = fetch(world, request)
    assert len(world.copies[job].job.slots) == 3
    world.finish()
    assert world.admit(request) == 8
    world.load_and_run(request)
    assert world.results[-1] == ("late", True)


def test_a_state_whose_fetch_failed_counts_as_the_missing_block() -> None:
    world = on_disk(4)
    other = world.add("other", TEXT)
    world.report(0, fetch(world, other), FAILED)
    assert world.admit(other) == 0
    world.states_end = ()
    compute(world, other, len(TEXT))  # The host now has the attention blocks, but no state.
    world.end_and_drain(other)
    assert (world.on_host(TEXT), world.on_host(TEXT, group=1)) == ("...", "xxx")
    world.device.forget_keys()
    late = world.add("late", TEXT)
    world.report(0, fetch(world, late), FAILED)
    assert world.admit(late) == 0
    assert world.reported(LookupAnswered)[-1].cause is MissCause.NO_STATE
    last = world.add("last", TEXT)
    fetch(world, last)
    world.finish()
    assert world.admit(last) == 4


# -- tails: hits that end inside a block -----------------------------------------------------------------------------


def with_tails(**chosen: bool | int | str) -> World:
    """Return a world whose hits may end after every second token, in blocks of four."""
    return World(recurrent(), full(group=1), promises=PROMISES, tail_tokens=2, **chosen)  # type: ignore[arg-type]


def stop_at(world: World, request: Req, *ends: int) -> None:
    """Let a request compute its text in chunks with these ends, as vLLM does for the states that it keeps."""
    for end in ends:
        world.step(request, tokens=end - request.computed)


def serve_with_tail(world: World, name: str, text: str) -> None:
    """Serve a request in chunks that end at the last whole block and at the last hash."""
    request = world.admitted(name, text)
    world.step_and_copy()
    stop_at(world, request, *sorted({end for end in (len(text) // 4 * 4, (len(text) - 1) // 2 * 2) if end > request.computed}))
    world.run(request)
    world.end_and_drain(request)
    world.device.forget_keys()


def test_a_hit_ends_at_the_last_state_inside_a_block() -> None:
    world = with_tails()
    serve_with_tail(world, "first", "abcdefghijk")  # states after 8 and after 10 tokens
    request = world.add("next", "abcdefghijXYZ")
    assert world.admit(request) == 10
    world.load_and_run(request)  # The world checks every block that the request reads.
    assert world.results == [("next", True)]
