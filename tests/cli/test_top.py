from __future__ import annotations

import fcntl
import http.server
import io
import itertools
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from rich.console import Console
from rich.table import Table

from kvoffload.cli.exits import CommandError, Exit
from kvoffload.cli.main import main
from kvoffload.cli.top import PageError, Reading, Row, Server, page_url, parse_page, table
from kvoffload.model import events
from kvoffload.model.causes import MissCause
from kvoffload.model.ids import RequestId
from kvoffload.model.wire import LOWER_TIERS, Tier
from kvoffload.telemetry.catalogue import LoadWait
from kvoffload.telemetry.exporter import KVOffloadCollector, serve
from tests.telemetry.fake_source import FakeSource

A = RequestId("a")


class Engine(FakeSource):
    def __init__(self) -> None:
        super().__init__()
        self.collector = KVOffloadCollector(self)

    def work(self, requests: int = 1, cause: MissCause = MissCause.EVICTED) -> None:
        """Look up prompts of 80 tokens; 48 tokens of each prompt are found."""
        for _ in range(requests):
            self.bus.publish(events.LookupAnswered(A, 0, 3, 2, 48, 32, cause))

    def reading(self, at: float) -> Reading:
        return parse_page(generate_latest(self.collector).decode(), at)[""]

    def serve(self, port: int = 0) -> AbstractContextManager[str]:
        registry = CollectorRegistry()
        registry.register(self.collector)
        return serve(registry, "127.0.0.1", port)


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.work()
    return engine


def row(*readings: Reading) -> Row:
    """Return the table row of a server that was scraped several times."""
    server = Server("http://h:1/metrics")
    for reading in readings:
        server.before, server.now = server.now, {"": reading}
    (found,) = server.rows()
    return found


def cells(*servers: Server) -> list[list[str]]:
    """Return the cells of the table's rows, without the headings."""
    console = Console(width=250, file=io.StringIO(), highlight=False, markup=False, emoji=False)
    console.print(table(servers))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()[1:]]


# -- pages ----------------------------------------------------------------------------------------------------------


def page_of(engines: int) -> str:
    """Return a metrics page with this many engines."""
    lines = [f'kvoffload_resets_total{{engine="{number}"}} 1\n' for number in range(engines)]
    return "".join(["# TYPE kvoffload_resets_total counter\n", *lines])


def test_engines_of_one_server_have_separate_rows_whatever_other_labels_exist() -> None:
    text = (
        '# TYPE kvoffload_resets_total counter\nkvoffload_resets_total{model_name="m",engine="0"} 1\n'
        'kvoffload_resets_total{model_name="m",engine="1"} 2\n'
        'kvoffload_resets_total{model_name="n",engine="1"} 4\n'
        "# TYPE other gauge\nother 1\n"
    )
    engines = parse_page(text, 0.0)
    assert engines.keys() == {"0", "1"}
    assert engines["0"].total("kvoffload_resets_total") == 1
    assert engines["1"].total("kvoffload_resets_total") == 6
    assert engines["1"].total("kvoffload_resets_total", model_name="n") == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "switched on"),
        ("# TYPE other gauge\nother 1\n", "switched on"),
        ("<html>hello</html>\n", "not a page of metrics"),
        ("# TYPE kvoffload_slots gauge\nkvoffload_slots NaN\n", "kvoffload_slots is nan"),
        ("# TYPE kvoffload_slots gauge\nkvoffload_slots +Inf\n", "kvoffload_slots is inf"),
        (page_of(1001), "it has 1,001 engines; at most 1,000 are shown"),
    ],
)
def test_a_page_that_cannot_be_shown_is_refused(text: str, said: str) -> None:
    with pytest.raises(PageError, match=said):
        parse_page(text, 0.0)


def test_a_page_may_have_a_thousand_engines() -> None:
    assert len(parse_page(page_of(1000), 0.0)) == 1000


def test_a_bucket_without_a_bound_hides_no_row() -> None:
    text = (
        '# TYPE kvoffload_transfer_seconds histogram\nkvoffload_transfer_seconds_bucket{direction="load"} 1\n'
        '# TYPE kvoffload_lookup_tokens_total counter\nkvoffload_lookup_tokens_total{result="hit"} 5\n'
    )
    assert row(parse_page(text, 0.0)[""]).saved_tokens == 5


