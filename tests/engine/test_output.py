from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.engine import SamplingParams
from kvoffload.engine.request import KeyChain
from tests.engine.tiny import (
    KINDS,
    alone,
    assert_idle,
    assert_same,
    dense,
    drain,
    run,
    served,
    taken,
    tiny_config,
    tiny_engine,
    tokens,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 4, 7, 16, 45])
def test_output_equals_a_dense_forward_pass(kind: str, length: int) -> None:
    engine = tiny_engine(kind)
    assert_same(run(engine, tokens(length)), dense(tiny_config(kind), tokens(length)))
    assert_idle(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reused_prefix_saves_work_and_changes_no_token(kind: str) -> None:
    engine = tiny_engine(kind)
    first = run(engine, tokens(40))
    stream = served(engine, tokens(40))
    assert_same(taken(stream), first)
    stats = stream.stats
    # the engine computes at least one token, and so recomputes the last block
    assert (stats.prompt_tokens, stats.generated_tokens, stats.device_hit_tokens) == (40, 6, 36)
    assert stats.computed_tokens == 40 + 6 - 1 - 36
    assert stats.first_token_s is not None
    assert stats.finished_s is not None
    assert stats.arrived_s < stats.first_token_s < stats.finished_s


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_of_a_conversation_also_reuses_the_answers_blocks(kind: str) -> None:
    engine = tiny_engine(kind)
    answer = run(engine, tokens(20), 8)
    turn = [*tokens(20), *(token.token_id for token in answer), *tokens(5, seed=1)]
    stream = served(engine, turn, 4)
    assert_same(taken(stream), dense(tiny_config(kind), turn, 4))
    # A hit consists of whole blocks. The first turn computed 27 tokens, which are 6 whole blocks of 4.
    assert stream.stats.device_hit_tokens == 24


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_block_changes_the_log_probabilities(kind: str) -> None:
    engine = tiny_engine(kind)
    first = run(engine, tokens(60))
    full_group = len(engine.facts.groups) - 1
    chain = KeyChain(4, full_group + 1)
    chain.extend(tokens(60))
    wrong = engine.pool.cached_block(chain.keys(full_group)[5])
    engine.runner.kv_tensors[0][0][wrong] += 1.0
    second = run(engine, tokens(60))
    assert max(abs(a.logprob - b.logprob) for a, b in zip(first, second, strict=True)) > 1e-2


def test_an_admission_does_not_evict_the_prefix_that_it_found() -> None:
    """The prefix's blocks are the next to be evicted, and the allocation needs all free blocks."""
    engine = tiny_engine(num_blocks=1 + 12)
    run(engine, tokens(16), 1)
    # this leaves one block unused, and the first prompt's blocks are the oldest
    run(engine, tokens(28, seed=1), 1)
    turn = [*tokens(16), *tokens(10, seed=2)]
    stream = served(engine, turn, 3)
    assert stream.stats.device_hit_tokens == 16
    assert_same(taken(stream), dense(tiny_config(), turn, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_cuda_device_and_the_cpu_generate_the_same_tokens(kind: str) -> None:
    assert_same(run(tiny_engine(kind, device="cuda"), tokens(45)), alone(kind, 45, 0, 6), tolerance=1e-3)


REQUESTS = st.lists(
    st.tuples(st.integers(1, 50), st.integers(1, 10), st.integers(0, 3)), min_size=1, max_size=6
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=settings().max_examples // 2)
@given(requests=REQUESTS, step_tokens=st.integers(1, 24), num_blocks=st.integers(34, 100), data=st.data())
def test_concurrent_requests_do_not_change_each_others_tokens(
    kind: str, requests: list[tuple[int, int, int]], step_tokens: int, num_blocks: int, data: st.DataObject
) -> None:
    """Compare random requests with the answers of an engine that serves each request alone."""
    engine = tiny_engine(kind, num_blocks=num_blocks, step_tokens=step_tokens, max_model_len=64)
    streams = []
    for length, new_tokens, seed in requests:
        streams.append(engine.submit(tokens(length, seed), SamplingParams(new_tokens)))
        for _ in range(data.draw(st.integers(0, 3))):
            engine.step()
        if data.draw(st.booleans()):
            engine.preempt(data.draw(st.sampled_from(streams)).request_id)
    drain(engine)
    for stream, (length, new_tokens, seed) in zip(streams, requests, strict=True):
        assert_same(taken(stream), alone(kind, length, seed, new_tokens))
    assert_idle(engine)
