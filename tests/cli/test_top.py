"""`kvoffload top` on real servers of metrics, on a real terminal, in a pipe, and through a server's restart."""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from rich.console import Console, RenderableType

from kvoffload.bus.bus import Bus
from kvoffload.cli.exits import CommandError, Exit, printable
from kvoffload.cli.main import main
from kvoffload.cli.top.reading import Change, History, PageError, Reading, has_restarted, parse_page
from kvoffload.cli.top.screen import Scrolled
from kvoffload.cli.top.server import State, page_url, scrape
from kvoffload.cli.top.view import details, engines_of, show
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
from kvoffload.model import events, facts
from kvoffload.model.causes import (
    CopyOutcome,
    DegradeCause,
    Found,
    LoadOutcome,
    MissCause,
    StoreOutcome,
    TierOutcome,
)
from kvoffload.model.ids import BlockKey, JobId, Rank, RequestId
from kvoffload.model.transfer import Direction, Tier
from kvoffload.telemetry.catalogue import BY_NAME
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.exporter import KVOffloadCollector
from kvoffload.telemetry.gauges import GaugeSnapshot, TierGauges
from kvoffload.telemetry.labels import HostBytes, TierState
from kvoffload.telemetry.server import MetricsServer, serve
from kvoffload.telemetry.snapshot import Labels

A = RequestId("a")


class Engine:
    """Counts what a test tells it, and knows a state."""

    def __init__(self) -> None:
        self.state = GaugeSnapshot({"ready": 6, "empty": 3, "pinned": 1}, 10, {("load", "submitted"): 2})
        self._counters = Counters()
        self._bus = Bus()
        self._counters.subscribe(self._bus)
        self.collector = KVOffloadCollector(self._counters, self)

    def gauges(self) -> GaugeSnapshot:
        return self.state

    def work(self, requests: int = 1) -> None:
        for _ in range(requests):
            self._bus.publish(events.LookupAnswered(A, 0, 3, 2, 48, 32, MissCause.EVICTED))
            self._bus.publish(events.BlocksOffered(2))
            self._bus.publish(events.StoreEnded(StoreOutcome.STORED, 2))
            self._bus.publish(events.LoadScheduled(JobId(1), A, 3, 48))
            self._bus.publish(events.LoadEnded(JobId(1), A, 3, LoadOutcome.LOADED))
            done = CopyOutcome.DONE
            self._bus.publish(
                events.RankReported(JobId(1), Rank(0), Direction.LOAD, done, 4096, 0.002, 0.004)
            )
        self._counters.hook("step", 0.01)

    def first_token(self, found: Found, seconds_: float) -> None:
        self._bus.publish(events.FirstTokenReached(A, found, seconds_))

    def reading(self, at: float) -> Reading:
        return parse_page(generate_latest(self.collector).decode(), at)[""]

    def serve(self, port: int = 0) -> MetricsServer:
        registry = CollectorRegistry()
        registry.register(self.collector)
        return serve(registry, "127.0.0.1", port)


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.work()
    return engine


def texts(*readings: Reading, unix_now: float = 0.0, width: int = 100) -> list[str]:
    """The page of one engine, line by line, with single spaces."""
    (engine,) = engines_of([state_of(*readings)], unix_now)
    return plain(details(engine, width), width)


def state_of(*readings: Reading) -> State:
    state = State("http://h:1/metrics")
    for reading in readings:
        state = state.after({"": reading})
    return state


def plain(page: RenderableType, width: int = 100) -> list[str]:
    return [" ".join(line.split()) for line in drawn(page, width).splitlines()]


def drawn(page: RenderableType, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(page)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def alarms(*readings: Reading, unix_now: float = 0.0) -> list[str]:
    """Lines that are drawn as alarms."""
    (engine,) = engines_of([state_of(*readings)], unix_now)
    console = Console(
        width=100, file=io.StringIO(), force_terminal=True, color_system="standard", highlight=False
    )
    console.print(details(engine, 100))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line for line in text.splitlines() if "\x1b[1;31m" in line]
    return [" ".join(re.sub("\x1b\\[[0-9;]*m", "", line).split()) for line in lines]


