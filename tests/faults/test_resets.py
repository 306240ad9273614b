from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvoffload.engine import Engine, Token
from tests.engine.tiny import assert_same, run, taken
from tests.reference.rig import (
    KINDS,
    TOLERANCE,
    Rig,
    config_of,
    on_host_only,
    open_loads,
    open_stores,
    rig,
    text,
)

PROMPTS = (text(1, 30), text(2, 40), text(3, 20))


def retrain(engine: Engine) -> None:
    """Change the model's weights in place. The change is the same for every engine."""
    noise = torch.Generator().manual_seed(7)
    model = engine.runner._model
    for parameter in (
        model._embedding,
        *(weights for layer in model._layers for weights in layer),
        model._head,
    ):
        parameter.add_(torch.randn(parameter.shape, generator=noise) * parameter.std() / 2)


def fresh(kind: str, prompt: Sequence[int], count: int) -> list[Token]:
    """Return the answer of a new engine with the new weights and without offloading."""
    engine = Engine(config_of(kind), clock=lambda: 0.0)
    retrain(engine)
    return run(engine, prompt, count)


def reset(made: Rig) -> int:
    """Call reset until it succeeds; return the number of calls."""
    for times in range(1, 1000):
        answer = made.engine.reset_prefix_cache()
        # a reset empties the index at once, even if it returns False
        assert not made.offload.core.state.pool.index
        if answer:
            assert made.offload.gauges()["kvoffload_reset_draining_jobs"][()] == 0
            return times
        made.release()
        made.step()
        # A copy that ends after a reset adds nothing to the index.
        assert not made.offload.core.state.pool.index
    raise AssertionError(made.engine.statistics())


def check_answers(made: Rig, *, count: int = 4) -> int:
    """Serve every request twice; check each answer against the new weights.

    Return how many tokens came from the host.
    """
    found = 0
    for _ in range(2):
        for prompt in PROMPTS:
            stream = made.submit(prompt, count)
            made.drain()
            assert_same(taken(stream), fresh(made.kind, prompt, count), TOLERANCE)
            found += stream.stats.external_tokens
        made.forget_device()
    return found


@pytest.mark.parametrize("in_flight", ["nothing", "stores", "loads", "requests"])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_after_a_reset_every_answer_is_that_of_the_new_weights(kind: str, in_flight: str) -> None:
    with rig(kind, num_blocks=200, step_tokens=8) as made:
        on_host_only(made, *PROMPTS)
        begin(made, in_flight)
        retrain(made.engine)
        times = reset(made)
        # A reset fails as long as blocks are leased or in use.
        assert (times == 1) is (in_flight == "nothing")
        assert check_answers(made) > 0
        made.assert_clean()


def begin(made: Rig, what: str) -> None:
    """Start a request or a copy that uses KV of the old weights."""
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


def test_a_request_from_before_a_reset_stores_no_block() -> None:
    """The request's blocks mix KV of the old and the new weights, so no other request may use them."""
    with rig(step_tokens=8) as made:
        on_host_only(made, PROMPTS[0])
        made.submit((*PROMPTS[0], 1, 2, 3), 30)  # half of this prompt is loaded from the host
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
        assert reset(made) == 1
        assert check_answers(made) > 0
        made.assert_clean()
