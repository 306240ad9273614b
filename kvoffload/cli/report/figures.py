"""An account's plots, each with what it shows in words and with its numbers.

Shapes are SVG without text: what a page writes beside them stays readable at every width. The drawing area is 1000 wide and
300 high and is stretched to its place; lines and dots keep their thickness (`vector-effect`). Every number is formatted here,
every name is a class of the page's style: nothing of the shapes needs escaping.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvoffload.cli.report.account import Account, by_label
from kvoffload.model.transfer import Direction

WIDTH, HEIGHT = 1000.0, 300.0
_COLUMNS = 48
_BAR = WIDTH / _COLUMNS
_MIB = 2**20

COLOURS: dict[str, str] = {
    # where tokens of prompts came from
    "host": "#5aa64b", "device": "#4a86d0", "hit": "#5aa64b", "miss": "#9a9a9a",
    # the host's slots, from the bottom; the rest is empty
    "pinned": "#5aa64b", "ready": "#4a86d0", "filling": "#7fb3ea", "draining": "#a06bc9", "quarantined": "#d44a3a",
    # ways of copies
    "load": "#5aa64b", "store": "#4a86d0",
}  # fmt: skip
"""One colour a thing, the same as on the dashboards; a test compares them."""
_TIERS = {"device": "device", "host": "host", "miss": "not found"}
_STATES = ("pinned", "ready", "filling", "draining", "quarantined")

Row = tuple[str, ...]


class Tick(NamedTuple):
    """A mark of an axis: where, as a share of its length, and what is written there."""

    share: float
    label: str


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers under their heads, as they are written."""

    head: Row
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot and all that is written around it. Nothing is escaped yet but `shapes`, which is SVG.

    Args:
        name: its id in the page.
        title: what it is.
        text: how to read it.
        summary: what is to be seen, for whoever does not see it.
        shapes: of the drawing area; empty where there is nothing to draw.
        table: the numbers.
        unit: of the vertical axis.
        ticks: of the vertical axis.
        times: of the horizontal axis, from left to right.
        legend: colours and what they mean.
    """

    name: str
    title: str
    text: str
    summary: str
    shapes: str
    table: Table
    unit: str = ""
    ticks: Sequence[Tick] = ()
    times: Sequence[str] = ()
    legend: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bars:
    """A list of names with a bar each, by number."""

    name: str
    title: str
    text: str
    numbers: Mapping[str, int]
    unit: str


@dataclass(frozen=True, slots=True)
class Sample:
    """The time to first token of one turn: with offloading or without, and the first of its conversation or later."""

    is_with: bool
    is_first: bool
    seconds: float


def hit_ratio(account: Account) -> Figure:
    """Tokens of prompts by where they came from, over time."""
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
    """Every turn's time to first token, with and without offloading."""
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
                shapes += (_path(f"dot c-{key}", f"{x * WIDTH:.1f} {_y(y):.1f} h0") for x, y in places)
                shapes.append(_level(key, middle / top, left - 0.015, right + 0.015))
                rows.append((f"{turns}, {label}", f"{len(times)}", f"{middle:,.1f}", f"{max(times):,.1f}"))
    medians = "; ".join(f"{row[0]} offloading {row[2]} ms" for row in rows)
    return Figure(
        "first-tokens",
        "Time to first token, with and without",
        "A dot is a turn, in the order in which they were served; a line is the median. Left: first turns, which find "
        "nothing. Right: returning turns.",
        f"Medians: {medians}." if medians else "Nothing was served.",
        "".join(shapes) if rows else "",
        Table(("turns", "number", "median, ms", "longest, ms"), tuple(rows)),
        "milliseconds",
        ticks,
        ("first turns", "returning turns"),
        {"miss": "without offloading", "hit": "with offloading"},
    )


def occupancy(account: Account, note: str) -> Figure:
    """The host's slots by state, over time; `note` says how well they are known."""
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
        f"What the host's memory holds; above it is empty. {note}",
        f"At most {max(used):,}{known} slots were in use, {used[-1]:,} at the end.",
        columns,
        {row[0]: row[0] for row in rows},
        Table(("state", "most", "at the end"), rows),
        "slots",
    )


def transfers(account: Account) -> Figure:
    """Bytes each way, over time."""
    columns: list[dict[str, float]] = [{} for _ in range(_COLUMNS)]
    width = (account.seconds or 1.0) / _COLUMNS
    for copy in account.copies:
        column, key = columns[_column(account, copy.time)], copy.direction.value
        column[key] = column.get(key, 0.0) + copy.copied_bytes / _MIB / width
    rows = []
    for way in Direction:
        times = [1000 * one.copy_s for one in account.copies if one.direction is way]
        size, longest = f"{account.copied_bytes(way):,}", max(times, default=0.0)
        middle = statistics.median(times or [0.0])
        rows.append((f"{way.value}s", f"{len(times):,}", size, f"{middle:,.2f}", f"{longest:,.2f}"))
    sizes = " and ".join(f"{row[2]} bytes in {row[1]} {row[0]}" for row in rows)
    return _over_time(
        account,
        "transfers",
        "Transfers",
        "Loads go from the host to the device, stores from the device to the host.",
        f"Copied were {sizes}.",
        columns,
        {"load": "loads", "store": "stores"},
        Table(("way", "copies", "bytes", "median, ms", "longest, ms"), tuple(rows)),
        "MiB per second",
    )


def misses(account: Account) -> Bars:
    """Blocks that were not found, by cause."""
    return Bars(
        "misses",
        "Misses by cause",
        "Looked-up blocks that were not found; each has exactly one cause.",
        by_label(account.counted, "kvoffload_miss_blocks_total"),
        "blocks",
    )


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
                box = f'x="{(place + 0.08) * _BAR:.1f}" y="{_y(floor + share):.1f}" width="{0.84 * _BAR:.1f}"'
                shapes.append(f'<rect class="c-{key}" {box} height="{max(share * HEIGHT, 0.5):.1f}"/>')
            floor += share
    form = "{:.0f} s" if account.seconds >= 20 else "{:.1f} s" if account.seconds >= 1 else "{:.3f} s"
    times = [form.format(account.seconds * place / 4) for place in range(5)]
    drawn = "".join(shapes) if most else ""
    return Figure(name, title, text, summary, drawn, table, unit, ticks, times, legend)


def _axis(top: float) -> tuple[float, list[Tick]]:
    """Return a round number that is not below `top`, and the marks from 0 to it; for `top` 0, as for 1."""
    least = (top if top > 0 else 1.0) / 4
    size = 10.0 ** math.floor(math.log10(least))
    step = next(size * one for one in (1, 2, 2.5, 5, 10) if size * one >= least * (1 - 1e-9))
    return 4 * step, [Tick(number / 4, f"{number * step:,g}") for number in range(5)]


def _grid(ticks: Iterable[Tick]) -> str:
    return "".join(_path("line grid", f"0 {_y(share):.1f} H{WIDTH:g}") for share, _ in ticks)


def _level(key: str, share: float, left: float, right: float) -> str:
    return _path(f"line level c-{key}", f"{left * WIDTH:.1f} {_y(share):.1f} H{right * WIDTH:.1f}")


def _path(name: str, way: str) -> str:
    return f'<path class="{name}" d="M{way}"/>'


def _y(share: float) -> float:
    return HEIGHT * (1 - min(max(share, 0.0), 1.0))


def _column(account: Account, time: float) -> int:
    share = (time - account.begun) / (account.seconds or 1.0)
    return min(max(int(share * _COLUMNS), 0), _COLUMNS - 1)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