# -- numbers --------------------------------------------------------------------------------------------------------


def test_a_page_is_read_as_it_was_counted(engine: Engine) -> None:
    reading = engine.reading(1.0)
    assert reading.number("kvoffload_lookup_tokens_total", "hit") == 48
    assert reading.number("kvoffload_miss_blocks_total", "evicted") == 1
    assert reading.number("kvoffload_slots", "host", "ready") == 6
    assert reading.number("kvoffload_transfer_seconds_count", "host", "load") == 1
    assert reading.total("kvoffload_store_blocks_total") == 2


def test_engines_of_one_server_are_read_apart_whatever_other_labels_there_are() -> None:
    text = (
        '# TYPE kvoffload_resets_total counter\nkvoffload_resets_total{model_name="m",engine="0"} 1\n'
        'kvoffload_resets_total{model_name="m",engine="1"} 2\n'
        'kvoffload_resets_total{model_name="n",engine="1"} 4\n'
        '# TYPE kvoffload_degraded gauge\nkvoffload_degraded{engine="0",cause="law_broken"} 1\n'
        '# TYPE kvoffload_of_tomorrow gauge\nkvoffload_of_tomorrow{engine="1"} 1\n# TYPE other gauge\nother 1\n'
    )
    engines = parse_page(text, 0.0)
    assert engines.keys() == {"0", "1"}
    assert engines["0"].number("kvoffload_resets_total") == 1
    assert engines["1"].number("kvoffload_resets_total") == 6
    assert engines["0"].number("kvoffload_degraded", "law_broken") == 1
    assert "kvoffload_of_tomorrow" not in engines["1"].numbers


@pytest.mark.parametrize("text", ["", "# TYPE other gauge\nother 1\n"])
def test_a_page_without_kvoffload_is_refused(text: str) -> None:
    with pytest.raises(PageError, match="switched on"):
        parse_page(text, 0.0)


def test_a_page_of_something_else_is_refused() -> None:
    with pytest.raises(PageError, match="not a page of metrics"):
        parse_page("<html>hello</html>\n", 0.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            'kvoffload_transfer_seconds_bucket{direction="load"} 1',
            "kvoffload_transfer_seconds_bucket has no bound",
        ),
        ("kvoffload_slots NaN", "kvoffload_slots is nan"),
        ("kvoffload_slots +Inf", "kvoffload_slots is inf"),
    ],
)
def test_a_page_with_numbers_that_cannot_be_shown_is_refused(line: str, said: str) -> None:
    """Whatever else it raised would end the scraping thread, and the screen would show old numbers without a word."""
    kind = "histogram" if "bucket" in line else "gauge"
    name = re.split("[ {]", line)[0].removesuffix("_bucket")
    with pytest.raises(PageError, match=said):
        parse_page(f"# TYPE {name} {kind}\n{line}\n", 0.0)


def test_an_address_that_cannot_be_asked_is_a_line() -> None:
    assert "not reachable: " in str(scrape("http://127.0.0.1:1/\u00e4", 1.0))


