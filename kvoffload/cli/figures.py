"""Collects samples from a journal's lines, and draws the figures of `kvoffload report` as SVG with matplotlib."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kvoffload.bus.bus import Bus
from kvoffload.cli.exits import CommandError
from kvoffload.model import events
from kvoffload.model.causes import MissCause, StoreOutcome
from kvoffload.model.wire import LOWER_TIERS, Direction, Tier
from kvoffload.telemetry.counters import Counters, Snapshot
from kvoffload.telemetry.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: dict[str, str] = {
    # sources of a prompt's tokens
    "host": "#5aa64b", "node": "#3fa07a", "disk": "#2f8f8f", "remote": "#1f6f8f", "device": "#4a86d0", "nothing": "#9a9a9a", "miss": "#9a9a9a", "opted_out": "#c9a0dc",
    # states of host slots
    "ready": "#4a86d0", "filling": "#7fb3ea",
    # directions of copies
    "load": "#5aa64b", "store": "#4a86d0",
}  # fmt: skip
"""The dashboards use these colours, too."""
_NO_COLOUR = "#333333"  # of a tier that has none

_SAMPLED = (events.LookupAnswered, events.FirstTokenReached, events.RankReported)
_ENDS_FILLING = (StoreOutcome.STORED, StoreOutcome.FAILED, StoreOutcome.ABANDONED, StoreOutcome.CANCELLED)
_COLUMNS = 48
_MOST_DOTS = 2000  # the maximum number of dots of one colour
LARGEST = 1e15
"""The largest number that is used: a damaged journal may have numbers that break an axis or overflow."""

AnySample = TypeVar("AnySample")
Series = Mapping[str, Sequence[tuple[float, float]]]
"""Samples for each key of `COLOURS`. A sample is a time in seconds since the journal's first line, and a value."""


@dataclass(slots=True)
class Account:
    """The samples and sums of a journal's events. Times are in seconds since the journal's first line.

    Args:
        samples: (time, event) pairs of lookups, first tokens and copies, by event class.
        slots: for each change, the time and the number of host slots in each state afterwards. Slots filled before the
            first line are not counted.
        counted: the metrics' counters after the last event.
        sampled: the last sample of other metrics (`MetricsSampled`).
        seconds: the time of the last line.
        ready_s: the time from which host memory could hold blocks; None if the journal does not say.
    """

    samples: dict[type, list[tuple[float, Any]]] = field(
        default_factory=lambda: {cls: [] for cls in _SAMPLED}
    )
    slots: list[tuple[float, Mapping[str, int]]] = field(default_factory=list)
    counted: Snapshot = field(default_factory=lambda: Counters().snapshot())
    sampled: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    ready_s: float | None = None


def add_up(records: Iterable[Record]) -> Account:
    account, bus, counters = Account(), Bus(), Counters()
    counters.subscribe(bus)
    begun: float | None = None
    before, slots = 0, Counter[str]()
    for record in records:
        begun = record.time if begun is None else begun
        if record.sequence <= before:  # the records of another process begin here
            slots.clear()
        before, at, message = record.sequence, record.time - begun, record.message
        account.seconds = max(account.seconds, at)
        if account.ready_s is None and isinstance(message, events.CapacityGrown):
            account.ready_s = at
        bus.publish(message)
        if (samples := account.samples.get(type(message))) is not None:
            samples.append((at, message))
        if isinstance(message, events.MetricsSampled):
            account.sampled = message.values
        if _count_slots(slots, message):
            # `+` drops negative counts, which result from evictions of blocks that were stored before the first line.
            account.slots.append((at, +slots))
    account.counted = counters.snapshot()
    return account


def _count_slots(slots: Counter[str], event: object) -> bool:
    """Update the counts of host slots, by state, after an event. Return whether the event affects slots."""
    match event:
        case events.StoreScheduled():
            slots["filling"] += event.blocks
        case events.StoreEnded(outcome=outcome) if outcome in _ENDS_FILLING:
            slots["filling"] -= event.blocks
            slots["ready"] += event.blocks if outcome is StoreOutcome.STORED else 0
        case events.BlocksEvicted():
            slots["ready"] -= event.blocks
        case _:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing with a heading and a caption.

    Args:
        title: the heading.
        text: the caption, which explains the drawing.
        svg: the drawing as SVG that HTML may contain unchanged; empty without data.
    """

    title: str
    text: str
    svg: str


def check_installed() -> None:
    """Check that reports can be drawn.

    Raises:
        CommandError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise CommandError(f"a report needs {error.name}: pip install 'kvoffload[report]'") from error


