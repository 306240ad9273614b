"""Checks how many requests and how much memory a connection needs with many packs, with bad packs, and with
writers whose clocks differ.

Most tests use pages of ten names instead of a thousand, so that a hundred packs stand for ten thousand.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import pytest
from xxhash import xxh3_64_digest

from kvoffload.model.errors import RemoteError
from kvoffload.model.ids import BlockKey
from kvoffload.remote import bucket, packs
from kvoffload.remote.address import BucketAddress
from kvoffload.remote.bucket import BucketStore
from kvoffload.remote.packs import Catalogue, index_of, new_name, place_at
from kvoffload.remote.store import MISSING
from kvoffload.remote.values import Shard
from tests.captured_logs import capture_logs
from tests.remote.s3_server import BUCKET, S3Server

SHARD = Shard("print/generation", 0, 1)
FOLDER = "kvo1/print/generation/0of1/"
VALUE = b"a value."
TIMEOUT_S = 30.0
PAGE = 10
SECOND, MINUTE, HOUR = 1000, 60_000, 3_600_000
START_MS = 1_800_000_000_000


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(33, "big"))


class World:
    """A bucket, and a clock that all writers share.

    Attributes:
        ms: the clock's time in milliseconds.
        rows: the number of batches of concurrent reads.
    """

    def __init__(self, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.ms, self.rows = server, START_MS, 0
        at_once = bucket._at_once

        def counted(reads: list[object]) -> list[object]:
            self.rows += 1
            return at_once(reads)  # type: ignore[arg-type]

        monkeypatch.setattr(bucket, "_at_once", counted)
        monkeypatch.setattr(bucket, "_now_ms", lambda: self.ms)
        monkeypatch.setattr(bucket, "LOOK_PERIOD_S", 0.0)

    def write(self, number: int, *, age_ms: int = 0) -> str:
        """Write a pack with this key as another engine; return the pack's name."""
        index, _ = index_of({key_of(number): memoryview(VALUE)})
        name = new_name(FOLDER, self.ms - age_ms, index)
        self.server.put(name, index + VALUE)
        return name

    def write_all(self, count: int, *, every_ms: int) -> None:
        """Write packs as other engines would, one per `every_ms` until now. Number 0 is the newest."""
        for number in range(count):
            self.write(number, age_ms=number * every_ms)

    def connect(self, timeout_s: float = TIMEOUT_S) -> BucketStore:
        return BucketStore(BucketAddress(BUCKET), timeout_s)

    def requests(self) -> tuple[int, int, int]:
        """Return the numbers of listings, reads and sequential rounds since the last call of this method."""
        made = len(self.server.lists), len(self.server.gets), len(self.server.lists) + self.rows
        self.server.forget_requests()
        self.rows = 0
        return made


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    made = S3Server()
    made.reach(monkeypatch)
    yield made
    made.end()


