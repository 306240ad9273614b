from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.core.planners import LazyPlanner
from kvoffload.model import facts
from kvoffload.model.causes import MissCause, StoreOutcome
from kvoffload.model.engine import EngineShape, Promises
from kvoffload.model.errors import EngineContractError
from kvoffload.model.events import BoundaryAsked, BoundaryMade, LookupAnswered
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import GroupId, JobId, RequestId
from kvoffload.model.wire import Direction, Tier
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


# -- tails: hits that end inside a block ----------------------------------------------------------------------------------

PROMPT = "abcdefghijk"
"""In blocks of four tokens and hashes of two, states are kept after 8 and after 10 of these tokens."""
NEXT = "abcdefghijXYZ"
"""It shares the first 10 tokens with `PROMPT`."""


def with_tails(**chosen: bool | int | str) -> World:
    settings = {"tail_tokens": 2, **chosen}
    return World(recurrent(), full(group=1), promises=PROMISES, **settings)  # type: ignore[arg-type]  # each by its name


def with_tail_of(prompt: str, **chosen: bool | int | str) -> World:
    """Return a world with an empty device. Its host has the blocks, states and tail of a prompt."""
    world = with_tails(**chosen)
    world.only_on_host(prompt)
    return world


def has_tail(world: World, end: int = 10) -> list[bool]:
    """Return whether the host has the recurrent state and the attention block of a tail."""
    return [key_at(PROMPT, end, group) in world.pool.index for group in (0, 1)]


@pytest.mark.parametrize("text", [PROMPT, NEXT])
def test_a_hit_ends_at_the_last_state_inside_a_block(text: str) -> None:
    world = with_tail_of(PROMPT)
    request = world.add("next", text)
    assert world.admit(request) == 10
    world.load_and_run(request)  # The world checks each block that the request reads.
    assert world.results == [("next", True)]


def with_whole_block() -> World:
    """Return a world whose host has the tail of 10 tokens, and the whole block and the state of 12 tokens."""
    world = with_tails()
    first = world.admitted("first", PROMPT + "l")
    for _ in range(4):
        world.step_and_copy()
    world.end_and_drain(first)
    world.device.forget_keys()
    return world


def test_a_state_after_a_whole_block_is_never_used_for_a_tail() -> None:
    world = with_whole_block()
    request = world.add("again", PROMPT + "l")
    assert world.admit(request) == 10  # the last token is always computed
    world.load_and_run(request)
    assert world.shape.tail_key(world.groups[0], (b"", b"", b"", b"", b"", b""), 12) is None


def test_a_whole_block_of_attention_replaces_that_of_a_tail() -> None:
    world = with_whole_block()
    world.lose(key_at(PROMPT + "l", 12))
    world.lose(key_at(PROMPT, 10, 1))
    assert world.lookup(world.add("other", NEXT)) == 8
    request = world.add("next", PROMPT + "lm")
    assert world.admit(request) == 10
    world.load_and_run(request)


def test_a_tail_is_found_without_the_state_at_the_block_before_it() -> None:
    world = with_tail_of(PROMPT)
    world.lose(key_at(PROMPT, 8))
    assert world.admit(world.add("next", NEXT + "uvw")) == 10
    assert (
        world.miss() is MissCause.NEVER_SEEN
    )  # not NO_STATE, because the next block's attention is missing, too


def test_a_tail_before_later_attention_blocks_is_found() -> None:
    world = with_tail_of(PROMPT)
    world.states_end = ()
    world.serve("longer", NEXT + "uvwxyz")
    world.device.forget_keys()
    world.lose(key_at(NEXT + "uvwxyz", 18))
    request = world.add("third", NEXT + "uvwxyz")
    assert world.lookup(request) == 10
    assert boundary(world, "third") == 16


def test_an_engine_that_accepts_a_part_of_a_tail_gets_no_state_of_another_length() -> None:
    world = with_tail_of(PROMPT)
    request = world.add("next", NEXT)
    assert world.lookup(request) == 10
    world.allocate(request, 9)
    assert world.results == [("next", False)]


