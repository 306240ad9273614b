from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from multiprocessing.connection import Connection
from operator import le
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.slot_file import SlotFile
from kvoffload.model.errors import ConfigError, DiskError
from kvoffload.telemetry.exporter import KVOffloadCollector
from kvoffload.testing import FakeClock
from kvoffload.tier_cache import Page, TierCache, tier_config
from tests.captured_logs import capture_logs
from tests.core.audit import audit_host
from tests.disk.blocks import fails_with
from tests.disk.fork_server import forking
from tests.gates import ThreadGate
from tests.remote.fake_store import FakeStore

PAGES = (640, 96, 5000)
LONG = (2**16, 2**17)  # pages of these sizes are read and written in place
IDENTITY = KVIdentity("engine 1", "weights 1", "sha256", {"tensor": 1}, {"dtype": "float16"})
SOON_S = 0.2
WAIT_S = 20.0


def key_of(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


def page_of(number: int, sizes: Sequence[int] = PAGES) -> Page:
    return [memoryview(bytearray(Random(f"{number} {size}").randbytes(size))) for size in sizes]


def blank(sizes: Sequence[int] = PAGES) -> Page:
    return [memoryview(bytearray(size)) for size in sizes]


def read(page: Page) -> list[bytes]:
    return [bytes(region) for region in page]


class Rig:
    """A cache with a folder, a remote tier or both."""

    def __init__(
        self,
        identity: KVIdentity = IDENTITY,
        sizes: Sequence[int] = PAGES,
        *,
        clock: FakeClock | None = None,
        is_open: bool = True,
        **settings: object,
    ) -> None:
        self.sizes = sizes
        config = tier_config({"disk_bytes": "4MiB", **settings} if "disk_path" in settings else settings)
        self.cache = TierCache(lambda: identity, sizes, config, clock=clock)
        assert self.cache.wait_open(WAIT_S) is is_open or not is_open

    def put(self, *numbers: int, timeout_s: float = WAIT_S) -> list[bool]:
        pages = [page_of(number, self.sizes) for number in numbers]
        return self.cache.put([key_of(number) for number in numbers], pages, timeout_s)

    def get(self, *numbers: int, timeout_s: float = WAIT_S) -> list[bool]:
        """Check the bytes of the blocks that are found; return which blocks are found."""
        pages = [blank(self.sizes) for _ in numbers]
        found = self.cache.get([key_of(number) for number in numbers], pages, timeout_s)
        for number, page, is_found in zip(numbers, pages, found, strict=True):
            assert not is_found or read(page) == read(page_of(number, self.sizes)), "wrong bytes were served"
        return found

    def has(self, *numbers: int) -> list[bool]:
        return self.cache.exists([key_of(number) for number in numbers], WAIT_S)

    def count(self, name: str, *labels: str) -> float:
        numbers = {**self.cache.counters.snapshot().counts, **self.cache.gauges()}
        return numbers[f"kvoffload_{name}"].get(labels, 0)


Start = Callable[..., Rig]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts caches, by default with a disk in the test's folder."""
    with ExitStack() as running:

        def begin(**options: Any) -> Rig:  # noqa: ANN401  # the arguments of `Rig`
            if "remote_url" not in options:
                options.setdefault("disk_path", str(tmp_path))
            rig = Rig(**options)
            running.callback(rig.cache.close)
            return rig

        yield begin


def put_and_close(start: Start, *numbers: int, **options: Any) -> None:  # noqa: ANN401  # the arguments of `Rig`
    """Put blocks by a cache that another cache follows."""
    rig = start(**options)
    assert all(rig.put(*numbers))
    rig.cache.close()


def key_file(path: Path) -> Path:
    path.touch(0o600)
    path.write_text(path.name * 16)
    return path


def events(lines: list[dict[str, Any]]) -> set[str]:
    return {line["event"] for line in lines}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    found = FakeStore()
    for side in ("tier_kinds", "remote_catalog"):
        monkeypatch.setattr(f"kvoffload.runtime.{side}.open_store", lambda *_: found)
    return found


REMOTE: dict[str, Any] = {"remote_url": "s3://bucket/blocks", "remote_timeout_s": 5.0}


# -- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [PAGES, LONG], ids=["gathered", "in place"])
@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_put_blocks_are_found_with_their_bytes(
    start: Start, store: FakeStore, sizes: Sequence[int], tier: str
) -> None:
    rig = start(sizes=sizes, **(REMOTE if tier == "remote" else {}))
    assert rig.has(0, 1) == [False, False]
    assert rig.put(0, 1, 2) == [True, True, True]
    assert rig.has(0, 9, 2) == [True, False, True]
    assert rig.get(2, 0, 9, 0) == [True, True, False, True]
    assert rig.put(1, 3) == [True, True]
    assert rig.count("tier_blocks_total", tier, "store", "done") == 4
    assert audit_host(rig.cache._state) == []


def test_more_blocks_than_staging_slots_are_found_by_the_next_process(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.tier_cache._STAGING_BYTES", 0)  # this leaves the minimum of eight slots
    numbers = range(50)
    put_and_close(start, *numbers)
    second = start()
    assert all(second.has(*numbers))
    assert all(second.get(*numbers))
    assert second.count("tier_blocks_total", "disk", "load", "done") == len(numbers)
    assert audit_host(second.cache._state) == []


@pytest.mark.parametrize("tier", ["disk", "remote"])
@pytest.mark.parametrize(
    "other",
    [
        {"identity": KVIdentity("engine 1", "weights 2", "sha256", {"tensor": 1}, {"dtype": "float16"})},
        {"sizes": (96, 640, 5000)},
    ],
    ids=["identity", "pages"],
)
def test_r18_blocks_of_another_model_or_layout_are_not_found(
    start: Start, store: FakeStore, other: dict[str, Any], tier: str
) -> None:
    tiers = REMOTE if tier == "remote" else {}
    put_and_close(start, 0, 1, **tiers)
    second = start(**other, **tiers)
    assert second.get(0, 1) == [False, False]
    assert second.has(0, 1) == [False, False]


def test_r18_blocks_written_with_another_tier_key_are_not_found(start: Start, tmp_path: Path) -> None:
    own, other = ({"tier_key_file": str(tmp_path / name)} for name in ("own key", "other key"))
    for name in ("own key", "other key"):
        key_file(tmp_path / name)
    put_and_close(start, 0, **own)
    assert start(**other).has(0) == [False]
    assert start(**own).get(0) == [True]


OTHER = replace(IDENTITY, weights="weights 2")


@pytest.mark.parametrize("what", ["renamed", "copied", "only the replica's"])
@pytest.mark.parametrize("has_key", [False, True])
def test_r18_a_folder_that_was_made_for_other_kv_is_not_used_and_one_line_says_so(
    start: Start, tmp_path: Path, what: str, *, has_key: bool
) -> None:
    key = {"tier_key_file": str(key_file(tmp_path / "key"))} if has_key else {}
    disk = tmp_path / "disk"
    put_and_close(start, 0, 1, disk_path=str(disk), **key)
    (own,) = disk.glob("*/")
    put_and_close(start, 2, identity=OTHER, disk_path=str(disk), **key)
    (other,) = (path for path in disk.glob("*/") if path != own)
    source, target = (own, other) if what != "only the replica's" else (own / "replica0", other / "replica0")
    shutil.rmtree(target)
    shutil.move(source, target) if what == "renamed" else shutil.copytree(source, target)
    with capture_logs() as lines:
        rig = start(identity=OTHER, disk_path=str(disk), **key)
        assert rig.has(0, 1, 2) == [False] * 3
        assert rig.put(0) == rig.get(0) == [True]
    (line,) = (line for line in lines if line["log_level"] != "info")
    reason = f"it was made for other KV, with the fingerprint {own.name!r}"
    note = "" if what == "only the replica's" else "; its identity.json names other weights"
    assert (line["event"], line["reason"]) == ("disk_index_dropped", reason + note)
    rig.cache.close()
    with capture_logs() as lines:
        assert start(identity=OTHER, disk_path=str(disk), **key).get(0) == [True]
    assert {line["log_level"] for line in lines} == {"info"}


def test_r17_blocks_that_are_corrupt_on_the_disk_are_read_from_the_remote_tier_or_missed(
    start: Start, store: FakeStore, tmp_path: Path
) -> None:
    both = {"disk_path": str(tmp_path), **REMOTE}
    put_and_close(start, 0, 1, 2, **both)
    (path,) = tmp_path.rglob("slots0")
    data = bytearray(path.read_bytes())
    for slot in range(4096, len(data), 4096):
        data[slot + 17] ^= 4
    path.write_bytes(data)
    del store.values[next(name for name in store.values if key_of(2).hex() in name)]
    with capture_logs() as lines:
        rig = start(**both)
        assert rig.get(0, 1, 2) == [True, True, False]
        assert rig.has(0, 1, 2) == [True, True, False], "a corrupt block is forgotten"
        rig.cache.close()  # a copy is counted before its failure is logged
    assert rig.count("tier_blocks_total", "remote", "load", "done") == 2
    assert rig.count("tier_blocks_total", "disk", "load", "corrupt") == 3
    assert rig.count("evicted_blocks_total", "disk", "corrupt") == 3
    assert "tier_copy_failed" in events(lines)


def test_a_block_is_written_when_it_is_put_again(start: Start) -> None:
    rig = start(disk_min_hits=1)
    assert rig.put(0, 1) == [False, False]
    assert rig.put(1, 2) == [True, False]


def test_puts_are_counted_for_each_tier_while_other_blocks_use_the_staging_slots(
    start: Start, tmp_path: Path, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.tier_cache._STAGING_BYTES", 0)  # this leaves the minimum of eight slots
    rig = start(disk_path=str(tmp_path), **REMOTE, remote_min_hits=2)
    for others in (range(100, 120), range(200, 220), ()):
        assert rig.count("tier_blocks_total", "remote", "store", "done") == 0
        assert rig.put(0) == [True]
        rig.put(*others)
    assert rig.count("tier_blocks_total", "remote", "store", "done") == 1


# -- faults ---------------------------------------------------------------------------------------------------------


def test_a_disk_without_room_is_closed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fails_with(errno.ENOSPC))
    with capture_logs() as lines:
        rig = start(is_open=False)
        assert rig.put(0) == [False]
        assert rig.get(0) == [False]
    assert rig.count("tier_state", "disk", "closed") == 1
    assert {"disk_not_opened", "disk_closed"} <= events(lines)


def test_weights_that_cannot_be_identified_close_the_tiers(start: Start, store: FakeStore) -> None:
    class Unknown(KVIdentity):
        @property
        def fingerprint(self) -> str:
            raise DiskError("the weights cannot be read")

    with capture_logs() as lines:
        assert start(identity=Unknown("engine 1", "", "", {}), is_open=False).put(0) == [False]
    assert "disk_closed" in events(lines)


@pytest.mark.parametrize(
    ("what", "way", "error"), [("write", "store", errno.ENOSPC), ("read", "load", errno.EIO)]
)
def test_r17_an_error_of_the_disk_is_a_miss(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: str, way: str, error: int
) -> None:
    if what == "read":
        put_and_close(start, 0, 1)
    rig = start()
    act = rig.put if what == "write" else rig.get
    with capture_logs() as lines, monkeypatch.context() as patch:
        patch.setattr(SlotFile, what, fails_with(error))
        assert act(0, 1) == [False, False]
        assert rig.count("tier_blocks_total", "disk", way, "failed") >= 2
    assert "disk_call_failed" in events(lines)
    assert act(0, 1) == [True, True]


def hold(monkeypatch: pytest.MonkeyPatch, what: str) -> ThreadGate:
    """Hold each read or write of a slot file at a gate."""
    gate, real = ThreadGate(), getattr(SlotFile, what)

    def held(self: SlotFile, slot: int, data: Sequence[memoryview]) -> None:
        gate.arrive()
        real(self, slot, data)

    monkeypatch.setattr(SlotFile, what, held)
    return gate


@pytest.mark.parametrize("sizes", [PAGES, LONG], ids=["gathered", "in place"])
def test_r17_a_hanging_disk_delays_no_caller_beyond_the_time_limit(
    start: Start, monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int]
) -> None:
    clock = FakeClock()
    put_and_close(start, 0, 1, sizes=sizes)
    rig = start(sizes=sizes, clock=clock, transfer_timeout_s=30.0)
    gate, page = hold(monkeypatch, "read"), blank(sizes)
    with capture_logs() as lines:
        began = time.monotonic()
        assert rig.cache.get([key_of(0)], [page], SOON_S) == [False]
        assert time.monotonic() - began < SOON_S + WAIT_S / 2
        gate.wait_for_arrivals(1)
        clock.jump(31.0)
        while not rig.count("tier_state", "disk", "failing"):
            os.sched_yield()
        began = time.monotonic()
        assert rig.has(1) == [False]
        assert rig.put(5, timeout_s=60.0) == [False]
        assert rig.get(1, timeout_s=60.0) == [False]
        assert time.monotonic() - began < WAIT_S, "nothing waits for a tier that is known to hang"
        gate.open()
        while rig.has(1) == [False]:
            os.sched_yield()
    assert read(page) == read(blank(sizes)), "a call that came late wrote into the caller's page"
    assert "disk_call_hangs" in events(lines)
    assert rig.get(1) == [True]


def test_a_write_that_hangs_lets_the_caller_reuse_its_page(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, gate, page = start(), hold(monkeypatch, "write"), page_of(0)
    assert rig.cache.put([key_of(0)], [page], SOON_S) == [False]
    for region in page:
        region[:] = bytes(len(region))
    gate.wait_for_arrivals(1)
    gate.open()
    while rig.has(0) == [False]:
        os.sched_yield()
    rig.cache.close()
    assert start().get(0) == [True]


@pytest.mark.parametrize("fault", ["fails", "is_gone"])
def test_r17_a_dead_store_is_a_miss_a_metric_and_a_log_line(
    start: Start, store: FakeStore, fault: str
) -> None:
    with capture_logs() as lines:
        rig = start(**REMOTE)
        assert all(rig.put(0, 1))
        setattr(store, fault, True)
        assert rig.get(2, 3) == [False, False]
        assert rig.put(2, 3, timeout_s=60.0) == [False, False]
        for _ in range(4):
            rig.get(7, 8)
        assert rig.has(0) == [False]
        assert rig.count("tier_state", "remote", "failing") == 1
    assert "remote_fails" in events(lines)


def test_r17_wrong_bytes_from_the_remote_tier_are_a_miss(
    start: Start, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_and_close(start, 0, 1, 2, **REMOTE)
    names = [name for name in store.values if name.endswith("0of1")]
    store.values[names[0]], store.values[names[1]] = store.values[names[1]], store.values[names[0]]
    store.values[names[2]] = store.values[names[2]][:-1]
    monkeypatch.setattr(store, "ask", lambda _, keys: [True] * len(keys))
    second = start(**REMOTE)
    assert second.has(0, 1, 2, 3) == [True] * 4
    assert second.get(0, 1, 2, 3) == [False] * 4
    assert second.count("tier_blocks_total", "remote", "load", "corrupt") > 0


def test_r17_a_hanging_remote_tier_delays_no_caller_beyond_the_time_limit(
    start: Start, store: FakeStore
) -> None:
    clock = FakeClock()
    rig = start(clock=clock, **REMOTE)
    assert all(rig.put(0))
    store.gate = ThreadGate()
    page, began = page_of(1), time.monotonic()
    assert rig.cache.exists([key_of(1)], SOON_S) == [False]
    assert rig.cache.get([key_of(2)], [blank()], SOON_S) == [False]
    assert rig.cache.put([key_of(1)], [page], SOON_S) == [False]
    assert time.monotonic() - began < WAIT_S
    clock.jump(10.0)
    while not rig.count("tier_state", "remote", "failing"):
        os.sched_yield()
    assert rig.has(0) == [False]
    store.gate.open()


def test_r12_a_core_that_raises_switches_the_tiers_off(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = start()
    assert all(rig.put(0))

    monkeypatch.setattr(rig.cache._state.pool, "reserve", fails_with(errno.EIO))
    with capture_logs() as lines:
        assert rig.put(1) == [False]
    assert rig.get(0) == [False]
    assert rig.has(0) == [False]
    assert rig.count("degraded", "handler_raised") == 1
    assert [line["event"] for line in lines] == ["core_raised"]


ODD_KEYS: dict[str, tuple[Any, str]] = {
    "empty": (b"", "a key has 0 bytes, not 1 to 64"),
    "65 bytes": (b"k" * 65, "a key has 65 bytes, not 1 to 64"),
    "text": ("k", "a key is of the type str, not bytes"),
    "a buffer": (bytearray(32), "a key is of the type bytearray, not bytes"),
    "none": (None, "a key is of the type NoneType, not bytes"),
}


@pytest.mark.parametrize(("key", "reason"), ODD_KEYS.values(), ids=ODD_KEYS)
@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_a_key_that_is_no_key_costs_only_itself_and_one_line(
    start: Start, store: FakeStore, tier: str, key: bytes, reason: str
) -> None:
    rig = start(**(REMOTE if tier == "remote" else {}))
    with capture_logs() as lines:
        for _ in range(2):
            keys, pages = [key_of(0), key, key_of(1)], [page_of(0), page_of(9), page_of(1)]
            assert rig.cache.put(keys, pages, WAIT_S) == [True, False, True]
            assert rig.cache.exists(keys, WAIT_S) == [True, False, True]
            assert rig.cache.get(keys, [blank(), blank(), blank()], WAIT_S) == [True, False, True]
    assert [(line["event"], line["reason"]) for line in lines] == [("tier_call_refused", reason)]
    # The index is written before the cache closes; a key in it that is too long would have closed the disk.
    assert rig.put(2) == rig.get(2) == [True]
    rig.cache.close()
    assert start(**(REMOTE if tier == "remote" else {})).get(0, 1, 2) == [True] * 3


ODD_PAGES: dict[str, tuple[Any, str]] = {
    "a region is missing": (
        blank((640, 96)),
        "a page has regions of (640, 96) bytes, not of (640, 96, 5000)",
    ),
    "a region is too long": (blank((640, 96, 5001)), "(640, 96, 5001) bytes"),
    "a region has one byte": (blank((640, 1, 5000)), "(640, 1, 5000) bytes"),
    "no region": ([], "a page has regions of () bytes"),
    "no page": (None, "a page has no usable memory"),
    "numbers": ([1, 2, 3], "a page has no usable memory"),
    "every second byte": (
        [*blank((640, 96)), memoryview(bytearray(10_000))[::2]],
        "a page's memory is not contiguous",
    ),
}


@pytest.mark.parametrize(("page", "reason"), ODD_PAGES.values(), ids=ODD_PAGES)
def test_a_page_of_another_size_costs_only_itself_and_one_line(start: Start, page: Page, reason: str) -> None:
    rig, keys = start(), [key_of(0), key_of(1)]
    with capture_logs() as lines:
        for _ in range(2):
            assert rig.cache.put(keys, [page, page_of(1)], WAIT_S) == [False, True]
        assert rig.put(0) == [True]
        assert rig.cache.get(keys, [page, blank()], WAIT_S) == [False, True]
    (line,) = lines
    assert (line["event"], reason in line["reason"]) == ("tier_call_refused", True), line
    assert rig.get(0, 1) == [True, True]
    assert audit_host(rig.cache._state) == []


def test_a_page_that_cannot_be_written_is_only_put(start: Start) -> None:
    rig, page = start(), [region.toreadonly() for region in page_of(0)]
    with capture_logs() as lines:
        assert rig.cache.put([key_of(0)], [page], WAIT_S) == [True]
        assert rig.cache.get([key_of(0)], [page], WAIT_S) == [False]
    assert [line["event"] for line in lines] == ["tier_call_refused"]
    assert rig.get(0) == [True]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_call_with_fewer_or_more_pages_than_keys_finds_and_stores_nothing(start: Start, count: int) -> None:
    rig, keys = start(), [key_of(0), key_of(1)]
    with capture_logs() as lines:
        assert rig.cache.put(keys, [page_of(0)] * count, WAIT_S) == [False, False]
        assert rig.put(0, 1) == [True, True]
        assert rig.cache.get(keys, [blank()] * count, WAIT_S) == [False, False]
    assert [line["reason"] for line in lines] == [f"2 keys came with {count} pages"]
    assert rig.get(0, 1) == [True, True]


def test_a_forked_child_finds_nothing_and_does_not_wait_for_the_parents_threads(start: Start) -> None:
    rig, gate = start(), ThreadGate()
    assert rig.put(0) == [True]

    def hold_lock() -> None:
        with rig.cache._changed:
            gate.arrive()

    holder = threading.Thread(target=hold_lock)
    holder.start()
    gate.wait_for_arrivals(1)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # ends a child that hangs
        try:
            answers = [rig.put(1), rig.get(0), rig.has(0)]
            others = [rig.cache.wait_open(WAIT_S), rig.cache.reset(), rig.cache.take_changes()]
            rig.cache.close()
            os._exit(answers != [[False]] * 3 or others != [False, False, []])
        finally:
            os._exit(2)
    gate.open()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0
    assert rig.get(0) == [True]


def test_settings_of_other_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        tier_config({"host_bytes": 1, "verify": "full"})
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="did you mean disk_path"):
        tier_config({"disk_pat": str(tmp_path)})


# -- bounds and resets ------------------------------------------------------------------------------------------------


def test_putting_more_blocks_than_the_disk_has_slots_keeps_the_last(start: Start) -> None:
    rig = start(sizes=(4096,), disk_bytes=4096 * 4)
    assert rig.put(*range(20)).count(True) >= 3
    assert rig.has(*range(20)).count(True) == 3
    assert audit_host(rig.cache._state) == []


def test_r10_nothing_is_found_after_a_reset(start: Start, store: FakeStore, tmp_path: Path) -> None:
    both = {"disk_path": str(tmp_path), **REMOTE}
    rig = start(**both)
    assert all(rig.put(0, 1))
    assert rig.cache.reset() is True
    assert rig.has(0, 1) == [False, False]
    assert rig.get(0, 1) == [False, False]
    assert rig.cache.wait_open(WAIT_S)
    assert rig.put(2) == [True]
    assert rig.get(2) == [True]
    rig.cache.close()
    assert start(**both).get(0, 1) == [False, False]


def test_r10_a_put_that_runs_during_a_reset_is_not_found(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, gate, stored = start(), hold(monkeypatch, "write"), list[bool]()
    putting = threading.Thread(target=lambda: stored.extend(rig.put(0, 1)))
    putting.start()
    gate.wait_for_arrivals(1)
    assert rig.cache.reset() is True
    gate.open()
    putting.join()
    assert stored == [False, False]
    assert rig.get(0, 1) == [False, False]
    assert rig.put(0) == [True]


def test_changes_of_the_disk_are_returned_in_order(start: Start) -> None:
    rig, keys = start(sizes=(4096,), disk_bytes=4096 * 3), [key_of(number) for number in (0, 1, 2)]
    assert rig.cache.take_changes() == []
    for number in (0, 1, 2):  # the file has room for a header and two slots
        assert rig.put(number) == [True]
    assert rig.cache.take_changes() == [(keys[0], True), (keys[1], True), (keys[0], False), (keys[2], True)]
    assert rig.cache.reset()
    assert sorted(rig.cache.take_changes()) == sorted([(keys[1], False), (keys[2], False)])
    assert rig.cache.take_changes() == []


def test_a_closed_cache_misses(start: Start) -> None:
    rig = start()
    assert all(rig.put(0))
    rig.cache.close()
    rig.cache.close()
    assert (rig.get(0), rig.put(1), rig.has(0)) == ([False], [False], [False])


def test_the_caches_metrics_are_served_to_prometheus(start: Start) -> None:
    rig = start()
    assert all(rig.put(0, 1))
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in KVOffloadCollector(rig.cache).collect()
        for sample in family.samples
    }
    assert samples["kvoffload_tier_blocks_total", "disk", "store", "done"] == 2
    assert samples["kvoffload_slots", "disk", "ready"] == 2
    assert samples["kvoffload_tier_state", "disk", "open"] == 1
    assert not [name for name in samples if "remote" in name]  # the remote tier is off


# -- random calls -----------------------------------------------------------------------------------------------------

ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["put", "get", "has"]), st.lists(st.integers(0, 19), min_size=1, max_size=8)),
    st.tuples(st.sampled_from(["reset", "restart"]), st.just([0])),
)