@pytest.fixture
def world(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(server, monkeypatch)


@pytest.fixture
def small(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(bucket, "_PAGE", PAGE)
    world.server.page = PAGE
    return world


def finds(store: BucketStore, *numbers: int) -> list[bool]:
    return store.ask(SHARD, [key_of(number) for number in numbers])


def looks_until(is_so: Callable[[], bool], most: int) -> int:
    """Call `is_so`, which queries the bucket, until it returns True; return the number of calls."""
    for looks in range(1, most + 1):
        if is_so():
            return looks
    raise AssertionError(f"not within {most} looks")


def catalogue_of(store: BucketStore) -> Catalogue:
    return store._catalogue(SHARD)


# -- many packs -------------------------------------------------------------------------------------------------


def test_the_newest_thousand_of_many_packs_are_found_with_ten_sequential_requests(world: World) -> None:
    world.write_all(100_000, every_ms=500)
    store = world.connect()
    assert finds(store, 0, 500, 999, 1000) == [True, True, True, False]
    listings, reads, in_a_row = world.requests()
    assert (listings, reads) == (1, 1000)
    assert in_a_row <= 10
    for look in (2, 3):
        assert finds(store, 1000 * look - 1, 1000 * look) == [True, False]
        assert world.requests() == (2, 1000, 2 + 8)


def test_a_walk_through_older_packs_reads_each_pack_once_and_ends(small: World) -> None:
    small.write_all(105, every_ms=HOUR)
    store = small.connect()
    assert looks_until(lambda: finds(store, 104) == [True], most=20) == 11
    assert all(finds(store, *range(105)))
    listings, reads, _ = small.requests()
    assert (listings, reads) == (1 + 10 * 2 + 1, 105)
    assert catalogue_of(store).walked_to is None


@pytest.mark.parametrize("per_minute", [6, 30, 60])
def test_a_query_after_a_finished_walk_lists_two_pages(small: World, per_minute: int) -> None:
    every_ms = MINUTE // per_minute
    small.write_all(30 * per_minute, every_ms=every_ms)
    store = small.connect()
    looks_until(lambda: bool(finds(store)) or catalogue_of(store).walked_to is None, most=400)
    small.requests()
    for number in range(1000, 1100):
        small.ms += every_ms
        small.write(number)
        assert finds(store, number) == [True]
        listings, reads, _ = small.requests()
        assert listings <= 2
        assert reads == 1


def test_packs_written_while_the_engine_was_idle_are_found(small: World) -> None:
    small.write_all(5, every_ms=SECOND)
    store = small.connect()
    finds(store)
    for number in range(100, 150):
        small.ms += SECOND
        small.write(number)
    looks_until(lambda: all(finds(store, *range(100, 150))), most=6)
    _, reads, _ = small.requests()
    assert reads == 55


def test_the_newest_packs_are_found_before_a_walk_continues_to_older_packs(small: World) -> None:
    small.write_all(1000, every_ms=HOUR)
    store = small.connect()
    finds(store)
    finds(store)
    small.ms += HOUR
    for number in range(2000, 2030):
        small.ms += SECOND
        small.write(number)
    looks_until(lambda: all(finds(store, *range(2000, 2030))), most=4)
    looks_until(lambda: finds(store, 999) == [True], most=110)
    assert small.requests()[1] == 1030


def test_an_engines_own_packs_do_not_hide_earlier_packs_of_others(small: World) -> None:
    small.write_all(3, every_ms=HOUR)
    store = small.connect()
    finds(store)
    for number in range(100, 125):
        small.ms += SECOND
        small.write(number)
    for number in range(200, 225):
        small.ms += SECOND
        store.put(SHARD, [key_of(number)], [memoryview(VALUE)])
    looks_until(lambda: all(finds(store, *range(100, 125))), most=6)


def test_a_read_searches_older_packs_until_it_finds_its_keys(
    small: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.write_all(100, every_ms=HOUR)
    value = bytearray(len(VALUE))
    assert small.connect().get(SHARD, [key_of(85)], [memoryview(value)]) == [len(VALUE)]
    assert value == VALUE
    hurried = small.connect()
    monkeypatch.setattr(hurried, "_listing_s", 0.0)
    assert hurried.get(SHARD, [key_of(85)], [memoryview(value)]) == [MISSING]


# -- clocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("minutes", "looks"), [(9, 65), (-9, 1)])
def test_a_clock_that_is_nine_minutes_behind_delays_its_packs_by_one_walk(
    small: World, minutes: int, looks: int
) -> None:
    small.write_all(1200, every_ms=SECOND)
    store = small.connect()
    looks_until(lambda: bool(finds(store)) or catalogue_of(store).walked_to is None, most=400)
    small.write(5000, age_ms=minutes * MINUTE)
    looks_until(lambda: finds(store, 5000) == [True], most=looks)


def test_packs_with_times_in_the_future_do_not_hide_other_packs(small: World) -> None:
    small.write_all(20, every_ms=MINUTE)
    store = small.connect()
    finds(store)
    for number in range(100, 150):
        small.write(number, age_ms=-5 * MINUTE)
    for number in range(200, 220):
        small.ms += SECOND
        small.write(number)
        finds(store)
    looks_until(lambda: all(finds(store, *range(100, 150), *range(200, 220))), most=20)


def test_packs_of_a_clock_that_is_wrong_by_more_than_ten_minutes_are_not_found(small: World) -> None:
    small.write_all(20, every_ms=MINUTE)
    store = small.connect()
    looks_until(lambda: bool(finds(store)) or catalogue_of(store).walked_to is None, most=10)
    small.requests()
    for number in range(100, 150):
        small.write(number, age_ms=-11 * MINUTE)
    small.write(200)
    assert finds(store, 100, 200) == [False, True]
    assert small.requests()[1] == 1
    small.ms += 2 * MINUTE
    looks_until(lambda: all(finds(store, *range(100, 150))), most=10)


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
    store = world.connect()
    with capture_logs() as lines:
        assert finds(store, 1, 7, 8) == [True, False, False]
        assert world.requests()[1] == 1 + is_read
        assert finds(store, 1, 7, 8) == [True, False, False]
        assert world.requests()[1] == 0
    (line,) = lines
    assert (line["event"], line["packs"]) == ("remote_packs_skipped", 1)
    assert line["first"].isprintable()


def test_a_refused_read_loses_one_pack_and_a_failing_server_fails_the_query(world: World) -> None:
    bad = world.write(1)
    world.write(2)
    world.server.refuses[bad] = 403
    store = world.connect()
    with capture_logs() as lines:
        assert finds(store, 1, 2) == [False, True]
    assert "403" in lines[0]["reason"]
    world.server.refuses[world.write(3)] = 503
    with pytest.raises(RemoteError, match="503"):
        finds(store, 3)


@pytest.mark.parametrize("odd", ["-x//y", "-x/../y", "\x7f"])
@pytest.mark.parametrize("age_ms", [0, -MINUTE])
def test_a_name_that_the_client_refuses_is_skipped_and_logged(world: World, odd: str, age_ms: int) -> None:
    world.ms -= world.ms % 2**20 - 2**19  # This sets the clock to the middle of a window of 2**20 ms.
    world.write(1, age_ms=2**20)
    world.write(2, age_ms=3 * 2**20)
    world.server.put(f"{place_at(FOLDER, world.ms - age_ms)}{odd}", b"")
    store = world.connect()
    with capture_logs() as lines:
        looks_until(lambda: finds(store, 1, 2) == [True, True], most=10)
        world.ms += 2**20
        world.write(3)
        looks_until(lambda: finds(store, 3) == [True], most=5)
        looks_until(lambda: finds(store) == [] and catalogue_of(store).walked_to is None, most=10)
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
    store = small.connect()
    for _ in range(30):
        assert finds(store, 0) == [True]
        assert len(catalogue_of(store).packs) <= most
    assert small.requests()[1] <= 40
    assert sum(finds(store, *range(100))) >= most * 3 // 4
    for number in range(1000, 1100):
        small.ms += SECOND // 2
        small.write(number)
        assert finds(store, number) == [True]
        assert len(catalogue_of(store).packs) <= most
    assert small.requests()[1] == 100
    assert not any(finds(store, *range(100)))


def test_a_full_catalogue_ends_the_walk(small: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "MOST_BLOCKS", 32)
    small.write_all(100, every_ms=HOUR)
    store = small.connect()
    for _ in range(10):
        finds(store)
    assert small.requests()[0] == 10 + 3


def test_the_newer_of_two_packs_with_one_key_is_used(world: World) -> None:
    older, newer = world.write(1, age_ms=MINUTE), world.write(1)
    store = world.connect()
    assert finds(store, 1) == [True]
    assert set(catalogue_of(store).packs) == {older, newer}
    assert catalogue_of(store).places[key_of(1)].pack == newer


def test_an_endless_listing_fails_and_is_not_continued(world: World) -> None:
    world.server.is_endless = True
    with pytest.raises(RemoteError, match="does not end"):
        finds(world.connect(0.3))
    other = world.connect()
    assert other.read("kvo1/probe") is None
    # the abandoned listing may have sent its last request before this line
    listings = len(world.server.lists)
    assert other.read("kvo1/probe") is None
    assert len(world.server.lists) == listings


def test_at_most_the_allowed_size_of_a_small_object_is_read(world: World) -> None:
    world.server.put("large", bytes(10**6))
    world.server.put("empty", b"")
    store = world.connect()
    assert (store.read("large"), store.read("empty"), store.read("none")) == (bytes(256), b"", None)


def test_a_connection_keeps_the_catalogues_of_two_shards(world: World) -> None:
    store = world.connect()
    for number in range(5):
        store.ask(Shard(f"print/{number}", 0, 1), [])
    assert len(store._catalogues) == 2
