"""Checks how many requests and how much memory a connection needs with many packs, with bad packs, and with
writers whose clocks differ.

Most tests use pages of ten names instead of a thousand, so that a hundred packs stand for ten thousand.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from xxhash import xxh3_64_digest

from kvoffload.model.errors import RemoteError
from kvoffload.model.ids import BlockKey
from kvoffload.remote import bucket, packs
from kvoffload.remote.address import BucketAddress
from kvoffload.remote.bucket import BucketStore
from kvoffload.remote.client import MISSING
from kvoffload.remote.packs import Catalogue, index_of, new_name, place_at
from kvoffload.remote.values import Shard
from tests.captured_logs import capture_logs
from tests.remote.http_servers import BUCKET, S3Server

SHARD = Shard("print/generation", 0, 1)
FOLDER = "kvo1/print/generation/0of1/"
VALUE = b"a value."
TIMEOUT_S = 30.0
PAGE = 10
SECOND, MINUTE, HOUR = 1000, 60_000, 3_600_000
START_MS = 1_800_000_000_000


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(33, "big"))


def connect(timeout_s: float = TIMEOUT_S) -> BucketStore:
    return BucketStore(BucketAddress(BUCKET), timeout_s)


class World:
    """A bucket, a connection to it, and a clock that all writers share.

    Attributes:
        ms: the clock's time in milliseconds.
        rows: the number of batches of concurrent reads.
    """

    def __init__(self, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.ms, self.rows = server, START_MS, 0
        self.store = connect()
        at_once = bucket._at_once

        def counted(reads: list[object]) -> list[object]:
            self.rows += 1
            return at_once(reads)  # type: ignore[arg-type]

        monkeypatch.setattr(bucket, "_at_once", counted)
        monkeypatch.setattr(bucket, "_now_ms", lambda: self.ms)
        monkeypatch.setattr(bucket, "LOOK_PERIOD_S", 0.0)

    def write(self, number: int, *, age_ms: int = 0, after_ms: int = 0) -> str:
        """Advance the clock, and write a pack with this key as another engine; return the pack's name."""
        self.ms += after_ms
        index, _ = index_of({key_of(number): memoryview(VALUE)})
        name = new_name(FOLDER, self.ms - age_ms, index)
        self.server.put(name, index + VALUE)
        return name

    def write_all(self, count: int, *, every_ms: int) -> None:
        """Write packs as other engines would, one per `every_ms` until now. Number 0 is the newest."""
        for number in range(count):
            self.write(number, age_ms=number * every_ms)

    def write_new(self, numbers: range) -> None:
        """Write packs as another engine, one per second from now on."""
        for number in numbers:
            self.write(number, after_ms=SECOND)

    @property
    def catalogue(self) -> Catalogue:
        return self.store._catalogue(SHARD)

    def finds(self, *numbers: int) -> list[bool]:
        return self.store.ask(SHARD, [key_of(number) for number in numbers])

    def look_for(self, *numbers: int, most: int) -> int:
        """Query the bucket until all these keys are found; return the number of queries."""
        for queries in range(1, most + 1):
            if all(self.finds(*numbers)):
                return queries
        raise AssertionError(f"not found by {most} queries")

    def walk(self, most: int = 400) -> None:
        """Query the bucket until the connection knows all packs."""
        assert any(self.finds() == [] and self.catalogue.walked_to is None for _ in range(most))

    def get(self, *numbers: int) -> list[int]:
        """Read these blocks; check the bytes of those that arrive."""
        buffers = [memoryview(bytearray(len(VALUE))) for _ in numbers]
        arrived = self.store.get(SHARD, [key_of(number) for number in numbers], buffers)
        assert all(size == MISSING or buffer == VALUE for size, buffer in zip(arrived, buffers, strict=True))
        return arrived

    def requests(self) -> tuple[int, int, int]:
        """Return the numbers of listings, reads and sequential rounds since the last call of this method."""
        lists, gets, rows = len(self.server.lists), len(self.server.gets), self.rows
        self.server.lists.clear()
        self.server.gets.clear()
        self.rows = 0
        return lists, gets, lists + rows


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with closing(S3Server()) as server:
        server.reach(monkeypatch)
        yield World(server, monkeypatch)


