from __future__ import annotations

import io
import json
from typing import Any

from msgspec.structs import replace

from kvoffload.model import events
from kvoffload.model.causes import Adoption, CopyOutcome, EvictionCause, LoadOutcome, PinDropCause
from kvoffload.model.ids import JobId, Rank, RequestId
from kvoffload.model.wire import Direction, Tier
from kvoffload.telemetry.records import Record, Summary
from kvoffload.telemetry.timeline import Rows, write_trace

A, B = RequestId("a"), RequestId("b")
DONE = CopyOutcome.DONE


def journal(*lines: tuple[float, object], first: int = 1) -> list[Record]:
    return [Record(first + number, 100.0 + at, message) for number, (at, message) in enumerate(lines)]  # type: ignore[arg-type]


def seen(request: RequestId) -> Summary:
    return Summary("RequestSeen", {"request": request, "prompt_tokens": 32})


def allocated(request: RequestId) -> Summary:
    return Summary("BlocksAllocated", {"request": request, "device_tokens": 0})


def step(number: int, *preempted: RequestId) -> Summary:
    return Summary("StepScheduled", {"step": number, "progress": 1, "preempted": list(preempted)})


def ended(request: RequestId) -> Summary:
    return Summary("RequestEnded", {"request": request})


def settled(request: RequestId, hit_tokens: int = 0) -> events.LookupAnswered:
    return events.LookupAnswered(request, 0, hit_tokens // 16, 0, hit_tokens, 0, None)


def reported(
    job: int, direction: Direction, queue_s: float, copy_s: float, rank: int = 0
) -> events.RankReported:
    return events.RankReported(JobId(job), Rank(rank), direction, DONE, 4096, queue_s, copy_s)


class Picture:
    """A timeline, as written for a trace viewer."""

    def __init__(self, records: list[Record]) -> None:
        file = io.StringIO()
        write_trace(records, file, dict)
        self.drawn: list[dict[str, Any]] = json.loads(file.getvalue())["traceEvents"]
        names = {"process_name": {}, "thread_name": {}}  # type: dict[str, dict[Any, str]]
        for event in self.drawn:
            if event["name"] in names:
                where = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
                names[event["name"]][where] = event["args"]["name"]
        self._processes, self._threads = names["process_name"], names["thread_name"]

    def line(self, event: dict[str, Any]) -> str:
        return f"{self._processes[event['pid']]}/{self._threads[event['pid'], event['tid']]}"

    def spans(self, line: str) -> list[tuple[str, float, float]]:
        """Return the name, start and end of each span on this line. Times are in milliseconds."""
        return [
            (event["name"], event["ts"] / 1000, round((event["ts"] + event["dur"]) / 1000, 6))
            for event in self.drawn
            if event["ph"] == "X" and self.line(event) == line
        ]

    def instants(self, line: str) -> list[tuple[str, float]]:
        return [
            (event["name"], event["ts"] / 1000)
            for event in self.drawn
            if event["ph"] == "i" and self.line(event) == line
        ]

    def args(self, name: str) -> dict[str, Any]:
        found: dict[str, Any]
        (found,) = [event["args"] for event in self.drawn if event["name"] == name]
        return found


def test_a_step_lasts_until_the_next_step_or_the_end_of_its_request() -> None:
    picture = Picture(
        journal(
            (0, seen(A)),
            (0.01, allocated(A)),
            (0.02, step(1)),
            (0.05, step(2)),
            (0.09, ended(A)),
            (9, seen(B)),
        )
    )
    assert picture.spans("scheduler/steps") == [("step 1", 20, 50), ("step 2", 50, 90)]


def test_an_idle_engines_steps_do_not_last_until_the_next_request() -> None:
    report = Summary("TransferReported", {"report": {}})
    drains = journal(
        (0, step(1)), (0.01, report), (5, step(2)), (5.002, events.BlocksOffered(1)), (9, seen(A))
    )
    assert Picture(drains).spans("scheduler/steps") == [("step 1", 0, 10), ("step 2", 5000, 5002)]


def test_a_request_waits_for_its_lookup_and_then_runs() -> None:
    picture = Picture(
        journal(
            *(
                (0, seen(A)),
                (0.004, events.HitPinned(A, 2, 0, 32)),
                (0.01, allocated(A)),
                (0.011, settled(A, 32)),
            ),
            *((0.05, ended(A)),),
        )
    )
    assert picture.spans("requests/request") == [("lookup", 0, 10), ("a", 10, 50)]
    assert picture.instants("requests/request") == [("HitPinned", 4)]
    assert picture.args("lookup")["hit_tokens"] == 32
    assert picture.args("a") == {"end": "ended"}


def test_a_preempted_request_waits_again_on_the_same_row() -> None:
    lines = [(0, seen(A)), (0.01, allocated(A)), (0.01, settled(A)), (0.02, step(7, A)), (0.05, allocated(A))]
    picture = Picture(journal(*lines, (0.05, settled(A)), (0.08, ended(A))))
    spans = [("lookup", 0, 10), ("a", 10, 20), ("lookup", 20, 50), ("a", 50, 80)]
    assert picture.spans("requests/request") == spans


def test_rows_of_requests_are_reused() -> None:
    picture = Picture(
        journal(
            (0, seen(A)), (0.01, seen(B)), (0.02, ended(A)), (0.03, seen(RequestId("c"))), (0.04, ended(B))
        )
    )
    assert [name for name, _, _ in picture.spans("requests/request")] == ["lookup", "lookup"]
    assert [name for name, _, _ in picture.spans("requests/request 2")] == ["lookup"]


def test_a_copy_begins_after_its_queue_and_its_job_ends_with_the_report() -> None:
    store = (events.StoreScheduled(JobId(3), 5), reported(3, Direction.STORE, 0.004, 0.001))
    picture = Picture(journal((0.01, store[0]), (0.03, store[1])))
    assert picture.spans("rank 0/stores") == [("store 3", 0, 20), ("queued", 0, 4), ("copy", 4, 5)]
    assert picture.args("store 3") == {
        "job": 3,
        "rank": 0,
        "blocks": 5,
        "request": None,
        "outcome": "done",
        "bytes": 4096,
    }


def test_a_copy_never_begins_before_its_job() -> None:
    picture = Picture(
        journal((0, events.StoreScheduled(JobId(3), 5)), (0.003, reported(3, Direction.STORE, 0.004, 0.001)))
    )
    assert picture.spans("rank 0/stores") == [("store 3", 0, 3), ("queued", 0, 2), ("copy", 2, 3)]


def test_each_rank_has_its_own_lines_and_overlapping_jobs_have_separate_rows() -> None:
    load = Direction.LOAD
    picture = Picture(
        journal(
            (0, events.LoadScheduled(JobId(1), A, 2, 32)),
            (0, events.LoadScheduled(JobId(2), B, 2, 32)),
            (0.01, reported(1, load, 0.0, 0.01)),
            (0.011, reported(1, load, 0.0, 0.01, rank=1)),
            (0.02, reported(2, load, 0.01, 0.01)),
            (0.03, events.LoadScheduled(JobId(3), A, 2, 32)),
            (0.04, reported(3, load, 0.0, 0.01)),
        )
    )
    assert [name for name, _, _ in picture.spans("rank 0/loads")][::3] == ["load 1", "load 3"]
    assert [name for name, _, _ in picture.spans("rank 0/loads 2")][::3] == ["load 2"]
    assert [name for name, _, _ in picture.spans("rank 1/loads")][::3] == ["load 1"]


def test_a_requests_wait_for_its_load_is_drawn() -> None:
    loaded = events.LoadEnded(JobId(1), A, 2, LoadOutcome.LOADED)
    lines = [
        (0, seen(A)),
        (0.01, allocated(A)),
        (0.02, events.LoadScheduled(JobId(1), A, 2, 32)),
        (0.04, loaded),
    ]
    picture = Picture(journal(*lines, (0.05, ended(A))))
    assert ("waits for load", 20, 40) in picture.spans("requests/request")
    assert picture.args("waits for load") == {"job": 1, "tokens": 32, "outcome": "loaded"}


def test_evictions_and_pins_are_drawn_as_instants() -> None:
    dropped = events.HitDropped(A, 2, PinDropCause.REQUEST_ENDED)
    picture = Picture(journal((0, events.BlocksEvicted(3, EvictionCause.SPACE)), (0.01, dropped)))
    assert picture.instants("scheduler/host memory") == [("BlocksEvicted", 0)]
    assert picture.args("BlocksEvicted") == {"blocks": 3, "cause": "space", "age_s": 0.0}
    assert picture.instants("requests/request") == [("HitDropped", 10)]


def test_what_a_start_adopted_is_drawn_at_host_memory() -> None:
    opened = events.HostMemoryOpened(Adoption.ADOPTED, 9)
    picture = Picture(
        journal((0, opened), (0.01, events.BlocksAdopted(9)), (0.02, events.AdoptedBlocksHit(4)))
    )
    assert picture.instants("scheduler/host memory") == [
        ("HostMemoryOpened", 0),
        ("BlocksAdopted", 10),
        ("AdoptedBlocksHit", 20),
    ]
    assert picture.args("HostMemoryOpened") == {"adoption": "adopted", "blocks": 9}


def test_open_spans_are_drawn_to_the_end_of_the_journal() -> None:
    picture = Picture(journal((0, seen(A)), (0.01, allocated(A)), (0.02, step(1)), (0.07, settled(A))))
    assert picture.spans("scheduler/steps") == [("step 1", 20, 70)]
    assert ("a", 10, 70) in picture.spans("requests/request")
    assert picture.args("a") == {"end": "unfinished"}


def test_a_copy_of_an_unknown_job_is_drawn_from_its_own_times() -> None:
    picture = Picture(journal((0, step(1)), (0.02, reported(9, Direction.LOAD, 0.002, 0.004))))
    assert picture.spans("rank 0/loads")[0] == ("load 9", 14, 20)


def test_dropped_lines_are_reported() -> None:
    records = [*journal((0, step(1))), *journal((0.5, step(2)), first=12)]
    assert Picture(records).args("lines dropped") == {"lines": 10}


def test_a_second_process_in_one_file_starts_with_no_open_jobs() -> None:
    scheduled = events.StoreScheduled(JobId(0), 1)
    records = [
        *journal((0, scheduled)),
        *journal((5, step(0)), (5.01, reported(0, Direction.STORE, 0.001, 0.002))),
    ]
    picture = Picture(records)
    assert picture.instants("scheduler/notes") == [("another process begins", 5000)]
    assert picture.spans("rank 0/stores")[0] == ("store 0", 5007, 5010)


def test_the_row_that_ended_first_is_reused_first() -> None:
    rows = Rows()
    placed = [rows.place("g", "l", *times) for times in ((0, 2), (1, 3), (2, 4), (3, 5))]
    assert placed == [0, 1, 0, 1]
    assert rows.place("g", "other", 0, 9) == 0


class Counted(float):
    compared = 0

    def _count(self) -> None:
        Counted.compared += 1

    def __le__(self, other: float) -> bool:
        self._count()
        return float(self) <= float(other)

    def __lt__(self, other: float) -> bool:
        self._count()
        return float(self) < float(other)

    def __gt__(self, other: float) -> bool:
        self._count()
        return float(self) > float(other)


def test_placing_a_span_does_not_compare_it_with_every_row() -> None:
    rows, number = Rows(), 1000
    start, end = Counted(0), Counted(1)
    assert [rows.place("g", "l", start, end) for _ in range(number)] == list(range(number))
    assert Counted.compared < 20 * number


def test_copies_to_and_from_the_disk_have_their_own_lines() -> None:
    spill = events.TierCopyScheduled(JobId(1), Tier.DISK, Direction.STORE, 3)
    fetch = events.TierCopyScheduled(JobId(2), Tier.DISK, Direction.LOAD, 2, A)
    picture = Picture(
        journal(
            (0, spill),
            (0.01, fetch),
            (0.03, replace(reported(2, Direction.LOAD, 0.0, 0.01), tier=Tier.DISK)),
            (0.05, replace(reported(1, Direction.STORE, 0.01, 0.02), tier=Tier.DISK)),
            (0.06, events.TierBlocksEvicted(Tier.DISK, 4, EvictionCause.SPACE)),
        )
    )
    assert picture.spans("rank 0/spills to disk")[0] == ("spill 1", 0, 50)
    assert picture.spans("rank 0/fetches from disk")[0] == ("fetch 2", 10, 30)
    assert picture.args("fetch 2")["request"] == A
    assert picture.instants("scheduler/lower tiers") == [("TierBlocksEvicted", 60)]
