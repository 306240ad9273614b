"""`kvoffload top` on real servers of metrics, on a real terminal, in a pipe, and through a server's restart."""

from __future__ import annotations

import fcntl
import os
import pty
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
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from kvoffload.bus.bus import Bus
from kvoffload.cli.exits import CommandError, Exit
from kvoffload.cli.main import main
from kvoffload.cli.top.page import page
from kvoffload.cli.top.reading import Change, PageError, Reading, has_restarted, parse_page
from kvoffload.cli.top.server import State, page_url, scrape
from kvoffload.cli.top.view import show
from kvoffload.cli.top.words import bar, count, duration, per_second, seconds, share, size
from kvoffload.model import events
from kvoffload.model.causes import CopyOutcome, DegradeCause, Found, LoadOutcome, MissCause, StoreOutcome
from kvoffload.model.ids import JobId, Rank, RequestId
from kvoffload.model.transfer import Direction
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.exporter import KVOffloadCollector
from kvoffload.telemetry.gauges import GaugeSnapshot
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
        return parse_page(generate_latest(self.collector).decode(), at)

    def serve(self, port: int = 0) -> MetricsServer:
        registry = CollectorRegistry()
        registry.register(self.collector)
        return serve(registry, "127.0.0.1", port)


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.work()
    return engine


def texts(change: Change, unix_now: float = 0.0) -> list[str]:
    return [" ".join(line.text.split()) for line in show(change, unix_now)]


# -- numbers --------------------------------------------------------------------------------------------------------


def test_a_page_is_read_as_it_was_counted(engine: Engine) -> None:
    reading = engine.reading(1.0)
    assert reading.number("kvoffload_lookup_tokens_total", "hit") == 48
    assert reading.number("kvoffload_miss_blocks_total", "evicted") == 1
    assert reading.number("kvoffload_slots", "host", "ready") == 6
    assert reading.number("kvoffload_transfer_seconds_count", "host", "load") == 1
    assert reading.total("kvoffload_store_blocks_total") == 2


def test_engines_of_one_server_are_added_up_whatever_other_labels_there_are() -> None:
    text = (
        '# TYPE kvoffload_resets_total counter\nkvoffload_resets_total{model_name="m",engine="0"} 1\n'
        'kvoffload_resets_total{model_name="m",engine="1"} 2\n'
        '# TYPE kvoffload_degraded gauge\nkvoffload_degraded{engine="0",cause="law_broken"} 1\n'
        'kvoffload_degraded{engine="1",cause="law_broken"} 1\n'
        "# TYPE kvoffload_oldest_pin_timestamp_seconds gauge\n"
        'kvoffload_oldest_pin_timestamp_seconds{engine="0"} 0\nkvoffload_oldest_pin_timestamp_seconds{engine="1"} 7\n'
        'kvoffload_oldest_pin_timestamp_seconds{engine="2"} 5\n'
        "# TYPE kvoffload_of_tomorrow gauge\nkvoffload_of_tomorrow 1\n# TYPE other gauge\nother 1\n"
    )
    reading = parse_page(text, 0.0)
    assert reading.number("kvoffload_resets_total") == 3
    assert reading.number("kvoffload_degraded", "law_broken") == 1
    assert reading.number("kvoffload_oldest_pin_timestamp_seconds") == 5
    assert "kvoffload_of_tomorrow" not in reading.numbers


@pytest.mark.parametrize("text", ["", "# TYPE other gauge\nother 1\n"])
def test_a_page_without_us_is_said_to_be_one(text: str) -> None:
    with pytest.raises(PageError, match="switched on"):
        parse_page(text, 0.0)


def test_a_page_that_is_none_is_said_to_be_none() -> None:
    with pytest.raises(PageError, match="no page of metrics"):
        parse_page("<html>hello</html>\n", 0.0)


def test_rates_and_means_are_of_the_time_between_two_readings(engine: Engine) -> None:
    before = engine.reading(10.0)
    engine.work(4)
    change = Change(engine.reading(12.0), before)
    assert change.rate("kvoffload_lookup_tokens_total", "hit") == pytest.approx(96)
    assert change.mean("kvoffload_transfer_seconds", "host", "load") == pytest.approx(0.004)
    assert change.mean("kvoffload_transfer_seconds", "host", "store") is None
    assert Change(before).rate("kvoffload_lookup_tokens_total", "hit") is None