def test_names_that_a_server_gives_are_shown_as_text() -> None:
    name = "[/bold]:smile:\x1b[2J"
    text = f'# TYPE kvoffload_degraded gauge\nkvoffload_degraded{{engine="{name}",cause="{name}"}} 1\n'
    [[engine, offloading, *_]] = cells(Server("http://h:1/metrics", now=parse_page(text, 0.0)))
    assert engine == "h:1 [/bold]:smile:?[2J"
    assert offloading == "OFF: [/bold]:smile:?[2J"


# -- rows -----------------------------------------------------------------------------------------------------------


def test_rates_are_computed_between_two_scrapes(engine: Engine) -> None:
    before = engine.reading(10.0)
    first = row(before)
    assert (first.hit_rate, first.hit_rate_now, first.saved_tokens_per_s) == (0.6, None, None)
    engine.work(4)
    found = row(before, engine.reading(12.0))
    assert (found.saved_tokens, found.saved_tokens_per_s) == (240, 96)
    assert found.hit_rate_now == 0.6


def test_waiting_and_interference_are_subtracted_from_the_seconds_saved(engine: Engine) -> None:
    engine.state = {"kvoffload_prefill_seconds_saved_total": {(): 10.0}}
    before = engine.reading(0.0)
    engine.state = {
        "kvoffload_prefill_seconds_saved_total": {(): 14.0},
        "kvoffload_interference_seconds_total": {("store",): 0.25, ("load",): 0.25},
    }
    engine.counters.waits[LoadWait.OWN_LOAD].observe(1.0)
    engine.counters.waits[LoadWait.FETCH].observe(0.5)
    found = row(before, engine.reading(2.0))
    assert (found.net_s, found.net_s_per_s) == (12.0, 1.0)


def test_the_top_cause_is_that_of_first_missing_blocks(engine: Engine) -> None:
    """Each lookup also misses a second block, with the cause "behind_miss". This second block must not be
    counted.
    """
    engine.work(2, MissCause.NEVER_SEEN)
    found = row(engine.reading(0.0))
    assert found.miss_cause == "never_seen"
    assert found.miss_share == pytest.approx(2 / 3)
    assert row(Engine().reading(0.0)).miss_cause is None


def test_requests_that_opted_out_change_neither_the_hit_rate_nor_the_top_cause(engine: Engine) -> None:
    before = engine.reading(0.0)
    engine.work()
    engine.bus.publish(events.LookupAnswered(A, 0, 0, 50, 0, 800, None, opted_out=True))
    found = row(before, engine.reading(2.0))
    assert (found.hit_rate, found.hit_rate_now) == (0.6, 0.6)
    assert (found.miss_cause, found.miss_share) == ("evicted", 1)


def test_after_a_restart_nothing_is_negative(engine: Engine) -> None:
    engine.work(3)
    fresh = Engine()
    fresh.work()
    found = row(engine.reading(1.0), fresh.reading(2.0))
    assert (found.saved_tokens, found.saved_tokens_per_s, found.hit_rate_now) == (48, None, None)


def test_a_row_has_the_operators_numbers(engine: Engine) -> None:
    engine.state = {
        "kvoffload_host_bytes": {("wanted",): 8 << 30, ("reserved",): 2 << 30, ("used",): 1 << 30},
        "kvoffload_slots": {("disk", "ready"): 3, ("disk", "empty"): 1},
        "kvoffload_capacity_slots": {("disk",): 4},
        "kvoffload_slot_bytes": {("disk",): 2**20},
        "kvoffload_tier_state": {("node", "open"): 1, ("disk", "open"): 1, ("remote", "opening"): 1},
        "kvoffload_neighbours": {(): 7},
        "kvoffload_predicted_hit_tokens_ratio": {("host", "1x"): 0.29, ("host", "2x"): 0.41},
    }
    server = Server("http://h:1/metrics", now={"0": engine.reading(0.0)})
    assert cells(server) == [
        [
            *("h:1 0", "on", "60% (-)", "48 (-)", "0.0 (-)", "evicted (100%)"),
            *("50% of 2.0 GiB, 25% pinned", "7 engines, open"),
            *("75% of 4.0 MiB, open", "opening"),
        ]
    ]
    engine.state["kvoffload_host_bytes"] = {("wanted",): 8 << 30, ("reserved",): 8 << 30}
    for unknown, host in (
        (0.04, "0% of 8.0 GiB, 2x finds +12%"),
        (0.3, "0% of 8.0 GiB, 2x finds +12% or more"),
    ):
        engine.state["kvoffload_predicted_unknown_ratio"] = {("host", "2x"): unknown}
        [[*_, shown, _, _, _]] = cells(Server("http://h:1/metrics", now={"0": engine.reading(0.0)}))
        assert shown == host
    engine.state = {
        "kvoffload_degraded": {("transfer_dead",): 1},
        "kvoffload_tier_state": {("disk", "closed"): 1},
    }
    [[_, offloading, *_, disk]] = cells(Server("http://h:1/metrics", now={"0": engine.reading(0.0)}))
    assert (offloading, disk) == ("OFF: transfer_dead", "closed")


