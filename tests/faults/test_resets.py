"""After a reset for new weights or a sleep, nothing computed with the old weights is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kvoffload.engine import Engine
from tests.engine.tiny import assert_same, run, taken
from tests.reference.rig import (
    KINDS,
    TIMEOUT_S,
    TOLERANCE,
    Rig,
    config_of,
    on_host_only,
    open_loads,
    open_stores,
    rig,
    text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffload.engine import Token

PROMPTS = (text(1, 30), text(2, 40), text(3, 20))


def retrain(engine: Engine) -> None:
    """Update the weights in place, in the same way in every engine."""
    noise = torch.Generator().manual_seed(7)
    model = engine.runner._model
    for parameter in (
        model._embedding,
        *(weights for layer in model._layers for weights in layer),
        model._head,
    ):
        parameter.add_(torch.randn(parameter.shape, generator=noise) * parameter.std() / 2)


def lose_device_memory(engine: Engine) -> None:
    """Clear the KV tensors, as a sleep does."""
    for tensor in engine.runner.kv_tensors:
        tensor.fill_(50.0)


def fresh(kind: str, prompt: Sequence[int], count: int, *, retrained: bool) -> list[Token]:
    """Return the answer of an engine with an empty cache and without offloading."""
    engine = Engine(config_of(kind), clock=lambda: 0.0)
    if retrained:
        retrain(engine)
    return run(engine, prompt, count)


def reset(made: Rig) -> int:
    """Reset until device and host report that no earlier block is left; return the number of attempts."""
    for times in range(1, 1000):
        answer = made.engine.reset_prefix_cache()
        # the index is empty at once, whatever the reset returned
        assert not made.offload.core.state.pool.index
        if answer:
            assert made.offload.gauges()["kvoffload_reset_draining_jobs"][()] == 0
            return times
        made.release()
        made.step()
        assert not made.offload.core.state.pool.index  # copies that ended later have added nothing
    raise AssertionError(made.engine.statistics())


def check_answers(made: Rig, *, count: int = 4) -> int:
    """Serve every request twice, and check that the answers are those of the new weights.

    Return how many tokens came from the host.
    """
    found = 0
    for _ in range(2):
        for prompt in PROMPTS:
            stream = made.submit(prompt, count)
            made.drain()
            assert_same(taken(stream), fresh(made.kind, prompt, count, retrained=True), TOLERANCE)
            found += stream.stats.external_tokens
        made.forget_device()
    return found


@pytest.mark.parametrize("in_flight", ["nothing", "stores", "loads", "requests"])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_new_weights_are_served_from_after_the_reset_on(kind: str, in_flight: str) -> None:
    with rig(kind, num_blocks=200, step_tokens=8) as made:
        on_host_only(made, *PROMPTS)
        begin(made, in_flight)
        retrain(made.engine)
        times = reset(made)
        assert (times == 1) is (in_flight == "nothing")  # the device cannot drop leased blocks
        assert check_answers(made) > 0
        made.assert_clean()


def begin(made: Rig, what: str) -> None:
    """Start a request or a copy whose KV is computed with the old weights."""
    if what == "nothing":
        return
    made.hold()
    if what == "stores":
        made.run_requests(text(4, 40))
        assert open_stores(made)
    if what == "loads":
        made.submit(PROMPTS[0], 3)
        made.step()
        assert open_loads(made)
        made.engine.abort(made.streams[-1][2].request_id)
    if what == "requests":
        made.submit((*PROMPTS[1], 1, 2, 3), 20)
        made.submit(text(5, 20), 20)
        for _ in range(4):
            made.step()
        assert made.engine.statistics().running + made.engine.statistics().loading == 2


def test_without_the_reset_the_old_weights_would_have_been_served() -> None:
    """This control shows that the tests above would detect old weights."""
    with rig() as made:
        on_host_only(made, PROMPTS[0])
        retrain(made.engine)
        stream = made.submit(PROMPTS[0], 4)
        made.drain()
        assert stream.stats.external_tokens > 0
        right = fresh("full", PROMPTS[0], 4, retrained=True)
        with pytest.raises(AssertionError):
            assert_same(taken(stream), right, TOLERANCE)


def test_a_request_from_before_a_reset_leaves_nothing_to_be_found() -> None:
    """No other request may use this request's blocks, which mix KV of the old and the new weights."""
    with rig(step_tokens=8) as made:
        on_host_only(made, PROMPTS[0])
        made.submit((*PROMPTS[0], 1, 2, 3), 30)  # half of this prompt comes from the host
        made.submit(PROMPTS[1], 30)
        for _ in range(8):
            made.step()
        retrain(made.engine)
        assert made.engine.reset_prefix_cache() is False
        stored = made.count("store_blocks", "stored")
        made.drain()
        assert made.count("store_blocks", "stored") == stored
        assert not made.offload.core.state.pool.index
        assert made.count("store_blocks", "before_reset") > 0
        assert reset(made) == 1  # now the device can drop its blocks too
        assert check_answers(made) > 0
        made.assert_clean()


def test_a_device_that_was_not_reset_stores_nothing_old_on_the_host() -> None:
    """The engine's own cache keeps old blocks until it is reset. None of these blocks may be stored on the host."""
    with rig() as made:
        for prompt in PROMPTS:
            made.run(prompt, 4)
            assert made.offload.core.state.pool.index  # these blocks were computed after the last reset
            assert made.offload.reset() is True  # resets only the host
            again = made.submit((*prompt, 1, 2, 3, 4, 5), 8)
            made.drain()
            assert again.stats.device_hit_tokens > 0
            assert not made.offload.core.state.pool.index
        made.assert_clean()


@pytest.mark.parametrize("in_flight", ["stores", "loads"])
def test_after_a_sleep_the_host_has_nothing_old(in_flight: str) -> None:
    with rig(num_blocks=200, step_tokens=8) as made:
        on_host_only(made, *PROMPTS)
        begin(made, in_flight)
        reset(made)
        lose_device_memory(made.engine)
        retrain(made.engine)
        assert check_answers(made) > 0
        made.assert_clean()


def test_a_copy_that_never_ends_delays_the_answer_by_the_time_out_and_no_more() -> None:
    """The device cannot drop a block that such a copy uses, so the device's reset returns False until the
    copy ends.
    """
    with rig(num_blocks=200) as made:
        made.hold()
        made.run_requests(PROMPTS[0])
        [stuck, *others] = open_stores(made)
        assert made.offload.reset() is False
        made.copiers[0]._held = False
        for other in others:
            other.finish()
        made.pass_time(1.1 * TIMEOUT_S)
        made.step()
        assert made.offload.reset() is True
        assert made.engine.pool.reset_prefix_cache() is False
        stuck.finish()
        made.step(TIMEOUT_S)
        made.step()
        assert made.engine.reset_prefix_cache() is True
