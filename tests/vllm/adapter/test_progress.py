"""When the adapter reports requests' progress to the core. The steps have the form of vLLM's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvoffload.model.engine import EngineShape
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import GroupId
from kvoffload_vllm import progress
from kvoffload_vllm.progress import KeyMaker, ProgressReports, Tracked
from tests.vllm.adapter.stand_ins import on_vllm

BLOCK = 8
EVERY = 4


class Engine:
    def __init__(self, every: int = EVERY, free: int = 1000, stages: int = 1) -> None:
        shape = EngineShape((GroupSpec(GroupId(0), AttentionKind.FULL, BLOCK),), 1, 1000, step_tokens=64)
        self.free, self.last = free, 0
        self.requests: dict[str, Tracked] = {}
        self.tables: dict[str, int] = {}
        self.grown: dict[str, list[int]] = {}
        """The blocks that the last step allocated."""
        device: Any = SimpleNamespace(free_blocks=lambda: self.free)
        keys = KeyMaker([1], [0])
        self.reports = ProgressReports(shape, (0,), keys, device, self.requests, every, None, stages)

    def add(self, name: str, prompt: int) -> Tracked:
        """Add a request, with device blocks for its whole prompt."""
        counts = {"num_computed_tokens": 0, "num_output_placeholders": 0}
        request: Any = SimpleNamespace(request_id=name, block_hashes=[], **counts)
        tracked = self.requests[name] = Tracked(request)
        self.tables[name] = -(-prompt // BLOCK)
        self.last += self.tables[name]
        self.reports.allocated(tracked, 0)
        return tracked

    def step(
        self, tokens: Mapping[str, int], resumed: Set[str] = frozenset(), states: Sequence[str] = ()
    ) -> tuple[dict[Any, Any], list[Any]]:
        """Return each reported request's confirmed tokens and new blocks, and the step's reallocated blocks."""
        new_blocks: list[Any] = []
        self.grown = {}
        for name, count in tokens.items():
            wanted = -(-(self.requests[name].request.num_computed_tokens + count) // BLOCK)
            more = range(self.last + 1, self.last + 1 + wanted - self.tables[name])
            self.last += len(more)
            self.tables[name] += len(more)
            self.grown[name] = list(more)
            # For a resumed request, vLLM passes the whole table.
            new_blocks.append(([0],) if name in resumed else (list(more),) if more else None)
        cached = SimpleNamespace(req_ids=list(tokens), new_block_ids=new_blocks, resumed_req_ids=resumed)
        output: Any = SimpleNamespace(
            num_scheduled_tokens=dict(tokens),
            scheduled_cached_reqs=cached,
            total_num_scheduled_tokens=sum(tokens.values()),
        )
        complete: Any = [SimpleNamespace(request=name) for name in states]
        reports, tables = self.reports.step(output, complete)
        assert len({each.request for each in reports}) == len(reports)
        for name, count in tokens.items():
            request = self.requests[name].request
            request.num_computed_tokens += count
            request.block_hashes = [b"hash"] * (request.num_computed_tokens // BLOCK)
        found = {
            each.request: (each.confirmed_tokens, [*each.new_blocks[0]] if each.new_blocks else [])
            for each in reports
        }
        return found, [block for table in tables for row in table for block in row]


def decoding() -> Engine:
    """Return an engine whose request "a" has decoded two tokens, and received block 3 for them."""
    engine = Engine()
    engine.add("a", 15)
    for tokens in (15, 1, 1):
        engine.step({"a": tokens})
    return engine


def test_progress_of_decoding_requests_is_reported_together() -> None:
    engine = Engine()
    engine.add("a", 14)
    engine.add("b", 15)
    engine.step({"a": 14, "b": 15})
    assert engine.step({"a": 1, "b": 1}) == ({"a": (14, []), "b": (15, [])}, [])
    assert engine.step({"a": 1, "b": 1}) == ({}, [5])
    # the adapter reports decoding requests in every fourth step
    assert engine.step({"a": 1, "b": 1}) == ({"a": (16, [6]), "b": (17, [5])}, [])
    for _ in range(3):
        assert engine.step({"a": 1, "b": 1}) == ({}, [])
    assert engine.step({"a": 1, "b": 1}) == ({}, [])  # no request has completed a block
    found = [engine.step({"a": 1, "b": 1}) for _ in range(4)]
    assert found == [({}, []), ({}, []), ({}, [7]), ({"b": (25, [7]), "a": (24, [8])}, [])]


@pytest.mark.parametrize(
    ("running", "parts"), [(64, [64, 0, 0, 0]), (150, [64, 64, 22, 0]), (400, [100, 100, 100, 100])]
)
def test_progress_of_a_large_batch_is_reported_in_parts(running: int, parts: list[int]) -> None:
    """No hook handles a whole large batch, but each request has its turn before the next turns begin."""
    engine = Engine()
    names = [f"r{number}" for number in range(running)]
    for name in names:
        engine.add(name, BLOCK - 1)
    engine.step(dict.fromkeys(names, BLOCK - 1))
    engine.step(dict.fromkeys(names, 1))  # reports the prompts
    found, new_blocks = engine.step(dict.fromkeys(names, 1))
    assert (found, len(new_blocks)) == ({}, running)
    reports = [engine.step(dict.fromkeys(names, 1))[0] for _ in range(EVERY)]
    assert [len(report) for report in reports] == parts
    reported = [block for report in reports for _, blocks in report.values() for block in blocks]
    assert reported == new_blocks


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_each_request_of_a_pipeline_has_its_turn_before_the_next_turns_begin(stages: int) -> None:
    """A turn of 8 steps schedules some of 3 microbatches only twice, so that each part must be larger."""
    every, late = 8, set[int]()
    engine = Engine(every, stages=stages)
    names = [f"r{number}" for number in range(39)]
    for name in names:
        engine.add(name, BLOCK)
    engine.step(dict.fromkeys(names, BLOCK))
    with patch.object(progress, "_LEAST_PART", 2):
        for step in range(10 * every):
            found, _ = engine.step(dict.fromkeys(names[step % stages :: stages], 1))
            late |= {confirmed % BLOCK for confirmed, _ in found.values()}
    assert max(late) * stages <= every  # each step of a microbatch computes a token


class Reports(RuleBasedStateMachine):
    """Each new block is reported once, in order and in time, or by the end of its request.

    With pipeline parallelism, vLLM schedules a request only in every second step, or third.
    """

    def __init__(self) -> None:
        super().__init__()
        self.small_parts = patch.object(progress, "_LEAST_PART", 2)
        self.small_parts.start()

    def teardown(self) -> None:
        self.small_parts.stop()

    @initialize(
        running=st.sampled_from([1, 2, 10, 40]),
        every=st.sampled_from([1, 4, 16]),
        stages=st.integers(1, 3),
        unconfirmed=st.integers(0, 1),
    )
    def start(self, running: int, every: int, stages: int, unconfirmed: int) -> None:
        self.engine = Engine(every, stages=stages)
        self.stages, self.unconfirmed, self.now = stages, unconfirmed, 0
        self.slowest = max(min(every, BLOCK), stages)
        self.names = [f"r{number}" for number in range(running)]
        self.resumed: set[str] = set()
        self.unreported: dict[str, list[int]] = {}
        self.reported: dict[str, int] = {}
        self.done_at: dict[str, int] = {}
        """The last step in which each request had nothing left to report, or did not take part in its turn."""
        for name in self.names:
            self._begin(name, BLOCK)

    def _begin(self, name: str, prompt: int) -> None:
        self.engine.add(name, prompt)
        self.unreported[name], self.reported[name], self.done_at[name] = [], 0, self.now

    @rule(number=st.integers(0, 39), is_preempted=st.booleans())
    def preempt_or_end(self, number: int, is_preempted: bool) -> None:
        """The request runs again, or another one with its name begins."""
        name = self.names[number % len(self.names)]
        assert [*chain(*self.engine.reports.forget(name))] == self.unreported[name]
        had = self.engine.requests[name].request.num_computed_tokens
        self.resumed |= {name} if is_preempted else set()
        self._begin(name, had + BLOCK if is_preempted else BLOCK)

    @rule(every=st.sampled_from([1, 2, 8]))
    def set_every(self, every: int) -> None:
        self.engine.reports.set_every(every)
        self.slowest = max(self.slowest, every)

    @rule(
        count=st.integers(1, 20),
        number=st.integers(0, 39),
        tokens=st.sampled_from([0, 1, 3]),
        is_state=st.booleans(),
        free=st.sampled_from([0, 1000, 1000]),
    )
    def steps(self, count: int, number: int, tokens: int, is_state: bool, free: int) -> None:
        """One request computes several tokens, or is not scheduled."""
        some, self.engine.free = self.names[number % len(self.names)], free
        for _ in range(count):
            scheduled = dict.fromkeys(self.names[self.now % self.stages :: self.stages], 1)
            if some in scheduled:
                scheduled[some] = tokens
            if not scheduled.get(some, 1):
                del scheduled[some]
                self.done_at[some] = self.now
            self._step(scheduled, [some] if is_state and some in scheduled else [])
            assert free or not any(self.unreported[name] for name in scheduled)

    def _step(self, scheduled: dict[str, int], states: list[str]) -> None:
        engine, self.now = self.engine, self.now + 1
        confirmed = dict[str, int]()
        for name in self.names:
            request = engine.requests[name].request
            request.num_output_placeholders = min(self.unconfirmed, request.num_computed_tokens)
            confirmed[name] = request.num_computed_tokens - request.num_output_placeholders
        found, reallocated = engine.step(scheduled, self.resumed & scheduled.keys(), states)
        self.resumed -= scheduled.keys()
        for name, blocks in engine.grown.items():
            self.unreported[name] += blocks
            assert {*blocks} <= {*found.get(name, (0, []))[1], *reallocated}
        for name, report in found.items():
            assert report == (confirmed[name], self.unreported[name])
            self.unreported[name], self.reported[name] = [], confirmed[name]
        for name in self.names:
            if not self.unreported[name] and confirmed[name] // BLOCK == self.reported[name] // BLOCK:
                self.done_at[name] = self.now
            assert self.now - self.done_at[name] <= 2 * self.slowest


TestReports = Reports.TestCase


def changed_to_every_step() -> Engine:
    engine = Engine()
    engine.reports.set_every(1)
    return engine


@pytest.mark.parametrize(
    "engine",
    [Engine(free=9 * 2 - 1), Engine(every=1), changed_to_every_step()],
    ids=["nearly full", "every step", "changed"],
)
def test_progress_is_reported_at_once_if_the_device_is_nearly_full_or_in_every_step(engine: Engine) -> None:
    engine.add("a", 15)
    engine.step({"a": 15})
    engine.step({"a": 1})
    assert engine.step({"a": 1}) == ({"a": (16, [3])}, [])


def test_each_chunk_of_a_prompt_is_reported_in_the_next_step() -> None:
    engine = Engine()
    engine.add("a", 64)
    engine.tables["a"], engine.last = 4, 4  # the first chunk has these blocks
    assert engine.step({"a": 32}) == ({}, [])
    assert engine.step({"a": 32}) == ({"a": (32, [5, 6, 7, 8])}, [])
    assert engine.step({"a": 1})[0] == {"a": (64, [9])}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("tokens", [2, 3, 5, 7])
def test_no_report_is_late_by_more_than_a_block(tokens: int, stages: int) -> None:
    """With several tokens per step, a window must not move past a block before that block is reported."""
    engine = Engine(every=16, stages=stages)
    engine.add("a", 8)
    engine.add("of the other microbatch", 8)
    engine.step({"a": 8})
    reported, late = 0, list[Any]()
    for _ in range(100):
        if stages == 2:
            engine.step({"of the other microbatch": 1})
        found, reallocated = engine.step({"a": tokens})
        late += reallocated
        if found:
            reported = engine.requests["a"].request.num_computed_tokens
            late = []
        if late:
            # With two stages, the request takes part in half of the steps.
            assert engine.requests["a"].request.num_computed_tokens - reported <= 2 * BLOCK // stages
    assert reported


def test_unreported_blocks_are_returned_when_a_request_ends_or_is_preempted() -> None:
    for is_ended in (False, True):
        engine = decoding()
        assert engine.reports.forget("a") == ((3,),)
        assert engine.reports.forget("a") == ()
        if is_ended:
            del engine.requests["a"]
        assert all(engine.step({}) == ({}, []) for _ in range(8))


def test_a_preemption_reported_after_the_next_allocation_keeps_the_new_table() -> None:
    """vLLM's reset preempts a request outside a step. The next step reports this, and may allocate again."""
    engine = decoding()
    engine.requests["a"].request.num_computed_tokens = 0
    engine.add("a", 15)
    engine.reports.forget("a")
    engine.step({"a": 15})
    assert engine.step({"a": 1}) == ({"a": (15, [])}, [])


