from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from kvoffload.model.causes import RemoteFault
from kvoffload.model.errors import RemoteError
from kvoffload.model.ids import BlockKey
from kvoffload.remote.address import parse_address
from kvoffload.remote.bucket import BucketStore
from kvoffload.remote.store import FAILED, MISSING, Refusals, RemoteStore, SharedMemory, open_store
from kvoffload.remote.values import TRAILER_BYTES, Shard, generation_name, is_whole, seal
from tests.captured_logs import capture_logs
from tests.remote.servers import Bucket, Mooncake

TIMEOUT_S = 5.0
SIZE = 5000 + TRAILER_BYTES
KEYS = [BlockKey(bytes([number]) * 33) for number in range(20)]
LAYOUT = b"layout"


@pytest.fixture
def store(url: str) -> Iterator[RemoteStore]:
    opened = open_store(parse_address(url), TIMEOUT_S)
    yield opened
    opened.close()


@pytest.fixture
def shard() -> Shard:
    return Shard(f"fingerprint/{secrets.token_hex(16)}", 1, 2)


def values(store: RemoteStore, count: int, *, size: int = SIZE) -> list[memoryview]:
    """Return memory for this many values, filled with random bytes."""
    buffer = memoryview(SharedMemory(count * size))
    buffer[:] = secrets.token_bytes(len(buffer))
    store.register(buffer)
    return [buffer[at * size : (at + 1) * size] for at in range(count)]


def test_put_blocks_are_found_and_fetched(url: str, store: RemoteStore, shard: Shard) -> None:
    written = values(store, len(KEYS))
    for key, value in zip(KEYS, written, strict=True):
        seal(value, shard.name(key), LAYOUT)
    assert store.put(shard, KEYS, written) == [True] * len(KEYS)
    reader = open_store(parse_address(url), TIMEOUT_S)
    assert reader.ask(shard, [*KEYS, BlockKey(b"none")]) == [True] * len(KEYS) + [False]
    read = values(reader, len(KEYS))
    arrived = reader.get(shard, KEYS, read)
    assert read == written
    for key, value, size in zip(KEYS, read, arrived, strict=True):
        assert is_whole(value, size, shard.name(key), LAYOUT)
        assert not is_whole(value, size - 1, shard.name(key), LAYOUT)
        assert not is_whole(value, size, shard.name(BlockKey(b"another")), LAYOUT)
        assert not is_whole(value, size, shard.name(key), b"another layout")
        value[17] ^= 1
        assert not is_whole(value, size, shard.name(key), LAYOUT)
    reader.close()


def test_missing_values_do_not_affect_found_values(store: RemoteStore, shard: Shard) -> None:
    written = values(store, 2)
    store.put(shard, KEYS[:2], written)
    read = values(store, 4)
    assert store.get(shard, [KEYS[2], KEYS[0], KEYS[3], KEYS[1]], read) == [MISSING, SIZE, MISSING, SIZE]
    assert [read[1], read[3]] == written


def test_values_of_another_rank_or_generation_are_not_found(store: RemoteStore, shard: Shard) -> None:
    store.put(shard, KEYS[:1], values(store, 1))
    for other in (
        Shard(shard.namespace, 0, 2),
        Shard(shard.namespace, 1, 3),
        Shard("fingerprint/other", 1, 2),
    ):
        assert store.ask(other, KEYS[:1]) == [False]


def test_existing_values_are_not_overwritten(store: RemoteStore, shard: Shard) -> None:
    first, second, read = values(store, 3)
    store.put(shard, KEYS[:1], [first])
    assert store.put(shard, KEYS[:1], [second]) == [True]
    store.get(shard, KEYS[:1], [read])
    assert read == first


def test_values_of_the_wrong_size_are_refused(url: str, store: RemoteStore, shard: Shard) -> None:
    [short], [long] = values(store, 1, size=SIZE - 7), values(store, 1, size=SIZE + 7)
    store.put(shard, KEYS[:2], [short, long])
    reader = open_store(parse_address(url), TIMEOUT_S)
    read = values(reader, 2)
    first, second = reader.get(shard, KEYS[:2], read)
    assert first == SIZE - 7
    assert second in (FAILED, SIZE + 7)
    reader.close()


