from __future__ import annotations

from unittest import mock

import pytest

from kvoffload.engine import PluginError, PoolExhausted, SamplingParams
from kvoffload.engine.plugin import LoadResults
from kvoffload.engine.request import Request
from tests.engine.copying_plugin import engine_with_plugin, returning
from tests.engine.tiny import KINDS, assert_idle, assert_same, drain, run, served, taken, tokens

# -- hooks ------------------------------------------------------------------------------------------------------


def test_a_request_that_must_ask_again_later_keeps_its_position_in_the_queue() -> None:
    engine, scheduler, _ = returning(max_requests=1)
    lookup = scheduler.lookup

    def ask(request: Request, device_tokens: int) -> int | None:
        found = lookup(request, device_tokens)
        return None if request.request_id == "patient" else found

    patient = engine.submit(tokens(40), SamplingParams(2), request_id="patient")
    other = engine.submit(tokens(8, seed=4), SamplingParams(2))
    last = engine.submit(tokens(8, seed=5), SamplingParams(2))
    with mock.patch.object(scheduler, "lookup", ask):
        engine.step()
    assert len(taken(other)) == 1
    asked = scheduler.counts["lookup"]
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
    withheld = engine.pool.next_evictable(2)
    engine.pool.touch(withheld)
    with mock.patch.object(plugin.scheduler, "has_pending_work", return_value=True):
        assert [engine.step() for _ in range(3)] == [False, False, False]
    engine.pool.free(withheld)
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
    run(engine, tokens(40))
    assert engine.reset_prefix_cache()
    stream = engine.submit(tokens(40))
    engine.step()
    assert not engine.reset_prefix_cache()  # the request still uses blocks
    drain(engine)
    assert (stream.stats.device_hit_tokens, stream.stats.external_tokens) == (0, 0)
    with mock.patch.object(scheduler, "reset", return_value=False):
        assert not engine.reset_prefix_cache()


def test_reporting_a_load_that_is_not_open_is_the_plugins_error() -> None:
    engine, plugin = engine_with_plugin()
    plugin.scheduler.update = lambda outputs: LoadResults(loaded=("unknown",))  # type: ignore[method-assign]
    engine.submit(tokens(4))
    with pytest.raises(PluginError, match="'unknown' that is not open"):
        engine.step()


# -- loads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_that_the_device_lost_are_loaded_instead_of_computed(kind: str, ranks: int) -> None:
    layers = {"layers": 4} if kind == "full" else {"layers": 6}
    engine, scheduler, first = returning(kind, ranks=ranks, model=layers)
    stream = served(engine, tokens(40))
    assert_same(taken(stream), first)
    assert (stream.stats.device_hit_tokens, stream.stats.external_tokens) == (0, 36)
    assert stream.stats.computed_tokens == 40 + 6 - 1 - 36
    assert all(len(outputs) == ranks for outputs in scheduler.outputs)
    assert scheduler.is_drained
    assert_idle(engine)


def test_blocks_under_a_load_cannot_be_found_and_other_requests_continue() -> None:
    engine, scheduler, first = returning()
    scheduler.hold_loads = True
    stream = engine.submit(tokens(40), SamplingParams(6), request_id="loading")
    engine.step()
    assert engine.statistics().loading == 1
    assert all(engine.pool.cached_block(key) is None for key, _ in scheduler.loads["loading"])
    other = engine.submit(tokens(10, seed=3), SamplingParams(4))
    for _ in range(10):
        engine.step()
    assert len(taken(other)) == 4
    assert taken(stream) == []
    # The plugin is also called for steps that compute no tokens.
    assert scheduler.steps[-1].progress == ()
    keys = [key for key, _ in scheduler.loads["loading"]]
    scheduler.hold_loads = False
    engine.step()
    # loaded blocks are indexed before the request computes tokens
    assert all(engine.pool.cached_block(key) is not None for key in keys)
    drain(engine)
    assert_same(taken(stream), first)


def test_requests_with_failed_loads_return_to_the_head_of_the_queue_in_order() -> None:
    engine, scheduler, _ = returning()
    scheduler.hold_loads = True
    scheduler.fails |= {"a", "b"}
    for name in ("a", "b"):
        engine.submit(tokens(40), request_id=name)
    engine.step()
    scheduler.hold_loads = False
    engine.step()
    assert [request.request_id for request in engine._scheduler.waiting] == ["a", "b"]
    drain(engine)


@pytest.mark.parametrize("offer", [39, 40])
def test_a_plugins_offer_is_rounded_down_to_whole_blocks_and_one_token_is_computed(offer: int) -> None:
    engine, scheduler, first = returning()
    scheduler.lookup = lambda request, device_tokens: offer  # type: ignore[method-assign]
    stream = served(engine, tokens(40))
    assert stream.stats.external_tokens == 36
    assert_same(taken(stream), first)


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_aborted_while_loading_keeps_its_blocks_and_its_id_until_the_load_ends(fails: bool) -> None:
    engine, scheduler, first = returning()
    scheduler.hold_loads = True
    scheduler.fails |= {"gone"} if fails else set()
    engine.submit(tokens(40), request_id="gone")
    engine.step()
    engine.abort("gone")
    engine.abort("gone")
    assert scheduler.counts["aborted"] == 1
    for _ in range(3):
        engine.step()
        assert engine.audit() == []
        assert engine._scheduler.loading["gone"].held_blocks == 9
    with pytest.raises(ValueError, match="'gone' is open"):
        engine.submit(tokens(40), request_id="gone")
    scheduler.hold_loads = False
    drain(engine)
    assert scheduler.is_drained
    assert_idle(engine)
    stream = engine.submit(tokens(40), SamplingParams(6), request_id="gone")
    drain(engine)
    assert_same(taken(stream), first)
