"""An account's plots, each with what it shows in words and with its numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvoffload.cli.report import plots
from kvoffload.cli.report.account import Account
from kvoffload.cli.report.plots import Tick
from kvoffload.model.transfer import Direction
from kvoffload.telemetry.labels import SlotLabel

_COLUMNS = 48
_MIB = 2**20
_STACK = ("pinned", "ready", "filling", "draining", "quarantined")  # from the bottom; the rest is empty

_TIERS = ("device", "host", "miss")
_ROOMY = 4  # of a host with so many times the room that is used, what is used would be a line on the floor

Row = tuple[str, ...]


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
    bins = [[0, 0, 0] for _ in range(_COLUMNS)]
    for lookup in account.lookups:
        one = bins[_column(account, lookup.time)]
        for place, tokens in enumerate(lookup[1:]):
            one[place] += int(tokens)
    columns = [
        dict(zip(_TIERS, (tokens / sum(one) for tokens in one), strict=True)) if sum(one) else {}
        for one in bins
    ]
    device, host, missed = (sum(one[place] for one in bins) for place in range(3))
    total = device + host + missed
    rows = [
        (label, f"{tokens:,}", _percent(tokens, total))
        for label, tokens in (("device", device), ("host", host), ("not found", missed))
    ]
    ticks = [Tick(share / 4, f"{share * 25} %") for share in range(5)]
    return Figure(
        "hits",
        "Hit ratio by tier",
        "Tokens of looked-up prompts by where they were found. A gap: no lookup then.",
        f"Of {total:,} prompt tokens {_percent(device, total)} were found on the device and "
        f"{_percent(host, total)} on the host.",
        plots.grid(tick.share for tick in ticks) + plots.stacked_bars(columns, _TIERS) if total else "",
        Table(("found", "tokens", "share"), (*rows, ("all prompts", f"{total:,}", _percent(total, total)))),
        "of prompt tokens",
        ticks,
        _times(account),
        {"device": "device", "host": "host", "miss": "not found"},
    )


def first_tokens(samples: Sequence[Sample]) -> Figure:
    """Every turn's time to first token, with and without offloading."""
    top, ticks = plots.axis(1000 * max((one.seconds for one in samples), default=0.0))
    shapes, rows = [plots.grid(tick.share for tick in ticks)], []
    for is_with, key, label in ((False, "miss", "without"), (True, "hit", "with")):
        for is_first, turns in ((True, "first turns"), (False, "returning turns")):
            times = [1000 * s.seconds for s in samples if (s.is_with, s.is_first) == (is_with, is_first)]
            if times:
                left, right = (0.02, 0.2) if is_first else (0.25, 0.98)
                middle = statistics.median(times)
                shapes.append(plots.dots(key, _spread(times, left, right, top)))
                shapes.append(plots.level(key, left - 0.015, right + 0.015, middle / top))
                rows.append((f"{turns}, {label}", f"{len(times)}", f"{middle:,.1f}", f"{max(times):,.1f}"))
    rows.sort(key=lambda row: row[0])
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
    columns, samples = _slots(account), [_used(sample.slots) for sample in account.occupancy]
    used = [sum(sample.values()) for sample in samples]
    most, capacity = max(used, default=0), account.capacity
    is_limit_drawn = capacity is not None and 0 < capacity <= _ROOMY * most
    top, ticks = plots.axis(capacity if is_limit_drawn and capacity else most, "{:,.0f}")
    shares = [{key: number / top for key, number in column.items()} for column in columns]
    shapes = plots.grid(tick.share for tick in ticks) + plots.stacked_areas(shares, _STACK)
    if is_limit_drawn and capacity:
        shapes += plots.level("capacity", 0, 1, capacity / top)
    table = Table(("state", "most", "at the end"), tuple(_states(samples)))
    room = f"; above it is empty{', up to the dashed line' if is_limit_drawn else ''}"
    known = "" if capacity is None else f" of {capacity:,}"
    return Figure(
        "occupancy",
        "Host slots by state",
        f"What the host's memory holds{room}. {note}",
        f"At most {most:,}{known} slots were in use, {used[-1] if used else 0:,} at the end.",
        shapes if most else "",
        table,
        "slots",
        ticks,
        _times(account),
        {row[0]: row[0] for row in table.rows},
    )


