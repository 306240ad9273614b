"""Ranks with the same bytes in their blocks keep one copy of them, on the host and on lower tiers."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.errors import HostMemoryError
from kvoffload.model.wire import DeviceJob, Direction, TransferPlan
from kvoffload.runtime import rank_memory, worker_side
from kvoffload.transfer import host_file
from tests.captured_logs import capture_logs
from tests.copy_jobs import device_job
from tests.reference.rig import BLOCK, KINDS, Engines, Rig, rig, slot_bytes, text

PROMPT = text(1, 10 * BLOCK)
NONE: Mapping[str, object] = {}
HOST_BLOCKS = 200
# ranks in all, and how many of them share a copy
SHARED = [(2, 2), (4, 2), (3, 3)]

StartEngine = Callable[..., Rig]


@pytest.fixture
def start(engines: Engines) -> StartEngine:
    """Return a function that ends the previous engine and starts another one."""

    def begin(
        kind: str = "full",
        shared: tuple[int, int] = (2, 2),
        extra: Mapping[str, object] = NONE,
        host_blocks: int = HOST_BLOCKS,
    ) -> Rig:
        ranks, replicas = shared
        return engines.next(kind, ranks=ranks, replicas=replicas, host_blocks=host_blocks, **extra)

    return begin


def memory_bytes(made: Rig) -> float:
    """Return the bytes of the host's slots, by the metric."""
    return made.offload.gauges()["kvoffload_host_bytes"]["wanted",]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("verify", ["off", "full"])
def test_one_copy_serves_all_ranks(
    start: StartEngine, kind: str, shared: tuple[int, int], verify: str
) -> None:
    made = start(kind, shared, {"verify": verify})
    made.run(PROMPT)
    made.forget_device()
    made.run(PROMPT)
    made.assert_clean()
    assert made.count("load_blocks", "loaded") > 0
    stages = shared[0] // shared[1]
    assert memory_bytes(made) == HOST_BLOCKS * stages * slot_bytes(kind, stages)
    arenas = [worker.pump._arena for worker in made.workers]
    assert {arena.slots for arena in arenas} == {HOST_BLOCKS}
    for slot in made.offload.state.pool.index.values():
        first, second = [[bytes(page) for page in arena.pages(slot)] for arena in arenas[: shared[1]]][:2]
        assert first == second
        assert any(any(page) for page in first)


def test_each_rank_writes_a_part_of_the_blocks_and_reads_all(start: StartEngine) -> None:
    made = start()
    copied: list[list[int]] = [[], []]
    for rank, worker in enumerate(made.workers):
        submit = worker.pump.submit_stores

        def record(
            jobs: Sequence[DeviceJob],
            submit: Callable[[Sequence[DeviceJob]], None] = submit,
            found: list[int] = copied[rank],
        ) -> None:
            found += [slot for job in jobs for slot in job.slots]
            submit(jobs)

        worker.pump.submit_stores = record  # type: ignore[method-assign]
    made.run(PROMPT)
    for rank, slots in enumerate(copied):
        assert slots
        assert {slot % 2 for slot in slots} == {rank}
    assert made.count("transfer_bytes", "host", "store") == len(copied[0] + copied[1]) * slot_bytes("full")
    made.forget_device()
    made.run(PROMPT)
    loaded = made.count("load_blocks", "loaded")
    assert made.count("transfer_bytes", "host", "load") == 2 * loaded * slot_bytes("full")


def test_a_rank_reports_a_store_without_a_part_of_its_own_although_nothing_else_is_new(
    start: StartEngine,
) -> None:
    made = start()
    first, second = made.workers
    for worker in made.workers:
        while worker.take_report() is not None:
            pass
    job = device_job(99, Direction.STORE, (4,), (1,))
    second.start_stores(TransferPlan(stores=(job,)))
    report = second.take_report()
    assert report is not None
    assert [(each.job, each.outcome) for each in report.jobs] == [(99, CopyOutcome.DONE)]
    assert second.take_report() is None
    first.start_stores(TransferPlan(stores=(job,)))
    made.pass_time()
    report = first.take_report()
    assert report is not None
    assert [(each.job, each.outcome) for each in report.jobs] == [(99, CopyOutcome.DONE)]


def test_without_the_setting_each_rank_keeps_its_own_copy(start: StartEngine) -> None:
    made = start(extra={"host_share": False}, host_blocks=2 * HOST_BLOCKS)
    assert made.offload.state.pool.capacity == HOST_BLOCKS
    assert memory_bytes(made) == 2 * HOST_BLOCKS * slot_bytes("full")
    made.run(PROMPT)
    made.forget_device()
    made.run(PROMPT)
    assert made.count("load_blocks", "loaded") > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_with_verify_every_rank_finds_a_changed_byte_whoever_wrote_it(start: StartEngine, rank: int) -> None:
    made = start(extra={"verify": "full"})
    made.run(PROMPT)
    made.forget_device()
    pool = made.offload.state.pool
    slot = next(slot for slot in pool.index.values() if slot % 2 == rank)
    made.workers[0].pump._arena.pages(slot)[0][0] ^= 1
    made.run(PROMPT)
    assert made.count("evicted_blocks", "host", "corrupt") == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", SHARED)
