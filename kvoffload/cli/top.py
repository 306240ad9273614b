"""`kvoffload top`: shows a table of the given servers' engines, updated until Ctrl-C or printed once."""

from __future__ import annotations

import argparse
import http.client
import math
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from kvoffload.checks.options import seconds
from kvoffload.cli.exits import CommandError, Exit, say
from kvoffload.model.causes import Adoption
from kvoffload.model.config import size_text
from kvoffload.model.errors import KVOffloadError, printable
from kvoffload.model.wire import LOWER_TIERS, Tier
from kvoffload.telemetry.catalogue import CAPACITIES, HostBytes, TierSizes, TierState

if TYPE_CHECKING:
    from rich.console import RenderableType

HELP = "watch running servers by their metrics"

_LEAST_INTERVAL_S = 0.1
_TIMEOUT_S = 5.0  # the time limit of one scrape
_LARGEST_PAGE = 64 << 20
_MOST_ENGINES = 1000  # of one page; a table of so many rows takes half a second to lay out
_SCHEMA = 3  # the version of the JSON output; a new version removes a field or changes a field's meaning
_TOKENS = "kvoffload_lookup_tokens_total"
_MISSES = "kvoffload_miss_blocks_total"
SAVED = "kvoffload_prefill_seconds_saved_total"
_HOST_STATES = tuple(state.value for state in HostBytes)
_HEADINGS = (
    "engine, offloading, hit rate (now), tokens saved (per s), net s saved (per s), top miss cause, host"
)
_BROKEN = {TierState.FAILING.value, TierState.CLOSED.value}
_NOTHING_TO_ADOPT = {"off", Adoption.OPENING.value, Adoption.NOTHING_LEFT.value}
UNSURE = 0.05
"""A prediction that may be off by this share of prompt tokens is not to be trusted."""
LOST = ("kvoffload_load_wait_seconds_sum", "kvoffload_interference_seconds_total")


