"""Tests the adapter's scheduler side with vLLM's own requests: sessions whose input comes in parts, new blocks after a
reset, and failed stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.facts import StepScheduled
from kvoffload.model.ids import Rank, RequestId
from kvoffload.model.wire import JobReport, TransferReport
from kvoffload_vllm.support import keeps_replaced_hashes, release_of
from tests.core.audit import audit_side
from tests.vllm.engine_rig import MARKS, prompt
from tests.vllm.line_rig import scheduling
from tests.vllm.scheduler_rig import BLOCK, BLOCKS, adapter, full_spec, make_request, step_output, table

pytestmark = MARKS

KEEPS = "this vLLM keeps the hashes that a session's next input replaces, so nothing of sessions is offloaded"


def session(text: Sequence[int]) -> Any:
    return make_request("s", text, resumable=True)


def go_on(request: Any, part: Sequence[int]) -> None:
    """Continue a session as vLLM does. vLLM drops the last sampled token, before vLLM 0.33 all tokens that were not
    computed, and their hashes.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import StreamingUpdate

    holder: Any = SimpleNamespace(hash_block_size=BLOCK, log_stats=False, num_waiting_for_streaming_input=0)
    Scheduler._update_request_as_session(holder, request, StreamingUpdate.from_request(session(part)))


def run(scheduler: Any, request: Any, blocks: Sequence[int], *, until: int) -> None:
    """Schedule a request, so that its first `until` tokens are computed."""
    scheduler.update_state_after_alloc(request, table(blocks), 0)
    scheduler.build_connector_meta(step_output(request, until - request.num_computed_tokens, is_new=True))
    request.num_computed_tokens = until


def known_keys(scheduler: Any) -> list[bytes]:
    record = scheduler.offload.core.state.requests.live.get(RequestId("s"))
    return [key[:-4] for key in record.keys[0]]


def test_vllm_before_0_32_keeps_the_hashes_of_replaced_tokens() -> None:
    assert keeps_replaced_hashes() is (release_of(version("vllm")) < (0, 32))


def serve(scheduler: Any, pool: Any, request: Any) -> tuple[int, int]:
    """Compute a prompt, and store it. Return how many tokens the lookup found, and how many blocks were stored."""
    scheduler.on_new_request(request)
    found, _ = scheduler.get_num_new_matched_tokens(request, 0)
    whole = request.num_tokens // BLOCK
    blocks = pool.get_new_blocks(whole + 1)
    scheduler.update_state_after_alloc(request, table([block.block_id for block in blocks]), 0)
    scheduler.build_connector_meta(step_output(request, request.num_tokens, is_new=True))
    pool.cache_full_blocks(request, blocks, 0, whole, BLOCK, 0)
    request.num_computed_tokens = request.num_tokens
    jobs = scheduler.build_connector_meta(step_output(request, 1)).plan.stores
    ended = [JobReport(job.id, job.direction, CopyOutcome.DONE, 1, 0.0, 0.0) for job in jobs]
    scheduler.offload.reported([TransferReport(Rank(0), tuple(ended), BLOCKS)])
    scheduler.request_finished_all_groups(request, ([1],))
    return found, sum(len(job.slots) for job in jobs)


@pytest.mark.parametrize("keeps", [True, False])
def test_where_vllm_keeps_replaced_hashes_nothing_of_a_session_is_stored_or_loaded(*, keeps: bool) -> None:
    text = prompt(1, 3 * BLOCK + 1)
    with adapter(BLOCK, keeps_replaced_hashes=keeps) as (scheduler, pool):
        scheduler.offload.reported([TransferReport(Rank(0), (), BLOCKS)])
        requests = [session(text), make_request("other", text), session(text)]
        found = [serve(scheduler, pool, request) for request in requests]
        whole = 3 * BLOCK
        assert found == ([(0, 0), (0, 3), (0, 0)] if keeps else [(0, 3), (whole, 0), (whole, 0)])
        counts = scheduler.offload.counters.snapshot()
        # Three lookups miss for this reason: those of the sessions, and the other's, whose first block was refused before.
        for name in ("kvoffload_store_blocks_total", "kvoffload_miss_blocks_total"):
            assert counts.count(name, "unsafe_hashes") == (3 if keeps else 0)
        assert audit_side(scheduler.offload) == []