@pytest.fixture
def small(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(bucket, "_PAGE", PAGE)
    world.server.page = PAGE
    return world


# -- many packs -------------------------------------------------------------------------------------------------


def test_the_newest_thousand_of_many_packs_are_found_with_ten_sequential_requests(world: World) -> None:
    world.write_all(100_000, every_ms=500)
    assert world.finds(0, 500, 999, 1000) == [True, True, True, False]
    *made, in_a_row = world.requests()
    assert (made, in_a_row <= 10) == ([1, 1000], True)
    for look in (2, 3):
        assert world.finds(1000 * look - 1, 1000 * look) == [True, False]
        assert world.requests() == (2, 1000, 2 + 8)


def test_a_walk_through_older_packs_reads_each_pack_once_and_ends(small: World) -> None:
    small.write_all(105, every_ms=HOUR)
    assert small.look_for(104, most=20) == 11
    assert all(small.finds(*range(105)))
    assert small.requests()[:2] == (1 + 10 * 2 + 1, 105)
    assert small.catalogue.walked_to is None


@pytest.mark.parametrize("per_minute", [6, 30, 60])
def test_a_query_after_a_finished_walk_lists_two_pages(small: World, per_minute: int) -> None:
    every_ms = MINUTE // per_minute
    small.write_all(30 * per_minute, every_ms=every_ms)
    small.walk()
    small.requests()
    for number in range(1000, 1100):
        small.write(number, after_ms=every_ms)
        assert small.finds(number) == [True]
        listings, reads, _ = small.requests()
        assert (listings <= 2, reads) == (True, 1)


def test_the_newest_packs_are_found_before_a_walk_continues_to_older_packs(small: World) -> None:
    small.write_all(1000, every_ms=HOUR)
    small.finds()
    small.finds()
    small.ms += HOUR
    small.write_new(range(2000, 2030))
    small.look_for(*range(2000, 2030), most=4)
    small.look_for(999, most=110)
    assert small.requests()[1] == 1030


def test_an_engines_own_packs_do_not_hide_earlier_packs_of_others(small: World) -> None:
    small.write_all(3, every_ms=HOUR)
    small.finds()
    small.write_new(range(100, 125))
    for number in range(200, 225):
        small.ms += SECOND
        small.store.put(SHARD, [key_of(number)], [memoryview(VALUE)])
    small.look_for(*range(100, 125), most=6)


def test_packs_are_read_concurrently_and_known_blocks_without_a_listing(world: World) -> None:
    world.write_all(5, every_ms=SECOND)
    # The barrier breaks, and so the reads fail, unless five reads arrive together.
    world.server.together = threading.Barrier(5, timeout=TIMEOUT_S)
    assert all(world.finds(*range(5)))
    assert world.requests() == (1, 5, 1 + 1)
    assert world.get(*range(5)) == [len(VALUE)] * 5
    assert world.requests() == (0, 5, 0 + 1)
    assert world.get(5) == [MISSING]
    assert world.requests()[0] == 1


def test_new_packs_that_take_too_long_are_read_by_the_next_calls(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "_INDEXES_AT_ONCE", 2)
    world.write_all(5, every_ms=SECOND)
    monkeypatch.setattr(world.store, "_listing_s", 0.0)
    assert world.finds(*range(5)) == [True, True, False, False, False]
    assert all(world.finds(*range(5)))


def test_a_read_searches_older_packs_until_it_finds_its_keys(
    small: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.write_all(100, every_ms=HOUR)
    assert small.get(85) == [len(VALUE)]
    small.store = connect()
    monkeypatch.setattr(small.store, "_listing_s", 0.0)
    assert small.get(85) == [MISSING]


# -- clocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("minutes", "looks"), [(9, 65), (-9, 1)])
def test_a_clock_that_is_nine_minutes_behind_delays_its_packs_by_one_walk(
    small: World, minutes: int, looks: int
) -> None:
    small.write_all(1200, every_ms=SECOND)
    small.walk()
    small.write(5000, age_ms=minutes * MINUTE)
    small.look_for(5000, most=looks)


def test_packs_with_times_in_the_future_do_not_hide_other_packs(small: World) -> None:
    small.write_all(20, every_ms=MINUTE)
    small.finds()
    for number in range(100, 150):
        small.write(number, age_ms=-5 * MINUTE)
    for number in range(200, 220):
        small.write(number, after_ms=SECOND)
        small.finds()
    small.look_for(*range(100, 150), *range(200, 220), most=20)


def test_packs_of_a_clock_that_is_wrong_by_more_than_ten_minutes_are_not_found(small: World) -> None:
    small.write_all(20, every_ms=MINUTE)
    small.walk(most=10)
    small.requests()
    for number in range(100, 150):
        small.write(number, age_ms=-11 * MINUTE)
    small.write(200)
    assert small.finds(100, 200) == [False, True]
    assert small.requests()[1] == 1
    small.ms += 2 * MINUTE
    small.look_for(*range(100, 150), most=10)


# -- bad packs --------------------------------------------------------------------------------------------------


def signed(index: bytes) -> bytes:
    return index + xxh3_64_digest(index)


GOOD, _ = index_of({key_of(7): memoryview(VALUE), key_of(8): memoryview(VALUE)})
ENTRY = struct.pack("<HQQ", 33, 71, 8) + key_of(7)
# for each: the end of its name, the object, its size in the listing, and whether it is read
BAD = {
    "an index of a gigabyte": ("-999999999", bytes(100), 10**9, False),
    "an index of 16 KiB and one byte": ("-16385", bytes(16400), None, False),
    "an index of nothing": ("-0", bytes(100), None, False),
    "an index without a count": ("-8", signed(b""), None, False),
    "an index beyond the end": (f"-{len(GOOD)}", GOOD[:-1], None, False),
    "an index beyond the true end": (f"-{len(GOOD)}", GOOD[:-1], 10**6, True),
    "an index that is changed": (f"-{len(GOOD)}", GOOD[:9] + b"!" + GOOD[10:] + VALUE, None, True),
    "2^32 - 1 entries": ("-63", signed(struct.pack("<I", 2**32 - 1) + ENTRY) + VALUE, None, True),
    "an entry that is cut": ("-30", signed(struct.pack("<I", 1) + ENTRY[:18]) + VALUE, None, True),
    "a key that is cut": ("-62", signed(struct.pack("<I", 1) + ENTRY[:-1]) + VALUE * 2, None, True),
    "bytes behind the entries": ("-64", signed(struct.pack("<I", 1) + ENTRY + b"!") + VALUE * 2, None, True),
    "a value beyond the end": ("-63", signed(struct.pack("<I", 1) + ENTRY), None, True),
    "another name": (".tmp", bytes(100), None, False),
    "a name that a terminal would obey": ("\x9b2J-63", bytes(100), None, False),
}


@pytest.mark.parametrize(("suffix", "data", "size", "is_read"), BAD.values(), ids=BAD)
def test_a_bad_pack_loses_only_itself_and_is_logged(
    world: World, suffix: str, data: bytes, size: int | None, is_read: bool
) -> None:
    world.write(1, age_ms=MINUTE)
    bad = f"{place_at(FOLDER, world.ms)}-{'0' * 16}{suffix}"
    world.server.put(bad, data)
    if size is not None:
        world.server.sizes[bad] = size
    with capture_logs() as lines:
        assert world.finds(1, 7, 8) == [True, False, False]
        assert world.requests()[1] == 1 + is_read
        assert world.finds(1, 7, 8) == [True, False, False]
        assert world.requests()[1] == 0
    (line,) = lines
    assert (line["event"], line["packs"]) == ("remote_packs_skipped", 1)
    assert line["first"].isprintable()


def test_a_refused_read_loses_one_pack_and_a_failing_server_fails_the_query(world: World) -> None:
    bad = world.write(1)
    world.write(2)
    world.server.refuses[bad] = 403
    with capture_logs() as lines:
        assert world.finds(1, 2) == [False, True]
    assert "403" in lines[0]["reason"]
    world.server.refuses[world.write(3)] = 503
    with pytest.raises(RemoteError, match="503"):
        world.finds(3)


@pytest.mark.parametrize("odd", ["-x//y", "-x/../y", "\x7f"])
@pytest.mark.parametrize("age_ms", [0, -MINUTE])
def test_a_name_that_the_client_refuses_is_skipped_and_logged(world: World, odd: str, age_ms: int) -> None:
    world.ms -= world.ms % 2**20 - 2**19  # This sets the clock to the middle of a window of 2**20 ms.
    world.write(1, age_ms=2**20)
    world.write(2, age_ms=3 * 2**20)
    world.server.put(f"{place_at(FOLDER, world.ms - age_ms)}{odd}", b"")
    with capture_logs() as lines:
        world.look_for(1, 2, most=10)
        world.ms += 2**20
        world.write(3)
        world.look_for(3, most=5)
        world.walk(most=10)
    (line,) = lines
    assert line["event"] == "remote_window_skipped"
    assert "InvalidPath" in line["reason"]
    assert world.requests()[1] == 3


# -- bounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "most"), [("MOST_BLOCKS", 32), ("MOST_PACKS", 32)])
def test_a_full_catalogue_keeps_the_newest_packs_and_reads_no_pack_twice(
    small: World, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(packs, bound, most)
    small.write_all(100, every_ms=SECOND)
    for _ in range(30):
        assert small.finds(0) == [True]
        assert len(small.catalogue.packs) <= most
    assert small.requests()[1] <= 40
    assert sum(small.finds(*range(100))) >= most * 3 // 4
    for number in range(1000, 1100):
        small.write(number, after_ms=SECOND // 2)
        assert small.finds(number) == [True]
        assert len(small.catalogue.packs) <= most
    assert small.requests()[1] == 100
    assert not any(small.finds(*range(100)))


def test_a_full_catalogue_ends_the_walk(small: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "MOST_BLOCKS", 32)
    small.write_all(100, every_ms=HOUR)
    for _ in range(10):
        small.finds()
    assert small.requests()[0] == 10 + 3


def test_the_newer_of_two_packs_with_one_key_is_used(world: World) -> None:
    older, newer = world.write(1, age_ms=MINUTE), world.write(1)
    assert world.finds(1) == [True]
    assert set(world.catalogue.packs) == {older, newer}
    assert world.catalogue.places[key_of(1)].pack == newer


def test_an_endless_listing_fails_and_is_not_continued(world: World) -> None:
    world.server.is_endless = True
    with pytest.raises(RemoteError, match="does not end"):
        connect(0.3).ask(SHARD, [])
    other = world.store
    assert other.read("kvo1/probe") is None
    # the abandoned listing may have sent its last request before this line
    listings = len(world.server.lists)
    assert other.read("kvo1/probe") is None
    assert len(world.server.lists) == listings


def test_a_listing_that_ignores_its_start_ends_the_walk_with_one_warning(small: World) -> None:
    small.server.lacks.add("start-after")
    small.write_all(25, every_ms=HOUR)
    with capture_logs() as lines:
        for _ in range(5):
            assert small.finds(9, 10) == [True, False]
            assert small.get(10) == [MISSING]
    assert [line["event"] for line in lines] == ["remote_server_lacks"]
    assert "start-after" in lines[0]["note"]
    # Each of the ten calls lists the newest page. The walk lists it once more, and ends.
    assert small.requests()[:2] == (10 + 1, 10)


def test_a_failing_read_fails_only_when_all_reads_have_ended() -> None:
    ended = list[str]()

    async def fail() -> None:
        raise RemoteError("the test says so")

    async def read() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        ended.append("read")

    with pytest.raises(RemoteError, match="says so"):
        bucket._at_once([read(), fail(), read()])
    assert ended == ["read", "read"]


def test_at_most_the_allowed_size_of_a_small_object_is_read(world: World) -> None:
    world.server.put("large", bytes(10**6))
    world.server.put("empty", b"")
    assert [world.store.read(name) for name in ("large", "empty", "none")] == [bytes(256), b"", None]


def test_a_connection_keeps_the_catalogues_of_two_shards(world: World) -> None:
    for number in range(5):
        world.store.ask(Shard(f"print/{number}", 0, 1), [])
    assert len(world.store._catalogues) == 2
