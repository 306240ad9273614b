"""Computes the demo's result, which `--json` prints, and renders the result as a table of 80 columns."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.demo.play import Player, Turn
from kvoffload.model.causes import MissCause
from kvoffload.model.config import size_text
from kvoffload.model.wire import LOWER_TIERS, Tier
from kvoffload.telemetry.counters import Snapshot

_LOGPROB_LIMIT = 1e-3
_SHOWN = 10  # the maximum number of mismatches in the table
_LABEL, _NUMBER = 42, 19
_TEXT_LABEL = 20  # the width of the label in rows with text instead of two numbers
_WIDTH = _LABEL + 2 * _NUMBER

Numbers = dict[str, Any]
"""A part of the object that `--json` prints."""


def play_numbers(player: Player, options: DemoOptions, block_tokens: int) -> Numbers:
    """Return the token counts and times of the conversations on one engine. All times are in seconds."""
    turns = player.turns
    stats = [turn.stats for turn in turns]
    first_round = turns[0].turn.turn
    returning = [turn.stats for turn in turns if turn.turn.turn > 0]
    # Earlier turns computed all of a prompt except the new message and the last token of the last answer.
    known = [each.prompt_tokens - options.turn_tokens - 1 for each in returning]
    reusable = sum(tokens // block_tokens * block_tokens for tokens in known)
    reused = sum(each.device_hit_tokens + each.external_tokens for each in returning)
    return {
        "prompt_tokens": sum(each.prompt_tokens for each in stats),
        "generated_tokens": sum(each.generated_tokens for each in stats),
        "computed_tokens": sum(each.computed_tokens for each in stats),
        "device_tokens": sum(each.device_hit_tokens for each in stats),
        "host_tokens": sum(each.external_tokens for each in stats),
        # After a kill in the middle of a round, host memory may also have what that round computed.
        "reused_share": min(reused / reusable, 1.0) if reusable else None,
        "first_ttft_s": quantiles([turn.ttft_s for turn in turns if turn.turn.turn == first_round]),
        "later_ttft_s": quantiles([turn.ttft_s for turn in turns if turn.turn.turn > first_round]),
        "elapsed_s": player.elapsed_s,
    }


def quantiles(samples: Sequence[float]) -> Numbers | None:
    """Return the median and the 99th percentile (by nearest rank), or None without samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    return {"p50": statistics.median(ordered), "p99": ordered[math.ceil(0.99 * len(ordered)) - 1]}


def offload_numbers(counted: Snapshot) -> Numbers:
    """Return the bytes copied between device and host, and the numbers of blocks by outcome or cause."""
    host = Tier.HOST.value
    return {
        "stored_bytes": counted.count("kvoffload_transfer_bytes_total", host, "store"),
        "loaded_bytes": counted.count("kvoffload_transfer_bytes_total", host, "load"),
        "stored_blocks": counted.by_label("kvoffload_store_blocks_total"),
        "loaded_blocks": counted.by_label("kvoffload_load_blocks_total"),
        "missed_blocks": counted.by_label("kvoffload_miss_blocks_total"),
        "evicted_blocks": counted.by_label("kvoffload_evicted_blocks_total", host),
    }


def tier_numbers(counted: Snapshot) -> Numbers:
    """Return the blocks and bytes copied between the host and each lower tier, without unused tiers."""
    tiers = {
        tier.value: {
            "written_blocks": counted.count("kvoffload_tier_blocks_total", tier.value, "store", "done"),
            "written_bytes": counted.count("kvoffload_transfer_bytes_total", tier.value, "store"),
            "read_blocks": counted.count("kvoffload_tier_blocks_total", tier.value, "load", "done"),
            "read_bytes": counted.count("kvoffload_transfer_bytes_total", tier.value, "load"),
        }
        for tier in LOWER_TIERS
    }
    return {name: numbers for name, numbers in tiers.items() if any(numbers.values())}


