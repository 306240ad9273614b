from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvoffload.model.causes import TierOutcome
from kvoffload.model.errors import RemoteError, RemoteGone
from kvoffload.model.ids import BlockKey
from kvoffload.model.wire import Direction
from kvoffload.remote import mooncake
from kvoffload.remote.address import parse_address
from kvoffload.remote.store import open_store
from kvoffload.remote.values import Shard
from kvoffload.runtime import remote_catalog
from kvoffload.telemetry.catalogue import TierState
from tests.captured_logs import capture_logs
from tests.reference.rig import BLOCK, text
from tests.remote.sharing import PATIENCE_S, StartEngine

TIMEOUT_S = 1.5
SHARD, KEYS = Shard("print/generation", 0, 1), [BlockKey(b"one"), BlockKey(b"two")]
OTHER, LATER = text(7, 10 * BLOCK), text(8, 10 * BLOCK)
pytestmark = pytest.mark.timeout(120)


class Master:
    """Listens like a Mooncake master, and closes each connection, as a master does after an unknown request.

    Args:
        answers: how many connections to accept; None for all.
    """

    def __init__(self, answers: int | None = None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"mooncake://127.0.0.1:{self._listener.getsockname()[1]}"
        self._left = answers
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while self._left != 0:
                self._listener.accept()[0].close()
                self._left = None if self._left is None else self._left - 1

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


class Fake:
    """The fake client on the import path of the child process, together with a fake master."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        for name in ("mooncake", "orders", "values"):
            (folder / name).mkdir()
        (folder / "mooncake" / "__init__.py").touch()
        shutil.copy(Path(__file__).with_name("fake_mooncake.py"), folder / "mooncake" / "store.py")

    def order(self, call: str, what: str) -> None:
        (self.folder / "orders" / call).write_text(what)

    def lift(self, call: str) -> None:
        (self.folder / "orders" / call).unlink()

    def pids(self, call: str | None = None) -> list[int]:
        """Return the ids of the processes that have made this call (by default any call), in order."""
        log = self.folder / "calls"
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return [int(pid) for pid, name in lines if call in (None, name)]


@pytest.fixture
def master() -> Iterator[Master]:
    with closing(Master()) as made:
        yield made


@pytest.fixture
def fake(tmp_path: Path, master: Master, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(remote_catalog, "LOOK_PERIOD_S", 0.05)
    return Fake(tmp_path, master.url)


def has_ended(pid: int) -> bool:
    """Wait for a process to end; return False if the time limit passes first."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended = bool(select.select([descriptor], [], [], PATIENCE_S)[0])
    os.close(descriptor)
    return ended


def of_event(lines: list[dict[str, Any]], event: str) -> list[str]:
    return [str(line.get("reason")) for line in lines if line["event"] == event]


def test_the_engines_process_never_calls_the_mooncake_client(start: StartEngine, fake: Fake) -> None:
    first, second = (start(fake.url, ranks=2).opened() for _ in range(2))
    first.share()
    second.find()
    made = set(fake.pids())
    assert os.getpid() not in made
    # each of the two engines has one process for the scheduler and one for each of two ranks
    assert len(made) == 2 * 3
    for engine in (first, second):
        engine.engine.close()
    assert all(map(has_ended, made))


@pytest.mark.parametrize(
    ("call", "how"),
    [
        ("batch_get_into", "kill"),
        ("batch_put_from", "kill"),
        pytest.param("batch_get_into", "abort", marks=pytest.mark.full),
        pytest.param("batch_put_from", "abort", marks=pytest.mark.full),
        pytest.param("batch_get_into", "hang", marks=pytest.mark.full),
        pytest.param("batch_put_from", "hang", marks=pytest.mark.full),
        ("batch_get_into", "three parts"),
        pytest.param("batch_put_from", "garbage", marks=pytest.mark.full),
    ],
)
def test_r17_a_client_that_fails_during_a_copy_loses_only_hits(
    start: StartEngine, fake: Fake, call: str, how: str
) -> None:
    # Only a client that hangs may reach the limit, however slow the machine is.
    limit_s = TIMEOUT_S if how == "hang" else PATIENCE_S
    first, second = (start(fake.url, remote_timeout_s=limit_s).opened() for _ in range(2))
    first.share()
    first.share(LATER)
    had = len(fake.pids(call))
    fake.order(call, how)
    with capture_logs() as lines:
        if call == "batch_get_into":
            second.run()
            assert second.copied(Direction.LOAD) == 0
        else:
            for _ in range(2):
                second.run(OTHER)
            second.step_until(lambda: second.copied(Direction.STORE, TierOutcome.FAILED) > 0)
        second.step_until(lambda: of_event(lines, "remote_fails") != [])
        fake.lift(call)
        second.step_until(
            lambda: len(of_event(lines, "remote_works")) == len(of_event(lines, "remote_fails"))
        )
    second.until(TierState.OPEN)
    ended, reasons = set(fake.pids(call)[had:]), of_event(lines, "remote_fails")
    # On a slow machine, a second process may also have been started and ended.
    assert len(reasons) == len(ended)
    assert all(map(has_ended, ended))
    expected = {"kill": "exit code -9", "abort": "exit code -6", "hang": "has not"}
    assert all(expected.get(how, "other than an answer") in reason for reason in reasons)
    assert of_event(lines, "remote_call_returned") == []
    second.find(LATER)
    assert fake.pids("batch_get_into")[-1] not in ended
    first.run(OTHER)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("hang", "has not answered for 1 s"),
        pytest.param("refuse", "refuses the connection", marks=pytest.mark.full),
        pytest.param("abort", "exit code -6", marks=pytest.mark.full),
    ],
)
def test_r17_a_client_that_does_not_connect_is_only_probed_and_used_later(
    start: StartEngine, fake: Fake, monkeypatch: pytest.MonkeyPatch, order: str, reason: str
) -> None:
    monkeypatch.setattr(mooncake, "CONNECT_S", 1.0)
    fake.order("setup", order)
    with capture_logs() as lines:
        engine = start(fake.url, remote_timeout_s=TIMEOUT_S)
        engine.step_until(lambda: len(of_event(lines, "remote_fails")) == 2)
        engine.run()
        engine.step_until(lambda: len(fake.pids("setup")) > 2)
        engine.run()
    reasons = of_event(lines, "remote_fails")  # the scheduler's side and the rank each log one line
    assert [reason in each for each in reasons] == [True, True]
    assert engine.tier is TierState.OPENING
    monkeypatch.setattr(mooncake, "CONNECT_S", PATIENCE_S)
    fake.lift("setup")
    engine.opened().share()
    made = fake.pids("setup")
    assert len(made) == len(set(made))
    engine.engine.close()
    assert all(map(has_ended, made))


