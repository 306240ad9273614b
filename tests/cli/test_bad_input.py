from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from kvoffload.cli.demo.play import Player
from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _nothing_is_played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that no conversation began and that no new thread is left."""

    def play(*_: object) -> None:
        raise AssertionError("it was played")

    monkeypatch.setattr(Player, "play_round", play)
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert left == []


def refusal(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """Run the command; check that it prints a single line on standard error, and return the line."""
    assert main(argv) == Exit.USAGE
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("kvoffload: error: ")
    assert "Traceback" not in err
    return err


def test_unknown_config_key(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean store_policy?" in refusal(capsys, [*small, "--config", "store_polcy=lazy"])


def test_bad_config_value(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "transfer_timeout_s" in refusal(capsys, [*small, "--config", "transfer_timeout_s=soon"])


def test_all_problems_are_reported_together(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, [*small, "--config", "verify=maybe", "--config", "hosts=3"])
    assert "verify" in said
    assert "hosts" in said


def test_a_size_that_is_set_twice(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "host_bytes is set twice" in refusal(capsys, [*small, "--config", "host_bytes=2MiB"])


def test_a_time_without_metrics(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "--serve-for needs --serve-metrics" in refusal(capsys, [*small, "--serve-for", "3"])


@pytest.mark.slow
def test_host_memory_below_one_block(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "below one block" in refusal(capsys, [*small[:-1], "1KiB"])


@pytest.mark.slow
def test_more_host_memory_than_there_is(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "above the" in refusal(capsys, [*small[:-1], "1000TiB"])


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "cpu:1"])
def test_a_device_that_does_not_exist(
    device: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert device in refusal(capsys, [*small, "--device", device])


def test_a_port_that_is_taken(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refusal(capsys, [*small, "--serve-metrics", str(port)])


def test_a_host_that_is_not_ours(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "192.0.2.1" in refusal(capsys, [*small, "--serve-metrics", "192.0.2.1:9464"])


def test_a_device_cache_too_small_for_one_request(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, [*small, "--device-blocks", "5"])
    assert "--device-blocks 5 is too small" in said
    assert "num_blocks" not in said


@pytest.mark.slow
def test_more_device_memory_than_there_is(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be made" in refusal(capsys, [*small, "--device-blocks", str(10**12)])


def test_no_such_plugin(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.engine.plugin.entry_points", lambda group: ())
    assert "no engine plugin is called 'kvoffload'" in refusal(capsys, small)
