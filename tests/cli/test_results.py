"""From turns to numbers, and from numbers to what people and machines read."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from kvoffload.cli.demo.compare import compare
from kvoffload.cli.demo.conversations import TurnId
from kvoffload.cli.demo.play import Play, Turn
from kvoffload.cli.demo.results import BenefitResult, DemoResult, Workload
from kvoffload.cli.demo.summary import quantiles, summarize, summarize_benefit, summarize_offloading
from kvoffload.cli.demo.table import render
from kvoffload.engine import RequestStats, Token
from kvoffload.telemetry.snapshot import Snapshot

ANSWER = (Token(1, -0.5), Token(2, -1.5))


def turn(
    number: int, prompt: range, *, device: int = 0, host: int = 0, ttft: float = 1.0, conversation: int = 0
) -> Turn:
    stats = RequestStats(
        len(prompt),
        arrived_s=100.0,
        device_hit_tokens=device,
        external_tokens=host,
        computed_tokens=len(prompt) + len(ANSWER) - 1 - device - host,
        generated_tokens=len(ANSWER),
        first_token_s=100.0 + ttft,
    )
    return Turn(TurnId(conversation, number), tuple(prompt), ANSWER, stats)


PLAIN = Play((turn(0, range(10), ttft=2.0), turn(1, range(14), ttft=3.0)), elapsed_s=4.0)
OFFLOADED = Play((turn(0, range(10)), turn(1, range(14), device=4, host=4, ttft=0.5)), elapsed_s=2.0)
COUNTED = Snapshot(
    {
        "kvoffload_transfer_bytes_total": {("host", "store"): 3 * 2**20, ("host", "load"): 2048},
        "kvoffload_offered_blocks_total": {(): 9},
        "kvoffload_store_blocks_total": {
            ("stored",): 6,
            ("host_full",): 1,
            ("already_cached",): 2,
            ("lost",): 0,
        },
        "kvoffload_miss_blocks_total": {("never_seen",): 3},
        "kvoffload_load_blocks_total": {("loaded",): 4},
        "kvoffload_evicted_blocks_total": {("host", "space"): 5},
    }
)
BENEFIT = BenefitResult(9.5, 1.25, 0.25, 8.0)
WORKLOAD = Workload(("README.md",), 12, 1, 2, "sliding_window", 4, "cpu", 0, 10, 30, 3.0, {"host_bytes": 1})


def result(plain: Play = PLAIN, offloaded: Play = OFFLOADED, laws: tuple[str, ...] = ()) -> DemoResult:
    without, with_ = summarize(plain, 4), summarize(offloaded, 4)
    agreement = compare(plain, offloaded)
    return DemoResult(
        WORKLOAD, without, with_, 6.0, summarize_offloading(COUNTED, 64, BENEFIT), agreement, laws
    )


def changed(play: Play, token: Token, place: int = 0) -> Play:
    """The same play with another token in its last turn."""
    last = play.turns[-1]
    answer = (*last.answer[:place], token, *last.answer[place + 1 :])
    return replace(play, turns=(*play.turns[:-1], replace(last, answer=answer)))


def test_numbers_of_a_play() -> None:
    found = summarize(OFFLOADED, 4)
    assert (found.prompt_tokens, found.generated_tokens, found.computed_tokens) == (24, 4, 18)
    assert (found.device_tokens, found.host_tokens) == (4, 4)
    assert (found.tokens_per_s, found.elapsed_s) == (14.0, 2.0)


def test_reuse_is_measured_against_what_was_there_to_reuse() -> None:
    # Of 14 tokens, 10 are the first turn's prompt; its two whole blocks can be reused.
    found = summarize(OFFLOADED, 4)
    assert (found.returning_reusable_tokens, found.returning_reused_tokens) == (8, 8)
    assert found.returning_reused_share == 1.0
    assert summarize(PLAIN, 4).returning_reused_share == 0.0


def test_times_of_first_and_returning_turns_stand_apart() -> None:
    found = summarize(PLAIN, 4)
    assert found.returning_ttft_s is not None
    assert (found.first_ttft_s.p50, found.returning_ttft_s.p50) == (2.0, 3.0)


def test_conversations_of_one_turn_have_no_returning_ones() -> None:
    found = summarize(Play(PLAIN.turns[:1], 4.0), 4)
    assert (found.returning_ttft_s, found.returning_reused_share) == (None, None)


@pytest.mark.parametrize(
    ("count", "p50", "p99"), [(1, 1, 1), (2, 1.5, 2), (99, 50, 99), (100, 50.5, 99), (101, 51, 100)]
)
def test_quantiles_are_nearest_ranks(count: int, p50: float, p99: float) -> None:
    found = quantiles([float(n) for n in range(count, 0, -1)])
    assert (found.samples, found.p50, found.p99) == (count, p50, p99)


def test_counters_by_reason_largest_first_and_without_those_at_0() -> None:
    found = summarize_offloading(COUNTED, 64, BENEFIT)
    assert (found.stored_bytes, found.loaded_bytes, found.stored_blocks) == (3 * 2**20, 2048, 6)
    assert list(found.declined_blocks.items()) == [("already_cached", 2), ("host_full", 1)]
    assert found.evicted_blocks == {"space": 5}


def test_what_was_saved_before_does_not_count() -> None:
    def looked(
        saved: float, own: float, others: float, lost: float
    ) -> dict[str, dict[tuple[str, ...], float]]:
        return {
            "kvoffload_prefill_seconds_saved_total": {(): saved},
            "kvoffload_load_wait_seconds_total": {("own_load",): own, ("others_load",): others},
            "kvoffload_interference_seconds_total": {("store",): lost, ("load",): lost},
        }

    found = summarize_benefit(looked(1.0, 0.5, 0.0, 0.0), looked(11.0, 1.0, 1.0, 0.25))
    assert found == BenefitResult(10.0, 1.5, 0.5, 8.0)


def test_equal_plays_agree() -> None:
    found = compare(PLAIN, changed(OFFLOADED, Token(1, -0.5009)))
    assert found.holds
    assert found.tokens == 4
    assert found.worst_logprob_difference == pytest.approx(0.0009)


@pytest.mark.parametrize("token", [Token(9, -0.5), Token(1, -0.502), Token(1, math.nan)])
def test_any_other_token_or_probability_is_a_mismatch(token: Token) -> None:
    found = compare(PLAIN, changed(OFFLOADED, token))
    assert not found.holds
    assert (found.first_mismatches[0].turn, found.first_mismatches[0].place) == (1, 0)


def test_behind_another_token_nothing_is_compared() -> None:
    twice = changed(changed(OFFLOADED, Token(9, -0.5)), Token(8, -9.0), place=1)
    assert compare(PLAIN, twice).mismatches == 1


def test_a_shorter_answer_is_a_mismatch() -> None:
    last = OFFLOADED.turns[-1]
    shorter = replace(OFFLOADED, turns=(OFFLOADED.turns[0], replace(last, answer=last.answer[:1])))
    found = compare(PLAIN, shorter)
    assert found.mismatches == 1
    assert "ends here" in str(found.first_mismatches[0])


def test_the_table_shows_what_matters() -> None:
    text = render(result())
    for reported in (
        "1 conversations of 2 turns, sliding window attention of 4 tokens",
        "text: README.md, 12 bytes of Python's library",
        "(3.0x)",
        "3,000/3,000 ms",
        "First token of returning turns: 3,000 -> 500 ms (6.0x). Outputs are identical.",
        "3.0 MiB",
        "2.0 KiB",
        "space 5 (of 64 host blocks)",
        "already cached 2, host full 1 (of 9 offered)",
        "never seen 3",
        "all 4 tokens agree",
        "9.5 saved, 1.2 waited for loads, 0.2 lost to copies: net 8.0",
        "no law is broken",
    ):
        assert reported in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_the_table_shows_what_is_wrong() -> None:
    found = result(offloaded=changed(OFFLOADED, Token(9, -0.5)), laws=("a block is lost",))
    assert not found.passed
    text = render(found)
    assert "DIFFER in 1 of 4 tokens" in text
    assert "conversation 0, turn 1, token 0: 1 (-0.500000) without offloading, 9 (-0.500000) with it" in text
    assert "1 laws BROKEN" in text
    assert "a block is lost" in text


def test_json_has_every_number_under_its_name() -> None:
    found = json.loads(result().to_json())
    assert (found["schema"], found["kind"], found["passed"]) == (1, "demo", True)
    assert found["with_offloading"]["returning_ttft_s"] == {"samples": 1, "p50": 0.5, "p99": 0.5}
    assert found["offloading"]["declined_blocks"] == {"already_cached": 2, "host_full": 1}
    assert found["agreement"]["first_mismatches"] == []


def test_json_knows_no_nan() -> None:
    found = json.loads(result(offloaded=changed(OFFLOADED, Token(1, math.nan))).to_json())
    assert found["passed"] is False
    assert found["agreement"]["first_mismatches"][0]["logprob_with"] is None


@pytest.mark.parametrize(
    ("play", "laws", "passed"),
    [(OFFLOADED, (), True), (OFFLOADED, ("x",), False), (changed(OFFLOADED, Token(9, 0.0)), (), False)],
)
def test_it_passes_only_if_outputs_agree_and_laws_hold(
    play: Play, laws: tuple[str, ...], passed: bool
) -> None:
    assert result(offloaded=play, laws=laws).passed is passed