class PageError(KVOffloadError):
    """Raised if a server's metrics page has no valid kvoffload metrics."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The metrics of one engine in one scrape.

    Args:
        at: the time of the scrape, in seconds of the monotonic clock.
        samples: the labels and value of each series, by sample name, such as `kvoffload_load_wait_seconds_sum`.
    """

    at: float
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the series of `name` that have all of `labels`; 0 without such series."""
        return sum(value for found, value in self.samples.get(name, ()) if labels.items() <= found.items())

    def values(self, name: str, label: str, **labels: str) -> list[str]:
        """Return the value of `label` in each nonzero series of `name` that has all of `labels`, the largest first."""
        series = [one for one in self.samples.get(name, ()) if one[1] and labels.items() <= one[0].items()]
        return [printable(found.get(label, "")) for found, _ in sorted(series, key=lambda one: -one[1])]


@dataclass(frozen=True, slots=True)
class LowerTier:
    """A tier below the host.

    Args:
        state: the tier's state; "off" if it is not used.
        capacity_bytes, used_bytes: the tier's size and what is used; 0 if the engine does not decide about its slots.
    """

    state: str
    capacity_bytes: float
    used_bytes: float


@dataclass(frozen=True, slots=True)
class Row:
    """One engine's row. A rate covers the time between the last two scrapes, and is None after the first scrape.

    Args:
        engine: the server's address, followed by the engine's name if the server gives one.
        off_because: the causes for which offloading is off; empty if offloading is on.
        hit_rate, hit_rate_now: the share of looked-up prompt tokens that were found on the host, since the engine's
            start and between the last two scrapes.
        predicted: the share of prompt tokens that the device and a host of this multiple of today's size would have
            found, by the multiple.
        unknown: the share of prompt tokens that the same host might have found in addition, had it been full at the
            start, by the multiple.
        saved_tokens, saved_tokens_per_s: the prompt tokens found on the host, since the engine's start and per second.
        net_s, net_s_per_s: the seconds of prefill that loads saved, minus the seconds that requests waited for loads
            and that copies added to steps; since the engine's start and per second.
        miss_cause: the most frequent cause of a lookup's first missing block; None if no lookup missed.
        miss_share: the share of the missing lookups that have the cause `miss_cause`.
        host_bytes: the bytes of host memory that are wanted, reserved (pinned) and used.
        adoption: what the start did with the blocks that an earlier engine left; "off" without `host_path`.
        adopted_blocks, adopted_hit_blocks: the adopted blocks, and those of them that loads have read.
        neighbours: how many other engines' memory this engine reads.
        tiers: the tiers below the host, by name.
    """

    engine: str
    off_because: list[str]
    hit_rate: float | None
    hit_rate_now: float | None
    predicted: dict[float, float]
    unknown: dict[float, float]
    saved_tokens: float
    saved_tokens_per_s: float | None
    net_s: float
    net_s_per_s: float | None
    miss_cause: str | None
    miss_share: float | None
    host_bytes: dict[str, float]
    adoption: str
    adopted_blocks: float
    adopted_hit_blocks: float
    neighbours: float
    tiers: dict[str, LowerTier]


def _body(answer: http.client.HTTPResponse) -> bytes:
    """Return an answer's body.

    Raises:
        PageError: the server sends it too slowly. The socket's own limit begins again with each part.
    """
    began, body = time.monotonic(), bytearray()
    while part := answer.read1(_LARGEST_PAGE - len(body)):
        body += part
        if time.monotonic() - began > _TIMEOUT_S:
            raise PageError(f"its answer takes longer than {_TIMEOUT_S:.0f} s")
    return bytes(body)


@dataclass(slots=True)
class Server:
    """A server and the last two scrapes of its metrics page.

    Args:
        url: the URL of the metrics page.
        now, before: the readings of the last scrape and of the scrape before, by the engine's name.
        problem: the reason why the last scrape failed; empty if it succeeded.
    """

    url: str
    now: dict[str, Reading] = field(default_factory=dict)
    before: dict[str, Reading] = field(default_factory=dict)
    problem: str = ""

    def scrape(self) -> None:
        """Read the metrics page. If this fails, set `problem` and keep the last readings."""
        try:
            with urllib.request.urlopen(self.url, timeout=_TIMEOUT_S) as answer:
                text = _body(answer).decode("utf-8", "replace")
                if answer.length:
                    raise PageError("its answer is cut off")
            readings = parse_page(text, time.monotonic())
        except urllib.error.HTTPError as error:
            with error:
                self.problem = f"it answers {error.code} {error.reason}"
        except PageError as error:
            self.problem = str(error)
        # The server is unreachable, hangs, closes the connection early, or redirects to an invalid URL.
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            self.problem = f"not reachable: {str(reason) or type(error).__name__}"
        else:
            self.problem = ""
            self.before = self.now
            self.now = readings

    def rows(self) -> Iterator[Row]:
        """Yield a row of the table for each engine."""
        host = urllib.parse.urlsplit(self.url).netloc
        for name, now in self.now.items():
            before = self.before.get(name)
            is_same_life = before is not None and not _has_restarted(before, now)
            yield summarize(f"{host} {name}".strip(), now, before if is_same_life else None)


def page_url(text: str) -> str:
    """Return the URL of a server's metrics page.

    Args:
        text: the page's URL, HOST:PORT, or a PORT of this machine.

    Raises:
        CommandError: `text` has none of these forms, or has a user or a password, which `urlopen` takes for a part of
            the host's name.
    """
    if text.isascii() and text.isdigit():
        text = f"127.0.0.1:{text}"
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(url)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        shown = text.rpartition("@")[2]  # without a user or a password
        raise CommandError(
            f"{shown!r} is not the URL of a page of metrics, such as http://127.0.0.1:9464/metrics, nor HOST:PORT or PORT"
        )
    if parts.username is not None:
        raise CommandError(f"the URL of {parts.hostname} must not have a user or a password")
    return urllib.parse.urlunsplit(parts._replace(path="/metrics")) if parts.path in ("", "/") else url


def parse_page(text: str, at: float) -> dict[str, Reading]:
    """Return the readings of a metrics page, by the engine's name. The name is empty if the page has no names.

    Args:
        text: the page.
        at: the time of the scrape, in seconds of the monotonic clock.

    Raises:
        PageError: the text is not a metrics page, has no kvoffload metrics, has too many engines, or has a value that
            is not finite.
    """
    from prometheus_client.parser import text_string_to_metric_families

    engines: dict[str, Reading] = {}
    try:
        families = [one for one in text_string_to_metric_families(text) if one.name.startswith("kvoffload_")]
    except Exception as error:  # if the text is no metrics page, the parser may raise any exception
        raise PageError(f"it is not a page of metrics: {str(error) or type(error).__name__}") from error
    for sample in (sample for family in families for sample in family.samples):
        if not math.isfinite(sample.value):
            raise PageError(f"{sample.name} is {sample.value}")
        reading = engines.setdefault(printable(sample.labels.get("engine", "")), Reading(at))
        reading.samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    if len(engines) > _MOST_ENGINES:
        raise PageError(f"it has {len(engines):,} engines; at most {_MOST_ENGINES:,} are shown")
    if not engines:
        raise PageError("it has no metrics of kvoffload: is offloading switched on in that server?")
    return engines


def summarize(engine: str, now: Reading, before: Reading | None) -> Row:
    """Return an engine's row of the table.

    Args:
        engine: the engine's name in the row.
        now: the last reading.
        before: the reading before `now`; None after the engine's first scrape or a restart.
    """
    found, missed, net = _hits(now), now.total(_TOKENS, result="miss"), _net_s(now)
    then = before or now
    period_s = now.at - then.at
    found_now, missed_now = found - _hits(then), missed - then.total(_TOKENS, result="miss")
    causes = [cause for cause in now.values(_MISSES, "cause") if cause != "behind_miss"]
    misses = now.total(_MISSES) - now.total(_MISSES, cause="behind_miss")
    return Row(
        engine=engine,
        off_because=now.values("kvoffload_degraded", "cause"),
        hit_rate=_ratio(found, found + missed),
        hit_rate_now=_ratio(found_now, found_now + missed_now),
        predicted=predicted(now, TierSizes.HOST),
        unknown=unknown(now, TierSizes.HOST),
        saved_tokens=found,
        saved_tokens_per_s=_ratio(found_now, period_s),
        net_s=net,
        net_s_per_s=_ratio(net - _net_s(then), period_s),
        miss_cause=next(iter(causes), None),
        miss_share=_ratio(now.total(_MISSES, cause=causes[0]), misses) if causes else None,
        host_bytes={state: now.total("kvoffload_host_bytes", state=state) for state in _HOST_STATES},
        adoption=next(iter(now.values("kvoffload_host_adoption", "result")), "off"),
        adopted_blocks=now.total("kvoffload_adopted_blocks_total"),
        adopted_hit_blocks=now.total("kvoffload_adopted_hit_blocks_total"),
        neighbours=now.total("kvoffload_neighbours"),
        tiers={tier.value: _lower_tier(now, tier.value) for tier in LOWER_TIERS},
    )


def predicted(reading: Reading, tiers: TierSizes) -> dict[float, float]:
    """Return the predicted share of prompt tokens that would be found, by the multiple of today's capacity."""
    return _by_capacity(reading, "kvoffload_predicted_hit_tokens_ratio", tiers)


