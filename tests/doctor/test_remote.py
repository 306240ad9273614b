from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvoffload.checks.outputs import CHECKS
from kvoffload.model.errors import RemoteError
from kvoffload.remote.bucket import BucketStore
from tests.doctor.trees import ask, machine, setup


def found(url: str, tmp_path: Path) -> tuple[str, str]:
    return ask(CHECKS, "remote tier", setup(remote_url=url), machine(tmp_path))


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


@pytest.mark.parametrize("is_granted", [True, False])
def test_a_bucket_that_refuses_writes_is_a_warning(
    is_granted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, bytes] = {}

    def replace(_: BucketStore, name: str, data: bytes) -> None:
        if not is_granted:
            raise RemoteError("s3://bucket fails: 403 Forbidden")
        written[name] = data

    monkeypatch.setenv("AWS_ENDPOINT", "https://127.0.0.1:1")
    monkeypatch.setattr(BucketStore, "read", lambda *_: None)
    monkeypatch.setattr(BucketStore, "replace", replace)
    verdict, text = found("s3://bucket", tmp_path)
    if is_granted:
        assert (verdict, written) == ("ok", {"kvo1/probe": b""})
    else:
        assert verdict == "warning"
        assert text == (
            "s3://bucket fails: 403 Forbidden on a write: this engine would read the bucket and add nothing to it"
        )
