from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from kvoffload.cli.demo.play import Player
from tests.cli.conftest import error_of

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


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--config", "store_polcy=lazy"], ["did you mean store_policy?"]),
        (["--config", "transfer_timeout_s=soon"], ["transfer_timeout_s"]),
        (["--config", "verify=maybe", "--config", "hosts=3"], ["verify", "hosts"]),
        (["--config", "host_bytes=2MiB"], ["host_bytes is set twice"]),
        (["--serve-for", "3"], ["--serve-for needs --serve-metrics"]),
        (["--serve-metrics", "192.0.2.1:9464"], ["192.0.2.1"]),
        pytest.param(["--host-bytes", "1KiB"], ["below one block"], marks=slow),
        pytest.param(["--host-bytes", "1000TiB"], ["above the"], marks=slow),
        (["--device", "cuda:99"], ["cuda:99"]),
        (["--device", "gpu"], ["gpu"]),
        (["--device", "cpu:1"], ["cpu:1"]),
        (["--device-blocks", "5"], ["--device-blocks 5 is too small"]),
        pytest.param(["--device-blocks", str(10**12)], ["cannot be made"], marks=slow),
    ],
)
def test_impossible_options_are_a_one_line_error_that_names_every_problem(
    more: list[str], said: list[str], small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(capsys, *small, *more)
    assert [words for words in said if words not in error] == []
    assert "num_blocks" not in error


def test_a_port_that_is_taken(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in error_of(capsys, *small, "--serve-metrics", str(port))


def test_no_such_plugin(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.engine.plugin.entry_points", lambda group: ())
    assert "no engine plugin is called 'kvoffload'" in error_of(capsys, *small)