def compare(plain: Sequence[Turn], offloaded: Sequence[Turn]) -> Numbers:
    """Compare every token and its log-probability. Both engines must have served the same prompts in the same order."""
    pairs = list(zip(plain, offloaded, strict=True))
    answers = [zip(one.answer, other.answer, strict=False) for one, other in pairs]
    differences = [abs(a.logprob - b.logprob) for answer in answers for a, b in answer]
    return {
        "tokens": sum(len(turn.answer) for turn in plain),
        "mismatches": [found for one, other in pairs for found in _mismatches(one, other)],
        "worst_logprob_difference": max(filter(math.isfinite, differences), default=0.0),
    }


def _mismatches(one: Turn, other: Turn) -> Iterator[str]:
    """Yield a message for each mismatch up to the first different token, after which the contexts differ."""
    where = f"conversation {one.turn.conversation}, turn {one.turn.turn}"
    for place, (a, b) in enumerate(zip(one.answer, other.answer, strict=False)):
        # Unlike `>`, `not <=` is True for a NaN.
        if a.token_id != b.token_id or not abs(a.logprob - b.logprob) <= _LOGPROB_LIMIT:
            without, with_ = (f"{token.token_id} ({token.logprob:.6f})" for token in (a, b))
            yield f"{where}, token {place}: {without} without offloading, {with_} with it"
        if a.token_id != b.token_id:
            return
    if len(one.answer) != len(other.answer):
        yield f"{where}: {len(one.answer)} tokens without offloading, {len(other.answer)} with it"


def render(result: Numbers) -> str:
    """Return a result as a table that begins with the verdict."""
    parts = [_verdict(result)], _head(result), _compared(result), _offloading(result), _checks(result)
    return "\n\n".join("\n".join(part) for part in parts)


def played(conversations: int, turns: int) -> str:
    """Return for example "1 conversation of 3 turns"."""
    numbers = {"conversation": conversations, "turn": turns}
    return " of ".join(f"{number} {what}{'s' * (number != 1)}" for what, number in numbers.items())


def _verdict(result: Numbers) -> str:
    what, name = "of returning turns", "later_ttft_s"
    if result["before"] is not None:
        is_restart = "remote_url" not in result["options"]["offload"]
        what = "after a SIGKILL" if is_restart else "on another engine"
        name = "first_ttft_s"
    outcome = "Outputs DIFFER." if result["agreement"]["mismatches"] else "Outputs are identical."
    if result["audit"]:
        outcome = f"The audit found {len(result['audit'])} PROBLEMS."
    times = [play[name] for play in _plays(result)]
    if None in times:
        return f"No turn returned: give at least 2 --turns. {outcome}"
    without, with_ = (1000 * each["p50"] for each in times)
    faster = f"{without / with_:.1f}x" if without >= with_ else f"{with_ / without:.1f}x SLOWER"
    return f"First token {what}: {without:,.0f} -> {with_:,.0f} ms ({faster}). {outcome}"


def _head(result: Numbers) -> Iterator[str]:
    options, blocks, needed = result["options"], result["device_blocks"], result["kv_blocks"]
    layers = "full attention" if options["layers"] == "full" else f"{options['layers']} layers"
    what = played(options["conversations"], options["turns"])
    yield f"{what}, {options['model']} model, {layers}, {options['device']}"
    need = f"the conversations need {needed:,} ({needed / blocks:.1f}x)"
    yield f"KV cache: {blocks:,} blocks on the device; {need}"
    if result["before"] is not None:
        yield "The turns before were served by another engine with offloading, which was killed"
        yield f"(SIGKILL) in turn {options['killed_in'] + 1}. These are the turns from there on."


def _compared(result: Numbers) -> Iterator[str]:
    plays = _plays(result)
    yield _row("", ("without", "with"))
    yield "-" * _WIDTH
    for label, name in {
        "prompt tokens": "prompt_tokens",
        "tokens computed": "computed_tokens",
        "prompt tokens reused from the device": "device_tokens",
        "prompt tokens reused from the host": "host_tokens",
    }.items():
        yield _row(label, (f"{play[name]:,}" for play in plays))
    shares = ["-" if play["reused_share"] is None else f"{play['reused_share']:.1%}" for play in plays]
    yield _row("reused of the reusable*, returning turns", shares)
    first, later = ("first", "returning") if result["before"] is None else ("next", "later")
    for which, name in ((first, "first_ttft_s"), (later, "later_ttft_s")):
        yield _row(f"first token, {which} turns, p50 / p99", (_milliseconds(play[name]) for play in plays))
    rates = ((play["prompt_tokens"] + play["generated_tokens"]) / play["elapsed_s"] for play in plays)
    yield _row("prompt and new tokens per second", (f"{rate:,.0f}" for rate in rates))
    yield _row("seconds", (f"{play['elapsed_s']:.1f}" for play in plays))


