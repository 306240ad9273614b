"""Makes each call inside the core raise once in a stock vLLM.

vLLM must survive, answer correctly, and get every block back (R12).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest

from kvoffload.model.causes import DegradeCause
from kvoffload.runtime.scheduler_side import SchedulerSide
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.transfer.ports import Clocks
from tests.sweep import Place, chosen, places, raising
from tests.vllm.engine_rig import MARKS, Asked, Held, Reported, Reports, Rig, offloading, prompt, same
from tests.vllm.stock import engines

pytestmark = MARKS

TIMEOUT_S = 30
STEPS = 300  # an engine that still has work after this many steps hangs


ASKED = {
    "first": Asked(prompt(1, 200), 2),
    "loads": Asked(prompt(1, 200), 4),
    "shares": Asked(prompt(1, 200), 3),
    "leaves": Asked(prompt(1, 150), 3),
    "stores": Asked(prompt(2, 200), 4),
    "later": Asked(prompt(2, 200), 3),
}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with offloading("qwen3", tmp_path_factory.getbasetemp() / "checkpoints", held=Held()) as rig:
        logging.disable()
        yield rig
        logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def expected(rig: Rig) -> dict[str, Reported]:
    salted = {name: Asked(one.prompt, one.count, salt=name) for name, one in ASKED.items()}
    return rig.run(salted)


def renew(rig: Rig) -> Held:
    """Replace both sides of the connector, as a restart would: after an error, offloading stays off. Return
    the new copier and clock.
    """
    from kvoffload_vllm.assembly import start_scheduler, start_worker

    held, scheduler, worker = Held(), rig.connector, rig.worker_connector
    layout = rig.pump._arena.layout
    config, cache = scheduler._vllm_config, scheduler._vllm_cache_config
    worker.shutdown()
    scheduler.shutdown()
    clocks = Clocks(monotonic=held.clock.monotonic)
    with (
        patch("kvoffload_vllm.assembly.WorkerSide", partial(WorkerSide, copier=held.copier)),
        patch("kvoffload_vllm.assembly.SchedulerSide", partial(SchedulerSide, clocks=clocks)),
    ):
        start_scheduler(scheduler, config, cache)
        start_worker(worker, config, cache)
    worker.register(layout)
    scheduler.bind_gpu_block_pool(rig.scheduler.kv_cache_manager.block_pool)
    worker.offload._tasks[0].result(TIMEOUT_S)  # wait until the host memory is ready
    rig.reported.clear()
    return held


def live(rig: Rig, held: Held) -> None:
    """Run requests that store, load and share blocks, and abort one. Then jump past the loads' time limit."""
    rig.ask("first", ASKED["first"])
    steps(rig, 12)
    rig.scheduler.reset_prefix_cache()
    held.copier.hold()
    for name in ("loads", "shares", "leaves", "stores"):
        rig.ask(name, ASKED[name])
    steps(rig, 6)
    rig.abort("leaves")
    steps(rig, 2)
    held.copier.release()
    steps(rig, 12)
    held.clock.jump(TIMEOUT_S + 1)  # if the core had forgotten a load, the load would time out now
    rig.scheduler.reset_prefix_cache()
    rig.ask("later", ASKED["later"])
    steps(rig, 6)


def steps(rig: Rig, count: int) -> None:
    for _ in range(count):
        rig.step()


def trial(rig: Rig, expected: dict[str, Reported], place: Place | None) -> list[str]:
    """Run all requests, raise an error at `place` in the core unless it is None, and return the problems found."""
    held = renew(rig)
    with Reports(rig) as reports:
        with raising(place) if place else nullcontext(lambda: False) as has_raised:
            live(rig, held)
        for _ in range(STEPS):
            if rig.scheduler.has_requests():
                rig.step()
    problems = [
        f"{name} says {reported}"
        for name, reported in rig.reported.items()
        if not right(reported, expected[name])
    ]
    problems += [
        f"{name} was answered twice" for name, count in Counter(reports.received).items() if count > 1
    ]
    # vLLM's threads affect how often the core is called, so a late place may not be reached.
    return problems + left_behind(rig) + said(rig, place if has_raised() else None)


def left_behind(rig: Rig) -> list[str]:
    return [
        problem
        for problem, is_there in {
            "the engine has work without end": rig.scheduler.has_requests(),
            "blocks are held": engines.held_blocks(rig.llm),
            "vLLM's cache cannot be reset": not rig.scheduler.reset_prefix_cache(),
        }.items()
        if is_there
    ]


def said(rig: Rig, place: Place | None) -> list[str]:
    audit, degraded = rig.side.audit(), rig.side.degraded
    if place is None:
        return audit
    if degraded is None and rig.counts.count("kvoffload_bus_removed_total", "gauges"):
        return audit  # vLLM asked for metrics, of which one could not be read
    is_said = degraded is DegradeCause.HANDLER_RAISED and str(place) in audit[0]
    return [] if is_said else [f"degraded is {degraded}, the audit says {audit}"]


def right(reported: Reported, expected: Reported) -> bool:
    """Return whether the answer is the expected one or, if the request has not finished, the beginning of it."""
    return (
        same(reported, expected)
        if reported.finished
        else reported.tokens == expected.tokens[: len(reported.tokens)]
    )


def test_without_an_error_all_requests_are_answered_and_blocks_are_loaded(
    rig: Rig, expected: dict[str, Reported]
) -> None:
    assert trial(rig, expected, None) == []
    assert rig.counts.count("kvoffload_load_blocks_total", "loaded") > 0
    assert all(reported.finished for name, reported in rig.reported.items() if name != "leaves")


def test_r12_wherever_the_core_raises_vllm_survives_and_gets_every_block_back(
    rig: Rig, expected: dict[str, Reported]
) -> None:
    held = renew(rig)
    found = places(lambda: live(rig, held))
    rig.finish()
    assert len(found) > 150
    wrong = {}
    tried = chosen(found, every=25)
    for place in tried:
        if problems := trial(rig, expected, place):
            wrong[str(place)] = problems
    assert not wrong, f"{len(wrong)} of {len(tried)} places: {wrong}"
