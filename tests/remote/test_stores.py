from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import obstore
import pytest
from obstore.store import S3Store

from kvoffload.model.causes import RemoteFault
from kvoffload.model.errors import RemoteError
from kvoffload.model.ids import BlockKey
from kvoffload.remote.address import parse_address
from kvoffload.remote.client import FAILED, MISSING, Refusals, SharedMemory
from kvoffload.remote.store import RemoteStore, open_store
from kvoffload.remote.values import TRAILER_BYTES, Shard, generation_name, is_whole, seal
from tests.captured_logs import capture_logs
from tests.remote.servers import Bucket, Mooncake

TIMEOUT_S = 5.0
SIZE = 5000 + TRAILER_BYTES
KEYS = [BlockKey(bytes([number]) * 33) for number in range(20)]
LAYOUT = b"layout"


def connect(url: str) -> RemoteStore:
    return open_store(parse_address(url), TIMEOUT_S)


@pytest.fixture
def store(url: str) -> Iterator[RemoteStore]:
    with closing(connect(url)) as opened:
        yield opened


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
    reader = connect(url)
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


def test_r18_values_of_another_rank_or_generation_are_not_found(store: RemoteStore, shard: Shard) -> None:
    store.put(shard, KEYS[:1], values(store, 1))
    for other in (replace(shard, rank=0), replace(shard, ranks=3), replace(shard, namespace="other")):
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
    reader = connect(url)
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


@pytest.fixture
def there(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """Return another writer's connection to the bucket."""
    bucket.reach(monkeypatch)
    return S3Store("blocks", prefix="kvoffload")


def packs_of(there: S3Store, shard: Shard) -> list[str]:
    pages = obstore.list(there, f"kvo1/{shard.namespace}/")
    return [entry["path"] for page in pages for entry in page]


def test_blocks_of_deleted_packs_are_missing(bucket: Bucket, there: S3Store, shard: Shard) -> None:
    first, second = (connect(bucket.url) for _ in range(2))
    for writer in (first, second):
        writer.put(shard, KEYS, values(writer, len(KEYS)))
    assert first.ask(shard, KEYS[:2]) == [True, True]
    for pack in packs_of(there, shard):  # the newest pack comes first
        obstore.delete(there, pack)
        assert first.get(shard, KEYS[:2], values(first, 2)) == [MISSING, MISSING]
    assert first.ask(shard, KEYS[:2]) == [False, False]


@pytest.mark.parametrize("left", [0, 5, 400, SIZE + 2000])
def test_r17_a_truncated_pack_loses_only_its_own_values(
    bucket: Bucket, there: S3Store, shard: Shard, left: int
) -> None:
    store, late = (connect(bucket.url) for _ in range(2))
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


def test_a_dead_node_fails_reads_and_a_dead_master_fails_all_calls(
    own_mooncake: Callable[..., Mooncake], shard: Shard
) -> None:
    server = own_mooncake()
    with closing(connect(server.url)) as store:
        written = values(store, 4)
        store.put(shard, KEYS[:4], written)
        server.node.kill()
        with pytest.raises(RemoteError, match="delivers nothing"):
            store.get(shard, KEYS[:4], written)
        server.master.kill()
        with pytest.raises(RemoteError, match="does not answer"):
            store.ask(shard, KEYS)


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
