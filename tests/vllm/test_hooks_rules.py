"""Tests the hooks on a stock vLLM, with both roles in this process and with copies that the test ends.

Tests of the core cover all cases of each rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvoffload.core.machine import SlotState
from tests.vllm.engine_rig import (
    MARKS,
    SLOT_BYTES,
    Asked,
    Hands,
    Held,
    Reports,
    check_same,
    offloading,
    prompt,
    same,
    start_loading,
    truth,
    truths,
)
from tests.vllm.stock import checkpoints, engines

pytestmark = MARKS


@pytest.fixture(scope="module", params=checkpoints.KINDS)
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Hands]:
    held = Held()
    with offloading(request.param, folder, held=held, max_num_seqs=64) as rig:
        yield rig, held


# -- loads that end well, badly or never --------------------------------------------------------------------------------


def test_r9_a_failed_load_is_recomputed(hands: Hands) -> None:
    rig, held = hands
    asked = Asked(prompt(1), 12)
    expected = truth(rig, asked)
    load = start_loading(hands, asked)
    before = rig.counts
    with Reports(rig) as reports:
        load.tear()
        held.copier.release()
        rig.finish()
    assert same(rig.reported["a"], expected)
    assert (reports.received, reports.failed) == (["a"], ["a"])
    gained = rig.counts.minus(before)
    assert gained.count("kvoffload_load_blocks_total", "failed") > 0
    assert gained.count("kvoffload_load_blocks_total", "loaded") == 0
    assert gained.total("kvoffload_load_scheduled_blocks_total") == 0, "it was not loaded again"
    assert gained.count("kvoffload_miss_blocks_total", "load_failed") > 0


@pytest.mark.parametrize("end", ["finish", "fail"])
def test_r9_a_load_that_times_out_is_recomputed_in_other_blocks(hands: Hands, end: str) -> None:
    """The load's blocks must stay leased until its copy ends, because the copy may still write to them."""
    rig, held = hands
    asked = Asked(prompt(3), 12)
    expected = truth(rig, asked)
    load = start_loading(hands, asked)
    held.copier._held = False  # later copies are not held
    held.clock.jump(31)
    with Reports(rig) as reports:
        rig.until(partial(rig.is_done, "a"))
    assert same(rig.reported["a"], expected)
    assert (reports.received, reports.failed) == (["a"], ["a"])
    assert load.is_open
    rig.finish()  # the engine does not wait for an abandoned copy
    leased = engines.held_blocks(rig.llm)
    assert leased > 0
    assert rig.slots(SlotState.QUARANTINED) >= leased

    other = Asked(prompt(4, 200), 6)
    right = truth(rig, other)
    quarantined = rig.slots(SlotState.QUARANTINED)
    getattr(load, end)()  # the copy writes only to blocks that were not reallocated
    assert same(rig.run({"b": other})["b"], right)
    assert engines.held_blocks(rig.llm) == 0
    assert rig.slots(SlotState.QUARANTINED) == quarantined
    assert reports.received == ["a"]


def test_a_request_aborted_while_loading_is_reported_once(hands: Hands) -> None:
    rig, held = hands
    load = start_loading(hands, Asked(prompt(5)))
    with Reports(rig) as reports:
        rig.abort("a")
        for _ in range(3):
            rig.step()
        assert reports.received == []
        assert engines.held_blocks(rig.llm) > 0
        assert rig.scheduler.has_requests()
        load.finish()
        held.copier.release()
        rig.finish()
    assert (reports.received, reports.failed) == (["a"], [])
    assert engines.held_blocks(rig.llm) == 0


# -- what a lookup found ------------------------------------------------------------------------------------------------


def test_r2_if_vllm_accepts_fewer_tokens_fewer_blocks_are_loaded(hands: Hands) -> None:
    rig, _ = hands
    asked = Asked(prompt(11))
    expected = truth(rig, asked)
    rig.put_on_host_only(asked.prompt)
    before, connector = rig.counts, rig.scheduler.connector
    ask = connector.get_num_new_matched_tokens

    def fewer(request: Any, computed: int) -> tuple[int | None, bool]:
        tokens, is_async = ask(request, computed)
        return tokens and tokens - 64, is_async

    with patch.object(connector, "get_num_new_matched_tokens", side_effect=fewer):
        reported = rig.run({"a": asked})["a"]
    assert same(reported, expected)
    gained = rig.counts.minus(before)
    assert gained.count("kvoffload_pin_dropped_blocks_total", "not_accepted") > 0
    if len(rig.side.shape.groups) == 1:
        assert reported.cached == 256 - 64
        assert gained.count("kvoffload_load_blocks_total", "loaded") == 6
    else:  # a shorter prefix needs other window blocks, which vLLM has not kept
        assert reported.cached == 0
        assert gained.count("kvoffload_contract_violations_total", "tokens_without_pin") == 0