def test_a_restart_is_seen_and_nothing_becomes_negative(engine: Engine) -> None:
    engine.work(3)
    state = State().after(engine.reading(1.0)).after(engine.reading(2.0))
    fresh = Engine()
    fresh.work()
    assert state.change is not None
    assert has_restarted(fresh.reading(3.0), state.change.now)
    state = state.after(fresh.reading(3.0))
    assert state.restarts == 1
    assert state.change is not None
    assert state.change.before is None
    assert "restarted 1 times" in page("url", state, 2.0, 0.0)[1].text


# -- what is shown --------------------------------------------------------------------------------------------------


def test_it_shows_what_the_overview_shows(engine: Engine) -> None:
    before = engine.reading(0.0)
    engine.work(2)
    shown = texts(Change(engine.reading(2.0), before))
    assert "offloading is on" in shown
    assert "found on the host 144 48.0" in shown
    assert "hit ratio 60.0 % 60.0 %" in shown
    assert "evicted 3 1.0" in shown  # the cause
    assert "behind_miss 3 1.0" in shown
    assert "stored 6 2.0" in shown
    assert "loaded 9 3.0" in shown
    assert "load 12.0 KiB 4.0 KiB 4.0 ms 2.0 ms 2" in shown
    assert "ready 6 ##################............" in shown
    assert any("0.5 % of the engine's time" in line for line in shown)


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


def test_it_shows_whether_it_is_worth_it(engine: Engine) -> None:
    engine.state = replace(engine.state, benefit=benefit(10.0, 1.5))
    before = engine.reading(0.0)
    assert "net 7.50 -" in texts(Change(before))
    engine.state = replace(engine.state, benefit=benefit(14.0, 2.5, break_even=96))
    shown = texts(Change(engine.reading(2.0), before))
    assert "net benefit, in seconds since start per second" in shown
    assert "prefilling saved 14.00 2.00" in shown
    assert "waited for loads 3.00 0.50" in shown
    assert "interference of copies 0.50 0.00" in shown
    assert "net 10.50 1.50" in shown
    assert "hits pay from 96 tokens on" in shown


def test_a_net_loss_is_an_alarm(engine: Engine) -> None:
    engine.state = replace(engine.state, benefit=benefit(1.0, 9.0, negative=True, break_even=1_000_000))
    lines = show(Change(engine.reading(0.0)), 0.0)
    assert [" ".join(line.text.split()) for line in lines if line.alarm] == ["net -9.00 -"]
    assert any("no hit pays" in line.text for line in lines)
    engine.state = replace(engine.state, benefit=benefit(1.0, 9.0))
    shown = show(Change(engine.reading(0.0)), 0.0)
    assert not [line for line in shown if line.alarm]
    assert any("break-even not measured yet" in line.text for line in shown)


def test_it_shows_the_times_to_first_token_by_what_was_found(engine: Engine) -> None:
    engine.first_token(Found.HOST, 0.2)
    before = engine.reading(0.0)
    for seconds_ in (0.3, 0.5):
        engine.first_token(Found.HOST, seconds_)
    engine.first_token(Found.NOTHING, 1.5)
    line = "first token, mean by what was found: host {}, device -, nothing {}"
    assert line.format("200.0 ms", "-") in texts(Change(before))
    assert line.format("400.0 ms", "1.5 s") in texts(Change(engine.reading(1.0), before))


def test_engines_that_lose_or_never_pay_are_not_averaged_away() -> None:
    name = "kvoffload_break_even_tokens"
    text = f"# TYPE {name} gauge\n" + "".join(
        f'{name}{{engine="{number}"}} {tokens}\n' for number, tokens in enumerate((64, 80))
    )
    assert parse_page(text, 0.0).number(name) == 80


def test_what_is_wrong_is_an_alarm(engine: Engine) -> None:
    engine.state = replace(
        engine.state,
        degraded=DegradeCause.LAW_BROKEN,
        slots={"quarantined": 10},
        oldest_pin_s=100.0,
        dropped={"log": 5},
    )
    alarms = [line.text.strip() for line in show(Change(engine.reading(0.0)), 160.0) if line.alarm]
    assert alarms[0] == "offloading is OFF: law_broken"
    assert "5 events dropped" in alarms
    assert any(text.startswith("quarantined") for text in alarms)
    assert any("oldest pin 60.0 s" in text for text in texts(Change(engine.reading(0.0)), 160.0))


