"""What `top` shows, made of rich's tables and text. Pure, so that it is the same on a terminal, in a pipe and in a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvoffload.cli.exits import printable
from kvoffload.cli.top.reading import Change, History
from kvoffload.cli.top.server import State
from kvoffload.cli.top.summary import Copies, Flow, Percentiles, Summary, summarize
from kvoffload.cli.top.words import (
    bar,
    count,
    duration,
    per_second,
    seconds,
    share,
    size,
    sparkline,
)
from kvoffload.model.causes import Found
from kvoffload.telemetry.break_even import NEVER_TOKENS
from kvoffload.telemetry.labels import Answer

_HEADING, _ALARM, _QUIET = "bold", "bold red", "dim"
_ROWS = 8  # of a list of causes or outcomes
_SPARK = 16
_FAILED = ("failed", "corrupt", "abandoned")
_TROUBLED = ("failing", "closed")
_TWO_COLUMNS = 130  # characters from which on sections stand side by side


@dataclass(frozen=True, slots=True)
class _Room:
    """Characters that parts of a section may take."""

    label: int
    number: int
    bar: int
    spark: int


_NARROW, _WIDE = _Room(22, 8, 9, 8), _Room(26, 10, 24, _SPARK)
_WIDE_FROM = 76


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine of one server, with its numbers."""

    url: str
    history: History
    summary: Summary

    @property
    def name(self) -> str:
        where = printable(self.url.removeprefix("http://").removesuffix("/metrics"))
        return f"engine {self.summary.engine}, {where}" if self.summary.engine else where


def engines_of(states: Iterable[State], unix_now: float) -> list[Engine]:
    """Return every engine that has answered."""
    return [
        Engine(state.url, history, summarize(name, history, unix_now))
        for state in states
        for name, history in state.engines.items()
    ]


def show(states: Sequence[State], engines: Sequence[Engine], chosen: int, width: int) -> RenderableType:
    """Return everything that is known: problems, a row an engine, and the chosen engine's numbers."""
    parts: list[RenderableType] = [*_problems(states)]
    if not engines:
        return Group(*parts, *([] if parts else [Text("waiting for the first answer")]))
    if len(engines) > 1:
        parts += [_engines(engines, chosen, width), Text()]
    return Group(*parts, details(engines[chosen], width))


def details(engine: Engine, width: int) -> RenderableType:
    """Return one engine's numbers, in two columns where there is room."""
    summary, changes = engine.summary, engine.history.changes()
    room = _WIDE if width >= _WIDE_FROM else _NARROW
    left = (
        _tokens(summary, changes, room),
        _benefit(summary, room),
        _first_tokens(summary, room),
        _memory(summary, room),
    )
    right = (
        _copies(summary.copies, changes, room, "copies", "host"),
        *_disk(summary, changes, room),
        *_store(summary, changes, room),
        _misses(summary, room),
        _by_label("offered blocks, by outcome", summary.stores, room),
        _by_label("loaded blocks, by outcome", summary.loads, room),
    )
    head = Group(*_health(engine.name, summary), Text())
    if width < _TWO_COLUMNS:
        return Group(head, *_spaced((*left, *right)))
    grid = Table.grid(padding=(0, 4))
    grid.add_row(Group(*_spaced(left)), Group(*_spaced(right)))
    return Group(head, grid)


def _problems(states: Iterable[State]) -> list[Text]:
    lines = []
    for state in states:
        if state.problem:
            old = "; its numbers are old" if state.engines else ""
            text = f"{printable(state.url)}: {printable(state.problem)}; trying again{old}"
            lines.append(Text(text, _ALARM))
    return lines


# -- a row an engine ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    width: int
    cell: Callable[[Engine], str | Text]


def _hit_ratios(engine: Engine) -> list[float | None]:
    name = "kvoffload_lookup_tokens_total"
    found = ((change.added(name, "hit"), change.total_added(name)) for change in engine.history.changes())
    return [hits / tokens if tokens > 0 else None for hits, tokens in found]


def _on_off(engine: Engine) -> Text:
    return Text("OFF", _ALARM) if engine.summary.off_because else Text("on")


_COLUMNS = (  # the most important first: those that do not fit are left out
    _Column("engine", 26, lambda engine: engine.name),
    _Column("offload", 8, _on_off),
    _Column("hits", 8, lambda engine: share(engine.summary.hit_ratio_lately)),
    _Column("net s/s", 8, lambda engine: seconds(engine.summary.net_s.per_s)),
    _Column("ttft p99", 9, lambda engine: duration(engine.summary.first_token["host"].p99_s)),
    _Column("memory used", 12, lambda engine: size(engine.summary.host_bytes["used"])),
    _Column("load B/s", 11, lambda engine: size(engine.summary.copies["load"].bytes.per_s)),
    _Column("store B/s", 11, lambda engine: size(engine.summary.copies["store"].bytes.per_s)),
    _Column("hit ratio", _SPARK, lambda engine: sparkline(_hit_ratios(engine), _SPARK, 1.0)),
)