def test_the_next_engine_finds_the_shared_memory(
    start: StartEngine, kind: str, shared: tuple[int, int], shared_memory: Path
) -> None:
    extra = {"host_path": shared_memory, "verify": "full"}
    made = start(kind, shared, extra)
    made.run(PROMPT)
    made.forget_device()
    made.run(PROMPT)
    before = made.count("load_blocks", "loaded")
    for _ in range(2):
        made = start(kind, shared, extra)
        made.run(PROMPT)
        assert made.count("load_blocks", "loaded") == before > 0
    assert len([*shared_memory.rglob("rank*")]) == shared[0] // shared[1]


def test_an_engine_with_another_number_of_copies_does_not_take_over_the_memory(
    start: StartEngine, shared_memory: Path
) -> None:
    start(extra={"host_path": shared_memory}).run(PROMPT)
    made = start(extra={"host_path": shared_memory, "host_share": False})
    made.run(PROMPT)
    assert made.count("load_blocks", "loaded") == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("verify", ["off", "full"])
def test_the_disk_has_one_copy_of_which_each_rank_has_a_part(
    start: StartEngine, kind: str, shared: tuple[int, int], verify: str, tmp_path: Path
) -> None:
    extra = {"disk_path": tmp_path, "disk_bytes": 2**20, "disk_min_hits": 0, "verify": verify}
    made = start(kind, shared, extra)
    made.run(PROMPT)
    made.drain()
    spilled = made.count("tier_blocks", "disk", "store", "done")
    assert spilled > 0
    stages = shared[0] // shared[1]
    assert made.count("transfer_bytes", "disk", "store") == spilled * stages * slot_bytes(kind, stages)
    made = start(kind, shared, extra)
    made.run(PROMPT)
    made.assert_clean()
    assert made.count("tier_blocks", "disk", "load", "done") > 0
    assert made.count("tier_blocks", "disk", "load", "corrupt") == 0


def test_a_start_says_how_many_copies_there_are(start: StartEngine) -> None:
    with capture_logs() as logged:
        start()
    lines = [line for line in logged if line["event"] == "worker_registered"]
    assert [(line["host_copies"], line["slots"]) for line in lines] == [(1, HOST_BLOCKS)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_r4_blocks_of_a_job_of_which_one_rank_could_not_copy_its_part_are_not_found(
    start: StartEngine, rank: int
) -> None:
    made = start()
    made.copiers[rank].hold()
    made.submit(PROMPT)
    for _ in range(20):
        made.step()
    assert not made.offload.state.pool.index
    for ticket in made.copiers[rank].open_tickets:
        ticket.fail()
    made.copiers[rank].release()
    made.drain()
    assert not made.offload.state.pool.index
    made.run(PROMPT)


def left_open() -> Counter[str]:
    """Return the process's open files, and its threads that pass files on."""
    gc.collect()  # a mapping keeps its file open until the collector has found it
    found = Counter(each.name for each in threading.enumerate() if each.name == "kvoffload-offer")
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own descriptor is closed by now
            found[os.readlink(f"/proc/self/fd/{descriptor}")] += 1
    return found


@pytest.mark.parametrize("has_path", [False, True])
@pytest.mark.parametrize(
    ("module", "name", "good_calls"),
    [
        (rank_memory, "Offer", 0),
        (rank_memory, "ask", 0),
        *[(host_file, "advise", number) for number in (0, 1)],
        *[
            (worker_side, part, number)
            for part in ("Arena", "make_checksums", "copies_of")
            for number in (0, 1)
        ],
    ],
)
def test_a_start_that_fails_at_any_point_leaves_nothing_open(
    module: ModuleType,
    name: str,
    good_calls: int,
    has_path: bool,
    shared_memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = getattr(module, name), iter([True] * good_calls)

    def fail(*args: object, **options: object) -> object:
        if next(calls, False):
            return real(*args, **options)
        raise HostMemoryError("it fails")

    extra = {"host_path": shared_memory} if has_path else {}
    before = left_open()
    monkeypatch.setattr(module, name, fail)
    with (
        pytest.raises(Exception, match="it fails"),
        rig(ranks=2, replicas=2, extra={"verify": "full", **extra}),
    ):
        pass
    assert left_open() - before == Counter()
