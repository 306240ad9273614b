"""Tests sessions whose input comes in parts. Between parts, vLLM drops tokens that were not computed, and
their hashes.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from kvoffload.model.ids import RequestId
from tests.core.audit import audit_side
from tests.vllm.engine_rig import MARKS, Asked, Reported, Rig, offloading, same
from tests.vllm.scheduler_rig import adapter

pytestmark = MARKS

BLOCK = 32


def tokens(seed: int, count: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(256) for _ in range(count))


def say(rig: Rig, name: str, part: Sequence[int], count: int, *, is_last: bool = False) -> None:
    """Send a session the next part of its prompt. The last part only ends the session; vLLM does not read it."""
    from vllm import SamplingParams

    engine = rig.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=0)
    request = engine.input_processor.process_inputs(
        name,
        {"prompt_token_ids": list(part)},
        params,
        supported_tasks=engine.get_supported_tasks(),
        resumable=not is_last,
    )
    request.external_req_id = name
    # The copy is for vLLM's front end, which normally runs in another process. Otherwise both sides would
    # append to the same lists.
    engine.output_processor.add_request(copy.deepcopy(request), None, None, 0)
    engine.engine_core.add_request(request)


# -- the adapter with vLLM's own request and its own way to go on with a session ----------------------------------------


def session(prompt: Sequence[int]) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    params = SamplingParams(max_tokens=100)
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request("s", list(prompt), params, None, block_hasher=hasher, resumable=True)


def go_on(request: Any, part: Sequence[int]) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import StreamingUpdate

    holder: Any = SimpleNamespace(hash_block_size=BLOCK, log_stats=False, num_waiting_for_streaming_input=0)
    Scheduler._update_request_as_session(holder, request, StreamingUpdate.from_request(session(part)))


def scheduled(request: Any, count: int, *, preempted: bool = False) -> Any:
    """Return a step in which this request is the only one: newly scheduled, or preempted."""
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    return SimpleNamespace(
        preempted_req_ids={request.request_id} if preempted else set(),
        num_scheduled_tokens={} if preempted else {request.request_id: count},
        total_num_scheduled_tokens=0 if preempted else count,
        scheduled_cached_reqs=cached,
        scheduled_new_reqs=[] if preempted else [SimpleNamespace(req_id=request.request_id)],
        kv_cache_block_copies=(),
    )


def run(scheduler: Any, request: Any, table: Sequence[int], *, until: int) -> None:
    """Schedule a request, so that its first `until` tokens are computed."""
    blocks = SimpleNamespace(get_block_ids=lambda: (list(table),))
    scheduler.update_state_after_alloc(request, blocks, 0)
    scheduler.build_connector_meta(scheduled(request, until - request.num_computed_tokens))
    request.num_computed_tokens = until


def known_keys(scheduler: Any) -> list[bytes]:
    record = scheduler.offload.core.state.requests.live.get(RequestId("s"))
    return [key[:-4] for key in record.keys[0]]


@pytest.mark.parametrize("computed", [0, 50, 64, 100])
def test_the_core_has_a_sessions_current_hashes(computed: int) -> None:
    """Let a session continue after `computed` of its 100 tokens.

    vLLM drops the other tokens. 0 means that vLLM has preempted the session.
    """
    with adapter(BLOCK) as (scheduler, _):
        request = session(tokens(1, 100))
        scheduler.on_new_request(request)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        run(scheduler, request, [1, 2, 3, 4], until=100)
        before = known_keys(scheduler)
        assert before == list(request.block_hashes)
        request.num_computed_tokens = computed
        go_on(request, tokens(2, 90))
        assert request.block_hashes[: computed // BLOCK] == before[: computed // BLOCK]
        assert len(request.block_hashes) == (computed + 90) // BLOCK
        if not computed:
            scheduler.build_connector_meta(scheduled(request, 0, preempted=True))
            assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
            assert known_keys(scheduler) == list(request.block_hashes)
        run(scheduler, request, [1, 2, 3, 4, 5, 6], until=request.num_tokens)
        assert known_keys(scheduler) == list(request.block_hashes)
        assert audit_side(scheduler.offload) == []
        scheduler.request_finished_all_groups(request, ([1],))
        assert not scheduler._tracked
        assert not scheduler.offload.core.state.requests.live


def test_a_session_that_ends_with_rewritten_hashes_reports_none_of_them() -> None:
    with adapter(BLOCK) as (scheduler, _):
        request = session(tokens(1, 100))
        scheduler.on_new_request(request)
        scheduler.get_num_new_matched_tokens(request, 0)
        run(scheduler, request, [1, 2, 3, 4], until=100)
        record = scheduler.offload.core.state.requests.live.get(RequestId("s"))
        before = list(record.keys[0])
        request.num_computed_tokens = 40
        go_on(request, tokens(2, 200))
        scheduler.request_finished_all_groups(request, ([1],))
        assert record.keys[0] == before
        assert audit_side(scheduler.offload) == []


# -- a stock engine -----------------------------------------------------------------------------------------------------

PARTS = (60, 36, 5, 90)
ANSWERS = (5, 33, 28, 12)


def talk(rig: Rig, name: str) -> tuple[list[int], list[Reported]]:
    """Send a session each part when it waits for input. Return all of the session's tokens at its end, and
    its answers.
    """
    from vllm.v1.request import RequestStatus

    answers: list[Reported] = []
    held: list[int] = []
    for number, (length, count) in enumerate(zip(PARTS, ANSWERS, strict=True)):
        say(rig, name, tokens(10 + number, length), count)
        rig.until(lambda: rig.scheduler.requests[name].status is RequestStatus.WAITING_FOR_STREAMING_REQ)
        answers.append(rig.reported[name])
        held = list(rig.scheduler.requests[name].all_token_ids)
    say(rig, name, [0], 1, is_last=True)
    rig.finish()
    return held, answers


@pytest.mark.parametrize("two_steps", [False, True])
def test_a_session_that_loads_blocks_gets_the_same_answers(folder: Path, two_steps: bool) -> None:
    with offloading("qwen3", folder, 256, two_steps=two_steps) as rig:
        live, wrong = rig.side.core.state.requests.live, list[str]()
        build = rig.connector.build_connector_meta

        def compared(output: Any) -> Any:
            made = build(output)
            for name in output.num_scheduled_tokens:
                record = live.get(RequestId(name))
                hashes = [key[:-4] for key in record.keys[0]] if record is not None else []
                if hashes != list(rig.scheduler.requests[name].block_hashes[: len(hashes)]):
                    wrong.append(name)
            return made

        with patch.object(rig.connector, "build_connector_meta", compared):
            held, answers = talk(rig, "a")
            # vLLM has dropped the first answer's fifth token
            assert held[60:65] == [*answers[0].tokens[:4], tokens(11, 36)[0]]
            assert rig.scheduler.reset_prefix_cache()
            before = rig.counts
            again, same_answers = talk(rig, "b")
            assert again == held
            assert [one.tokens for one in same_answers] == [one.tokens for one in answers]
            assert rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded") > 0
            assert wrong == []
        # Send all of the session's tokens as one prompt. All its whole blocks are on the host.
        asked = Asked(tuple(held[:-1]), 1)
        expected = rig.run({"truth": dataclasses.replace(asked, salt="truth")})["truth"]
        assert rig.scheduler.reset_prefix_cache()
        before = rig.counts
        assert same(rig.run({"c": asked})["c"], expected)
        blocks = (len(asked.prompt) - 1) // BLOCK
        assert rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded") == blocks
        rig.check_clean()
