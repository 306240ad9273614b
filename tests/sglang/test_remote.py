from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from tests.remote.servers import Bucket, resume, suspend
from tests.sglang.prompts import PATIENT, STATE, Prompts, attached
from tests.sglang.stock.engines import Server, wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

LONGEST_S = 6.0
"""The longest that a request may take while the store hangs: SGLang's time limit, ours, and the computation."""


def test_another_backend_finds_the_first_backends_pages_in_the_store(
    server: Server, some: Prompts, bucket: Bucket
) -> None:
    settings = {**PATIENT, "remote_url": bucket.url}
    with attached(server, **settings):
        assert some.ask(server) == some.none
    with attached(server, **settings, weights_id="other weights"):
        assert some.ask(server) == some.none
    with attached(server, **settings):
        assert some.ask(server) == some.all


@contextmanager
def hanging(bucket: Bucket) -> Iterator[None]:
    suspend(bucket.server)
    try:
        yield
    finally:
        resume(bucket.server)


@pytest.mark.full
def test_wrong_bytes_from_a_store_change_no_token(
    server: Server, some: Prompts, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.reach(monkeypatch)
    url = f"{bucket.url}/lies"
    with attached(server, remote_url=url):
        some.ask(server)
    there = S3Store("blocks", prefix="kvoffload/lies")
    for page in obstore.list(there, "kvo1/"):
        for entry in page:
            if (size := entry["size"]) > 4096:
                obstore.put(there, entry["path"], secrets.token_bytes(size))
    with attached(server, remote_url=url):
        assert some.ask(server) == some.none


@pytest.mark.full
def test_a_request_does_not_wait_for_a_hanging_store_and_later_requests_use_it(
    server: Server, some: Prompts, bucket: Bucket
) -> None:
    others = Prompts.answered_by(server)
    # With this policy SGLang waits until a prefetch ends, so a prefetch that never ended would block the request.
    with attached(server, "wait_complete", remote_url=bucket.url):
        some.ask(server)
        server.flush()
        with hanging(bucket):
            # The pages of `some` may all still be in the backend's memory, so only `others` are sure to call the store.
            answers = [*some.answers(server), *others.answers(server)]
            wait_until(lambda: server.metric(STATE, tier="remote", state="open") == 0)
        assert max(answer.seconds for answer in answers) < LONGEST_S
        wait_until(lambda: server.has_logged("remote_fails"))
        wait_until(lambda: server.metric(STATE, tier="remote", state="open") == 1)

        def finds_all() -> bool:  # not at once, on a slow machine
            server.flush()
            return some.ask(server) == some.all

        wait_until(finds_all)


@pytest.mark.full
def test_a_backend_can_be_detached_while_writes_to_the_store_hang(
    server: Server, some: Prompts, bucket: Bucket, tmp_path: Path
) -> None:
    with attached(server, disk_path=str(tmp_path), remote_url=bucket.url), hanging(bucket):
        some.ask(server)
        wait_until(lambda: server.detach()[0] == 200)
    with attached(server, **PATIENT, disk_path=str(tmp_path), remote_url=bucket.url):
        some.ask(server)
        server.flush()
        assert some.ask(server) == some.all


@pytest.mark.full
def test_a_dead_store_only_costs_hits(server: Server, some: Prompts) -> None:
    with attached(server, "wait_complete", opens=False, remote_url="mooncake://127.0.0.1:9"):
        answers = some.answers(server)
    assert max(answer.seconds for answer in answers) < LONGEST_S
    assert sum(answer.stored for answer in answers) == 0
