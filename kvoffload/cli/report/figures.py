"""The plots of an account, each with a text and its numbers.

Shapes are SVG without visible text: the page's own text beside them stays readable at every width. The drawing area is 1000
wide and 300 high and is stretched to its place; lines and dots keep their thickness (`vector-effect`). All numbers and names
in the shapes are made here, so nothing of them needs escaping.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvoffload.cli.report.account import Account, FirstToken, by_label
from kvoffload.model.causes import Found, MissCause
from kvoffload.model.transfer import Direction, Tier

WIDTH, HEIGHT = 1000.0, 300.0
_COLUMNS = 48
_BAR = WIDTH / _COLUMNS
_MIB = 2**20

COLOURS: dict[str, str] = {
    # where tokens of prompts came from
    "host": "#5aa64b", "disk": "#2f8f8f", "remote": "#1f6f8f", "device": "#4a86d0", "nothing": "#9a9a9a", "hit": "#5aa64b", "miss": "#9a9a9a",
    # the host's slots, from the bottom; the rest is empty
    "pinned": "#5aa64b", "ready": "#4a86d0", "filling": "#7fb3ea", "draining": "#a06bc9", "quarantined": "#d44a3a",
    # directions of copies
    "load": "#5aa64b", "store": "#4a86d0",
}  # fmt: skip
"""The dashboards' colours; a test compares them."""
_TIERS = {"device": "device", "host": "host", "miss": "not found"}
_FOUND = {
    Found.DISK: "on the disk",
    Found.REMOTE: "in the shared store",
    Found.HOST: "on the host",
    Found.DEVICE: "on the device only",
    Found.NOTHING: "nothing",
}
LOWER_TIERS = {Tier.DISK: "disk", Tier.REMOTE: "shared store"}
_MOST_DOTS = 2000  # of one colour
_CLOCK_STEPS = (15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_STATES = ("pinned", "ready", "filling", "draining", "quarantined")

Row = tuple[str, ...]


class Tick(NamedTuple):
    """A mark of an axis: its place, as a share of the axis' length, and its label."""

    share: float
    label: str


@dataclass(frozen=True, slots=True)
class Table:
    """Formatted numbers under their headings."""

    head: Row
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot and the text around it. Only `shapes`, which is SVG, needs no escaping.

    Args:
        name: its id in the page.
        title: its heading.
        text: how to read it.
        summary: what it shows, in words.
        shapes: of the drawing area; empty if there is nothing to draw.
        table: the numbers.
        unit: of the vertical axis.
        ticks: of the vertical axis.
        times: of the horizontal axis.
        legend: colours and their meanings.
    """

    name: str
    title: str
    text: str
    summary: str
    shapes: str
    table: Table
    unit: str = ""
    ticks: Sequence[Tick] = ()
    times: Sequence[Tick] = ()
    legend: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bars:
    """A list of names with a bar for each number."""

    name: str
    title: str
    text: str
    numbers: Mapping[str, int]
    unit: str


@dataclass(frozen=True, slots=True)
class Sample:
    """The time to first token of one turn: with offloading or without, first or later turn of its conversation."""

    is_with: bool
    is_first: bool
    seconds: float


def hit_ratio(account: Account) -> Figure:
    """Plot the tokens of prompts by where they were found, over time."""
    columns: list[dict[str, float]] = [dict.fromkeys(_TIERS, 0) for _ in range(_COLUMNS)]
    for lookup in account.lookups:
        for key, tokens in zip(_TIERS, lookup[1:], strict=True):
            columns[_column(account, lookup.time)][key] += tokens
    found = {key: int(sum(one[key] for one in columns)) for key in _TIERS}
    total = sum(found.values())
    rows = [(_TIERS[key], f"{tokens:,}", _percent(tokens, total)) for key, tokens in found.items()]
    return _over_time(
        account,
        "hits",
        "Hit ratio by tier",
        "Tokens of looked-up prompts by where they were found. A gap: no lookup then.",
        f"Of {total:,} prompt tokens {_percent(found['device'], total)} were found on the device and "
        f"{_percent(found['host'], total)} on the host.",
        [{key: 100 * value / (sum(one.values()) or 1) for key, value in one.items()} for one in columns],
        _TIERS,
        Table(("found", "tokens", "share"), (*rows, ("all prompts", f"{total:,}", _percent(total, total)))),
        "% of prompt tokens",
    )


def first_tokens(samples: Sequence[Sample]) -> Figure:
    """Plot every turn's time to first token, with and without offloading."""
    top, ticks = _axis(1000 * max((one.seconds for one in samples), default=0.0))
    shapes, rows = [_grid(ticks)], []
    for is_first, turns, left, right in (
        (True, "first turns", 0.02, 0.2),
        (False, "returning turns", 0.25, 0.98),
    ):
        for is_with, key, label in ((True, "hit", "with"), (False, "miss", "without")):
            times = [1000 * s.seconds for s in samples if (s.is_with, s.is_first) == (is_with, is_first)]
            if times:
                middle, step = statistics.median(times), (right - left) / len(times)
                places = ((left + step * (place + 0.5), time / top) for place, time in enumerate(times))
                shapes += (_dot(key, x, y, f"{y * top:,.1f} ms") for x, y in places)
                shapes.append(_level(key, middle / top, left - 0.015, right + 0.015))
                rows.append((f"{turns}, {label}", f"{len(times)}", f"{middle:,.1f}", f"{max(times):,.1f}"))
    medians = "; ".join(f"{row[0]} offloading {row[2]} ms" for row in rows)
    return Figure(
        "first-tokens",
        "Time to first token, with and without",
        "A dot is a turn, in the order of serving; a line is the median. Left: first turns, which find nothing. Right: "
        "returning turns.",
        f"Medians: {medians}." if medians else "Nothing was served.",
        "".join(shapes) if rows else "",
        Table(("turns", "number", "median, ms", "longest, ms"), tuple(rows)),
        "milliseconds",
        ticks,
        (Tick(0.11, "first turns"), Tick(0.62, "returning turns")),
        {"miss": "without offloading", "hit": "with offloading"},
    )


def occupancy(account: Account, note: str) -> Figure:
    """Plot the host's slots by state, over time; `note` says how they are known."""
    samples = [{key: one.slots.get(key, 0) for key in _STATES} for one in account.occupancy]
    columns: list[Mapping[str, float]] = [{}] * _COLUMNS
    for sample, one in zip(samples, account.occupancy, strict=True):
        place = _column(account, one.time)
        columns[place:] = [sample] * (_COLUMNS - place)  # it holds until the next
    used = [sum(sample.values()) for sample in samples] or [0]
    known = "" if account.capacity is None else f" of {account.capacity:,}"
    most = {key: max((sample[key] for sample in samples), default=0) for key in _STATES}
    rows = tuple((key, f"{number:,}", f"{samples[-1][key]:,}") for key, number in most.items() if number)
    return _over_time(
        account,
        "occupancy",
        "Host slots by state",
        f"Slots of host memory in use. {note}",
        f"At most {max(used):,}{known} slots were in use, {used[-1]:,} at the end.",
        columns,
        {row[0]: row[0] for row in rows},
        Table(("state", "most", "at the end"), rows),
        "slots",
    )


def transfers(account: Account) -> Figure:
    """Plot the bytes copied between device and host, over time."""
    text = "Loads go from the host to the device, stores from the device to the host."
    return _transfers(account, Tier.HOST, "transfers", "Transfers", text)


def lower_transfers(account: Account) -> list[Figure]:
    """Plot the bytes copied between the host and each tier below it that the journal has copies of, over time."""
    return [
        _transfers(
            account,
            tier,
            f"{tier.value}-transfers",
            f"Transfers with the {name}",
            f"Loads go from the {name} to the host, stores from the host to the {name}.",
        )
        for tier, name in LOWER_TIERS.items()
        if account.uses(tier)
    ]


def _transfers(account: Account, tier: Tier, name: str, title: str, text: str) -> Figure:
    columns: list[dict[str, float]] = [{} for _ in range(_COLUMNS)]
    width = (account.seconds or 1.0) / _COLUMNS
    for copy in (copy for copy in account.copies if copy.tier is tier):
        column, key = columns[_column(account, copy.time)], copy.direction.value
        column[key] = column.get(key, 0.0) + copy.copied_bytes / _MIB / width
    rows = []
    for way in Direction:
        times = [1000 * one.copy_s for one in account.copies_of(tier, way)]
        size, longest = f"{account.copied_bytes(way, tier):,}", max(times, default=0.0)
        middle = statistics.median(times or [0.0])
        rows.append((f"{way.value}s", f"{len(times):,}", size, f"{middle:,.2f}", f"{longest:,.2f}"))
    sizes = " and ".join(f"{row[2]} bytes in {row[1]} {row[0]}" for row in rows)
    return _over_time(
        account,
        name,
        title,
        text,
        f"{sizes} were copied.",
        columns,
        {"load": "loads", "store": "stores"},
        Table(("direction", "copies", "bytes", "median, ms", "longest, ms"), tuple(rows)),
        "MiB per second",
    )


def misses(account: Account) -> Bars:
    """List the causes that ended lookups."""
    causes = by_label(account.counted, "kvoffload_miss_blocks_total")
    behind = causes.pop(MissCause.BEHIND_MISS.value, 0)
    return Bars(
        "misses",
        "Lookups that missed, by cause",
        f"The cause of the first missing block of each lookup. {behind:,} more blocks lay behind one and could not be used.",
        causes,
        "lookups",
    )


def stores(account: Account) -> Bars:
    """List the outcomes of offered blocks."""
    return Bars(
        "stores",
        "Offered blocks by outcome",
        "Computed blocks that were offered to the host; each gets one outcome in the end.",
        by_label(account.counted, "kvoffload_store_blocks_total"),
        "blocks",
    )


def first_token_times(account: Account) -> Figure:
    """Plot the time to first token of every request, by what its lookup found."""
    top, ticks = _axis(1000 * max((one.seconds for one in account.first_tokens), default=0.0))
    shapes, rows, legend = [_grid(ticks)], [], {}
    for found in Found:
        key, label = found.value, _FOUND[found]
        chosen = [one for one in account.first_tokens if one.found is found]
        if chosen:
            times = sorted(1000 * one.seconds for one in chosen)
            for one in _thinned(chosen):
                place = (one.time - account.begun) / (account.seconds or 1.0)
                shapes.append(
                    _dot(key, place, 1000 * one.seconds / top, f"{label}: {1000 * one.seconds:,.1f} ms")
                )
            shapes.append(_level(key, statistics.median(times) / top, 0.0, 1.0))
            p99 = times[math.ceil(0.99 * len(times)) - 1]
            rows.append((label, f"{len(times):,}", f"{statistics.median(times):,.1f}", f"{p99:,.1f}"))
            legend[key] = label
    medians = "; ".join(f"{row[0]}: {row[2]} ms" for row in rows)
    return Figure(
        "first-tokens",
        "Time to first token, by what was found",
        "A dot is a request; a line is the median. Times are up to one step too long.",
        f"Medians: {medians}." if medians else "No first token was recorded.",
        "".join(shapes) if rows else "",
        Table(("found", "requests", "p50, ms", "p99, ms"), tuple(rows)),
        "milliseconds",
        ticks,
        _times(account),
        legend,
    )


def median_ms(account: Account, found: Found) -> str:
    """Return the median time to first token of requests that found this, as text."""
    times = [one.seconds for one in account.first_tokens if one.found is found]
    return f"{1000 * statistics.median(times):,.1f} ms" if times else "-"


# -- shapes -------------------------------------------------------------------------------------------------------


def _over_time(
    account: Account,
    name: str,
    title: str,
    text: str,
    summary: str,
    columns: Sequence[Mapping[str, float]],
    legend: Mapping[str, str],
    table: Table,
    unit: str,
) -> Figure:
    """Return a figure of bars, one a column, whose parts stand on each other in the legend's order."""
    most = max(sum(column.values()) for column in columns)
    top, ticks = _axis(most)
    shapes = [_grid(ticks)]
    for place, column in enumerate(columns):
        floor = 0.0
        for key in legend:
            if (share := column.get(key, 0.0) / top) > 0:
                hover = f"<title>{legend[key]}: {column[key]:,.1f} {unit}</title>"
                box = f'x="{(place + 0.08) * _BAR:.1f}" y="{_y(floor + share):.1f}" width="{0.84 * _BAR:.1f}"'
                shapes.append(
                    f'<rect class="c-{key}" {box} height="{max(share * HEIGHT, 0.5):.1f}">{hover}</rect>'
                )
            floor += share
    drawn = "".join(shapes) if most else ""
    return Figure(name, title, text, summary, drawn, table, unit, ticks, _times(account), legend)


def _times(account: Account) -> list[Tick]:
    """Return round times of the horizontal axis."""
    seconds = account.seconds or 1.0
    step = _round_up(seconds / 6, (1, 2, 5, 10)) if seconds < 60 else _clock_step(seconds / 6)
    return [Tick(number * step / seconds, _clock(number * step)) for number in range(int(seconds / step) + 1)]


def _clock_step(least: float) -> float:
    return next((step for step in _CLOCK_STEPS if step >= least), 86400 * math.ceil(least / 86400))


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:g} s"
    hours, minutes = divmod(seconds / 60, 60)
    return f"{minutes:g} min" if not hours else f"{hours:.0f} h {minutes:02.0f}"