@pytest.mark.slow
@given(st.lists(ACTIONS, max_size=12))
def test_random_calls_find_only_blocks_put_since_the_last_reset(
    tmp_path_factory: pytest.TempPathFactory, life: list[tuple[str, list[int]]]
) -> None:
    settings = {"disk_path": str(tmp_path_factory.mktemp("disk")), "disk_bytes": 4096 * 13, "sizes": (4000,)}
    rig = Rig(**settings)  # type: ignore[arg-type]
    known: set[int] = set()  # blocks put since the last reset, all of which fit if there are at most 12
    was_reset = False
    try:
        for action, numbers in life:
            if action == "reset":
                assert rig.cache.reset()
                known, was_reset = set(), True
            elif action == "restart":
                rig.cache.close()
                rig = Rig(**settings)  # type: ignore[arg-type]
                known, was_reset = set() if was_reset else known, False
            else:
                known |= set(numbers) if action == "put" else set()
                found = {"put": rig.put, "get": rig.get, "has": rig.has}[action](*numbers)
                was_put = [number in known for number in numbers]
                assert found == was_put or (len(known) > 12 and all(map(le, found, was_put)))
        assert audit_host(rig.cache._state) == []
    finally:
        rig.cache.close()


@pytest.mark.slow
def test_several_threads_put_and_get_the_same_blocks(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.tier_cache._STAGING_BYTES", 0)
    rig = start(sizes=(4096,), disk_bytes=4096 * 24)
    errors: list[BaseException] = []

    def live(seed: int) -> None:
        draw = Random(seed)
        try:
            for _ in range(40):
                numbers = draw.sample(range(40), draw.randint(1, 6))
                draw.choice([rig.put, rig.get, rig.get, rig.has])(*numbers)
                if seed == 0 and draw.random() < 0.1:
                    rig.cache.reset()
        except BaseException as error:  # an exception in any thread fails the test
            errors.append(error)

    threads = [threading.Thread(target=live, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert rig.cache.degraded is None
    assert audit_host(rig.cache._state) == []
    assert rig.put(0) == [True]
    assert rig.get(0) == [True]


KILLS = int(os.environ.get("KVOFFLOAD_KILLS", "6"))


def put_until_killed(folder: Path, seed: int, to_test: Connection) -> None:
    rig = Rig(disk_path=str(folder), disk_bytes="256KiB")
    draw = Random(seed)
    while True:
        first = draw.randrange(200)
        numbers = range(first, first + draw.randint(1, 9))
        rig.put(*numbers)
        rig.get(*draw.sample(range(200), 4))
        to_test.send(list(numbers))


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * KILLS)
def test_after_a_kill_at_any_moment_found_blocks_have_their_bytes(tmp_path: Path) -> None:
    context, found = forking(), 0
    for seed in range(KILLS):
        from_child, to_test = context.Pipe(duplex=False)
        process = context.Process(target=put_until_killed, args=(tmp_path, seed, to_test))
        process.start()
        to_test.close()
        for _ in range(Random(seed).randrange(1, 60)):
            from_child.recv()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        rig = Rig(disk_path=str(tmp_path), disk_bytes="256KiB")
        served = rig.get(*range(210))  # raises if wrong bytes are served
        found += served.count(True)
        assert audit_host(rig.cache._state) == []
        rig.cache.close()
    assert found