def test_r1_a_lookup_without_an_allocation_keeps_nothing(hands: Hands) -> None:
    """vLLM looks the request up repeatedly while the device is full. Then the request is aborted."""
    rig, _held = hands
    wanted = Asked(prompt(13))
    rig.put_on_host_only(wanted.prompt)
    device = rig.scheduler.kv_cache_manager
    before = rig.counts
    with patch.object(device, "allocate_slots", return_value=None):
        rig.ask("a", wanted)
        for _ in range(5):
            rig.step()
        assert rig.slots(SlotState.PINNED) > 0
        rig.abort("a")
    assert rig.slots(SlotState.PINNED) == 0
    gained = rig.counts.minus(before)
    assert gained.count("kvoffload_pin_dropped_blocks_total", "looked_up_again") == 0, "nothing has changed"
    assert gained.count("kvoffload_pin_dropped_blocks_total", "request_ended") > 0
    assert gained.total("kvoffload_lookup_blocks_total") == 0, "a lookup counts when it is admitted"


# -- stores -------------------------------------------------------------------------------------------------------------


def test_while_stores_are_held_their_blocks_stay_in_use_and_vllm_keeps_stepping(hands: Hands) -> None:
    """Hold all stores while requests need more blocks than the device has (R5), then reset (R10)."""
    rig, held = hands
    connector = rig.scheduler.connector
    asked = {f"r{number}": Asked(prompt(30 + number, 230), 8) for number in range(8)}
    expected = truths(rig, asked)
    assert not connector.has_pending_push_work()
    held.copier.hold()
    for name, one in asked.items():
        rig.ask(name, one)
    rig.until(lambda: all(map(rig.is_done, asked)))
    check_same({name: rig.reported[name] for name in asked}, expected)
    leased = len(rig.side.core.state.leases.counts)
    assert 0 < leased <= rig.side.shape.lease_limit
    assert engines.held_blocks(rig.llm) == leased
    for _ in range(5):
        assert connector.has_pending_push_work()
        assert rig.scheduler.has_requests()  # vLLM must run a step without tokens
        rig.step()
    assert not rig.scheduler.requests
    assert rig.connector.reset_cache() is True, "the results of these stores are dropped"
    held.copier.release()
    rig.until(lambda: not connector.has_pending_push_work())
    assert not rig.scheduler.has_requests()
    assert rig.slots(SlotState.READY) == rig.slots(SlotState.FILLING) == 0


@pytest.mark.parametrize("engine", ["gemma3"], indirect=True)  # this model has sliding windows
def test_r7_window_blocks_are_reallocated(hands: Hands) -> None:
    rig, _held = hands
    asked = {f"r{number}": Asked(prompt(40 + number, 400), 80) for number in range(3)}
    expected = truths(rig, asked)
    before = rig.counts
    check_same(rig.run(asked), expected)
    assert rig.counts.minus(before).total("kvoffload_stale_blocks_zeroed_total") > 0
    rig.check_bytes()
    rig.scheduler.reset_prefix_cache()
    check_same(rig.run(asked), expected)


def test_r10_after_a_reset_of_running_requests_no_earlier_block_is_found(hands: Hands) -> None:
    rig, _held = hands
    asked = {name: Asked(prompt(62 + number), 20) for number, name in enumerate("ab")}
    expected = truths(rig, asked)
    rig.put_on_host_only(asked["a"].prompt)
    for name, one in asked.items():
        rig.ask(name, one)
    rig.until(lambda: all(name in rig.reported and len(rig.reported[name].tokens) > 4 for name in asked))
    rig.until(lambda: not rig.side.core.state.leases.counts)
    before = rig.counts
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    rig.finish()
    check_same({name: rig.reported[name] for name in asked}, expected)
    assert rig.counts.minus(before).count("kvoffload_lookup_tokens_total", "hit") == 0