@pytest.mark.parametrize(("limit", "found"), [(0, 0), (7, 0), (8, 0), (9, 8), (10, 10), (11, 10), (None, 10)])
def test_a_limit_on_loads_bounds_a_tail(limit: int | None, found: int) -> None:
    world = with_tail_of(PROMPT)
    assert world.admit(world.add("next", NEXT, limits=facts.Limits(load_tokens=limit))) == found


@pytest.mark.parametrize(("limit", "is_stored"), [(9, False), (10, True)])
@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_a_limit_on_stores_bounds_a_tail(policy: str, limit: int, is_stored: bool) -> None:
    world = with_tails(policy=policy, device=60)
    world.serve_limited("a", PROMPT, facts.Limits(store_tokens=limit))
    for number in range(8):
        world.serve(f"other {number}", f"{number}bcdefghijkl")
    assert has_tail(world)[0] == is_stored


def test_lazy_stores_a_tail_that_the_device_evicts_next() -> None:
    world = with_tails(tail_tokens=1, policy="lazy", device=60)
    world.serve("a", PROMPT[:10])
    assert has_tail(world, 9) == [False, False]
    for number in range(8):
        world.serve(f"other {number}", f"{number}bcdefghijkl")
    assert has_tail(world, 9) == [True, True]


def test_twice_stores_a_tail_on_a_full_host_only_when_it_is_offered_again() -> None:
    world = with_tails(policy="twice", host=7, device=60)
    for number in range(4):
        world.serve(f"other {number}", f"{number}bcdefghijkl")
    assert not world.count(SlotState.EMPTY)
    for is_stored in (False, True):
        world.serve("a", PROMPT)
        assert has_tail(world) == [is_stored, is_stored]
        world.device.forget_keys()


def handed_off(world: World, *, held: str = PROMPT[:10]) -> facts.StepScheduled:
    """Return the step that hands off the tail of the running request "a", whose attention block has this key."""
    request = world.requests["a"]
    compute(world, request, 10)
    world.device.name(request.tables[1][2], key_at(held, len(held), 1))
    (target,) = world.device.hand_out(1)
    world.device.name(target, key_at(PROMPT, 10))
    for held_by_rank in world.device.bytes:
        held_by_rank[target] = key_at(PROMPT, 10)
    world.device_age[target] = world.resets
    tail = facts.TailHandedOff(request.name, GroupId(0), 10, key_at(PROMPT, 10), target)
    return facts.StepScheduled(
        world.steps,
        reallocated=(target,),
        tails=(tail,),
        copies=(facts.DeviceCopy(request.tables[0][2], target),),
    )


@pytest.mark.parametrize(
    ("held", "is_stored"), [(PROMPT[:10], True), (PROMPT + "l", True), ("otherthanit", False)]
)
def test_r7_the_attention_of_a_tail_is_stored_only_from_a_block_that_has_it(
    held: str, is_stored: bool
) -> None:
    world = with_tails()
    world.admitted("a", PROMPT + "l")
    world.tell(handed_off(world, held=held))
    world.submit()
    world.finish()
    assert has_tail(world) == [True, is_stored]


REFUSED: Mapping[str, StoreOutcome] = {
    "of an unknown request": StoreOutcome.REQUEST_GONE,
    "of a preempted request": StoreOutcome.REQUEST_GONE,
    "with another key": StoreOutcome.STALE,
    "from before a reset": StoreOutcome.BEFORE_RESET,
}


