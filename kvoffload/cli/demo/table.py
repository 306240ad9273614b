"""The demo's result for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvoffload.cli.demo.results import (
    BenefitResult,
    DemoResult,
    OffloadResult,
    PlayResult,
    Quantiles,
    Workload,
)
from kvoffload.cli.report.page import size_of

_LABEL, _NUMBER = 50, 18
_NONE = "-"
NOTE = (
    "* whole blocks of the prompt that a cache without limit would hold; one token is always left to compute"
)
_RULE = "-" * (_LABEL + 2 * _NUMBER)

Row = tuple[str, str, str]


def render(result: DemoResult) -> str:
    """Return the whole report."""
    rows = [_row("", "without", "with"), _RULE, *(_row(*row) for row in compared(result))]
    lines = [*head(result.workload), "", *rows, "", *_offloading(result.offloading), ""]
    return "\n".join([*lines, *_verdict(result)])


def head(workload: Workload) -> Iterator[str]:
    """Yield what was played, in lines."""
    reach = f" of {workload.reach_tokens} tokens" if workload.reach_tokens else ""
    attention = workload.attention.replace("_", " ")
    yield (
        f"{workload.conversations} conversations of {workload.turns} turns, {attention} attention{reach}, "
        f"{workload.device}, seed {workload.seed}"
    )
    sources = [*workload.documents]
    if workload.library_tokens:
        sources.append(f"{workload.library_tokens:,} bytes of Python's library")
    yield f"text: {', '.join(sources)}"
    yield (
        f"KV cache: {workload.device_blocks:,} blocks on the device; the conversations need "
        f"{workload.kv_blocks:,}, {workload.kv_to_cache:.1f} times as many"
    )


def compared(result: DemoResult) -> Iterator[Row]:
    """Yield both plays' numbers side by side."""
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
        yield "returning turns: reused of the reusable*", _share(plain), _share(offloaded)
    yield _times("first turns", plain.first_ttft_s, offloaded.first_ttft_s)
    if plain.returning_ttft_s and offloaded.returning_ttft_s:
        yield _times("returning turns", plain.returning_ttft_s, offloaded.returning_ttft_s)
    if result.returning_ttft_ratio is not None:
        yield "  median, times lower", "", f"{result.returning_ttft_ratio:.1f}x"
    speed, other = (f"{play.tokens_per_s:,.0f}" for play in (plain, offloaded))
    yield "prompt and new tokens per second", speed, other
    yield "seconds", f"{plain.elapsed_s:.1f}", f"{offloaded.elapsed_s:.1f}"


def _offloading(result: OffloadResult) -> Iterator[str]:
    yield _row("offloading", "device to host", "host to device")
    yield _RULE
    yield _row("bytes moved", size_of(result.stored_bytes), size_of(result.loaded_bytes))
    loaded = result.loaded_blocks.get("loaded", 0)
    yield _row("blocks moved", f"{result.stored_blocks:,}", f"{loaded:,}")
    yield _list("host evictions", result.evicted_blocks, f"of {result.host_slots:,} host blocks")
    yield _list("stores declined, by reason", result.declined_blocks, f"of {result.offered_blocks:,} offered")
    yield _list("misses, by cause", result.missed_blocks)
    if failed := {outcome: blocks for outcome, blocks in result.loaded_blocks.items() if outcome != "loaded"}:
        yield _list("loads that brought nothing", failed)
    yield _benefit(result.benefit)


def _verdict(result: DemoResult) -> Iterator[str]:
    agreement = result.agreement
    if agreement.holds:
        yield f"outputs   all {agreement.tokens:,} tokens agree; {_logprobs(result)}"
    else:
        yield f"outputs   DIFFER in {agreement.mismatches} of {agreement.tokens:,} tokens; {_logprobs(result)}"
        yield from (f"          {mismatch}" for mismatch in agreement.first_mismatches)
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


def _benefit(shown: BenefitResult) -> str:
    parts = (
        f"{shown.saved_s:.1f} saved, {shown.waited_s:.1f} waited for loads, "
        f"{shown.interference_s:.1f} lost to copies: net {shown.net_s:.1f}"
    )
    return f"{'seconds, as it estimates':<{_LABEL - 12}}{parts}"


def _row(label: str, one: str, other: str) -> str:
    return f"{label:<{_LABEL}}{one:>{_NUMBER}}{other:>{_NUMBER}}"


def _list(label: str, numbers: Mapping[str, int], total: str = "") -> str:
    shown = ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in numbers.items()) or "none"
    return f"{label:<{_LABEL - 12}}{shown}{f' ({total})' if total else ''}"


def _times(label: str, one: Quantiles, other: Quantiles) -> Row:
    label = f"time to first token, {label}, p50 / p99"
    return label, _milliseconds(one), _milliseconds(other)


def _milliseconds(times: Quantiles) -> str:
    return f"{times.p50 * 1000:,.0f}/{times.p99 * 1000:,.0f} ms"


def _share(play: PlayResult) -> str:
    share = play.returning_reused_share
    return _NONE if share is None else f"{share:.1%}"