# -- many at once -------------------------------------------------------------------------------------------------------


def test_r14_many_requests_with_one_prefix_load_it_once(hands: Hands) -> None:
    rig, held = hands
    shared = prompt(70, 256)
    one = {"one": Asked((*shared, 1), 1)}
    # With the extra token, the shared prefix ends where vLLM keeps a window.
    rig.put_on_host_only((*shared, 99))
    before = rig.counts
    rig.run(one)
    once = rig.counts.minus(before).count("kvoffload_transfer_bytes_total", "host", "load")
    assert once >= 8 * SLOT_BYTES

    asked = {f"r{number}": Asked((*shared, number), 2) for number in range(50)}
    expected = truths(rig, {name: asked[name] for name in ("r0", "r49")})
    rig.put_on_host_only((*shared, 99))
    held.copier.hold()
    before = rig.counts
    for name, request in asked.items():
        rig.ask(name, request)
    for _ in range(4):
        rig.step()
    assert len(held.loads) == 1
    held.copier.release()
    rig.finish()
    gained = rig.counts.minus(before)
    assert gained.count("kvoffload_transfer_bytes_total", "host", "load") <= 1.1 * once
    assert gained.total("kvoffload_lookups_deferred_total") > 0
    assert sum(rig.reported[name].cached >= 256 for name in asked) == 50
    check_same({name: rig.reported[name] for name in expected}, expected)


# -- the order of hooks -------------------------------------------------------------------------------------------------

HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


def test_r13_loads_and_stores_start_in_hooks_after_a_fence(hands: Hands) -> None:
    rig, held = hands
    asked = Asked(prompt(80), 40)
    rig.put_on_host_only(asked.prompt)
    calls: list[str] = []
    with ExitStack() as patches:
        for owner, name in [
            *((rig.worker_connector, name) for name in HOOKS),
            (rig.pump._queue, "add"),
            (rig.pump, "_start_loads"),
            (held.copier, "fence"),
        ]:
            patches.enter_context(patch.object(owner, name, noting(calls, name, getattr(owner, name))))
        fences, tickets = held.copier.fences, len(held.copier.tickets)
        rig.run({"a": asked})
    story = " ".join(calls)
    assert "bind_connector_metadata fence start_load_kv _start_loads" in story
    assert "wait_for_save fence add" in story
    assert calls.count("_start_loads") == 1
    steps = story.split("handle_preemptions ")[1:]
    assert all(step.split()[0] == "bind_connector_metadata" for step in steps)
    assert all(step.split()[-2:] == ["clear_connector_metadata", "wait_for_save"] for step in steps)
    new = held.copier.tickets[tickets:]
    assert all(ticket.fences for ticket in new)
    assert held.copier.fences - fences == calls.count("add") + calls.count("_start_loads")


def noting(calls: list[str], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that adds its name to `calls`. vLLM calls some hooks once per layer, which count once."""

    def note(*args: Any, **fields: Any) -> Any:
        if not calls or calls[-1] != name:
            calls.append(name)
        return original(*args, **fields)

    return note


@pytest.mark.skipif(engines.IS_V2_RUNNER, reason="the order of the V1 runner's hooks")
def test_answers_are_right_if_vllm_clears_the_plan_late(hands: Hands) -> None:
    """With a draft model, vLLM asks for results before it lets stores start, and then clears the step's plan."""
    rig, _ = hands
    runner = rig.core.model_executor.driver_worker.worker.model_runner
    enter, sample = runner.maybe_get_kv_connector_output, runner.sample_tokens
    asked = {f"r{number}": Asked(prompt(90 + number), 40) for number in range(3)}
    expected = truths(rig, asked)

    def sample_and_finalize(*args: Any, **fields: Any) -> Any:
        output = sample(*args, **fields)
        runner.finalize_kv_connector()
        return output

    def deferring(output: Any, defer_finalize: bool = False) -> Any:
        return enter(output, defer_finalize=True)

    with (
        patch.object(runner, "maybe_get_kv_connector_output", deferring),
        patch.object(runner, "sample_tokens", sample_and_finalize),
    ):
        check_same(rig.run(asked), expected)
        assert rig.scheduler.reset_prefix_cache()
        before = rig.counts
        reported = rig.run(asked)
    check_same(reported, expected)
    assert rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded") > 0