def test_the_rest_of_a_long_list_is_one_line() -> None:
    misses: dict[Labels, float] = {}
    for number, cause in enumerate(MissCause):
        misses[cause.value,] = 100.0 - number
    shown = texts(Change(Reading(0.0, {"kvoffload_miss_blocks_total": misses})))
    (rest,) = [line for line in shown if line.startswith("others")]
    assert int(rest.split()[1].replace(",", "")) == sum(100 - n for n in range(8, len(MissCause)))


def test_numbers_as_people_read_them() -> None:
    assert (count(1234567.0), count(None)) == ("1,234,567", "-")
    assert (per_second(0.0), per_second(3.14159), per_second(12345.6), per_second(None)) == (
        "0",
        "3.1",
        "12,346",
        "-",
    )
    assert (share(1, 3), share(0, 0)) == ("33.3 %", "-")
    assert (seconds(0.125), seconds(-3.0), seconds(12345.6), seconds(None)) == (
        "0.12",
        "-3.00",
        "12,346",
        "-",
    )
    assert (size(0), size(1536), size(3 * 2**40), size(None)) == ("0 B", "1.5 KiB", "3.0 TiB", "-")
    assert (duration(2e-6), duration(0.25), duration(90), duration(7200), duration(None)) == (
        *("2.0 us", "250.0 ms", "90.0 s", "120 min", "-"),
    )
    assert (bar(1, 2, 4), bar(0, 0, 2), bar(9, 3, 2)) == ("##..", "..", "##")


def test_old_numbers_stay_while_there_is_no_answer(engine: Engine) -> None:
    state = State().after("not reachable: refused")
    assert [line.text for line in page("u", state, 1.0, 0.0)][2] == "not reachable: refused; trying again"
    state = State().after(engine.reading(0.0)).after("not reachable: refused")
    lines = page("u", state, 1.0, 0.0)
    assert lines[2].text.endswith("these numbers are old")
    assert any("found on the host" in line.text for line in lines)
    assert page("u", State(), 1.0, 0.0)[-1].text == "waiting for the first answer"


# -- where it looks -------------------------------------------------------------------------------------------------


def test_an_address_is_enough() -> None:
    assert page_url("127.0.0.1:9464") == "http://127.0.0.1:9464/metrics"
    assert page_url("http://[::1]:1/") == "http://[::1]:1/metrics"
    assert page_url("https://h/own/path?x=1") == "https://h/own/path?x=1"


@pytest.mark.parametrize("text", ["ftp://h/metrics", "http://", "h:99999999", "file:///etc/passwd"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="not the URL"):
        page_url(text)


def test_servers_that_have_nothing_for_us_are_told_apart(engine: Engine) -> None:
    with engine.serve() as server:
        assert (
            scrape(server.url.replace("/metrics", "/elsewhere"), 5.0)
            == "it answers 404 only /metrics is served here"
        )
        port = server.port
    assert str(scrape(f"http://127.0.0.1:{port}/metrics", 5.0)).startswith("not reachable: ")


def test_once_prints_the_numbers_and_ends(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with engine.serve() as server:
        assert main(["top", server.url, "--once"]) == Exit.OK
        out = capsys.readouterr().out
        assert out.startswith(f"{server.url}\n")
        assert "\x1b" not in out
        assert "found on the host" in out
    assert main(["top", server.url, "--once"]) == Exit.FAILED
    assert "not reachable" in capsys.readouterr().err


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
        terminal.read_until("these numbers are old")
        fresh = Engine()
        fresh.work()
        with fresh.serve(server.port):
            terminal.read_until("restarted 1 times")
            os.write(terminal.master, b"q")
            assert terminal.end() == Exit.OK
        assert terminal.is_as_before()
        assert terminal.seen.endswith("\x1b[?25h\x1b[?1049l")


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
        assert terminal.seen.endswith("\x1b[?25h\x1b[?1049l")
        assert "Traceback" not in terminal.seen


@pytest.mark.slow
def test_keys_are_heard_while_nobody_answers() -> None:
    with on_terminal("127.0.0.1:1") as terminal:
        terminal.read_until("trying again")
        os.write(terminal.master, b"x")
        terminal.read_until("trying again")
        os.write(terminal.master, b"q")
        assert terminal.end() == Exit.OK
