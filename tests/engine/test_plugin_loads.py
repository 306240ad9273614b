from __future__ import annotations

import pytest

from kvoffload.engine import SamplingParams
from tests.engine.copying_plugin import returning
from tests.engine.tiny import KINDS, assert_idle, assert_same, drain, taken, tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_that_the_device_lost_are_loaded_instead_of_computed(kind: str, ranks: int) -> None:
    layers = {"layers": 4} if kind == "full" else {"layers": 6}
    engine, scheduler, first = returning(kind, ranks=ranks, model=layers)
    stream = engine.submit(tokens(40), SamplingParams(6))
    drain(engine)
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
    stream = engine.submit(tokens(40), SamplingParams(6))
    drain(engine)
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
        # the request keeps its blocks even if the plugin does not lease them
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
