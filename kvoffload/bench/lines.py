"""What every bench finds, as lines: what was measured, a median with its interval, the target, and whether it is met.

A bench prints its lines as a table or as JSON and keeps them on request; bench/README.md shows those that are kept.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement.

    Args:
        what: what was measured.
        median: of the samples; None where it was not measured, and `what` says why.
        low, high: how far it can be trusted; None with too few samples to say.
        unit: of all three.
        target: what was wanted, in words; empty where nothing was.
        is_met: whether it is so; None without a target.
        is_check: whether something is wrong where it is not so, and not only slow.
        curve: the same over time, a number a second.
        marks: of the curve, the second in which something was done, and the one in which it was over.
    """

    what: str
    median: float | None
    low: float | None = None
    high: float | None = None
    unit: str = "x"
    target: str = ""
    is_met: bool | None = None
    is_check: bool = False
    curve: Sequence[int] = ()
    marks: Sequence[int] = ()

    @property
    def found(self) -> str:
        """The numbers as a table shows them."""
        if self.median is None:
            return ""
        shown = f"{_digits(self.median)}{self.unit}"
        if self.low is None or self.high is None:
            return shown
        return f"{shown} [{_digits(self.low)}, {_digits(self.high)}]"

    @property
    def verdict(self) -> str:
        """Whether the target is met, in a word."""
        if self.is_met is None:
            return ""
        return "pass" if self.is_met else "fail" if self.is_check else "miss"

    @property
    def over_time(self) -> str:
        """The curve, with a bar at each mark; empty without one."""
        shown = [
            ("| " if second in self.marks else "") + f"{each:,}" for second, each in enumerate(self.curve)
        ]
        return " ".join(shown)

    def to_plain(self) -> dict[str, object]:
        """The fields for JSON, numbers to five digits."""
        return {
            name: float(f"{value:.5g}") if isinstance(value, float) else value
            for name, value in asdict(self).items()
            if value or name not in ("curve", "marks")
        }


def line(
    what: str,
    samples: Sequence[float],
    unit: str = "x",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    is_check: bool = False,
) -> Line:
    """Return the median of at least one sample and its 95 % interval; the median is held against the target."""
    middle, target, is_met = statistics.median(samples), "", None
    low, high = (one if math.isfinite(one) else None for one in median_interval(samples))
    if at_least is not None:
        target, is_met = f"at least {at_least:g}{unit}", middle >= at_least
    if at_most is not None:
        target, is_met = f"at most {at_most:g}{unit}", middle <= at_most
    return Line(what, middle, low, high, unit, target, is_met, is_check)


def not_run(what: str, reason: object) -> Line:
    """Return a line that says why something was not measured."""
    return Line(f"{what}: not run, {reason}", None)


def ratios(mine: Iterable[float], others: Iterable[float]) -> list[float]:
    """Return the one over the other, in pairs."""
    return [one / other for one, other in zip(mine, others, strict=True)]


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return two of the samples between which the median lies with at least this confidence.

    The number of samples below the median is that of heads in as many tosses of a coin, so of n ordered samples the
    k-th from either end enclose it unless fewer than k tosses came up heads, or fewer than k tails. The narrowest such
    pair is taken; where even the outermost is not enough (fewer than 6 samples for 95 %), everything is possible.
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
    """Yield the lines for a terminal."""
    width, room = (max(len(getattr(one, name)) for one in lines) for name in ("what", "found"))
    for one in lines:
        yield f"{one.what:<{width}}  {one.found:>{room}}  {one.target:<14}  {one.verdict}".rstrip()
        if one.curve:
            yield f"    each second: {one.over_time}"


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table for each machine, of results as they are kept; what offloading costs comes first."""
    parts = []
    by_machine: dict[str, list[Mapping[str, Any]]] = {}
    for result in sorted(results, key=lambda result: _ORDER.index(result["bench"])):
        by_machine.setdefault(_machine(result["machine"]), []).append(result)
    for about, benches in by_machine.items():
        dates = " and ".join(sorted({result["date"] for result in benches}))
        parts += [f"{about}, {dates}:", "", "| bench | what | found | target | |", "|---|---|---|---|---|"]
        for result in benches:
            for one in (Line(**plain) for plain in result["lines"]):
                word = _IN_DOCUMENTS[one.verdict]
                curve = one.over_time.replace("|", r"\|")  # a bar ends a cell
                found = f"{one.found}<br>each second: {curve}" if one.curve else one.found
                parts.append(f"| `{result['bench']}` | {one.what} | {found} | {one.target} | {word} |")
        parts.append("")
    return "\n".join(parts)


_ORDER = (
    "engine",
    "serve",
    "hooks",
    "queue",
    "copy",
    "disk",
    "remote",
    "verify",
    "scale",
    "trace",
)
_IN_DOCUMENTS = {"": "", "pass": "met", "miss": "**missed**", "fail": "**failed**"}


def _machine(about: Mapping[str, Any]) -> str:
    named = about.get("gpu") or f"{about['cpu']}, {about['cores']} cores"
    return f"{named}, {about['memory_gib']:g} GiB, Python {about['python']}, kvoffload {about['kvoffload']}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:#.3g}"
