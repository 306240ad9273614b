"""Makes each call inside the core raise once. The output stays the same, and no block stays leased."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kvoffload.model.causes import DegradeCause
from tests.core.audit import audit_side
from tests.reference.rig import STEP_S, TIMEOUT_S, Options, Rig, rig, text
from tests.sweep import Place, chosen, places, raising

ENGINES: dict[str, tuple[str, Options]] = {
    "full": ("full", {"num_blocks": 80, "step_tokens": 8, "host_blocks": 24}),
    "window, two ranks": ("sliding_window", {"num_blocks": 120, "step_tokens": 16, "ranks": 2}),
}

LATE_S = 2.0  # Abandoned copies are queried rarely.


@pytest.fixture(autouse=True)
def no_logs() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def live(made: Rig) -> None:
    """Store, load, share, preempt and abort requests, reset the caches, and let copies end late."""
    made.submit(text(1, 25), 3)
    turns(made, 12)
    made.engine.pool.reset_prefix_cache()
    made.hold()
    for seed, tokens in ((1, 25), (1, 25), (2, 20), (3, 9)):
        made.submit(text(seed, tokens), 3)
    turns(made, 4)
    made.engine.preempt(made.streams[-1][2].request_id)
    made.engine.abort(made.streams[1][2].request_id)
    turns(made, 2)
    made.release()
    turns(made, 6)
    made.hold()
    made.submit(text(4, 20), 3)
    turns(made, 4)
    made.engine.reset_prefix_cache()
    made.engine.step()
    made.pass_time(TIMEOUT_S)
    turns(made, 2)
    made.release()
    made.pass_time(LATE_S)
    turns(made, 6)


def turns(made: Rig, count: int) -> None:
    for _ in range(count):
        made.engine.step()
        made.pass_time(STEP_S)


def problems_at_end(made: Rig) -> list[str]:
    """Step until the engine has no work, for less time than any timeout; return the remaining problems."""
    for _ in range(60):
        if not made.engine.has_work:
            break
        turns(made, 1)
    numbers = made.engine.statistics()
    problems = ["the engine has work without end"] if made.engine.has_work else []
    if numbers.leased_blocks:
        problems.append(f"{numbers.leased_blocks} blocks are leased")
    if numbers.free_blocks != made.engine.pool.usable_blocks:
        problems.append(f"{numbers.free_blocks} of {made.engine.pool.usable_blocks} blocks are free")
    made.assert_outputs()
    return problems + made.engine.audit()


def trial(make: Callable[[], Rig], place: Place) -> list[str]:
    """Return the problems after the core has raised at this place."""
    made = make()
    try:
        with raising(place):
            live(made)
        problems = problems_at_end(made)
        made.run_plain(text(9, 12))
        problems += problems_at_end(made)
        if made.offload.degraded is not DegradeCause.HANDLER_RAISED:
            problems.append("offloading is on")
        if not any(str(place) in line for line in made.offload.audit()):
            problems.append("the audit does not say so")
        return problems
    except Exception as error:
        return [repr(error)]
    finally:
        made.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_r12_wherever_the_core_raises_the_engine_continues_and_nothing_is_leased(name: str) -> None:
    kind, options = ENGINES[name]
    with rig(kind, **options) as made:
        found = places(partial(live, made))
        assert problems_at_end(made) == []
        assert audit_side(made.offload) == []
    assert len(found) > 150
    tried = {place: trial(partial(Rig, kind, **options), place) for place in chosen(found, every=40)}
    wrong = {str(place): problems for place, problems in tried.items() if problems}
    assert not wrong, f"{len(wrong)} of {len(tried)} places: {wrong}"