@pytest.mark.parametrize("case", REFUSED)
def test_r2_r10_a_tail_that_does_not_belong_to_its_request_is_not_stored(case: str) -> None:
    world = with_tails()
    request = world.admitted("a", PROMPT)
    step = handed_off(world)
    (tail,) = step.tails
    if case == "of an unknown request":
        tail = tail._replace(request=RequestId("unknown"))
    elif case == "of a preempted request":
        world.preempt_and_step(request)
    elif case == "with another key":
        tail = tail._replace(tokens=6)
    else:
        world.reset()
    before = world.stores().get(REFUSED[case], 0)
    world.tell(facts.StepScheduled(world.steps, reallocated=step.reallocated, tails=(tail,)))
    assert world.stores()[REFUSED[case]] == before + 1
    world.drain()
    assert has_tail(world) == [False, False]


def test_r10_a_tail_computed_after_a_reset_is_stored() -> None:
    world = with_tails()
    world.reset()
    world.only_on_host(PROMPT)
    assert has_tail(world) == [True, True]


@pytest.mark.parametrize("is_since_reset", [True, False])
def test_r10_a_copy_on_the_device_may_be_stored_if_its_source_may(is_since_reset: bool) -> None:
    world = with_tails()
    if not is_since_reset:
        world.admitted("a", PROMPT)
    world.reset()
    if is_since_reset:
        world.admitted("a", PROMPT)
    (target,) = handed_off(world).reallocated
    source = world.requests["a"].tables[0][2]
    copy = facts.DeviceCopy(source, target)
    world.tell(facts.StepScheduled(world.steps, reallocated=(target,), copies=(copy,)))
    assert (target in world.core.state.computed_since_reset) == is_since_reset


@pytest.mark.parametrize("host", [3, 64])
def test_an_offer_of_a_tail_never_waits(host: int) -> None:
    world = with_tails(host=host, device=16)  # stores may lease four of these blocks
    world.admitted("a", PROMPT)
    step = handed_off(world)
    world.tell(step)
    waiting = world.core.state.requests.live[RequestId("a")].waiting
    assert not {(GroupId(0), 2), (GroupId(1), 2)} & waiting.keys()
    world.finish()
    assert has_tail(world) == [False, False]
    assert world.stores()[StoreOutcome.HOST_FULL if host == 3 else StoreOutcome.LEASE_LIMIT] == 2


def test_r15_a_tail_counts_as_used_at_the_end_of_its_request() -> None:
    world = with_tails()
    request = world.admitted("a", PROMPT)
    world.run(request)
    world.finish()
    world.serve("between", OTHER)
    world.end_and_drain(request)
    order = world.eviction_order()
    tail, head = order.index(key_at(PROMPT, 10)), order.index(key_at(PROMPT, 4, 1))
    assert order.index(key_at(OTHER, 4, 1)) < tail < head


def test_r19_a_request_reserves_a_block_for_the_copy_of_its_tail() -> None:
    assert with_tails().shape.request_blocks(12) == with_tails(tail_tokens=0).shape.request_blocks(12) + 1


def test_a_tail_is_spilled_and_fetched() -> None:
    world = DiskWorld(
        recurrent(), full(group=1), promises=PROMISES, tail_tokens=2, min_hits=1, host=32, disk=400
    )
    world.only_on_host(PROMPT)
    world.serve("again", NEXT)
    world.settle()
    world.empty_host()
    request = world.add("late", NEXT)
    assert world.lookup(request) is None
    world.copy_all()
    assert world.admit(request) == 10
    assert world.reported(LookupAnswered)[-1].fetched == ((Tier.DISK, 10),)
    world.load_and_run(request)


@pytest.mark.parametrize(
    "groups",
    [
        (recurrent(), full(2, 1)),
        (recurrent(), window(6, group=1)),
        (recurrent(), full(group=1, has_lookahead=True)),
        (recurrent(3), full(3, 1)),
    ],
)
def test_an_engine_with_other_groups_has_no_tails(groups: tuple[GroupSpec, ...]) -> None:
    with pytest.raises(
        EngineContractError,
        match="tail_tokens is 2; it needs full attention and recurrent groups, with equal",
    ):
        EngineShape(groups, 1, 8, 8, tail_tokens=2)