def _engines(engines: Sequence[Engine], chosen: int, width: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style=_HEADING)
    left = width - 2
    table.add_column("", min_width=1, no_wrap=True)
    shown: list[_Column] = []
    for column in _COLUMNS:
        left -= column.width + 1
        if left < 0 and shown:
            break
        shown.append(column)
        table.add_column(
            column.heading, no_wrap=True, overflow="ellipsis", min_width=min(column.width, width - 4)
        )
    for place, engine in enumerate(engines):
        mark = ">" if place == chosen else " "
        table.add_row(
            mark, *(column.cell(engine) for column in shown), style=_HEADING if place == chosen else None
        )
    return table


# -- one engine's sections ------------------------------------------------------------------------------------------


def _spaced(tables: Iterable[RenderableType]) -> list[RenderableType]:
    return [part for table in tables for part in (table, Text())]


def _section(room: _Room, *headings: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style=_HEADING, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, min_width=room.number)
    table.columns[0].justify, table.columns[0].min_width = "left", room.label
    return table


def _health(name: str, summary: Summary) -> list[Text]:
    off = summary.off_because
    state = (
        Text(f"offloading is OFF: {', '.join(off)}", _ALARM) if off else Text("offloading is on", _HEADING)
    )
    info = summary.info
    ran = (
        f"kvoffload {info['version']}, {info['engine_name']} {info['engine_version']}, {info['store_policy']}"
        if info
        else ""
    )
    restarts = f"; restarted {summary.restarts} times" if summary.restarts else ""
    pin = duration(summary.oldest_pin_s) if summary.oldest_pin_s is not None else "none"
    lines = [
        Text(f"{name}  {ran}{restarts}", _QUIET),
        state,
        Text(
            f"  hooks take {share(summary.hooks_share)} of the engine's time; oldest pin {pin}; {count(summary.resets)} resets"
        ),
    ]
    if summary.troubles:
        found = ", ".join(f"{count(number)} {words}" for words, number in summary.troubles.items())
        lines.append(Text(f"  {found}", _ALARM))
    return lines


def _tokens(summary: Summary, changes: Sequence[Change], room: _Room) -> Table:
    table = _section(room, "prompt tokens looked up", "since start", "per second", "trend")
    name = "kvoffload_lookup_tokens_total"
    for words, label, flow in (
        ("found on the host", "hit", summary.found_tokens),
        ("missed", "miss", summary.missed_tokens),
    ):
        trend = sparkline([change.rate(name, label) for change in changes], room.spark)
        table.add_row(f"  {words}", count(flow.total), per_second(flow.per_s), trend)
    table.add_row("  hit ratio", share(summary.hit_ratio), share(summary.hit_ratio_lately))
    return table


def _benefit(summary: Summary, room: _Room) -> Table:
    """Seconds, all requests together; a second per second is a whole engine's time."""
    table = _section(room, "net benefit, in seconds", "since start", "per second")
    for words, flow in (
        ("prefilling saved", summary.saved_s),
        ("waited for loads", summary.waited_s),
        ("interference of copies", summary.interference_s),
    ):
        table.add_row(f"  {words}", seconds(flow.total), seconds(flow.per_s))
    style = _ALARM if summary.net_is_negative else None
    table.add_row("  net", seconds(summary.net_s.total), seconds(summary.net_s.per_s), style=style)
    table.add_row(f"  {_break_even(summary.break_even_tokens)}")
    return table


def _break_even(tokens: int) -> str:
    if not tokens:
        return "break-even not measured yet"
    return "no hit pays" if tokens >= NEVER_TOKENS else f"hits pay from {count(tokens)} tokens on"


def _first_tokens(summary: Summary, room: _Room) -> Table:
    table = _section(room, "first token, by what was found", "p50", "p99")
    for found, times in summary.first_token.items():
        if times.p50_s is None and found in (Found.DISK.value, Found.REMOTE.value):
            continue  # most engines have no such tier
        table.add_row(f"  {found}", *_times(times))
    return table


