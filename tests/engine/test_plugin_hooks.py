from __future__ import annotations

import pytest

from kvoffload.engine import PluginError, PoolExhausted, SamplingParams
from kvoffload.engine.plugin import LoadResults
from tests.engine.copying_plugin import engine_with_plugin, returning
from tests.engine.tiny import assert_idle, drain, run, taken, tokens


def test_a_request_that_must_ask_again_later_keeps_its_position_in_the_queue() -> None:
    engine, scheduler, _ = returning(max_requests=1)
    scheduler.asks_later.add("patient")
    patient = engine.submit(tokens(40), SamplingParams(2), request_id="patient")
    other = engine.submit(tokens(8, seed=4), SamplingParams(2))
    last = engine.submit(tokens(8, seed=5), SamplingParams(2))
    engine.step()
    assert len(taken(other)) == 1
    asked = scheduler.counts["lookup"]
    scheduler.asks_later.clear()
    engine.step()  # this step computes the other request's last token
    # The engine makes no lookup, because `max_requests` requests are running.
    assert scheduler.counts["lookup"] == asked
    engine.step()
    waiting = [request.request_id for request in engine._scheduler.waiting]
    assert waiting == [last.request_id]  # the request that had to ask later was admitted first
    drain(engine)
    assert patient.stats.external_tokens == 36
    assert len(taken(last)) == 2


def test_allocations_without_external_tokens_are_reported_and_every_request_ends_once() -> None:
    engine, plugin = engine_with_plugin()
    run(engine, tokens(10))
    waiting = engine.submit(tokens(10, seed=1))
    engine.abort(waiting.request_id)
    drain(engine)
    assert plugin.scheduler.counts == {"lookup": 1, "allocated": 1, "finished": 1, "aborted": 1}
    engine.close()
    assert plugin.scheduler.counts["shutdown"] == 1
    assert plugin.workers[0].calls[-1] == "shutdown"
    assert plugin.workers[0].calls[:-1] == ["loads", "stores", "output"] * engine.statistics().steps


def test_a_preemption_is_reported_before_blocks_are_allocated_again() -> None:
    engine, plugin = engine_with_plugin()
    stream = engine.submit(tokens(10), SamplingParams(5))
    engine.step()
    engine.preempt(stream.request_id)
    engine.step()
    assert plugin.scheduler.steps[-1].preempted == (stream.request_id,)
    assert plugin.scheduler.counts["allocated"] == 1
    engine.step()
    assert plugin.scheduler.counts["allocated"] == 2
    drain(engine)
    assert len(taken(stream)) == 5


def test_an_ended_request_is_not_reported_as_preempted() -> None:
    engine, plugin = engine_with_plugin()
    stream = engine.submit(tokens(10))
    engine.step()
    engine.preempt(stream.request_id)
    engine.abort(stream.request_id)
    engine.step()
    assert plugin.scheduler.steps[-1].preempted == ()


def test_each_new_block_is_reported_once_and_confirmed_tokens_are_one_step_behind() -> None:
    engine, plugin = engine_with_plugin()
    run(engine, tokens(20), 6)
    facts = [step.progress[0] for step in plugin.scheduler.steps if step.progress]
    assert [progress.confirmed_tokens for progress in facts] == [0, 16, 20, 21, 22, 23, 24]
    reported = [[position for position, _ in group] for progress in facts for group in progress.new_blocks]
    # `allocated` already reported the first chunk's blocks. Three later steps add one block each.
    assert reported == [[], [4], [5], [], [], [], [6]]


def test_a_running_request_waits_for_leased_blocks_and_keeps_its_own() -> None:
    engine, plugin = engine_with_plugin(num_blocks=9)
    stream = engine.submit(tokens(29), SamplingParams(4))
    engine.step()
    plugin.scheduler.withhold(2, steps=3)
    assert [engine.step() for _ in range(3)] == [False, False, False]
    drain(engine)
    assert len(taken(stream)) == 4
    assert stream.stats.preemptions == 0
    assert_idle(engine)


def test_a_request_fails_if_a_plugin_never_releases_its_blocks() -> None:
    engine, _ = engine_with_plugin(num_blocks=9)
    engine.pool.touch([3, 5])
    stream = engine.submit(tokens(29), SamplingParams(4))
    for _ in range(10):
        engine.step()
    with pytest.raises(PoolExhausted, match="2 of the pool's 8 KV blocks are leased"):
        taken(stream)
    assert not engine.has_work


def test_reset_empties_device_and_plugin_and_returns_whether_it_succeeded() -> None:
    engine, scheduler, _ = returning()
    assert engine.reset_prefix_cache()
    stream = engine.submit(tokens(40))
    engine.step()
    assert not engine.reset_prefix_cache()  # the request still uses blocks
    drain(engine)
    assert stream.stats.external_tokens == 0
    scheduler.is_resettable = False
    assert not engine.reset_prefix_cache()


def test_reporting_a_load_that_is_not_open_is_the_plugins_error() -> None:
    engine, plugin = engine_with_plugin()
    plugin.scheduler.update = lambda outputs: LoadResults(loaded=("nobody",))  # type: ignore[method-assign]
    engine.submit(tokens(4))
    with pytest.raises(PluginError, match="'nobody' that is not open"):
        engine.step()