def _offloading(result: Numbers) -> Iterator[str]:
    found, benefit = result["offloading"], result["benefit"]
    yield _list("stores, blocks", found["stored_blocks"], size_text(found["stored_bytes"]))
    yield _list("loads, blocks", found["loaded_blocks"], size_text(found["loaded_bytes"]))
    slots = f"of {result['host_slots']:,} host blocks that were ready"
    yield _list("evicted", found["evicted_blocks"], slots)
    # A lookup ends at the first missing block, so no later block has a cause except BEHIND_MISS.
    causes = dict(found["missed_blocks"])
    behind = causes.pop(MissCause.BEHIND_MISS.value, 0)
    yield _list("missed, by cause", causes, f"and {behind:,} blocks behind those")
    for name, tier in result["tiers"].items():
        yield _text(name, _moved(tier))
    net = benefit["saved_s"] - benefit["waited_s"] - benefit["lost_s"]
    yield _text(
        "seconds (estimate)",
        f"{benefit['saved_s']:.1f} saved, {benefit['waited_s']:.1f} waited for loads, "
        f"{benefit['lost_s']:.1f} lost to copies: net {round(net, 1) + 0.0:.1f}",  # `+ 0.0` avoids "-0.0"
    )


def _checks(result: Numbers) -> Iterator[str]:
    if (before := result["before"]) is not None:
        below = "".join(f"; {name}: {_moved(tier)}" for name, tier in before["tiers"].items())
        yield _text("before the kill", f"{before['stored_blocks']:,} blocks stored on the host{below}")
        if adopted := result["adopted_blocks"]:
            yield _text("after the kill", f"{adopted:,} blocks found in host memory")
    agreement, audit = result["agreement"], result["audit"]
    if mismatches := agreement["mismatches"]:
        yield f"outputs   DIFFER in {len(mismatches)} of {agreement['tokens']:,} tokens"
        yield from (f"          {mismatch}" for mismatch in mismatches[:_SHOWN])
    else:
        yield f"outputs   all {agreement['tokens']:,} tokens agree"
    worst = f"{agreement['worst_logprob_difference']:.1e} (allowed: {_LOGPROB_LIMIT:.0e})"
    yield f"          log-probabilities differ by at most {worst}"
    passed = "passed: every block, pin, lease and copy is accounted for"
    yield f"audit     {f'FAILED: {len(audit)} problems' if audit else passed}"
    yield from (f"          {problem}" for problem in audit)
    yield "\n* reusable: whole blocks of the prompt that were computed in earlier turns"


def _plays(result: Numbers) -> tuple[Numbers, Numbers]:
    return result["without_offloading"], result["with_offloading"]


def _moved(tier: Mapping[str, int]) -> str:
    written = f"{tier['written_blocks']:,} blocks written ({size_text(tier['written_bytes'])})"
    return f"{written}, {tier['read_blocks']:,} read ({size_text(tier['read_bytes'])})"


def _row(label: str, values: Iterable[str]) -> str:
    return f"{label:<{_LABEL}}" + "".join(f"{value:>{_NUMBER}}" for value in values)


def _list(label: str, numbers: Mapping[str, int], note: str) -> str:
    shown = ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in numbers.items()) or "none"
    return _text(label, f"{shown} ({note})")


def _text(label: str, text: str) -> str:
    indent = " " * _TEXT_LABEL
    return textwrap.fill(text, _WIDTH, initial_indent=label.ljust(_TEXT_LABEL), subsequent_indent=indent)


def _milliseconds(times: Mapping[str, float] | None) -> str:
    return "-" if times is None else f"{times['p50'] * 1000:,.0f}/{times['p99'] * 1000:,.0f} ms"