def test_names_that_a_server_gives_are_shown_as_text() -> None:
    name = "[/bold]:smile:\x1b[2J"
    text = f'# TYPE kvoffload_degraded gauge\nkvoffload_degraded{{engine="{name}",cause="{name}"}} 1\n'
    state = State("u").after(parse_page(text, 0.0))
    console = Console(width=100, file=io.StringIO(), highlight=False, markup=False, emoji=False)
    console.print(show([state], engines_of([state, state], 0.0), 0, 100))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[/bold]:smile:?[2J" in shown
    assert "\x1b" not in shown


def test_rates_are_of_the_time_between_two_readings(engine: Engine) -> None:
    before = engine.reading(10.0)
    engine.work(4)
    change = Change(engine.reading(12.0), before)
    assert change.rate("kvoffload_lookup_tokens_total", "hit") == pytest.approx(96)
    assert change.quantile(0.5, "kvoffload_transfer_seconds", "host", "store") is None
    assert Change(before).rate("kvoffload_lookup_tokens_total", "hit") is None


@given(st.lists(st.floats(0.001, 200), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_property_a_quantile_lies_in_the_bucket_of_the_right_sample(samples: list[float], at: float) -> None:
    engine = Engine()
    before = engine.reading(0.0)
    for sample in samples:
        engine.first_token(Found.HOST, sample)
    found = Change(engine.reading(1.0), before).quantile(at, "kvoffload_first_token_seconds", "host")
    exact = sorted(samples)[math.ceil(at * len(samples)) - 1]
    bounds = (0.0, *BY_NAME["kvoffload_first_token_seconds"].buckets, math.inf)
    upper = next(bound for bound in bounds if exact <= bound)
    lower = bounds[bounds.index(upper) - 1]
    assert found is not None
    assert lower <= found <= upper


def test_a_restart_is_seen_and_nothing_becomes_negative(engine: Engine) -> None:
    engine.work(3)
    state = state_of(engine.reading(1.0), engine.reading(2.0))
    fresh = Engine()
    fresh.work()
    assert has_restarted(fresh.reading(3.0), state.engines[""].now)
    history = state.after({"": fresh.reading(3.0)}).engines[""]
    assert (history.restarts, len(history.readings)) == (1, 1)
    assert any("restarted 1 times" in line for line in texts(engine.reading(1.0), fresh.reading(3.0)))


def test_history_is_bounded(engine: Engine) -> None:
    history = History((engine.reading(0.0),))
    for second in range(1, 200):
        history = history.after(Reading(float(second), history.now.numbers))
    assert len(history.readings) == 61
    assert history.window.seconds == 60


# -- what is shown --------------------------------------------------------------------------------------------------


def test_it_shows_what_the_overview_shows(engine: Engine) -> None:
    before = engine.reading(0.0)
    engine.work(2)
    shown = texts(before, engine.reading(2.0))
    assert "offloading is on" in shown
    assert "found on the host 144 48.0 █" in shown
    assert "hit ratio 60.0 % 60.0 %" in shown
    assert "lookups that missed, by cause 3 per second" in shown
    assert "evicted 3 1.0" in shown
    assert "blocks behind those 3 1.0" in shown
    assert not any(line.startswith("behind_miss") for line in shown)
    assert "stored 6 2.0" in shown
    assert "loaded 9 3.0" in shown
    assert "load 12.0 KiB 4.0 KiB 3.8 ms 5.0 ms 2.5 ms 2" in shown
    assert "ready 6 ██████████████░░░░░░░░░░" in shown
    assert any("0.5 % of the engine's time" in line for line in shown)


def test_host_memory_is_shown_in_bytes_and_while_it_is_pinned(engine: Engine) -> None:
    engine.state = replace(
        engine.state,
        host_bytes={HostBytes.WANTED: 8 << 30, HostBytes.RESERVED: 2 << 30, HostBytes.USED: 1 << 30},
        info=("0.1.0", "vllm", "0.33", "lazy", "lru", "off", "auto"),
    )
    shown = texts(engine.reading(0.0))
    assert "host memory 2.0 GiB 10 blocks" in shown
    assert "25 % of 8.0 GiB pinned" in shown
    assert "used 1.0 GiB ████████████░░░░░░░░░░░░" in shown
    assert "h:1 kvoffload 0.1.0, vllm 0.33, lazy" in shown


def benefit(
    saved_s: float, waited_s: float = 0.0, *, negative: bool = False, break_even: float = 0.0
) -> dict[str, dict[Labels, float]]:
    return {
        "kvoffload_prefill_seconds_saved_total": {(): saved_s},
        "kvoffload_load_wait_seconds_total": {("own_load",): waited_s, ("others_load",): 0.5},
        "kvoffload_interference_seconds_total": {("store",): 0.25, ("load",): 0.25},
        "kvoffload_net_benefit_negative": {(): float(negative)},
        "kvoffload_break_even_tokens": {(): break_even},
    }


def test_a_disk_is_shown_where_there_is_one(engine: Engine) -> None:
    assert not [line for line in texts(engine.reading(0)) if "disk" in line]
    engine.state = replace(engine.state, disk=TierGauges(TierState.OPEN, {"ready": 3, "empty": 1}, 4, 2**20))
    before = engine.reading(0)
    engine._bus.publish(
        events.RankReported(
            JobId(2), Rank(0), Direction.STORE, CopyOutcome.DONE, 3 * 2**20, 0.0, 0.1, Tier.DISK
        )
    )
    engine._bus.publish(events.TierCopyEnded(JobId(3), Direction.LOAD, 2, TierOutcome.CORRUPT))
    engine._bus.publish(events.LookupAnswered(A, 0, 3, 0, 48, 0, None, fetched_tokens=32))
    engine.first_token(Found.DISK, 0.2)
    shown = texts(before, engine.reading(1))
    assert "disk: open 4.0 MiB 4 blocks" in shown
    assert "tokens fetched 32 32.0" in shown
    assert "load corrupt 2 2.0" in shown
    assert [line for line in shown if line.startswith("store 3.0 MiB 3.0 MiB")]
    assert [line for line in shown if line.startswith("disk 175.0 ms")]
    engine.state = replace(engine.state, disk=TierGauges(TierState.CLOSED))
    assert "disk: closed 0 B 0 blocks" in texts(engine.reading(2))


def test_a_store_that_engines_share_is_shown_where_there_is_one(engine: Engine) -> None:
    assert not [line for line in texts(engine.reading(0)) if "store:" in line]
    engine.state = replace(
        engine.state,
        remote=TierState.OPEN,
        benefit={"kvoffload_prefill_tokens_per_second": {(): 16.0}},
    )
    before = engine.reading(0)
    keys = (BlockKey(b"one"), BlockKey(b"two"))
    engine._bus.publish(facts.RemoteAnswered(A, "print/one", keys, keys[:1], 0, 0.02))
    engine._bus.publish(events.TierCopyEnded(JobId(3), Direction.LOAD, 2, TierOutcome.DONE, 0.1, Tier.REMOTE))
    engine._bus.publish(
        events.TierCopyEnded(JobId(4), Direction.STORE, 5, TierOutcome.FAILED, 0.1, Tier.REMOTE)
    )
    engine._bus.publish(
        events.LookupAnswered(A, 0, 2, 0, 32, 0, None, fetched_tokens=32, fetched_from=Tier.REMOTE)
    )
    shown = texts(before, engine.reading(1))
    assert "shared store: open blocks per second" in shown
    for line in (
        "asked: found 2 2.0",
        "asked: missing 1 1.0",
        "asked: none 0 0",
        "fetched 2 2.0",
        "store failed 5 5.0",
        "tokens fetched 32 32.0",
        "worth, in seconds 2.00",
    ):
        assert line in shown, (line, shown)
    assert [line for line in shown if line.startswith("time to ask, p50, p99 17.5 ms")]
    [copies] = [place for place, line in enumerate(shown) if line.startswith("copies with the store")]
    assert shown[copies + 1].split()[-1] == "-"  # how many jobs are open is not known
    engine._bus.publish(facts.RemoteAnswered(A, "print/one", unanswered=3))
    engine.state = replace(engine.state, remote=TierState.FAILING)
    shown = texts(before, engine.reading(2))
    assert "shared store: failing blocks per second" in shown
    assert "asked: none 3 1.5" in shown


def test_it_shows_whether_it_is_worth_it(engine: Engine) -> None:
    engine.state = replace(engine.state, benefit=benefit(10.0, 1.5))
    before = engine.reading(0.0)
    assert "net 7.50 -" in texts(before)
    engine.state = replace(engine.state, benefit=benefit(14.0, 2.5, break_even=96))
    shown = texts(before, engine.reading(2.0))
    assert "net benefit, in seconds since start per second" in shown
    assert "prefilling saved 14.00 2.00" in shown
    assert "waited for loads 3.00 0.50" in shown
    assert "interference of copies 0.50 0.00" in shown
    assert "net 10.50 1.50" in shown
    assert "hits pay from 96 tokens on" in shown


def test_a_net_loss_is_an_alarm(engine: Engine) -> None:
    engine.state = replace(engine.state, benefit=benefit(1.0, 9.0, negative=True, break_even=1_000_000))
    assert alarms(engine.reading(0.0)) == ["net -9.00 -"]
    assert "no hit pays" in texts(engine.reading(0.0))
    engine.state = replace(engine.state, benefit=benefit(1.0, 9.0))
    assert alarms(engine.reading(0.0)) == []
    assert "break-even not measured yet" in texts(engine.reading(0.0))


def test_it_shows_percentiles_of_the_time_to_first_token_by_what_was_found(engine: Engine) -> None:
    for seconds_ in (0.3, 0.4, 0.5, 9.0):
        engine.first_token(Found.HOST, seconds_)
    shown = texts(engine.reading(0.0))
    assert "first token, by what was found p50 p99" in shown
    (host,) = [line for line in shown if re.match(r"host \d", line)]
    assert host == "host 416.7 ms 9.9 s"
    assert "device - -" in shown


def test_what_is_wrong_is_an_alarm(engine: Engine) -> None:
    engine.state = replace(
        engine.state,
        degraded=DegradeCause.LAW_BROKEN,
        slots={"quarantined": 10},
        oldest_pin_s=100.0,
        dropped={"log": 5},
    )
    found = alarms(engine.reading(0.0), unix_now=160.0)
    assert found[0] == "offloading is OFF: law_broken"
    assert "5 events dropped" in found
    assert any(text.startswith("quarantined") for text in found)
    assert any("oldest pin 60.0 s" in text for text in texts(engine.reading(0.0), unix_now=160.0))


def test_the_rest_of_a_long_list_is_one_line() -> None:
    misses: dict[Labels, float] = {}
    causes = [cause for cause in MissCause if cause is not MissCause.BEHIND_MISS]
    for number, cause in enumerate(causes):
        misses[cause.value,] = 100.0 - number
    shown = texts(Reading(0.0, {"kvoffload_miss_blocks_total": misses}))
    (rest,) = [line for line in shown if line.startswith("others")]
    assert int(rest.split()[1].replace(",", "")) == sum(100 - n for n in range(8, len(causes)))


def test_several_servers_have_a_row_each_and_one_is_shown_in_full(engine: Engine) -> None:
    sick = Engine()
    sick.state = replace(sick.state, degraded=DegradeCause.TRANSFER_DEAD)
    states = [
        State("http://a:1/metrics").after({"0": engine.reading(0.0), "1": sick.reading(0.0)}),
        State("http://b:2/metrics").after("not reachable: refused"),
    ]
    engines = engines_of(states, 0.0)
    shown = plain(show(states, engines, 1, 120), 120)
    assert shown[0] == "http://b:2/metrics: not reachable: refused; trying again"
    assert any(line.startswith("engine 0, a:1 on ") for line in shown)
    assert any(line.startswith("> engine 1, a:1 OFF ") for line in shown)
    assert "offloading is OFF: transfer_dead" in shown


@pytest.mark.parametrize("width", [30, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(engine: Engine, width: int) -> None:
    states = [State("http://a:1/metrics").after({"0": engine.reading(0.0), "1": engine.reading(0.0)})]
    text = drawn(show(states, engines_of(states, 0.0), 0, width), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "offloading is on" in text


def test_wide_terminals_have_two_columns(engine: Engine) -> None:
    def lines(width: int) -> int:
        return len(texts(engine.reading(0.0), width=width))

    assert lines(150) < 0.7 * lines(100)


@pytest.mark.parametrize(("offset", "first", "last"), [(0, "0", "7"), (5, "5", "12"), (99, "22", "29")])
def test_a_page_that_is_too_long_is_scrolled(offset: int, first: str, last: str) -> None:
    console = Console(width=40, height=10, file=io.StringIO())
    page = Scrolled("head", lambda _: "\n".join(map(str, range(30))), offset, "q quit")
    lines = [
        "".join(segment.text for segment in line).rstrip()
        for line in console.render_lines(page, console.options.update(height=10))
    ]
    below = 29 - int(last)
    assert lines[0] == "head"
    assert (lines[1], lines[8]) == (first, last)
    assert lines[9] == (f"{below} more lines below; q quit" if below else "q quit")
    assert page.offset == int(first)


def test_numbers_as_people_read_them() -> None:
    assert (count(1234567.0), count(None)) == ("1,234,567", "-")
    rates = per_second(0.0), per_second(3.14159), per_second(12345.6), per_second(None)
    assert rates == ("0", "3.1", "12,346", "-")
    assert (share(1 / 3), share(None)) == ("33.3 %", "-")
    sums = seconds(0.125), seconds(-3.0), seconds(12345.6), seconds(None)
    assert sums == ("0.12", "-3.00", "12,346", "-")
    assert (size(0), size(1536), size(3 * 2**40), size(None)) == ("0 B", "1.5 KiB", "3.0 TiB", "-")
    times = duration(2e-6), duration(0.25), duration(90), duration(7200), duration(None)
    assert times == ("2.0 us", "250.0 ms", "90.0 s", "120 min", "-")
    assert (bar(1, 2, 4), bar(0, 0, 2), bar(9, 3, 2)) == ("██░░", "░░", "██")
    assert sparkline([0, 1, None, 4, 8], 5) == "▁▂ ▅█"
    assert sparkline([1, 2, 3], 2) == "▆█"
    assert sparkline([0.5], 3, top=1.0) == "  ▅"
    assert (sparkline([], 2), sparkline([0.0, 0.0], 2)) == ("  ", "▁▁")
    assert printable("a\x1b[2Jb") == "a?[2Jb"


def test_old_numbers_stay_while_there_is_no_answer(engine: Engine) -> None:
    silent = State("u").after("not reachable: refused")
    assert plain(show([silent], [], 0, 100)) == ["u: not reachable: refused; trying again"]
    state = state_of(engine.reading(0.0)).after("not reachable: refused")
    lines = plain(show([state], engines_of([state], 0.0), 0, 100))
    assert lines[0].endswith("its numbers are old")
    assert any(line.startswith("found on the host") for line in lines)
    assert plain(show([State("u")], [], 0, 100)) == ["waiting for the first answer"]


# -- where it looks -------------------------------------------------------------------------------------------------


def test_an_address_or_a_port_is_enough() -> None:
    assert page_url("127.0.0.1:9464") == "http://127.0.0.1:9464/metrics"
    assert page_url("9777") == "http://127.0.0.1:9777/metrics"
    assert page_url("http://[::1]:1/") == "http://[::1]:1/metrics"
    assert page_url("https://h/own/path?x=1") == "https://h/own/path?x=1"


@pytest.mark.parametrize(
    "text", ["ftp://h/metrics", "http://", "h:99999999", "99999999", "file:///etc/passwd"]
)
def test_what_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="not the URL"):
        page_url(text)


def test_a_server_that_is_gone_is_reported(engine: Engine) -> None:
    with engine.serve() as server:
        port = server.port
    assert str(scrape(f"http://127.0.0.1:{port}/metrics", 5.0)).startswith("not reachable: ")


def test_once_prints_the_numbers_and_exits(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with engine.serve() as server:
        assert main(["top", server.url, "--once"]) == Exit.OK
        out = capsys.readouterr().out
        assert out.startswith(f"127.0.0.1:{server.port}")
        assert "\x1b" not in out
        assert "found on the host" in out
        assert main(["top", server.url, "127.0.0.1:1", "--once"]) == Exit.FAILED
        captured = capsys.readouterr()
        assert "found on the host" in captured.out
        assert "127.0.0.1:1/metrics: not reachable" in captured.err


def test_the_numbers_as_json(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.first_token(Found.HOST, 0.2)
    with engine.serve() as server:
        assert main(["top", str(server.port), "--once", "--json"]) == Exit.OK
        result = json.loads(capsys.readouterr().out)
        url = server.url
    assert (result["schema"], result["kind"]) == (1, "top")
    assert result["seen_from"]["kvoffload"]
    ((server_,),) = [result["servers"]]
    assert (server_["url"], server_["problem"]) == (url, None)
    (seen,) = server_["engines"]
    assert seen["found_tokens"] == {"total": 48.0, "per_s": None}
    assert seen["slots"]["ready"] == 6
    assert seen["missed_lookups"]["evicted"]["total"] == 1
    assert 0.1 < seen["first_token"]["host"]["p99_s"] <= 0.25


# -- on a terminal --------------------------------------------------------------------------------------------------


class OnTerminal:
    """The command on a terminal of its own."""

    def __init__(self, url: str) -> None:
        self.master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self._slave)
        command = [sys.executable, "-m", "kvoffload.cli", "top", url, "--interval", "0.1"]
        own = {"stdin": self._slave, "stdout": self._slave, "stderr": self._slave}
        self.process = subprocess.Popen(command, start_new_session=True, preexec_fn=self._own_terminal, **own)  # type: ignore[call-overload]
        self.seen = ""

    def _own_terminal(self) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches it

    def read_until(self, text: str, seconds: float = 30.0) -> None:
        """Read what is drawn from now on until `text` is in it."""
        drawn, deadline = "", time.monotonic() + seconds
        while text not in drawn:
            assert time.monotonic() < deadline, f"{text!r} is not in {drawn[-3000:]!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                drawn += os.read(self.master, 65536).decode()
        self.seen += drawn

    def end(self) -> int:
        """Wait for the end and return the exit code."""
        deadline = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65536).decode()
        while select.select([self.master], [], [], 0)[0]:
            self.seen += os.read(self.master, 65536).decode()
        return self.process.wait(timeout=1)

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self._slave) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=30)
        os.close(self.master)
        os.close(self._slave)


@contextmanager
def on_terminal(url: str) -> Iterator[OnTerminal]:
    terminal = OnTerminal(url)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.mark.slow
def test_it_lives_through_the_servers_restart_and_q_ends_it(engine: Engine) -> None:
    engine.work(5)
    server = engine.serve()
    with on_terminal(server.url) as terminal:
        terminal.read_until("found on the host")
        server.close()
        terminal.read_until("its numbers are old")
        fresh = Engine()
        fresh.work()
        with fresh.serve(server.port):
            terminal.read_until("restarted 1 times")
            os.write(terminal.master, b"q")
            assert terminal.end() == Exit.OK
        assert terminal.is_as_before()
        assert {"\x1b[?1049l", "\x1b[?25h"} <= set(re.findall(r"\x1b\[\?\d+[hl]", terminal.seen[-40:]))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ctrl-c", "terminated"])
def test_the_terminal_is_given_back_however_it_ends(engine: Engine, how: str) -> None:
    with engine.serve() as server, on_terminal(server.url) as terminal:
        terminal.read_until("found on the host")
        if how == "ctrl-c":
            os.write(terminal.master, b"\x03")
            assert terminal.end() == Exit.OK
        else:
            terminal.process.send_signal(signal.SIGTERM)
            assert terminal.end() == Exit.TERMINATED
        assert terminal.is_as_before()
        assert {"\x1b[?1049l", "\x1b[?25h"} <= set(re.findall(r"\x1b\[\?\d+[hl]", terminal.seen[-40:]))
        assert "Traceback" not in terminal.seen


@pytest.mark.slow
def test_keys_work_while_no_server_answers() -> None:
    with on_terminal("127.0.0.1:1") as terminal:
        terminal.read_until("trying again")
        os.write(terminal.master, b"x")
        terminal.read_until("trying again")
        os.write(terminal.master, b"q")
        assert terminal.end() == Exit.OK
