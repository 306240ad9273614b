from __future__ import annotations

import dataclasses

import pytest

from kvoffload.cli.demo.play import TurnId
from tests.vllm.stock import demo_report
from tests.vllm.stock.client import Metrics, Reply
from tests.vllm.stock.demo_report import Play

REPLY = Reply((1, 2), (-0.5, -1.5), 64, 32, 0.25)
NOTHING = Metrics("")
FOUND = Metrics(
    'vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 32\n'
    'kvoffload_lookup_blocks_total{engine="0",model_name="m",result="hit"} 1\n'
    'kvoffload_lookup_blocks_total{engine="0",model_name="m",result="miss"} 2\n'
)


def play(metrics: Metrics, second: Reply = REPLY) -> Play:
    return Play({TurnId(0, 0): REPLY, TurnId(0, 1): second}, NOTHING, metrics)


def test_equal_answers_pass() -> None:
    without, with_it = play(NOTHING), play(FOUND)
    assert demo_report.holds(without, with_it)
    reported = demo_report.render("demo", 64, without, with_it)
    assert "all 4 tokens of 2 turns agree" in reported
    assert "hits      1 of 3 block positions" in reported
    assert 'kvoffload_lookup_blocks_total{result="hit"} 1' in reported


@pytest.mark.parametrize("change", [{"tokens": (1, 3)}, {"logprobs": (-0.5, -1.6)}])
def test_a_different_answer_fails_and_is_named(change: dict[str, tuple[float, ...]]) -> None:
    without, with_it = play(NOTHING), play(FOUND, dataclasses.replace(REPLY, **change))  # type: ignore[arg-type]
    assert not demo_report.holds(without, with_it)
    reported = demo_report.render("demo", 64, without, with_it)
    assert "DIFFER in 1 of 2 turns" in reported
    assert "conversation 0, turn 1" in reported


def test_a_run_without_hits_fails() -> None:
    without, with_it = play(NOTHING), play(NOTHING)
    assert not demo_report.holds(without, with_it)
    assert "NONE" in demo_report.render("demo", 64, without, with_it)


def test_a_nan_never_agrees_with_a_number() -> None:
    assert not REPLY.agrees_with(dataclasses.replace(REPLY, logprobs=(-0.5, float("nan"))))
    assert not REPLY.agrees_with(dataclasses.replace(REPLY, logprobs=(-0.5,)))
