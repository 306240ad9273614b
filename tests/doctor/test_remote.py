from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kvoffload.checks import memory
from kvoffload.checks.check import Sizes, Verdict, run_checks
from kvoffload.checks.outputs import CHECKS
from tests.doctor.trees import GIB, ask, machine, setup
from tests.remote.http_servers import BUCKET, S3Server
from tests.remote.servers import SecureBucket

UNTRIED = "neither its speed nor its free space was tried"


def found(url: str, tmp_path: Path) -> tuple[str, str]:
    return ask(CHECKS, "remote tier", setup(remote_url=url), machine(tmp_path))


@pytest.mark.parametrize(
    ("url", "host_gib", "verdict", "taken"),
    [
        (None, 90, "ok", ""),
        ("mooncake://host:1", 80, "ok", " and some 1.1 GiB of connections"),
        ("s3://bucket", 80, "ok", " and some 2.6 GiB of connections"),
        ("s3://bucket", 88, "warning", " and some 2.6 GiB of connections"),
        ("s3://bucket", 100, "error", ""),
    ],
)
def test_connections_to_a_remote_tier_take_memory_beside_the_hosts(
    url: str | None, host_gib: int, verdict: str, taken: str, tmp_path: Path
) -> None:
    """The machine has 100 GiB left."""
    known = setup(host_bytes=host_gib * GIB, remote_url=url, sizes=Sizes(ranks=8))
    said, text = ask(memory.CHECKS, "host memory", known, machine(tmp_path))
    assert said == verdict
    assert taken in text
    assert ("connections" in text) == bool(taken)


def test_beside_huge_pages_connections_to_a_remote_tier_are_said_to_be_not_compared(tmp_path: Path) -> None:
    known = setup(host_path=tmp_path, host_hugetlbfs=tmp_path, remote_url="s3://bucket")
    verdict, text = ask(memory.CHECKS, "host memory", known, machine(tmp_path))
    assert verdict == "ok"
    assert "some 600.0 MiB of connections to the remote tier were not compared" in text


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
    assert text.endswith(UNTRIED)


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


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with closing(S3Server()) as made:
        made.reach(monkeypatch)
        yield made


def test_a_bucket_that_refuses_writes_is_a_warning(server: S3Server, tmp_path: Path) -> None:
    server.override = lambda request: (403, {}, b"") if request.command == "PUT" else None
    verdict, text = found(f"s3://{BUCKET}", tmp_path)
    assert verdict == "warning"
    assert text == (
        f"s3://{BUCKET}/ fails: 403 Forbidden on a write: this engine would read the bucket and add nothing to it"
    )


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ("start-after", "ignores start-after in listings"),
        ("conditions", "has no conditional writes"),
        ("ranges", "answers a range with the whole object: nothing would be shared"),
    ],
)
def test_what_an_s3_server_lacks_is_a_warning(
    server: S3Server, tmp_path: Path, lacks: str, words: str
) -> None:
    server.lacks.add(lacks)
    verdict, text = found(f"s3://{BUCKET}", tmp_path)
    assert verdict == "warning"
    assert words in text


def test_a_bucket_with_tls_that_does_everything_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SecureBucket(tmp_path)) as bucket:
        bucket.reach(monkeypatch)
        monkeypatch.setenv("SSL_CERT_FILE", str(bucket.certificate))
        assert found(bucket.url, tmp_path) == ("ok", f"{bucket.url}/ answers; {UNTRIED}")


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_no_status_of_a_server_that_repeats_secrets_takes_them_to_a_finding(
    server: S3Server, tmp_path: Path, method: str
) -> None:
    secret = "session-token-of-an-engine"
    for status in (301, 400, 401, 403, 404, 409, 412, 416, 501, 507):
        server.override = lambda request, status=status: (  # type: ignore[misc]
            (status, {}, f"<Code>{secret}</Code>".encode()) if request.command == method else None
        )
        _, text = found(f"s3://{BUCKET}", tmp_path)
        assert secret not in text


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [("s3://bucket", "obstore", "s3"), ("mooncake://host:1", "mooncake.store", "mooncake")],
)
def test_a_missing_client_is_an_error_whose_remedy_alone_has_the_command(
    url: str, module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with machine(tmp_path):
        (finding,) = run_checks([one for one in CHECKS if one.name == "remote tier"], setup(remote_url=url))
    assert finding.verdict is Verdict.ERROR
    assert "install" not in finding.text
    assert finding.remedy.startswith(f"pip install 'kvoffload[{extra}]'")
