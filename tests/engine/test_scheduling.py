from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.engine import RequestRefused, SamplingParams, Token
from tests.engine.tiny import KINDS, alone, assert_idle, assert_same, drain, run, taken, tiny_engine, tokens

if TYPE_CHECKING:
    from kvoffload.engine.scheduler import Batch


def test_a_step_never_computes_more_than_its_budget_and_running_requests_come_first() -> None:
    engine = tiny_engine(step_tokens=8)
    first = engine.submit(tokens(6), SamplingParams(5))
    engine.step()
    second = engine.submit(tokens(20, 1), SamplingParams(5))
    computed = []
    while engine.has_work:
        before = first.stats.computed_tokens, second.stats.computed_tokens
        engine.step()
        computed.append((first.stats.computed_tokens - before[0], second.stats.computed_tokens - before[1]))
    # A step computes at most eight tokens: one for the first request, and up to seven of the second prompt.
    assert computed == [(1, 7), (1, 7), (1, 6), (1, 1), (0, 1), (0, 1), (0, 1)]


def test_at_most_max_requests_run_together() -> None:
    engine = tiny_engine(max_requests=2)
    for seed in range(5):
        engine.submit(tokens(5, seed), SamplingParams(3))
    engine.step()
    assert engine.statistics()[1:4] == (3, 0, 2)
    drain(engine)
    assert_idle(engine)


def test_the_latest_request_is_preempted_and_computes_again() -> None:
    engine = tiny_engine(num_blocks=1 + 16)  # enough for three prompts, but not with their answers
    streams = [engine.submit(tokens(12, seed), SamplingParams(20)) for seed in range(3)]
    drain(engine)
    assert streams[0].stats.preemptions == 0
    assert sum(stream.stats.preemptions for stream in streams) > 0
    for seed, stream in enumerate(streams):
        assert_same(taken(stream), alone("full", 12, seed, 20))
    assert_idle(engine)


def test_an_operator_may_preempt_only_running_requests() -> None:
    engine = tiny_engine()
    stream = engine.submit(tokens(10), SamplingParams(5))
    assert not engine.preempt(stream.request_id)
    engine.step()
    assert engine.preempt(stream.request_id)
    assert engine.pool.free_blocks == engine.pool.usable_blocks
    drain(engine)
    assert stream.stats.preemptions == 1
    assert stream.stats.resumed_tokens == 8  # two blocks are still on the device after the preemption
    assert_same(taken(stream), alone("full", 10, 0, 5))
    assert not engine.preempt(stream.request_id)


def test_an_admission_leaves_the_blocks_that_the_oldest_request_can_still_need() -> None:
    """If the new request were admitted, it would later be preempted, and its prompt would be computed twice."""
    engine = tiny_engine(num_blocks=1 + 12, step_tokens=64)
    oldest = engine.submit(tokens(16), SamplingParams(17))  # needs 8 blocks in the end
    other = engine.submit(tokens(20, 1), SamplingParams(1))
    engine.step()
    assert engine.statistics()[1:4] == (1, 0, 1)
    drain(engine)
    assert (oldest.stats.preemptions, other.stats.preemptions) == (0, 0)


@pytest.mark.parametrize(("steps", "is_preempted"), [(0, False), (1, False), (1, True), (3, False)])
def test_abort_releases_everything(steps: int, is_preempted: bool) -> None:
    engine = tiny_engine(step_tokens=4)
    stream = engine.submit(tokens(10), SamplingParams(5))
    for _ in range(steps):
        engine.step()
    if is_preempted:
        assert engine.preempt(stream.request_id)
    engine.abort(stream.request_id)
    assert not engine.has_work
    assert stream.stats.finished_s is not None
    assert_idle(engine)


def test_a_prefix_is_evicted_from_its_tail() -> None:
    engine = tiny_engine(num_blocks=1 + 12)
    run(engine, tokens(40), 1)  # uses 10 of the 12 blocks
    run(engine, tokens(20, seed=1), 1)  # uses the 2 other blocks, and 3 of the first prompt's blocks
    stream = engine.submit(tokens(40), SamplingParams(1))
    engine.step()
    assert stream.stats.device_hit_tokens == 28  # the first prompt's first 7 blocks are still on the device


def test_ids_are_unique_among_open_requests() -> None:
    engine = tiny_engine()
    engine.submit(tokens(4), request_id="a")
    with pytest.raises(RequestRefused, match="'a' is open"):
        engine.submit(tokens(4), request_id="a")
    drain(engine)
    engine.submit(tokens(4), request_id="a")


def test_the_audit_finds_a_block_that_was_not_released() -> None:
    engine = tiny_engine()
    engine.submit(tokens(10))
    engine.step()
    request = engine._scheduler.running[0]
    request.tables[0][1] = 0
    # Two counts miss the block: the pool's and the request's.
    assert len(engine.audit()) == 2


MIX = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(0, 99)), min_size=1, max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@given(mix=MIX, spare=st.integers(0, 10), step_tokens=st.integers(1, 20), aborts=st.sets(st.integers(0, 11)))
def test_no_mix_of_requests_deadlocks(
    kind: str, mix: list[tuple[int, int, int]], spare: int, step_tokens: int, aborts: set[int]
) -> None:
    """Use a pool that is just large enough for the largest request."""
    sizes = [length + new - 1 for length, new, _ in mix]
    capacity = tiny_engine(kind, step_tokens=step_tokens)._capacity
    need = max(map(capacity.request_blocks, sizes))
    engine = tiny_engine(kind, num_blocks=1 + need + spare, step_tokens=step_tokens)
    engine.runner = _NoForward()  # type: ignore[assignment]
    streams = [engine.submit(tokens(length, seed), SamplingParams(new)) for length, new, seed in mix]
    engine.step()
    for index in aborts & set(range(len(streams))):
        engine.abort(streams[index].request_id)
    drain(engine, limit=5000)
    for index, (stream, (_, new, _)) in enumerate(zip(streams, mix, strict=True)):
        assert index in aborts or stream.stats.generated_tokens == new
    assert_idle(engine)


class _NoForward:
    """A model runner that computes nothing. The next token is always 1."""

    def launch(self, batch: Batch) -> Batch:
        return batch

    def sample(self, batch: Batch, logits: object) -> list[Token]:
        return [Token(1, 0.0) for chunk in batch.chunks if chunk.samples]
