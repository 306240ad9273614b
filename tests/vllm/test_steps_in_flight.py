"""Tests with one step in flight and with two: sessions whose input comes in parts, and the estimates of the time that
loading saves and costs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvoffload.model.ids import RequestId
from tests.vllm.engine_rig import MARKS, Asked, Reported, Rig, offloading, prompt, same, truth
from tests.vllm.stock import engines

pytestmark = MARKS


@pytest.fixture(scope="module", params=[False, True], ids=["one step", "two steps"])
def rig(request: pytest.FixtureRequest, folder: Path) -> Iterator[Rig]:
    with offloading("qwen3", folder, two_steps=request.param) as rig:
        yield rig
        rig.check_clean()


# -- sessions -----------------------------------------------------------------------------------------------------------

PARTS = (60, 36, 5, 90)  # tokens
ANSWERS = (5, 33, 28, 12)


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


def talk(rig: Rig, name: str) -> tuple[list[int], list[Reported]]:
    """Send a session each part when it waits for input. Return all of the session's tokens at its end, and
    its answers.
    """
    from vllm.v1.request import RequestStatus

    answers: list[Reported] = []
    held: list[int] = []
    for number, (length, count) in enumerate(zip(PARTS, ANSWERS, strict=True)):
        say(rig, name, prompt(10 + number, length), count)
        rig.until(lambda: rig.scheduler.requests[name].status is RequestStatus.WAITING_FOR_STREAMING_REQ)
        answers.append(rig.reported[name])
        held = list(rig.scheduler.requests[name].all_token_ids)
    say(rig, name, [0], 1, is_last=True)
    rig.finish()
    return held, answers


def test_a_session_that_loads_blocks_gets_the_same_answers(rig: Rig) -> None:
    """Between two parts, vLLM drops tokens that were not computed, and their hashes."""
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
        assert held[60:65] == [*answers[0].tokens[:4], prompt(11, 36)[0]]
        assert rig.scheduler.reset_prefix_cache()
        before = rig.counts
        again, same_answers = talk(rig, "b")
        assert again == held
        assert [one.tokens for one in same_answers] == [one.tokens for one in answers]
        assert rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded") > 0
        assert wrong == []
    # Send all of the session's tokens as one prompt. All its whole blocks are on the host.
    asked = Asked(tuple(held[:-1]), 1)
    expected = truth(rig, asked)
    assert rig.scheduler.reset_prefix_cache()
    before = rig.counts
    assert same(rig.run({"c": asked})["c"], expected)
    blocks = (len(asked.prompt) - 1) // engines.BLOCK
    assert rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded") == blocks


# -- estimates ----------------------------------------------------------------------------------------------------------


def reload(rig: Rig, asked: dict[str, Asked]) -> None:
    for name, one in asked.items():
        rig.run({name: one})
        assert rig.scheduler.reset_prefix_cache()  # resets only the device's cache


def value(rig: Rig, name: str) -> float:
    return rig.side.gauges()[f"kvoffload_{name}"][()]


def test_saved_time_is_estimated_from_vllms_prefill_speed(rig: Rig) -> None:
    asked = {f"p{number}": Asked(prompt(number, 960), 8) for number in range(4)}
    rig.forget()
    saved = value(rig, "prefill_seconds_saved_total")
    reload(rig, asked)
    rate = value(rig, "prefill_tokens_per_second")
    assert rate > 0
    assert value(rig, "prefill_seconds_saved_total") == saved
    before = rig.counts
    for _ in range(2):
        reload(rig, asked)
    loaded = rig.counts.minus(before).count("kvoffload_lookup_tokens_total", "hit")
    assert loaded > 960 * len(asked)
    assert 0.2 < (value(rig, "prefill_seconds_saved_total") - saved) / (loaded / rate) < 5
    waits = rig.counts.distributions["kvoffload_load_wait_seconds"]["own_load",]
    assert waits.samples - before.samples("kvoffload_load_wait_seconds", "own_load") == 2 * len(asked)
    assert 0 < waits.total < 60
    assert value(rig, "break_even_tokens") > 0
