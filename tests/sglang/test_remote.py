"""kvoffload's remote tier as a storage backend of a stock SGLang."""

from __future__ import annotations

import secrets
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from tests.remote.servers import Bucket, resume, suspend
from tests.sglang.prompts import STATE, Prompts, attached
from tests.sglang.stock.engines import Server, wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

LONGEST_S = 6.0
"""Seconds that a request may take while the store hangs: one of SGLang's, our time limits, and the computation."""


def test_another_backend_finds_in_the_store_what_the_first_wrote(
    server: Server, some: Prompts, bucket: Bucket
) -> None:
    with attached(server, remote_url=bucket.url):
        assert some.ask(server) == some.none
    with attached(server, remote_url=bucket.url, weights_id="other weights"):
        assert some.ask(server) == some.none
    with attached(server, remote_url=bucket.url):
        assert some.ask(server) == some.all


@pytest.mark.full
def test_a_store_that_lies_changes_no_token(
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
def test_a_request_does_not_wait_for_a_store_that_hangs_and_finds_it_later(
    server: Server, some: Prompts, bucket: Bucket
) -> None:
    # SGLang waits until a prefetch ends, so after a hanging call a request would never run.
    with attached(server, "wait_complete", remote_url=bucket.url):
        some.ask(server)
        server.flush()
        suspend(bucket.server)
        try:
            answers = some.answers(server)
            wait_until(lambda: server.metric(STATE, tier="remote", state="open") == 0)
        finally:
            resume(bucket.server)
        assert max(answer.seconds for answer in answers) < LONGEST_S
        assert server.words("remote_fails")
        wait_until(lambda: server.metric(STATE, tier="remote", state="open") == 1)
        server.flush()
        assert some.ask(server) == some.all


@pytest.mark.full
def test_a_backend_is_detached_while_the_store_hangs_with_pages_on_their_way(
    server: Server, some: Prompts, bucket: Bucket, tmp_path: Path
) -> None:
    with attached(server, disk_path=str(tmp_path), remote_url=bucket.url):
        suspend(bucket.server)
        try:
            some.ask(server)
            wait_until(lambda: server.detach()[0] == 200)
        finally:
            resume(bucket.server)
    with attached(server, disk_path=str(tmp_path), remote_url=bucket.url):
        some.ask(server)
        server.flush()
        assert some.ask(server) == some.all


@pytest.mark.full
def test_a_store_that_is_dead_costs_hits_only(server: Server, some: Prompts) -> None:
    with attached(server, "wait_complete", opens=False, remote_url="mooncake://127.0.0.1:9"):
        answers = some.answers(server)
    assert max(answer.seconds for answer in answers) < LONGEST_S
    assert sum(answer.stored for answer in answers) == 0
