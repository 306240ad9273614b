"""Checks what a connection tries of an S3 server before an engine uses it, on real servers and on servers that lack something."""

from __future__ import annotations

import pytest

from kvoffload.model.errors import RemoteError
from kvoffload.remote.address import BucketAddress, parse_address
from kvoffload.remote.bucket import BucketStore
from kvoffload.remote.store import open_store
from kvoffload.remote.values import generation_name
from tests.captured_logs import capture_logs
from tests.remote.http_servers import BUCKET, S3Server
from tests.remote.servers import Moto
from tests.remote.sharing import StartEngine
from tests.remote.test_faults import check_not_used

ADDRESS = BucketAddress(BUCKET)


@pytest.mark.parametrize("url", ["bucket", "moto"], indirect=True)
def test_real_servers_lack_nothing(url: str) -> None:
    address = parse_address(url)
    assert isinstance(address, BucketAddress)
    for _ in range(2):  # the second look finds the object that the first one created
        assert BucketStore(address, 5.0).first_look() == []


def test_a_first_look_sends_one_request_of_each_kind(server: S3Server) -> None:
    with capture_logs() as lines:
        open_store(ADDRESS, 5.0)
    assert (list(server.objects), server.gets, server.lists) == (["kvo1/look"], ["kvo1/look"], ["kvo1/look~"])
    assert lines == []


@pytest.mark.parametrize("status", [400, 501, None])
def test_a_server_without_conditional_writes_gets_writes_without_a_condition(
    server: S3Server, status: int | None
) -> None:
    if status is None:
        server.lacks.add("conditions")
    else:
        server.override = lambda request: (status, {}, b"") if "If-None-Match" in request.headers else None
    name = generation_name("print")
    with capture_logs() as lines:
        store = open_store(ADDRESS, 5.0)
        store.create(name, b"a generation")
    assert [line["event"] for line in lines] == ["remote_server_lacks"]
    assert "conditional writes" in lines[0]["note"]
    assert store.read(name) == b"a generation"


def test_a_conditional_write_keeps_an_existing_object(server: S3Server) -> None:
    store = open_store(ADDRESS, 5.0)
    for data in (b"first", b"second"):
        store.create("name", data)
    assert store.read("name") == b"first"


def test_a_server_without_ranges_is_not_used_and_named(server: S3Server) -> None:
    server.lacks.add("ranges")
    with pytest.raises(RemoteError, match="answers a range with the whole object"):
        open_store(ADDRESS, 5.0)


def test_a_listing_that_ignores_its_start_is_named_once(server: S3Server) -> None:
    server.lacks.add("start-after")
    with capture_logs() as lines:
        store = open_store(ADDRESS, 5.0)
    assert [line["event"] for line in lines] == ["remote_server_lacks"]
    assert "start-after" in lines[0]["note"]
    assert store.read("name") is None


def test_a_foreign_name_that_the_client_refuses_does_not_close_the_tier(server: S3Server) -> None:
    server.put("kvo1/other//name", b"")
    assert BucketStore(ADDRESS, 5.0).first_look() == []


def test_a_server_that_refuses_writes_can_be_read(server: S3Server) -> None:
    server.override = lambda request: (403, {}, b"") if request.command == "PUT" else None
    server.put("name", b"data")
    assert open_store(ADDRESS, 5.0).read("name") == b"data"


def test_a_missing_bucket_is_named_and_never_works(
    start: StartEngine, moto: Moto, monkeypatch: pytest.MonkeyPatch
) -> None:
    moto.reach(monkeypatch)
    lines = check_not_used(start("s3://no-such-bucket"), "404 Not Found, NoSuchBucket")
    assert "remote_works" not in [line["event"] for line in lines]