def _memory(summary: Summary, room: _Room) -> Table:
    wanted, reserved, used = (summary.host_bytes[part] for part in ("wanted", "reserved", "used"))
    table = _section(room, "host memory", size(reserved), f"{count(summary.capacity_slots)} blocks")
    if reserved < wanted:
        pinned = f"{100 * reserved / wanted:.0f} % of {size(wanted)} pinned"
        table.add_row(f"  {pinned}", "", "", style=_ALARM)
    table.add_row("  used", size(used), bar(used, reserved, room.bar))
    for state, slots in summary.slots.items():
        if slots or state in ("ready", "empty"):
            style = _ALARM if state == "quarantined" else None
            table.add_row(
                f"  {state}", count(slots), bar(slots, summary.capacity_slots, room.bar), style=style
            )
    table.add_row("  evicted", count(summary.evicted_blocks.total), _rate(summary.evicted_blocks))
    return table


def _disk(summary: Summary, changes: Sequence[Change], room: _Room) -> list[Table]:
    disk = summary.disk
    if disk is None:
        return []
    table = _section(
        room,
        f"disk: {disk.state}",
        size(disk.capacity_slots * disk.slot_bytes),
        f"{count(disk.capacity_slots)} blocks",
    )
    if disk.state in _TROUBLED:
        table.columns[0].header_style = _ALARM
    for state, slots in disk.slots.items():
        if slots or state in ("ready", "empty"):
            style = _ALARM if state == "quarantined" else None
            table.add_row(f"  {state}", count(slots), bar(slots, disk.capacity_slots, room.bar), style=style)
    table.add_row("  evicted", count(disk.evicted_blocks.total), _rate(disk.evicted_blocks))
    table.add_row("  tokens fetched", count(disk.fetched_tokens.total), _rate(disk.fetched_tokens))
    _add_failures(table, disk.blocks)
    return [table, _copies(disk.copies, changes, room, "copies with the disk", "disk")]


def _store(summary: Summary, changes: Sequence[Change], room: _Room) -> list[Table]:
    store = summary.store
    if store is None:
        return []
    table = _section(room, f"shared store: {store.state}", "blocks", "per second")
    if store.state in _TROUBLED:
        table.columns[0].header_style = _ALARM
    for answer, flow in store.asked_blocks.items():
        is_wrong = answer == Answer.NONE.value and flow.total
        table.add_row(
            f"  asked: {answer}", count(flow.total), _rate(flow), style=_ALARM if is_wrong else None
        )
    for name in ("load done", "store done"):
        if (done := store.blocks.get(name)) is not None:
            table.add_row(
                "  fetched" if name.startswith("load") else "  written", count(done.total), _rate(done)
            )
    _add_failures(table, store.blocks)
    table.add_row("  tokens fetched", count(store.fetched_tokens.total), _rate(store.fetched_tokens))
    table.add_row("  worth, in seconds", seconds(store.saved_s), "")
    table.add_row("  time to ask, p50, p99", *_times(store.ask))
    return [table, _copies(store.copies, changes, room, "copies with the store", "remote")]


def _add_failures(table: Table, blocks: Mapping[str, Flow]) -> None:
    for name, flow in blocks.items():
        if name.endswith(_FAILED):
            table.add_row(f"  {name}", count(flow.total), _rate(flow), style=_ALARM)


def _copies(
    flows: Mapping[str, Copies], changes: Sequence[Change], room: _Room, title: str, tier: str
) -> Table:
    table = _section(room, title, "bytes", "per second", "p50", "p99", "queue p99", "open")
    for way, copies in flows.items():
        table.add_row(
            f"  {way}",
            size(copies.bytes.total),
            size(copies.bytes.per_s),
            *_times(copies.copy),
            duration(copies.queue.p99_s),
            count(copies.open_jobs),
        )
        rates = [change.rate("kvoffload_transfer_bytes_total", tier, way) for change in changes]
        table.add_row("", "", Text(sparkline(rates, room.spark // 2 + 2)))
    for column in table.columns:
        column.min_width = 6
    return table


def _misses(summary: Summary, room: _Room) -> Table:
    table = _by_label("lookups that missed, by cause", summary.missed_lookups, room)
    behind = summary.behind_miss_blocks
    table.add_row("  blocks behind those", count(behind.total), _rate(behind), style=_QUIET)
    return table


def _by_label(title: str, flows: Mapping[str, Flow], room: _Room) -> Table:
    """Return the largest ones and the sum of the others, so that the total can be checked."""
    total = sum(flow.total for flow in flows.values())
    table = _section(room, title, count(total), "per second")
    for place, (name, flow) in enumerate(flows.items()):
        if place < _ROWS:
            table.add_row(
                f"  {name}", count(flow.total), _rate(flow), style=_ALARM if name in _FAILED else None
            )
    rest = list(flows.values())[_ROWS:]
    if rest:
        table.add_row("  others", count(sum(flow.total for flow in rest)), "")
    return table


def _rate(flow: Flow) -> str:
    return per_second(flow.per_s)


def _times(times: Percentiles) -> tuple[str, str]:
    return duration(times.p50_s), duration(times.p99_s)
