"""R19: requests that load or have loaded keep their blocks until they run, so all of them must fit on the device."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload.core.request import Requests
from kvoffload.model.causes import Deferral, MissCause
from kvoffload.model.events import LookupDeferred
from kvoffload.model.groups import GroupSpec
from kvoffload.model.wire import Direction
from tests.core.world import FAILED, Req, World, chunked, full, needed_blocks, recurrent, window

WINDOWS = (full(), window(5, group=1), window(5, group=2))
MIXED = (full(), chunked(8, group=1), recurrent(group=2))


def text(number: int, tokens: int) -> str:
    return chr(ord("a") + number) * tokens


def holding(*groups: GroupSpec, device: int, texts: Sequence[str] = (text(0, 13), text(1, 13))) -> World:
    """Return a world with these texts on the host. The device has `device` blocks, all of them free."""
    world = World(*groups, device=device, host=400)
    world.checks_each_fact = False
    for each in texts:
        before = -1
        while world.blocks_on_host > before:  # a small device stores few blocks at a time
            before = world.blocks_on_host
            request = world.admitted("first", each)
            while not request.text.endswith("."):
                world.step_and_copy()
            world.end_and_drain(request)
            world.device.forget_keys()
    world.checks_each_fact = True
    world.log.clear()
    world.results.clear()
    return world


def waits(world: World) -> list[tuple[str, Deferral]]:
    return [(event.request, event.reason) for event in world.reported(LookupDeferred)]


# A prompt of 33 tokens needs 9 blocks of full attention. With steps of 8 tokens, a window of 5 tokens needs at most 4
# blocks, a chunk of 8 tokens 5, and a recurrent state 2.
@pytest.mark.parametrize(("groups", "blocks"), [((full(),), 9), (WINDOWS, 17), (MIXED, 16)])
def test_r19_a_load_starts_only_if_all_requests_with_loads_fit_on_the_device(
    groups: Sequence[GroupSpec], blocks: int
) -> None:
    for device, is_room in ((2 * blocks - 1, False), (2 * blocks, True)):
        world = holding(*groups, texts=[text(0, 33), text(1, 33)], device=device)
        first, second = (world.add(name, text(number, 33)) for number, name in enumerate("ab"))
        assert world.admit(first) == 32
        assert world.core.state.requests.reserved == blocks
        assert world.lookup(second) == (32 if is_room else None)
        assert waits(world) == ([] if is_room else [("b", Deferral.ROOM)])


def test_r19_the_wait_for_room_ends_when_the_other_request_runs() -> None:
    world = holding(device=7)
    first, second = world.add("a", text(0, 13)), world.add("b", text(1, 13))
    world.admit(first)
    assert world.lookup(second) is None
    world.step_and_copy()
    assert world.results == [("a", True)]
    assert world.lookup(second) is None, "the load has ended, but its request does not run yet"
    assert waits(world) == [("b", Deferral.ROOM)], "one wait is reported once"
    world.step(first)
    assert world.lookup(second) == 12


@pytest.mark.parametrize("how", ["fails", "abandoned", "ends", "preempted", "allocated again"])
def test_r19_a_request_that_loses_its_table_reserves_nothing(how: str) -> None:
    world = holding(device=7)
    first, second = world.loading("a", text(0, 13)), world.add("b", text(1, 13))
    assert world.lookup(second) is None
    (job,) = world.open_jobs(Direction.LOAD)
    if how == "fails":
        world.finish(outcome=FAILED)
    elif how == "abandoned":
        world.overdue(job)
    elif how == "ends":
        world.end(first)
    else:
        world.finish()
        world.preempt(first)
        if how == "preempted":
            world.idle_step()
        else:
            world.allocate(first, 0)
    assert world.core.state.requests.reserved == 0
    assert world.lookup(second) == 12


def test_r19_after_a_reset_a_loaded_request_still_needs_its_room() -> None:
    world = holding(device=7)
    first = world.loading("a", text(0, 13))
    world.reset()
    world.finish()
    world.computed("c", text(2, 5))
    world.finish()
    world.device.forget_keys()
    second = world.add("b", text(2, 13))
    assert world.lookup(second) is None
    world.step(first)
    assert world.lookup(second) == 4


def test_r19_small_requests_do_not_overtake_one_that_waits_for_room() -> None:
    world = holding(device=12, texts=[text(0, 13), text(1, 13), text(2, 33)])
    first, small, large = world.add("a", text(0, 13)), world.add("b", text(1, 9)), world.add("c", text(2, 33))
    world.admit(first)
    assert world.lookup(large) is None
    assert world.lookup(small) is None, "the device has room for 7 blocks, but the large request comes first"
    world.step_and_copy()
    world.step(first)
    assert world.admit(large) == 32
    assert world.lookup(small) == 8


@pytest.mark.parametrize("device", [7, 8])
def test_r19_a_request_that_may_not_wait_for_room_computes_its_tokens(device: int) -> None:
    world = holding(device=device)
    world.loading("a", text(0, 13))
    is_room = device == 8
    assert world.admit(world.add("b", text(1, 13)), may_wait=False) == (12 if is_room else 0)
    assert world.miss() is (MissCause.PARTIAL_BLOCK if is_room else MissCause.NO_ROOM)


@pytest.mark.parametrize("is_stuck", [True, False])
def test_r19_blocks_under_a_copy_that_timed_out_are_no_room(is_stuck: bool) -> None:
    world = holding(device=10, texts=[text(number, 13) for number in range(3)])
    world.loading("stuck", text(2, 13))
    [job] = world.open_jobs(Direction.LOAD)
    world.overdue(job)
    if not is_stuck:
        world.finish(job)
    first, second = world.add("a", text(0, 13)), world.add("b", text(1, 13))
    assert world.admit(first) == 12
    # Both requests need 4 blocks, and 3 of the 10 blocks are under the copy.
    assert world.lookup(second) == (None if is_stuck else 12)


# -- the whole line -----------------------------------------------------------------------------------------------------


class Line:
    """An engine whose requests keep their blocks from the allocation for a load until they run, as in vLLM.

    Loaded requests come first. If the first request in the line cannot get blocks, no later request is asked. A load
    leaves free what running requests still need. If no request can go on, the last one to run loses its blocks.
    """

    def __init__(self, world: World, requests: Sequence[Req]) -> None:
        self.world = world
        self.waiting = list(requests)
        self.loaded: list[Req] = []
        self.running: list[Req] = []
        self.ended: list[Req] = []

    def move(self) -> bool:
        """Run one step; return whether anything changed."""
        before = self._progress()
        self._run()
        self._start_loaded()
        if not [request for request in self.loaded if request.state == "running"]:
            self._admit()
        self.world.copy_all()
        self._end()
        return self._progress() != before or self._preempt()

    def _progress(self) -> object:
        return [
            (each.name, each.state, each.computed) for each in (*self.loaded, *self.running, *self.waiting)
        ]

    def _run(self) -> None:
        for request in self.running:
            self.world.step(request)

    def _start_loaded(self) -> None:
        for request in [each for each in self.loaded if each.state == "running"]:
            was = request.computed
            self.world.step(request)
            if request.computed == was:
                return
            self.loaded.remove(request)
            self.running.append(request)

    def _admit(self) -> None:
        for request in list(self.waiting):
            answer = self.world.lookup(request)
            if answer is None:
                continue
            if (answer and not self._has_room(request, answer)) or not self.world.allocate(request, answer):
                return
            self.waiting.remove(request)
            (self.loaded if answer else self.running).append(request)

    def _has_room(self, request: Req, answer: int) -> bool:
        shape, length = self.world.shape, self.world.device_hit(request) + answer
        loaded = sum(len(needed_blocks(group, length)) for group in shape.groups)
        promised = sum(shape.request_blocks(len(each.text)) - len(each.held()) for each in self.running)
        return loaded + promised <= self.world.device.free_blocks()

    def _end(self) -> None:
        for request in [each for each in self.running if each.text.endswith(".")]:
            self.running.remove(request)
            self.ended.append(request)
            self.world.end(request)

    def _preempt(self) -> bool:
        if not self.running:
            return False
        self.world.preempt_and_step(last := self.running.pop())
        self.waiting.insert(0, last)
        return True


def line(groups: Sequence[GroupSpec], lengths: Sequence[tuple[int, int]], spare: int) -> Line:
    """Return a line of requests, given by the tokens on the host and all tokens of each.

    The device has `spare` more blocks than the largest request needs.
    """
    largest = max(tokens for _, tokens in lengths)
    needed = World(*groups).shape.request_blocks(largest + 1)
    texts = [text(number, prefix + 1) for number, (prefix, _) in enumerate(lengths)]
    world = holding(*groups, device=needed + spare, texts=texts)
    return Line(
        world,
        [world.add(each[0], each[0] * tokens) for each, (_, tokens) in zip(texts, lengths, strict=True)],
    )


def serve(served: Line, count: int) -> bool:
    """Step until all requests have ended or the line does not move; return whether all have ended."""
    for _ in range(200):
        if len(served.ended) == count or not served.move():
            break
    return len(served.ended) == count


# Each request has 24 tokens on the host, in 6 + 1 + 1 blocks, and its next 8 tokens need 2 blocks in each group. When
# three requests have loaded, 5 of 29 blocks are free.
STUCK = WINDOWS, [(24, 40)] * 3, 10


def test_r19_without_the_rule_loaded_requests_keep_each_other_from_running() -> None:
    with patch.object(Requests, "has_room", return_value=True):
        stuck = line(*STUCK)
        assert not serve(stuck, 3)
    assert [request.computed for request in stuck.loaded] == [24, 24, 24]
    assert stuck.world.device.free_blocks() == 5
    assert serve(line(*STUCK), 3)


LENGTHS = st.lists(
    st.tuples(st.integers(1, 10), st.integers(1, 24)).map(lambda two: (4 * two[0], 4 * two[0] + two[1])),
    min_size=1,
    max_size=6,
)


@given(st.sampled_from([(full(),), WINDOWS, MIXED]), LENGTHS, st.integers(0, 24))
@example(*STUCK)
def test_r19_property_the_line_always_moves(
    groups: Sequence[GroupSpec], lengths: list[tuple[int, int]], spare: int
) -> None:
    assert serve(line(groups, lengths, spare), len(lengths))
