from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvoffload.checks.outputs import CHECKS
from tests.doctor.trees import ask, machine, setup


def found(url: str | None, tmp_path: Path) -> tuple[str, str]:
    return ask(CHECKS, "remote tier", setup(remote_url=url), machine(tmp_path))


def test_no_remote_tier_passes(tmp_path: Path) -> None:
    assert found(None, tmp_path)[0] == "ok"


@pytest.mark.parametrize("url", ["mooncake://host", "mooncake://host:1?protocol=udp", "s3://bucket?x=1"])
def test_a_url_of_another_form_is_an_error(url: str, tmp_path: Path) -> None:
    verdict, text = found(url, tmp_path)
    assert verdict == "error"
    assert text.startswith("remote_url")


def test_a_master_that_answers_is_a_warning_because_anyone_can_read_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as master:
        # The server accepts a connection and closes it at once.
        master.submit(lambda: server.accept()[0].close())
        verdict, text = found(f"mooncake://127.0.0.1:{server.getsockname()[1]}", tmp_path)
    assert verdict == "warning"
    assert "no authentication" in text
    assert "all addresses" in text


@pytest.mark.parametrize("url", ["mooncake://127.0.0.1:1", "s3://bucket"])
def test_a_store_that_does_not_answer_is_a_warning(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "name-of-a-credential")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    verdict, text = found(url, tmp_path)
    assert verdict == "warning"
    assert "nothing would be shared" in text
    assert "credential" not in text
    assert "secret" not in text