def unknown(reading: Reading, tiers: TierSizes) -> dict[float, float]:
    """Return the share that might have been found in addition, had a tier of this capacity been full at the start."""
    return _by_capacity(reading, "kvoffload_predicted_unknown_ratio", tiers)


def _by_capacity(reading: Reading, name: str, tiers: TierSizes) -> dict[float, float]:
    return {
        times: reading.total(name, tiers=tiers.value, capacity=capacity)
        for capacity, times in CAPACITIES.items()
    }


def _hits(reading: Reading) -> float:
    return reading.total(_TOKENS, result="hit")


def _net_s(reading: Reading) -> float:
    return reading.total(SAVED) - sum(map(reading.total, LOST))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _lower_tier(reading: Reading, tier: str) -> LowerTier:
    slot_bytes = reading.total("kvoffload_slot_bytes", tier=tier)
    capacity = reading.total("kvoffload_capacity_slots", tier=tier)
    empty = reading.total("kvoffload_slots", tier=tier, state="empty")
    state = next(iter(reading.values("kvoffload_tier_state", "state", tier=tier)), "off")
    return LowerTier(state, capacity * slot_bytes, (capacity - empty) * slot_bytes)


def _has_restarted(before: Reading, now: Reading) -> bool:
    counters = [name for name in before.samples if name.endswith("_total")]
    return any(now.total(name) < before.total(name) for name in counters)


# -- the command ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    address = (
        "of the metrics, HOST:PORT, or a PORT of this machine: kvoffload's own port, or that of `vllm serve`"
    )
    add("urls", metavar="URL", nargs="+", help=address)
    add(
        "--interval", metavar="SECONDS", type=_interval, default=2.0, help="between two scrapes, at least 0.1"
    )
    add("--once", action="store_true", help="scrape twice, print and exit, as also without a terminal")
    add("--json", action="store_true", help="the same, as JSON")


def _interval(text: str) -> float:
    """Parse a number of seconds that is not too short, for argparse's `type=`."""
    if (interval_s := seconds(text)) < _LEAST_INTERVAL_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds of at least {_LEAST_INTERVAL_S}"
        )
    return interval_s


def run(args: argparse.Namespace) -> int:
    """Show the table until Ctrl-C, or print the table once.

    Raises:
        KVOffloadError: a URL is not valid.
    """
    servers = [Server(page_url(url)) for url in args.urls]
    if args.json or args.once or not sys.stdout.isatty():
        return _print_once(servers, args.interval, as_json=args.json)
    with suppress(KeyboardInterrupt):  # Ctrl-C is the usual way to end `kvoffload top`
        _watch(servers, args.interval)
    return Exit.OK


