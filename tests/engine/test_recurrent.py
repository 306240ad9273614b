from __future__ import annotations

from kvoffload.engine import Engine, SamplingParams
from tests.engine.copying_plugin import engine_with_plugin
from tests.engine.tiny import BLOCK, alone, assert_same, dense, drain, run, served, taken, tiny_engine, tokens

GROUPS = 2  # the recurrent groups of the tiny model, which come before its attention group


def row(engine: Engine, group: int = 0) -> list[int]:
    return engine._scheduler.running[0].tables[group]


def test_a_partial_blocks_state_stays_in_its_block_and_a_whole_blocks_state_is_kept() -> None:
    engine = tiny_engine("recurrent", step_tokens=6)
    engine.submit(tokens(21), SamplingParams(8))
    engine.step()
    first = row(engine)
    assert [bool(block) for block in first] == [False, True]
    state = first[1]
    engine.step()
    assert row(engine) == [0, 0, state]  # after 12 tokens, the state is still in the same device block
    engine.step()
    found = row(engine)
    assert found[:2] == [0, 0]
    # The step reads the state from one block and writes it to another.
    assert found[2] == state != found[4] != 0
    engine.step()
    assert row(engine)[2] == 0  # the request no longer needs this block, but later requests may still find it
    assert engine.pool.key_of(state) is not None
    drain(engine)
    assert engine.pool.free_blocks == engine.pool.usable_blocks


def test_a_step_ends_at_a_prompts_last_whole_block() -> None:
    engine, plugin = engine_with_plugin("recurrent", step_tokens=64)
    assert_same(run(engine, tokens(30), 1), dense(engine.config, tokens(30), 1))
    steps = [step for step in plugin.scheduler.steps if step.progress]
    assert [step.progress[0].tokens for step in steps] == [28, 2]
    assert [{state.position for state in step.states} for step in steps] == [{6}, set()]
    assert len(steps[0].states) == GROUPS


def test_a_state_is_not_found_in_the_step_that_writes_it() -> None:
    """In this step the block already has its key, but its bytes are not written yet."""
    engine = tiny_engine("recurrent", step_tokens=64)
    streams = [engine.submit(tokens(24), SamplingParams(4)) for _ in range(2)]
    drain(engine)
    for stream in streams:
        assert stream.stats.device_hit_tokens == 0
        assert_same(taken(stream), alone("recurrent", 24, 0, 4))


def test_a_shared_prefix_is_found_from_the_third_request_on() -> None:
    engine, found = tiny_engine("recurrent", step_tokens=64), []
    for number in range(4):
        prompt = [*tokens(6 * BLOCK), *tokens(2 * BLOCK + 1, 10 + number)]
        stream = served(engine, prompt, 1)
        found.append(stream.stats.device_hit_tokens)
        assert_same(taken(stream), dense(engine.config, prompt, 1))
    assert found == [0, 0, 24, 24]


def test_a_plugin_may_ask_for_a_state() -> None:
    engine, plugin = engine_with_plugin("recurrent", step_tokens=64)
    plugin.scheduler.prefix_boundary = lambda request: 12  # type: ignore[method-assign]
    run(engine, tokens(30), 1)
    positions = [{state.position for state in step.states} for step in plugin.scheduler.steps if step.states]
    assert positions == [{2}, {6}]