def transfers(account: Account) -> Figure:
    """Bytes each way, over time."""
    ways = {way: [0.0] * _COLUMNS for way in (Direction.LOAD, Direction.STORE)}
    width = (account.seconds or 1.0) / _COLUMNS
    for copy in account.copies:
        ways[copy.direction][_column(account, copy.time)] += copy.copied_bytes / _MIB / width
    top, marks = plots.axis(max((max(rates) for rates in ways.values()), default=0.0))
    ticks = [Tick(0.5 + mark.share / 2, mark.label) for mark in marks]
    ticks += [Tick(0.5 - mark.share / 2, mark.label) for mark in marks[1:]]
    up, down = ([rate / top for rate in rates] for rates in ways.values())
    loaded, stored = (account.copied_bytes(way) for way in ways)
    return Figure(
        "transfers",
        "Transfers",
        "Up: loads, host to device. Down: stores, device to host.",
        f"{loaded:,} bytes were loaded and {stored:,} stored, in {len(account.copies):,} copies.",
        plots.grid(tick.share for tick in ticks) + plots.mirrored_bars(up, down, "load", "store")
        if account.copies
        else "",
        Table(("way", "copies", "bytes", "median, ms", "longest, ms"), tuple(_ways(account))),
        "MiB per second",
        ticks,
        _times(account),
        {"load": "loads", "store": "stores"},
    )


def misses(account: Account) -> Bars:
    """Blocks that were not found, by cause."""
    return Bars(
        "misses",
        "Misses by cause",
        "Looked-up blocks that were not found; each has exactly one cause.",
        dict(sorted(account.misses.items(), key=lambda item: -item[1])),
        "blocks",
    )


def _slots(account: Account) -> list[dict[str, int]]:
    """The sample of each column in which most is neither empty nor ready, for that passes; else its last one."""
    of_column: list[list[dict[str, int]]] = [[] for _ in range(_COLUMNS)]
    for sample in account.occupancy:
        of_column[_column(account, sample.time)].append(_used(sample.slots))
    shown: list[dict[str, int]] = []
    last: dict[str, int] = {}
    for samples in of_column:
        shown.append(max(reversed(samples), key=_passing, default=last))
        last = samples[-1] if samples else last
    return shown


def _states(samples: Sequence[Mapping[str, int]]) -> Iterator[Row]:
    for key in _STACK:
        if most := max((sample.get(key, 0) for sample in samples), default=0):
            yield key, f"{most:,}", f"{samples[-1].get(key, 0):,}"


def _used(slots: Mapping[str, int]) -> dict[str, int]:
    return {key: number for key, number in slots.items() if key in _STACK}


def _passing(used: Mapping[str, int]) -> int:
    return sum(used.values()) - used.get(SlotLabel.READY.value, 0)


def _ways(account: Account) -> Iterator[Row]:
    for way in (Direction.LOAD, Direction.STORE):
        copies = [copy for copy in account.copies if copy.direction is way]
        times = [1000 * copy.copy_s for copy in copies] or [0.0]
        yield (
            f"{way.value}s",
            f"{len(copies):,}",
            f"{account.copied_bytes(way):,}",
            f"{statistics.median(times):,.2f}",
            f"{max(times):,.2f}",
        )


def _spread(times: Sequence[float], left: float, right: float, top: float) -> Iterator[tuple[float, float]]:
    for place, time in enumerate(times):
        yield left + (right - left) * (place + 0.5) / len(times), time / top


def _column(account: Account, time: float) -> int:
    share = (time - account.begun) / (account.seconds or 1.0)
    return min(max(int(share * _COLUMNS), 0), _COLUMNS - 1)


def _times(account: Account) -> list[str]:
    form = "{:.0f} s" if account.seconds >= 20 else "{:.1f} s" if account.seconds >= 1 else "{:.3f} s"
    return [form.format(account.seconds * place / 4) for place in range(5)]


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