def test_the_keys_of_a_sessions_next_input_are_reported_at_once_and_the_blocks_of_its_new_table_are_not() -> (
    None
):
    engine = decoding()
    engine.reports.set_every(8)
    engine.reports.allocated(engine.requests["a"], 17)
    reports = [engine.step({"a": 1})[0] for _ in range(2 * EVERY)]
    assert reports == [{"a": (17, [])}, *[{}] * (2 * EVERY - 1)]


def test_r11_nothing_of_a_request_that_has_ended_is_kept() -> None:
    engine = Engine()
    for name in "ab":
        engine.add(name, 4 * BLOCK)
    with patch.object(progress, "_LEAST_PART", 1):
        for _ in range(EVERY):
            engine.step({"a": 1, "b": 2})
    waiting = engine.reports._due, engine.reports._soon
    assert [[*names] for names in waiting] == [["b"], ["b"]]
    engine.reports.forget("b")
    assert waiting == ({}, {})


def test_a_request_that_is_not_scheduled_is_reported_later() -> None:
    """A request that is missing from a step may be preempted. vLLM reports this only when it allocates again."""
    engine = decoding()
    # The adapter reports in every fourth step, but only scheduled requests.
    assert engine.step({}) == ({}, [])
    engine.free = 0
    assert engine.step({}) == ({}, [])
    engine.free = 1000
    for _ in range(2):
        engine.step({"a": 1})
    assert engine.step({"a": 1}) == ({"a": (19, [3])}, [])