def _thinned(samples: list[FirstToken]) -> list[FirstToken]:
    """Return evenly chosen samples, at most as many as a page can show."""
    return samples[:: -(-len(samples) // _MOST_DOTS)]


def _axis(top: float) -> tuple[float, list[Tick]]:
    """Return a round number that is not below `top`, and the marks from 0 to it; for `top` 0, as for 1."""
    step = _round_up((top if top > 0 else 1.0) / 4, (1, 2, 2.5, 5, 10))
    return 4 * step, [Tick(number / 4, f"{number * step:,g}") for number in range(5)]


def _round_up(least: float, steps: Sequence[float]) -> float:
    size = 10.0 ** math.floor(math.log10(least))
    return next(size * one for one in steps if size * one >= least * (1 - 1e-9))


def _grid(ticks: Iterable[Tick]) -> str:
    return "".join(_path("line grid", f"0 {_y(share):.1f} H{WIDTH:g}") for share, _ in ticks)


def _level(key: str, share: float, left: float, right: float) -> str:
    return _path(f"line level c-{key}", f"{left * WIDTH:.1f} {_y(share):.1f} H{right * WIDTH:.1f}")


def _dot(key: str, x: float, y: float, title: str) -> str:
    return f'<path class="dot c-{key}" d="M{x * WIDTH:.1f} {_y(y):.1f} h0"><title>{title}</title></path>'


def _path(name: str, way: str) -> str:
    return f'<path class="{name}" d="M{way}"/>'


def _y(share: float) -> float:
    return HEIGHT * (1 - min(max(share, 0.0), 1.0))


def _column(account: Account, time: float) -> int:
    share = (time - account.begun) / (account.seconds or 1.0)
    return min(max(int(share * _COLUMNS), 0), _COLUMNS - 1)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
