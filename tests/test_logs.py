from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import anyio
import pytest

from kvoffload.bus.bus import Bus
from kvoffload.logs import get_logger
from kvoffload.model.causes import LoadOutcome, RejectionCause, StoreOutcome, TierOutcome
from kvoffload.model.events import (
    BlocksOffered,
    Event,
    FactRejected,
    JobAbandoned,
    LoadEnded,
    PrefixExceedsHost,
    ResetEnded,
    ResetStarted,
    StoreEnded,
    TierCopyEnded,
)
from kvoffload.model.ids import JobId, RequestId
from kvoffload.model.wire import Direction, Tier
from kvoffload.telemetry.logging import LogObserver, log_removed
from kvoffload.testing import FakeClock

A, JOB = RequestId("a"), JobId(1)


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    root = logging.getLogger("kvoffload")
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.level, root.propagate = before


def reported(
    caplog: pytest.LogCaptureFixture, *published: Event, observer: LogObserver | None = None
) -> list[str]:
    async def tell() -> None:
        watch = observer or LogObserver(FakeClock().monotonic)
        for event in published:
            await watch(event)

    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        anyio.run(tell)
    return [
        f"{record.levelname} {record.getMessage()}"
        for record in caplog.records
        if record.name.startswith("kvoffload")
    ]


# for each event, how its line begins
LINES: list[tuple[Event, str]] = [
    (JobAbandoned(JOB, Direction.STORE, 2), "ERROR job_abandoned job=1 direction=store blocks=2"),
    (
        LoadEnded(JOB, A, 2, LoadOutcome.CORRUPT),
        "WARNING load_failed job=1 request=a blocks=2 outcome=corrupt",
    ),
    (StoreEnded(StoreOutcome.FAILED, 2), "WARNING store_failed outcome=failed blocks=2"),
    (
        TierCopyEnded(JOB, Tier.DISK, Direction.LOAD, 2, TierOutcome.CORRUPT),
        "WARNING tier_copy_failed job=1",
    ),
    (
        PrefixExceedsHost(A, 21, 16),
        "WARNING prefix_exceeds_host request=a blocks=21 slots=16 note=",
    ),
    (ResetStarted(1, 2, 3, 4), "INFO reset_started epoch=1 dropped_blocks=2 draining_blocks=3 open_jobs=4"),
    (ResetEnded(1, 2), "INFO reset_ended epoch=1 abandoned_jobs=2"),
    (FactRejected(RejectionCause.UNKNOWN_JOB, A), "WARNING fact_rejected cause=unknown_job request=a note="),
]


@pytest.mark.parametrize(("event", "line"), LINES, ids=[line.split()[1] for _, line in LINES])
def test_rare_events_are_logged_at_their_level(
    caplog: pytest.LogCaptureFixture, event: Event, line: str
) -> None:
    (logged,) = reported(caplog, event)
    assert logged.startswith(line)


def test_events_without_a_log_line_do_not_wake_the_log_observer() -> None:
    bus = Bus()
    feed = LogObserver(FakeClock().monotonic).subscribe(bus)
    bus.publish(BlocksOffered(1))
    bus.publish(StoreEnded(StoreOutcome.STORED, 2))
    bus.publish(LoadEnded(JOB, A, 2, LoadOutcome.LOADED))
    bus.publish(TierCopyEnded(JOB, Tier.DISK, Direction.LOAD, 2, TierOutcome.DONE))
    assert not feed._waiting
    bus.publish(LoadEnded(JOB, A, 2, LoadOutcome.FAILED))
    bus.publish(ResetEnded(1, 2))
    assert len(feed._waiting) == 2
    assert list(bus.feeds) == ["log"]


def test_a_rejected_fact_is_logged_once_per_cause(caplog: pytest.LogCaptureFixture) -> None:
    lines = reported(
        caplog,
        FactRejected(RejectionCause.UNKNOWN_JOB),
        FactRejected(RejectionCause.UNKNOWN_JOB, A),
        FactRejected(RejectionCause.UNKNOWN_REQUEST),
    )
    assert [line.split()[2] for line in lines] == ["cause=unknown_job", "cause=unknown_request"]


def test_repeated_failures_share_one_log_line_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    observer = LogObserver(clock.monotonic)
    failed = LoadEnded(JOB, A, 2, LoadOutcome.FAILED)
    assert len(reported(caplog, failed, failed, failed, observer=observer)) == 1
    assert len(reported(caplog, LoadEnded(JOB, A, 2, LoadOutcome.CORRUPT), observer=observer)) == 1
    clock.jump(9.9)
    assert reported(caplog, failed, observer=observer) == []
    clock.jump(0.2)
    (line,) = reported(caplog, failed, observer=observer)
    assert line.endswith("held_back=3")
    clock.jump(10.0)
    (line,) = reported(caplog, failed, observer=observer)
    assert "held_back" not in line


def test_a_removed_observer_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise RuntimeError("at 1")
    except RuntimeError as error:
        log_removed("watcher", error)
    (removed,) = caplog.records
    assert removed.getMessage().startswith(
        "observer_removed name=watcher error=\"RuntimeError('at 1')\"\nTraceback"
    )


def test_no_handler_is_added_and_the_hosts_log_level_applies(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger("part")
    logging.getLogger("kvoffload").setLevel(logging.WARNING)
    log.info("quiet")
    log.warning("percent_sign", share="100 %s", empty="")
    assert logging.getLogger("kvoffload").handlers == []
    (record,) = caplog.records
    assert (record.name, record.filename) == ("kvoffload.part", "test_logs.py")
    assert record.getMessage() == "percent_sign share='100 %s' empty=''"
    assert record.kvoffload == {"event": "percent_sign", "share": "100 %s", "empty": ""}  # type: ignore[attr-defined]


def test_a_logger_can_be_a_child_of_the_hosts_logger() -> None:
    host, stream = logging.getLogger("somehost"), io.StringIO()
    handler = logging.StreamHandler(stream)
    host.addHandler(handler)
    host.propagate = False
    get_logger("part", under="somehost").warning("told", number=1)
    host.removeHandler(handler)
    assert stream.getvalue() == "told number=1\n"