# -- one request ----------------------------------------------------------------------------------------------------

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("fields", "parent"),
    [
        ({}, None),  # some versions of vLLM have no traces
        ({"trace_headers": None}, None),
        ({"trace_headers": {"tracestate": "a=b"}}, None),
        ({"trace_headers": {"traceparent": PARENT, "tracestate": "a=b"}}, PARENT),
    ],
)
def test_the_callers_trace_is_found(fields: dict[str, Any], parent: str | None) -> None:
    request: Any = SimpleNamespace(request_id="a", **fields)
    assert Tracked(request).trace_parent == parent


@pytest.mark.parametrize(
    ("hashes", "is_rewritten"),
    [
        ([b"a", b"b", b"c"], False),
        ([b"a", b"b", b"c", b"d"], False),
        ([b"a", b"b"], True),
        ([], True),
        ([b"a", b"b", b"x"], True),
        ([b"a", b"b", b"x", b"y"], True),
    ],
)
def test_hashes_that_were_rewritten_are_noticed(hashes: list[bytes], is_rewritten: bool) -> None:
    request: Any = SimpleNamespace(request_id="a", block_hashes=[])
    tracked, maker = Tracked(request), KeyMaker([1], [0])
    tracked.new_keys(maker)
    assert not tracked.is_rewritten
    request.block_hashes = [b"a", b"b", b"c"]
    assert not tracked.is_rewritten
    tracked.new_keys(maker)
    request.block_hashes = hashes
    assert tracked.is_rewritten == is_rewritten


@on_vllm
def test_the_callers_trace_is_where_vllm_keeps_it() -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    headers = {"traceparent": PARENT}
    request = Request("a", [1, 2, 3], SamplingParams(max_tokens=1), None, trace_headers=headers)
    assert Tracked(request).trace_parent == PARENT
