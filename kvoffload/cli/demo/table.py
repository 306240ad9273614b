"""The demo's result as a table of 80 columns. The verdict comes first."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from kvoffload.cli.demo.results import (
    BenefitResult,
    DemoResult,
    OffloadResult,
    PlayResult,
    Quantiles,
    Workload,
)
from kvoffload.cli.exits import printable
from kvoffload.model.causes import MissCause
from kvoffload.model.config import size_text

_LABEL, _NUMBER = 42, 19
_TEXT_LABEL = 20  # of a row whose value is a text
_WIDTH = _LABEL + 2 * _NUMBER
_NONE = "-"
NOTE = "* reusable: whole blocks of the prompt that a cache without limit would hold"
_RULE = "-" * _WIDTH

Row = tuple[str, str, str]


def render(result: DemoResult) -> str:
    """Return the whole report."""
    rows = [_row("", "without", "with"), _RULE, *(_row(*row) for row in compared(result))]
    about = (_wrapped("", line) for line in head(result.workload))
    parts = ([verdict(result)], about, rows, _offloading(result.offloading), _checks(result))
    return "\n\n".join("\n".join(part) for part in parts)


def verdict(result: DemoResult) -> str:
    """Return in a line what offloading changed, and whether the outputs are the same."""
    without, with_ = result.without_offloading.returning_ttft_s, result.with_offloading.returning_ttft_s
    if without is None or with_ is None or result.returning_ttft_ratio is None:
        return f"No turn returned: give at least 2 --turns. {_outcome(result)}"
    times = f"{without.p50 * 1000:,.0f} -> {with_.p50 * 1000:,.0f} ms ({result.returning_ttft_ratio:.1f}x)"
    return f"First token of returning turns: {times}. {_outcome(result)}"


def head(workload: Workload) -> Iterator[str]:
    """Yield what was played, line by line."""
    reach = f" of {workload.reach_tokens} tokens" if workload.reach_tokens else ""
    what = "layers" if workload.attention == "recurrent" else "attention"
    layers = f"{workload.attention.replace('_', ' ')} {what}"
    yield (
        f"{workload.conversations} conversations of {workload.turns} turns, {layers}{reach}, "
        f"{workload.device}, seed {workload.seed}"
    )
    sources = [*workload.documents]
    if workload.library_tokens:
        sources.append(f"{workload.library_tokens:,} bytes of Python's library")
    yield printable(f"text: {', '.join(sources)}")
    yield (
        f"KV cache: {workload.device_blocks:,} blocks on the device; the conversations need {workload.kv_blocks:,} "
        f"({workload.kv_to_cache:.1f}x)"
    )


def compared(result: DemoResult) -> Iterator[Row]:
    """Yield the numbers of both plays side by side."""
    plain, offloaded = result.without_offloading, result.with_offloading
    counts = {
        "prompt tokens": "prompt_tokens",
        "tokens computed": "computed_tokens",
        "prompt tokens reused from the device": "device_tokens",
        "prompt tokens reused from the host": "host_tokens",
    }
    for label, name in counts.items():
        yield label, f"{getattr(plain, name):,}", f"{getattr(offloaded, name):,}"
    if offloaded.returning_reusable_tokens:
        yield "reused of the reusable*, returning turns", _share(plain), _share(offloaded)
    yield _times("first turns", plain.first_ttft_s, offloaded.first_ttft_s)
    if plain.returning_ttft_s and offloaded.returning_ttft_s:
        yield _times("returning turns", plain.returning_ttft_s, offloaded.returning_ttft_s)
    speed, other = (f"{play.tokens_per_s:,.0f}" for play in (plain, offloaded))
    yield "prompt and new tokens per second", speed, other
    yield "seconds", f"{plain.elapsed_s:.1f}", f"{offloaded.elapsed_s:.1f}"


def _offloading(result: OffloadResult) -> Iterator[str]:
    yield _row("offloading", "device to host", "host to device")
    yield _RULE
    yield _row("bytes moved", size_text(result.stored_bytes), size_text(result.loaded_bytes))
    loaded = result.loaded_blocks.get("loaded", 0)
    yield _row("blocks moved", f"{result.stored_blocks:,}", f"{loaded:,}")
    yield _list("evicted", result.evicted_blocks, f"of {result.host_slots:,} host blocks")
    if result.disk_written_bytes or result.disk_read_bytes:
        moved = f"{size_text(result.disk_written_bytes)} written, {size_text(result.disk_read_bytes)} read"
        yield _text("disk", f"{moved}; {result.disk_tokens:,} tokens of hits were fetched from it")
    yield _list("stores declined", result.declined_blocks, f"of {result.offered_blocks:,} offered")
    yield _misses(result.missed_blocks)
    if failed := {outcome: blocks for outcome, blocks in result.loaded_blocks.items() if outcome != "loaded"}:
        yield _list("loads that failed", failed)
    yield _benefit(result.benefit)


def _outcome(result: DemoResult) -> str:
    if result.broken_laws:
        return f"{len(result.broken_laws)} laws are BROKEN."
    return "Outputs are identical." if result.agreement.holds else "Outputs DIFFER."


def _checks(result: DemoResult) -> Iterator[str]:
    agreement = result.agreement
    if agreement.holds:
        yield f"outputs   all {agreement.tokens:,} tokens agree"
    else:
        yield f"outputs   DIFFER in {agreement.mismatches} of {agreement.tokens:,} tokens"
        yield from (f"          {mismatch}" for mismatch in agreement.first_mismatches)
    yield f"          {_logprobs(result)}"
    if result.broken_laws:
        yield f"audit     {len(result.broken_laws)} laws BROKEN"
        yield from (f"          {law}" for law in result.broken_laws)
    else:
        yield "audit     no law is broken; every block, pin, lease and copy is accounted for"
    yield ""
    yield NOTE


def _logprobs(result: DemoResult) -> str:
    agreement = result.agreement
    return (
        f"log-probabilities differ by at most {agreement.worst_logprob_difference:.1e} "
        f"(allowed: {agreement.logprob_limit:.0e})"
    )


def _misses(blocks: Mapping[str, int]) -> str:
    """A lookup ends at its first miss, so the blocks behind that say nothing about a cause."""
    causes = {cause: count for cause, count in blocks.items() if cause != MissCause.BEHIND_MISS.value}
    behind = blocks.get(MissCause.BEHIND_MISS.value, 0)
    return _list("missed, by cause", causes, f"and {behind:,} blocks behind those" if behind else "")


def _benefit(shown: BenefitResult) -> str:
    return _text(
        "seconds (estimate)",
        f"{shown.saved_s:.1f} saved, {shown.waited_s:.1f} waited for loads, {shown.interference_s:.1f} lost to copies: "
        f"net {shown.net_s:.1f}",
    )


def _row(label: str, one: str, other: str) -> str:
    return f"{label:<{_LABEL}}{one:>{_NUMBER}}{other:>{_NUMBER}}"


def _list(label: str, numbers: Mapping[str, int], total: str = "") -> str:
    shown = ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in numbers.items()) or "none"
    return _text(label, f"{shown}{f' ({total})' if total else ''}")


def _text(label: str, text: str) -> str:
    return _wrapped(f"{label:<{_TEXT_LABEL}}", text)


def _wrapped(label: str, text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=label, subsequent_indent=" " * len(label))


def _times(label: str, one: Quantiles, other: Quantiles) -> Row:
    label = f"first token, {label}, p50 / p99"
    return label, milliseconds(one), milliseconds(other)


def milliseconds(times: Quantiles) -> str:
    """Return median and 99th percentile as text."""
    return f"{times.p50 * 1000:,.0f}/{times.p99 * 1000:,.0f} ms"


def _share(play: PlayResult) -> str:
    share = play.returning_reused_share
    return _NONE if share is None else f"{share:.1%}"
