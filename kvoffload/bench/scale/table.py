"""What `bench scale` found, as text: each number beside its target, whether it is met or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvoffload.bench.results import headline
from kvoffload.bench.scale import idle, lookups, memory

Case = Mapping[str, Any]


def table(told: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of what was measured, `told` as it is written to JSON."""
    yield "The scheduler's side as requests and slots grow"
    yield f"  {headline(told['machine'])}"
    yield f"  {told['method']}"
    for name, lines in _PARTS.items():
        if name in told:
            yield ""
            yield from lines(told[name])


def _idle(cases: Sequence[Case]) -> Iterator[str]:
    form = "{:>9}  {:<24}{:>12}{:>12}{:>22}  {}"
    yield f"Requests that do nothing in a step, in hooks per step; target: at most {idle.TARGET:g}x growth"
    yield form.format("requests", "beside them", f"with {idle.FEW}", "with all", "growth", "").rstrip()
    for case in cases:
        few, many, growth = case["few_us"]["median"], case["many_us"]["median"], case["growth"]
        cells = f"{case['tracked']:,}", case["work"], f"{few:.1f} us", f"{many:.1f} us", _spread(growth)
        yield form.format(*cells, _verdict(growth["median"] <= idle.TARGET))


def _lookup(cases: Sequence[Case]) -> Iterator[str]:
    form = "{:>9}{:>12}{:>12}{:>12}{:>22}{:>22}  {}"
    yield (
        f"A lookup that finds all its blocks, against a bare loop over the same keys; target: at most {lookups.TARGET:g}x, "
        f"a miss at most {lookups.MISS_TARGET_US:g} us"
    )
    yield form.format("blocks", "loop", "search", "hook", "search / loop", "hook / loop", "search | hook")
    for case in cases:
        took = {name: case[f"{name}_us"]["median"] for name in ("bare", "search", "hook")}
        ratios = [case["search_ratio"], case["hook_ratio"]]
        is_met = (
            [ratio["median"] <= lookups.TARGET for ratio in ratios]
            if case["blocks"]
            else [took[name] <= lookups.MISS_TARGET_US for name in ("search", "hook")]
        )
        times = [f"{micros:,.1f} us" for micros in took.values()]
        shown = [_spread(ratio) if ratio else "" for ratio in ratios]
        blocks = f"{case['blocks']:,}" if case["blocks"] else "a miss"
        yield form.format(blocks, *times, *shown, " | ".join(map(_verdict, is_met)))


def _memory(cases: Sequence[Case]) -> Iterator[str]:
    form = "{:>12}{:>12}{:>14}{:>14}{:>16}{:>18}  {}"
    yield (
        f"Python memory of host slots, bytes each; targets at {memory.TARGET_SLOTS:,}: at most "
        f"{memory.TARGET_BYTES}, start-up under {memory.TARGET_START_S:g} s"
    )
    heads = "slots", "start-up", "empty", "full", "all replaced", "longest pause", "start | full | replaced"
    yield form.format(*heads)
    for case in cases:
        is_met = (
            case["start_s"] < memory.TARGET_START_S,
            case["full"] <= memory.TARGET_BYTES,
            case["churned"] <= memory.TARGET_BYTES,
        )
        sizes = [f"{case[name]:,.0f} B" for name in ("empty", "full", "churned")]
        start, pause = f"{case['start_s']:.2f} s", f"{1e3 * case['longest_put_s']:,.1f} ms"
        yield form.format(f"{case['slots']:,}", start, *sizes, pause, " | ".join(map(_verdict, is_met)))


def _growth(told: Case) -> Iterator[str]:
    form = "{:>12}{:>16}{:>18}{:>16}{:>16}{:>10}"
    yield (
        f"{told['requests']:,} requests, {told['running']} at a time, over {told['pool']:,} slots that are full from the "
        "start; each line a tenth"
    )
    yield form.format("requests", "hooks / step", "hooks / request", "longest step", "resident", "found")
    for one in told["readings"]:
        yield form.format(
            f"{one['requests']:,}",
            f"{one['step_us']:,.0f} us",
            f"{one['request_us']:,.0f} us",
            f"{one['longest_us'] / 1e3:,.1f} ms",
            f"{one['resident_mib']:,.1f} MiB",
            f"{one['found']:.0%}",
        )
    second, last = told["readings"][1], told["readings"][-1]
    times, sizes = (last[name] / second[name] for name in ("request_us", "resident_mib"))
    yield f"the last tenth over the second: {times:.2f}x the time of a request, {sizes:.3f}x the memory"


def _spread(spread: Case) -> str:
    if spread["low"] is None:
        return f"{spread['median']:.2f}x"
    return f"{spread['median']:.2f}x [{spread['low']:.2f}, {spread['high']:.2f}]"


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


_PARTS: dict[str, Any] = {"idle": _idle, "lookup": _lookup, "memory": _memory, "growth": _growth}