def draw(account: Account) -> list[Figure]:
    """Return a report's figures. Lower tiers without copies have no figure."""
    lookups = account.samples[events.LookupAnswered]
    causes = account.counted.by_label("kvoffload_miss_blocks_total")
    behind = causes.pop(MissCause.BEHIND_MISS.value, 0)
    lower = [_transfers(account, tier) for tier in LOWER_TIERS]
    return [
        _dots(
            "Time to first token, by what was found",
            "A dot is a request; a line is the median of its colour. Times are up to one step too long.",
            first_token_ms(account),
            account.seconds,
        ),
        _columns(
            "Prompt tokens, by where they were found",
            "Tokens of admitted prompts. opted_out: the request asked to read no cache.",
            "tokens",
            {
                "device": [(at, one.device_tokens) for at, one in lookups],
                "host": [(at, one.hit_tokens) for at, one in lookups],
                "miss": [(at, one.miss_tokens) for at, one in lookups if not one.opted_out],
                "opted_out": [(at, one.miss_tokens) for at, one in lookups if one.opted_out],
            },
            account.seconds,
        ),
        _slots(account),
        _transfers(account, Tier.HOST),
        *(figure for figure in lower if figure.svg),
        _bars(
            "Lookups that missed, by cause",
            f"The cause of the first missing block. {behind:,} more blocks lay behind one and could not be used.",
            causes,
        ),
        _bars(
            "Offered blocks, by outcome",
            "Computed blocks that were offered to the host; each gets one outcome in the end.",
            account.counted.by_label("kvoffload_store_blocks_total"),
        ),
    ]


def first_token_ms(account: Account) -> Series:
    """Return the times to first token in milliseconds, by the tier that had the request's prompt."""
    waits = account.samples[events.FirstTokenReached]
    found = {None: "nothing"} | {tier: tier.value for tier in Tier}
    return {
        name: [(at, 1000 * one.seconds) for at, one in waits if one.found is tier]
        for tier, name in found.items()
    }