@pytest.mark.parametrize(
    ("call", "answer", "reason"),
    [
        *[
            ("batch_is_exist", answer, "other than an answer")
            for answer in ("a number", "no result", "texts")
        ],
        *[("batch_is_exist", answer, "other than an answer") for answer in ("three parts", "garbage")],
        ("batch_is_exist", "too few", "0 results for 2 keys"),
        ("batch_is_exist", "too many", "4 results for 2 keys"),
        ("batch_is_exist", "closes", "closed a connection without an answer"),
        ("batch_is_exist", "print and abort", r"exit code -6\): line 99 of the client\?\[31m$"),
        ("is_exist", "no result", "other than an answer"),
    ],
)
def test_r17_a_client_process_that_answers_otherwise_than_a_call_allows_is_killed(
    fake: Fake, call: str, answer: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.order(call, answer)
    with closing(open_store(parse_address(fake.url), PATIENCE_S)) as store:
        with pytest.raises(RemoteGone, match=reason):
            store.read("name") if call == "is_exist" else store.ask(SHARD, KEYS)
        assert has_ended(fake.pids(call)[-1])
    assert capfd.readouterr() == ("", "")


def test_r17_an_answer_has_a_size_limit(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    received = list[int]()
    decode = msgspec.msgpack.decode

    def measured(data: bytes, **kind: Any) -> Any:  # noqa: ANN401  # as `decode`
        received.append(len(data))
        return decode(data, **kind)

    monkeypatch.setattr(msgspec.msgpack, "decode", measured)
    fake.order("batch_is_exist", "a flood")
    with (
        closing(open_store(parse_address(fake.url), PATIENCE_S)) as store,
        pytest.raises(RemoteGone, match="other than an answer"),
    ):
        store.ask(SHARD, KEYS)
    assert received[-1] < 2**21  # the answer has twice as many bytes


def test_an_errors_text_from_the_client_is_short_and_printable(fake: Fake) -> None:
    fake.order("batch_is_exist", "raise text")
    with closing(open_store(parse_address(fake.url), PATIENCE_S)) as store:
        with pytest.raises(RemoteError) as caught:
            store.ask(SHARD, KEYS)
        assert str(caught.value) == "?[31m" + "x" * 195
        fake.lift("batch_is_exist")
        assert store.ask(SHARD, KEYS) == [False, False]


def test_what_the_client_prints_neither_reaches_the_engines_output_nor_blocks_a_call(
    fake: Fake, capfd: pytest.CaptureFixture[str]
) -> None:
    for call in ("setup", "batch_is_exist"):
        fake.order(call, "print")
    with closing(open_store(parse_address(fake.url), PATIENCE_S)) as store:
        for _ in range(3):
            assert store.ask(SHARD, KEYS) == [False, False]
    assert capfd.readouterr() == ("", "")


def test_r17_a_client_that_cannot_be_loaded_is_logged_once_per_side(start: StartEngine, fake: Fake) -> None:
    fake.order("import", "raise")
    with capture_logs() as lines:
        engine = start(fake.url)
        # the scheduler's side and the rank have each started a process, and one of them has started a second
        engine.step_until(lambda: len(fake.pids("import")) > 2)
        engine.run()
    reasons = of_event(lines, "remote_fails")
    assert len(reasons) == 2
    assert all(
        "libibverbs.so.1" in reason and "pip install 'kvoffload[mooncake]'" in reason for reason in reasons
    )
    assert all(map(has_ended, fake.pids()[:-2]))


@pytest.mark.parametrize(
    ("answers", "reason"),
    [(None, "refuses the connection"), (2, "has not answered for 1 s"), (0, "no Mooncake master answers")],
)
def test_r17_a_master_that_closes_or_ignores_connections_does_not_delay_the_engine(
    start: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    answers: int | None,
    reason: str,
) -> None:
    if find_library("ibverbs") is None:
        pytest.skip("needs ibverbs: make tools")
    pytest.importorskip("mooncake", reason="needs the Mooncake client")
    if answers is not None:
        monkeypatch.setattr(mooncake, "CONNECT_S", 1.0)
    with closing(Master(answers)) as master, capture_logs() as lines:
        engine = start(master.url, remote_timeout_s=TIMEOUT_S)
        engine.step_until(lambda: len(of_event(lines, "remote_fails")) == 2)
        engine.run()
        engine.engine.close()
    assert all(reason in each for each in of_event(lines, "remote_fails"))
    assert capfd.readouterr().err == ""


IN_A_CALL = """
import sys, time
from kvoffload.remote.address import parse_address
from kvoffload.remote.store import open_store
from kvoffload.runtime.portal import DaemonExecutor
from kvoffload.transfer.remote import remote_calls

connect = lambda: open_store(parse_address(sys.argv[1]), 300.0)
calls = remote_calls(connect, DaemonExecutor("calls", 2), time.monotonic, 300.0)
if sys.argv[2] == "in a call":
    while not calls.works:
        calls.poll()
    calls.submit(lambda _, store: store.ask(None, []), print)
calls.poll()
print(flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("call", ["setup", "batch_is_exist"])
@pytest.mark.parametrize("how", ["exit", "kill"])
def test_client_processes_end_with_the_engine_even_during_a_hanging_call(
    fake: Fake, call: str, how: str
) -> None:
    fake.order(call, "hang")
    what = "connecting" if call == "setup" else "in a call"
    command = [sys.executable, "-c", IN_A_CALL, fake.url, what]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(fake.folder), *filter(None, sys.path)])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        while not fake.pids(call):
            os.sched_yield()
        [client] = fake.pids(call)
        if how == "exit":
            process.stdin.close()
            assert process.wait(PATIENCE_S) == 0  # the hanging call may last ten times as long
        else:
            process.send_signal(signal.SIGKILL)
    assert has_ended(client)