def _print_once(servers: list[Server], interval_s: float, *, as_json: bool) -> int:
    from rich.console import Console

    for wait_s in (interval_s, 0.0):
        for server in servers:
            server.scrape()
        time.sleep(wait_s)
    if as_json:
        _print_json(servers)
    elif any(server.now for server in servers):
        width = None if sys.stdout.isatty() else 250  # wide enough that every row is one line
        console = Console(highlight=False, markup=False, emoji=False, width=width)
        console.print(table(servers))
    for server in servers:
        if server.problem:
            say(f"{server.url}: {server.problem}")
    return Exit.FAILED if any(server.problem for server in servers) else Exit.OK


def _print_json(servers: list[Server]) -> None:
    import json

    from kvoffload.telemetry.provenance import describe_process

    answers = [
        {"url": one.url, "problem": one.problem or None, "engines": [asdict(row) for row in one.rows()]}
        for one in servers
    ]
    seen_from = describe_process(time.time())
    print(
        json.dumps({"schema": _SCHEMA, "kind": "top", "seen_from": seen_from, "servers": answers}, indent=2)
    )


def _watch(servers: list[Server], interval_s: float) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(highlight=False, markup=False, emoji=False), auto_refresh=False) as live:
        while True:
            for server in servers:
                server.scrape()
            problems = [f"{one.url}: {one.problem}; trying again" for one in servers if one.problem]
            lines = [Text(printable(text), "bold red") for text in problems]
            head = f"{time.strftime('%H:%M:%S')}, every {interval_s:g} s, Ctrl-C ends"
            rows = [table(servers)] if any(server.now for server in servers) else []
            live.update(Group(*rows, *lines, Text(head, "dim")), refresh=True)
            time.sleep(interval_s)


def table(servers: Iterable[Server]) -> RenderableType:
    from rich.table import Table

    rows = [row for server in servers for row in server.rows()]
    # A tier that no engine uses would only take space, of which a terminal has 80 columns.
    used = [one.value for one in LOWER_TIERS if any(row.tiers[one.value].state != "off" for row in rows)]
    headings = [*_HEADINGS.split(", "), *used]
    shown = Table(*headings, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        is_healthy = not row.off_because and not {one.state for one in row.tiers.values()} & _BROKEN
        shown.add_row(
            *_cells(row), *(_tier_cell(row, name) for name in used), style=None if is_healthy else "bold red"
        )
    return shown


def _cells(row: Row) -> Iterator[str]:
    yield row.engine
    yield f"OFF: {', '.join(row.off_because)}" if row.off_because else "on"
    yield f"{_percent(row.hit_rate)} ({_percent(row.hit_rate_now)})"
    yield f"{row.saved_tokens:,.0f} ({_number(row.saved_tokens_per_s, 0)})"
    yield f"{row.net_s:,.1f} ({_number(row.net_s_per_s, 2)})"
    yield f"{row.miss_cause} ({_percent(row.miss_share)})" if row.miss_cause else "-"
    host = row.host_bytes
    pinning = f", {_percent(_ratio(host['reserved'], host['wanted']))} pinned"
    # A prediction is for today's size, so it says nothing of the configured one while memory is pinned.
    is_growing = host["reserved"] < host["wanted"]
    yield (
        _fill(host["used"], host["reserved"])
        + (pinning if is_growing else "")
        + _adopted(row)
        + ("" if is_growing else _twice(row))
    )


def _twice(row: Row) -> str:
    """Return what the cell of host memory says about twice its size."""
    if not any(row.predicted.values()):
        return ""
    more = " or more" if row.unknown[2] >= UNSURE else ""
    return f", 2x finds {row.predicted[2] - row.predicted[1]:+.0%}{more}"


def _tier_cell(row: Row, name: str) -> str:
    tier = row.tiers[name]
    if name == Tier.NODE.value and row.neighbours:
        return f"{row.neighbours:.0f} engines, {tier.state}"
    return (
        f"{_fill(tier.used_bytes, tier.capacity_bytes)}, {tier.state}" if tier.capacity_bytes else tier.state
    )


def _fill(used: float, size: float) -> str:
    return f"{_percent(_ratio(used, size))} of {size_text(size)}"


def _adopted(row: Row) -> str:
    """Return what the cell of host memory says about the blocks of an earlier engine."""
    if row.adoption == Adoption.ADOPTED.value:
        return f", {row.adopted_blocks:,.0f} adopted, {row.adopted_hit_blocks:,.0f} hit"
    return "" if row.adoption in _NOTHING_TO_ADOPT else f", not adopted: {row.adoption}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"


def _number(number: float | None, digits: int) -> str:
    return "-" if number is None else f"{number:,.{digits}f}"