@pytest.mark.parametrize("tier", LOWER_TIERS)
def test_a_tier_has_a_column_if_an_engine_uses_it_and_is_red_if_it_fails(engine: Engine, tier: Tier) -> None:
    for state, style in (("open", None), ("failing", "bold red")):
        engine.state = {"kvoffload_tier_state": {(tier.value, state): 1}}
        shown = table([Server("http://h:1/metrics", now={"0": engine.reading(0.0)})])
        assert isinstance(shown, Table)
        headings = [str(column.header) for column in shown.columns]
        assert [one for one in headings if one in {lower.value for lower in LOWER_TIERS}] == [tier.value]
        assert [row.style for row in shown.rows] == [style]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("adopted", ", 1,200 adopted, 300 hit"),
        ("other_kv", ", not adopted: other_kv"),
        ("nothing_left", ""),
        ("opening", ""),
    ],
)
def test_the_hosts_cell_says_what_an_earlier_engine_left(engine: Engine, result: str, said: str) -> None:
    engine.state = {
        "kvoffload_host_bytes": {("wanted",): 2 << 30, ("reserved",): 2 << 30, ("used",): 1 << 30},
        "kvoffload_host_adoption": {(result,): 1},
    }
    if result == "adopted":
        engine.bus.publish(events.BlocksAdopted(1200))
        engine.bus.publish(events.AdoptedBlocksHit(300))
    [[*_, host]] = cells(Server("http://h:1/metrics", now={"0": engine.reading(0.0)}))
    assert host == f"50% of 2.0 GiB{said}"
    assert row(engine.reading(0.0)).adoption == result


# -- addresses ------------------------------------------------------------------------------------------------------


def test_an_address_or_a_port_is_enough() -> None:
    assert page_url("127.0.0.1:9464") == "http://127.0.0.1:9464/metrics"
    assert page_url("9777") == "http://127.0.0.1:9777/metrics"
    assert page_url("http://[::1]:1/") == "http://[::1]:1/metrics"
    assert page_url("https://h/own/path?x=1") == "https://h/own/path?x=1"


@pytest.mark.parametrize(
    "text", ["ftp://h/metrics", "http://", "h:99999999", "99999999", "file:///etc/passwd"]
)
def test_a_text_that_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="not the URL"):
        page_url(text)


def test_a_password_in_a_url_is_refused_and_not_printed() -> None:
    for text in ("http://user:secret@h:1/metrics", "user:secret@h:1"):
        with pytest.raises(CommandError, match=r"^the URL of h must not have a user or a password$"):
            page_url(text)
    for text in (
        "http://user:secret@h:99999",
        "user:secret@h:x",
        "ftp://user:secret@h",
        "http://user:sec?ret@h",
    ):
        with pytest.raises(CommandError, match=r"^'h\b.* is not the URL"):
            page_url(text)


def test_a_stopped_server_keeps_its_rows_and_gets_an_error_line(engine: Engine) -> None:
    with engine.serve() as url:
        server = Server(url)
        server.scrape()
    assert not server.problem
    server.scrape()
    assert server.problem.startswith("not reachable: ")
    assert [row.saved_tokens for row in server.rows()] == [48]


def test_an_unreachable_address_is_shown_as_a_line() -> None:
    server = Server("http://127.0.0.1:1/\u00e4")
    server.scrape()
    assert server.problem.startswith("not reachable: ")


@contextmanager
def answering(*lines: bytes) -> Iterator[str]:

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.writelines(lines)

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([b"HTTP/1.0 404 Not Found\r\n\r\n"], "it answers 404 Not Found"),
        ([b"HTTP/1.0 200 OK\r\n\r\n<html>\n"], "it is not a page of metrics"),
        ([b"HTTP/1.0 200 OK\r\n\r\n\xff\n"], "it is not a page of metrics"),
        ([b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\nother 1\n"], "its answer is cut off"),
        ([b"HTTP/1.0 302 Found\r\nLocation: ftp://x/\r\n\r\n"], "not reachable: "),
        ([b"\x1b[2J\r\n"], "not reachable: "),
        ([], "not reachable: "),
    ],
)
def test_an_answer_that_is_not_a_metrics_page_is_shown_as_a_line(
    lines: list[bytes], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(*lines) as address:
        assert main(["top", address, "--once", "--interval", "0.1"]) == Exit.FAILED
    out, error = capsys.readouterr()
    assert out == ""
    assert said in error
    assert error.count("\n") == 1
    assert error.rstrip("\n").isprintable()


def test_an_answer_that_comes_too_slowly_ends_the_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=itertools.count(0.0, 6.0).__next__)
    monkeypatch.setattr("kvoffload.cli.top.time", clock)
    with answering(b"HTTP/1.0 200 OK\r\n\r\nother 1\n") as address:
        server = Server(page_url(address))
        server.scrape()
    assert server.problem == "its answer takes longer than 5 s"


