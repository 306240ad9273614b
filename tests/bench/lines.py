"""The lines of a bench's results, and the headlines in README.md.

A line describes a measurement, and has the median with a confidence interval, the target, and whether the median
meets the target. A bench prints its lines as a table or JSON, and saves the lines if requested.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one measurement.

    Args:
        what: a description of the measurement.
        median: the median of the samples.
        low, high: the ends of the median's confidence interval; None with too few samples.
        unit: the unit of `median`, `low` and `high`.
        target: the target in words; empty without a target.
        is_met: whether the median meets the target; None without a target.
    """

    what: str
    median: float
    low: float | None = None
    high: float | None = None
    unit: str = "x"
    target: str = ""
    is_met: bool | None = None

    @property
    def found(self) -> str:
        """The median and the interval, formatted for a table."""
        shown = f"{_digits(self.median)}{self.unit}"
        if self.low is None or self.high is None:
            return shown
        return f"{shown} [{_digits(self.low)}, {_digits(self.high)}]"

    @property
    def verdict(self) -> str:
        return {None: "", True: "met", False: "missed"}[self.is_met]

    def to_plain(self) -> dict[str, object]:
        """Return the fields for JSON, with numbers rounded to five digits."""
        return {
            name: float(f"{value:.5g}") if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def line(
    what: str,
    samples: Sequence[float],
    unit: str = "x",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Line:
    """Return a line with the samples' median, the 95 % interval, and whether the median meets the target.

    Args:
        what: a description of the measurement.
        samples: the measured numbers.
        unit: the unit of the samples.
        at_least, at_most: the target; None for no target.
    """
    middle, target, is_met = statistics.median(samples), "", None
    low, high = (one if math.isfinite(one) else None for one in median_interval(samples))
    if at_least is not None:
        target, is_met = f"at least {at_least:g}{unit}", middle >= at_least
    if at_most is not None:
        target, is_met = f"at most {at_most:g}{unit}", middle <= at_most
    return Line(what, middle, low, high, unit, target, is_met)


def ratios(mine: Iterable[float], others: Iterable[float]) -> list[float]:
    """Divide each number in `mine` by the number at the same index in `others`."""
    return [one / other for one, other in zip(mine, others, strict=True)]


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the closest two samples that enclose the distribution's median with at least the given confidence.

    Each sample is below the median with a probability of one half, like a coin toss. The k-th smallest and the
    k-th largest sample enclose the median, unless fewer than k samples are on one side of the median. With too
    few samples (fewer than 6 for 95 %), the interval is infinite.
    """
    ordered = sorted(samples)
    count = len(ordered)
    allowed = (1 - confidence) / 2
    rank, tail = 0, 0.0
    while rank < count // 2 and (tail := tail + math.comb(count, rank) / 2**count) <= allowed:
        rank += 1
    if rank == 0:
        return -math.inf, math.inf
    return ordered[rank - 1], ordered[-rank]


def table(lines: Sequence[Line]) -> Iterator[str]:
    width, room = (max(len(getattr(one, name)) for one in lines) for name in ("what", "found"))
    for one in lines:
        yield f"{one.what:<{width}}  {one.found:>{room}}  {one.target:<14}  {one.verdict}".rstrip()


HEADLINES: Mapping[str, Sequence[str]] = {
    "engine": (
        "throughput on prompts that never repeat, reference engine, with over without",
        "first token of returning turns, working set 4 times the device's cache: sooner than recomputed",
    ),
    "serve": (
        "throughput on prompts that never repeat, vLLM 0.32.0, with over none",
        "first token of returning turns, vLLM 0.32.0, working set 4 times the cache: with, sooner than recomputed",
        "first token of returning turns, vLLM 0.32.0, working set 4 times the cache: sooner than vLLM's own connector",
    ),
    "hooks": (
        "scheduler's hooks over the peer's, each decoding step, 128 running, full attention",
        "scheduler's hooks over the peer's, the whole workload, 128 running, full attention",
        "scheduler's hooks over the peer's, the whole workload, 128 running, hybrid windows",
        "scheduler's hooks over the peer's, the longest hook, without garbage collections, 128 running, full attention",
    ),
    "queue": ("scheduler's hooks per step with 10,000 requests that wait, over 10",),
    "copy": (
        "load of scattered pages of 64 KiB, 1 thread, over one large copy",
        "a load of 64 MiB while 256 MiB of stores are queued, over the load alone",
    ),
    "disk": (
        "spill of blocks of 1024 KiB, over a sequential pass of direct I/O",
        "fetch of blocks of 1024 KiB, over a sequential pass of direct I/O",
        "opening an index of 1,000,000 blocks, 2 ranks",
        "time in the scheduler's hooks with the disk, over without; reference engine, while it works",
        "first token of turns that return after a restart: with the disk, sooner than recomputed",
    ),
    "restart": (
        "from a start after a SIGKILL to the first hit, over the same server's start without a connector",
        "first token of a prompt that returns after a SIGKILL: sooner than computed",
    ),
    "remote": (
        "get of blocks of 1024 KiB, Mooncake, over the store's own client",
        "first token of a prefix that another engine computed, Mooncake: sooner than recomputed",
        "time in the scheduler's hooks with a store, over without; reference engine, idle",
        "tokens/s over those without a store, Mooncake, node hangs",
    ),
    "scale": (
        "the whole lookup, a miss",
        "a slot's memory, every block replaced twice, 1,000,000 slots",
    ),
}
"""README.md shows these lines of each bench."""


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the headlines of saved results, as one Markdown table per machine.

    Raises:
        KeyError: a result lacks a headline.
    """
    order, by_machine = list(HEADLINES), dict[str, list[Mapping[str, Any]]]()
    for result in sorted(results, key=lambda result: order.index(result["bench"])):
        by_machine.setdefault(_machine(result["machine"]), []).append(result)
    parts = []
    for about, benches in by_machine.items():
        dates = " and ".join(sorted({result["date"] for result in benches}))
        parts += [f"{about}, {dates}:", "", "| bench | what | found | target | |", "|---|---|---|---|---|"]
        parts += [row for result in benches for row in _rows(result)]
        parts.append("")
    return "\n".join(parts)


def _rows(result: Mapping[str, Any]) -> Iterator[str]:
    kept = {one["what"]: Line(**one) for one in result["lines"]}
    for what in HEADLINES[result["bench"]]:
        one = kept[what]
        verdict = "**missed**" if one.verdict == "missed" else one.verdict
        yield f"| `{result['bench']}` | {what} | {one.found} | {one.target} | {verdict} |"


def _machine(about: Mapping[str, Any]) -> str:
    named = about.get("gpu") or f"{about['cpu']}, {about['cores']} cores"
    return f"{named}, {about['memory_gib']:g} GiB, Python {about['python']}, kvoffload {about['kvoffload']}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:#.3g}"