def test_a_small_object_is_created_once_and_replaced(store: RemoteStore, shard: Shard) -> None:
    name = generation_name(secrets.token_hex(16))
    assert store.read(name) is None
    store.create(name, b"first")
    store.create(name, b"second")
    assert store.read(name) == b"first"
    store.replace(name, b"the third")
    assert store.read(name) == b"the third"


def test_calls_do_not_block_other_threads(store: RemoteStore, shard: Shard) -> None:
    turns, is_over = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not is_over.wait(0.001):
            turns += 1

    size = 2**20 + TRAILER_BYTES
    written = values(store, 16, size=size)
    thread = threading.Thread(target=count)
    thread.start()
    before = turns
    began = time.monotonic()
    while time.monotonic() < began + 0.5:
        store.put(shard, [BlockKey(secrets.token_bytes(16)) for _ in written][:4], written[:4])
    is_over.set()
    thread.join()
    assert turns - before > 5


@pytest.fixture
def there(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """Return another writer's connection to the bucket."""
    bucket.reach(monkeypatch)
    return S3Store("blocks", prefix="kvoffload")


def packs_of(there: S3Store, shard: Shard) -> list[str]:
    pages = obstore.list(there, f"kvo1/{shard.namespace}/")
    return [entry["path"] for page in pages for entry in page]


def test_blocks_of_deleted_packs_are_missing(bucket: Bucket, there: S3Store, shard: Shard) -> None:
    first, second = (open_store(parse_address(bucket.url), TIMEOUT_S) for _ in range(2))
    for writer in (first, second):
        writer.put(shard, KEYS, values(writer, len(KEYS)))
    assert first.ask(shard, KEYS[:2]) == [True, True]
    for pack in packs_of(there, shard):  # the newest pack comes first
        obstore.delete(there, pack)
        assert first.get(shard, KEYS[:2], values(first, 2)) == [MISSING, MISSING]
    assert first.ask(shard, KEYS[:2]) == [False, False]


def test_known_blocks_are_read_without_a_listing(
    bucket: Bucket, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the bucket is listed")

    bucket.reach(monkeypatch)
    store = open_store(parse_address(bucket.url), TIMEOUT_S)
    written = values(store, 2)
    store.put(shard, KEYS[:2], written)
    monkeypatch.setattr("kvoffload.remote.bucket.LOOK_PERIOD_S", 0.0)
    monkeypatch.setattr(obstore, "list", refuse)
    read = values(store, 2)
    assert store.get(shard, KEYS[:2], read) == [SIZE, SIZE]
    assert read == written
    with pytest.raises(AssertionError, match="is listed"):
        store.get(shard, KEYS[1:3], read)


@pytest.fixture
def new_packs(bucket: Bucket, there: S3Store, shard: Shard) -> BucketStore:
    """Return a connection that has not yet seen five packs, each with one of the first five keys."""
    writer = open_store(parse_address(bucket.url), TIMEOUT_S)
    for key in KEYS[:5]:
        writer.put(shard, [key], values(writer, 1))
    assert len(packs_of(there, shard)) == 5
    reader = open_store(parse_address(bucket.url), TIMEOUT_S)
    assert isinstance(reader, BucketStore)
    return reader


@pytest.mark.parametrize("at_once", [3, 32])
def test_packs_are_read_concurrently(
    new_packs: BucketStore, shard: Shard, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("kvoffload.remote.bucket._INDEXES_AT_ONCE", at_once)
    read, now, most = new_packs._read_range, 0, list[int]()

    async def counted(pack: str, start: int, size: int) -> memoryview | None:
        nonlocal now
        now += 1
        most.append(now)
        try:
            return await read(pack, start, size)
        finally:
            now -= 1

    monkeypatch.setattr(new_packs, "_read_range", counted)
    assert new_packs.get(shard, KEYS[:5], values(new_packs, 5)) == [SIZE] * 5
    assert len(most) == 10  # five reads of an index, then five reads of a value
    assert max(most[:5]) == min(at_once, 5)
    assert max(most[5:]) == 5


def test_new_packs_that_take_too_long_are_read_by_the_next_calls(
    new_packs: BucketStore, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.remote.bucket._INDEXES_AT_ONCE", 2)
    monkeypatch.setattr("kvoffload.remote.bucket.LOOK_PERIOD_S", 0.0)
    monkeypatch.setattr(new_packs, "_listing_s", 0.0)
    assert [new_packs.ask(shard, KEYS[:5]) for _ in range(2)] == [
        [False, False, False, True, True],
        [True] * 5,  # the second call reads the other new packs
    ]


@pytest.mark.parametrize("left", [0, 5, 400, SIZE + 2000])
def test_r17_a_truncated_pack_loses_only_its_own_values(
    bucket: Bucket, there: S3Store, shard: Shard, left: int
) -> None:
    store, late = (open_store(parse_address(bucket.url), TIMEOUT_S) for _ in range(2))
    written = values(store, 4)
    store.put(shard, KEYS[:3], written[:3])
    [cut] = packs_of(there, shard)
    store.put(shard, KEYS[3:4], written[3:])
    obstore.put(there, cut, bytes(obstore.get(there, cut).bytes())[:left])
    read = values(store, 4)
    arrived = store.get(shard, KEYS[:4], read)
    assert arrived[3] == SIZE
    assert read[3] == written[3]
    assert all(arrived[at] < SIZE or read[at] == written[at] for at in range(3))
    assert arrived[2] < SIZE
    assert store.get(shard, KEYS[2:3], read[:1]) == [MISSING]  # the index is not read again
    assert late.ask(shard, KEYS[:4]) == [False, False, False, True]
    assert store.put(shard, KEYS[2:3], written[2:3]) == [True]
    assert len(packs_of(there, shard)) == 3


def test_the_error_for_refused_credentials_does_not_contain_them(
    bucket: Bucket, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.reach(monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = open_store(parse_address(bucket.url), TIMEOUT_S)
    assert store.put(shard, KEYS[:1], values(store, 1)) == [False]
    with pytest.raises(RemoteError, match="403") as refused:
        store.ask(shard, KEYS[:1])
    text = str(refused.value)
    assert "blocks" in text
    assert not any(secret in text for secret in (*bucket.secrets, "wrong"))


def test_a_missing_server_is_an_error_within_the_time_limit(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RemoteError, match="no Mooncake master answers"):
        open_store(parse_address("mooncake://127.0.0.1:1"), TIMEOUT_S)
    assert time.monotonic() - began < TIMEOUT_S  # the client alone would wait for 90 s


def test_a_dead_node_fails_reads_and_a_dead_master_fails_all_calls(tmp_path: Path, shard: Shard) -> None:
    server = Mooncake(tmp_path)
    store = open_store(parse_address(server.url), TIMEOUT_S)
    try:
        written = values(store, 4)
        store.put(shard, KEYS[:4], written)
        server.node.kill()
        with pytest.raises(RemoteError, match="delivers nothing"):
            store.get(shard, KEYS[:4], written)
        server.master.kill()
        with pytest.raises(RemoteError, match="does not answer"):
            store.ask(shard, KEYS)
    finally:
        server.close()
        store.close()


def test_a_refusal_is_logged_once_until_a_put_is_accepted() -> None:
    refusals = Refusals()
    with capture_logs() as lines:
        for reason in ("full", "full", None, "full"):
            refusals.note(reason, RemoteFault.FULL)
    assert [line["reason"] for line in lines] == ["full", "full"]
    assert refusals.fault is RemoteFault.FULL


def test_shared_memory_closes_its_descriptor() -> None:
    memory = SharedMemory(4096)
    descriptor = memory.descriptor
    os.fstat(descriptor)
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