# -- --once ---------------------------------------------------------------------------------------------------------


def test_once_prints_the_rows_and_exits(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with engine.serve() as url:
        assert main(["top", url, "--once", "--interval", "0.1"]) == Exit.OK
        assert "\x1b" not in capsys.readouterr().out
        assert main(["top", url, "127.0.0.1:1", "--once", "--interval", "0.1"]) == Exit.FAILED
        captured = capsys.readouterr()
        heading, found = captured.out.splitlines()
        assert heading.startswith("engine")
        assert found.startswith(f"{urlsplit(url).netloc}  on")
        assert "127.0.0.1:1/metrics: not reachable" in captured.err


def test_the_rows_as_json(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with engine.serve() as url:
        assert main(["top", str(urlsplit(url).port), "--interval", "0.1", "--json"]) == Exit.OK
        result = json.loads(capsys.readouterr().out)
    assert (result["schema"], result["kind"]) == (3, "top")
    assert result["seen_from"]["kvoffload"]
    ((server_,),) = [result["servers"]]
    assert (server_["url"], server_["problem"]) == (url, None)
    (seen,) = server_["engines"]
    assert (seen["saved_tokens"], seen["saved_tokens_per_s"]) == (48, 0)
    assert seen["miss_cause"] == "evicted"
    off = {"state": "off", "capacity_bytes": 0, "used_bytes": 0}
    assert seen["tiers"] == {tier.value: off for tier in LOWER_TIERS}
    assert (seen["adoption"], seen["adopted_blocks"], seen["adopted_hit_blocks"]) == ("off", 0, 0)


# -- on a terminal --------------------------------------------------------------------------------------------------


class OnTerminal:
    """Runs the command on a pseudo-terminal."""

    def __init__(self, url: str) -> None:
        self.master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
        command = [sys.executable, "-m", "kvoffload", "top", url, "--interval", "0.1"]
        own = {"stdin": self._slave, "stdout": self._slave, "stderr": self._slave}
        self.process = subprocess.Popen(command, start_new_session=True, preexec_fn=self._own_terminal, **own)  # type: ignore[call-overload]
        self.seen = ""

    def _own_terminal(self) -> None:
        # Make this the controlling terminal, so that Ctrl-C reaches the command.
        fcntl.ioctl(self._slave, termios.TIOCSCTTY, 0)

    def read_until(self, text: str, seconds: float = 30.0) -> None:
        """Read output until `text` appears."""
        drawn, deadline = "", time.monotonic() + seconds
        while text not in drawn:
            assert time.monotonic() < deadline, f"{text!r} is not in {drawn[-3000:]!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                drawn += os.read(self.master, 65536).decode()
        self.seen += drawn

    def end(self) -> int:
        deadline = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65536).decode()
        while select.select([self.master], [], [], 0)[0]:
            self.seen += os.read(self.master, 65536).decode()
        return self.process.wait(timeout=1)

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
@pytest.mark.parametrize("how", ["ctrl-c", "terminated"])
def test_top_survives_a_servers_restart_and_restores_the_terminal(engine: Engine, how: str) -> None:
    engine.work(5)
    served = ExitStack()
    url = served.enter_context(engine.serve())
    with on_terminal(url) as terminal:
        terminal.read_until("288 (")
        served.close()
        terminal.read_until("trying again")
        fresh = Engine()
        fresh.work()
        with fresh.serve(urlsplit(url).port or 0):
            terminal.read_until("48 (")
            if how == "ctrl-c":
                os.write(terminal.master, b"\x03")
                assert terminal.end() == Exit.OK
            else:
                terminal.process.send_signal(signal.SIGTERM)
                assert terminal.end() == Exit.TERMINATED
        cursor = re.findall(r"\x1b\[\?25[hl]", terminal.seen)
        assert cursor[-1] == "\x1b[?25h"
        assert "Traceback" not in terminal.seen