@pytest.mark.parametrize("computed", [0, 50, 64, 100])
def test_the_core_has_a_sessions_current_hashes(computed: int) -> None:
    """Let a session continue after `computed` of its 100 tokens. 0 means that vLLM has preempted the session."""
    if keeps_replaced_hashes():
        pytest.skip(KEEPS)
    with adapter(BLOCK) as (scheduler, _):
        request = session(prompt(1, 100))
        scheduler.on_new_request(request)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        run(scheduler, request, [1, 2, 3, 4], until=100)
        before = known_keys(scheduler)
        assert before == list(request.block_hashes)
        request.append_output_token_ids(7)
        request.num_computed_tokens = computed
        go_on(request, prompt(2, 90))
        assert request.block_hashes[: computed // BLOCK] == before[: computed // BLOCK]
        assert len(request.block_hashes) == request.num_tokens // BLOCK >= (computed + 90) // BLOCK
        if not computed:
            scheduler.build_connector_meta(step_output(request, 0, is_preempted=True))
            assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
            assert known_keys(scheduler) == list(request.block_hashes)
        run(scheduler, request, [1, 2, 3, 4, 5, 6], until=request.num_tokens)
        assert known_keys(scheduler) == list(request.block_hashes)
        assert audit_side(scheduler.offload) == []
        scheduler.request_finished_all_groups(request, ([1],))
        assert not scheduler._tracked
        assert not scheduler.offload.core.state.requests.live


def test_a_session_that_ends_with_rewritten_hashes_reports_none_of_them() -> None:
    if keeps_replaced_hashes():
        pytest.skip(KEEPS)
    with adapter(BLOCK) as (scheduler, _):
        request = session(prompt(1, 3 * BLOCK - 1))
        request.append_output_token_ids(7)
        scheduler.on_new_request(request)
        scheduler.get_num_new_matched_tokens(request, 0)
        run(scheduler, request, [1, 2, 3], until=3 * BLOCK)
        record = scheduler.offload.core.state.requests.live.get(RequestId("s"))
        before = list(record.keys[0])
        request.num_computed_tokens = 40
        go_on(request, prompt(2, 200))
        scheduler.request_finished_all_groups(request, ([1],))
        assert record.keys[0] == before
        assert audit_side(scheduler.offload) == []


@pytest.mark.parametrize("was_reset", [False, True])
def test_r10_after_a_reset_new_blocks_are_reported_in_the_step_that_allocates_them(was_reset: bool) -> None:
    with adapter(BLOCK, report_every=16) as (scheduler, _):
        steps: list[StepScheduled] = []
        step = scheduler.offload.step

        def noting(fact: StepScheduled) -> Any:
            steps.append(fact)
            return step(fact)

        scheduler.offload.step = noting
        if was_reset:
            scheduler.offload.reset()
        request = make_request("a", prompt(1))
        scheduler.on_new_request(request)
        scheduler.get_num_new_matched_tokens(request, 0)
        run(scheduler, request, range(1, 10), until=request.num_tokens)
        scheduler.build_connector_meta(step_output(request, 1))
        scheduler.build_connector_meta(step_output(request, 1, new_blocks=([50],)))
        assert [fact.progress for fact in steps[2:]] == [()]
        assert steps[2].reallocated == ((50,) if was_reset else ())


def test_statistics_that_raise_end_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("no statistics")

    with adapter(BLOCK) as (scheduler, _):
        monkeypatch.setattr(scheduler._changes, "take", fail)
        for _ in range(2):
            scheduler.build_connector_meta(step_output(None, 0))
            assert scheduler.get_kv_connector_stats() is None
        assert caplog.text.count("observer_removed") == 1
        assert scheduler.offload.counters.snapshot().total("kvoffload_bus_removed_total") == 1


def test_r4_a_failed_store_cannot_hit(folder: Path) -> None:
    with scheduling(folder, [full_spec()], 100) as line:
        line.stores_end = CopyOutcome.FAILED
        for name in "ab":
            line.ask(name, prompt(1))
            assert line.finish()
            assert line.scheduler.reset_prefix_cache()
        counts = line.scheduler.connector.offload.counters.snapshot()
        assert counts.count("kvoffload_store_blocks_total", "failed") > 0
        assert not line.core.state.pool.index
        assert line.cached["b"] == 0