def median_and_p99(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile (by nearest rank) of sorted numbers."""
    return statistics.median(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1]


def verdict(account: Account) -> str:
    """Return one line with the share of prompt tokens that were found, and the median times to first token."""
    lookups = [one for _, one in account.samples[events.LookupAnswered] if not one.opted_out]
    device, host = sum(one.device_tokens for one in lookups), sum(one.hit_tokens for one in lookups)
    if not (total := device + host + sum(one.miss_tokens for one in lookups)):
        return "No prompt was looked up."
    shares = (
        f"{device / total:.0%} were found on the device, {host / total:.0%} on the host or a tier below it"
    )
    medians = [
        f"{statistics.median(milliseconds for _, milliseconds in samples):,.0f} ms ({found})"
        for found, samples in first_token_ms(account).items()
        if samples
    ]
    return f"Of {_shown(total)} prompt tokens {shares}. First token, median by what was found: {', '.join(medians) or '-'}."


def _shown(number: int) -> str:
    return f"{number:,}" if number < LARGEST else f"over {LARGEST:.0e}"


def _transfers(account: Account, tier: Tier) -> Figure:
    copies = [(at, one) for at, one in account.samples[events.RankReported] if one.tier is tier]
    sizes = {
        way.value: [
            (at, min(one.copied_bytes, LARGEST) / 2**20) for at, one in copies if one.direction is way
        ]
        for way in Direction
    }
    text = "Stores copy to it, loads from it, all ranks together."
    return _columns(f"Transfers with the {tier.value} tier", text, "MiB", sizes, account.seconds)


def _slots(account: Account) -> Figure:
    samples = _thinned(account.slots)

    def plot(axes: Axes) -> None:
        states = ("ready", "filling")
        rows = [[min(slots.get(state, 0), LARGEST) for _, slots in samples] for state in states]
        colours = [COLOURS[state] for state in states]
        axes.stackplot([at for at, _ in samples], *rows, labels=states, colors=colours, step="post")

    text = "Blocks of host memory, counted from the first line on by the events of stores and evictions."
    units = ("seconds", "slots")
    return _figure("Host slots, by state", text, units, plot if samples else None, until=account.seconds)


def _dots(title: str, text: str, series: Series, until: float) -> Figure:
    """Draw times in milliseconds as dots, and the median of each series as a line."""

    def plot(axes: Axes) -> None:
        for key, samples in series.items():
            if samples:
                ordered = sorted(min(number, LARGEST) for _, number in samples)
                median, p99 = median_and_p99(ordered)
                label = f"{key}: {len(ordered):,}, p50 {median:,.1f} ms, p99 {p99:,.1f} ms"
                dots = [(at, min(number, LARGEST)) for at, number in _thinned(samples)]
                colour = COLOURS.get(key, _NO_COLOUR)
                axes.plot(*zip(*dots, strict=True), ".", color=colour, label=label)
                axes.axhline(median, color=colour)
        axes.set_ylim(bottom=0)

    units = ("seconds", "milliseconds")
    return _figure(title, text, units, plot if any(series.values()) else None, until=until)


def _columns(title: str, text: str, unit: str, series: Series, until: float) -> Figure:
    """Draw the sums of all series, in equal periods of time, as stacked columns."""
    shown = {key: samples for key, samples in series.items() if any(number for _, number in samples)}

    def plot(axes: Axes) -> None:
        axes.hist(
            [[at for at, _ in samples] for samples in shown.values()],
            _COLUMNS,
            range=(0, until or 1),
            weights=[[min(number, LARGEST) for _, number in samples] for samples in shown.values()],
            stacked=True,
            color=[COLOURS.get(key, _NO_COLOUR) for key in shown],
            label=list(shown),
        )

    return _figure(title, text, ("seconds", unit), plot if shown else None, until=until)


def _bars(title: str, text: str, numbers: Mapping[str, int]) -> Figure:
    def plot(axes: Axes) -> None:
        lengths = [min(number, LARGEST) for number in numbers.values()]
        bars = axes.barh(list(numbers), lengths, color=COLOURS["miss"])
        axes.bar_label(bars, fmt="{:,.0f}", padding=3)
        axes.invert_yaxis()

    return _figure(title, text, ("", ""), plot if numbers else None, 0.8 + 0.3 * len(numbers))


def _figure(
    title: str,
    text: str,
    units: tuple[str, str],
    plot: Callable[[Axes], None] | None,
    height: float = 3.0,
    *,
    until: float | None = None,
) -> Figure:
    """Return a figure with the drawing that `plot` makes, or without a drawing if `plot` is None.

    Args:
        title: the heading.
        text: the caption.
        units: the units of the two axes.
        plot: draws into the axes.
        height: the drawing's height in inches.
        until: the end of the time axis, which begins at 0; None if the figure has no time axis.
    """
    if plot is None:
        return Figure(title, text, "")
    import matplotlib as mpl
    from matplotlib import figure

    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        picture = figure.Figure(figsize=(8, height), layout="constrained")
        axes = picture.add_subplot()
        axes.set_xlabel(units[0])
        axes.set_ylabel(units[1])
        axes.grid(alpha=0.3)
        plot(axes)
        if until:
            axes.set_xlim(0, until)
        if axes.get_legend_handles_labels()[1]:
            picture.legend(loc="outside upper left", ncols=2, frameon=False)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        picture.savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = file.getvalue()
    # A page contains several drawings, so each id gets a prefix to be unique on the page.
    prefix = re.sub(r"\W", "", title)
    own = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg[svg.index("<svg") :])
    return Figure(title, text, own)


def _thinned(samples: Sequence[AnySample]) -> Sequence[AnySample]:
    """Return every n-th sample, with the smallest n that gives no more than `_MOST_DOTS` samples."""
    return samples[:: -(-len(samples) // _MOST_DOTS) or 1]
