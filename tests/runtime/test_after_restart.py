"""What metrics, journal and log say about host memory in files, after a start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.model.causes import Adoption
from kvoffload.model.events import HostMemoryOpened
from kvoffload.model.wire import Tier
from kvoffload.node.folder import list_kept
from kvoffload.runtime import host_catalog
from tests.captured_logs import capture_logs
from tests.reference.rig import BLOCK, Engines, Rig, rig, text

PROMPT = text(1, 10 * BLOCK)


class Lives(Engines):
    """Starts engines one after the other in one folder, and collects what each says about its memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.settings["host_path"] = self.folder = folder
        self.opened: list[HostMemoryOpened] = []

    def live(self, **extra: Any) -> int:  # noqa: ANN401  # settings
        """Serve the prompt in a life of its own; return how many blocks it leaves."""
        made = self.begin(**extra)
        made.run(PROMPT)
        return len(made.offload.state.pool.index)

    def begin(self, *, opens: bool = True, **extra: Any) -> Rig:  # noqa: ANN401  # settings
        made = self.next(ranks=2, starts_ready=False, drains=False, **extra)
        self.opened.clear()
        made.offload.bus.count(HostMemoryOpened, self.opened.append)
        if opens:
            made.portal.advance()
            made.step()
            made.drain()
        return made


@pytest.fixture
def lives(shared_memory: Path) -> Iterator[Lives]:
    made = Lives(shared_memory)
    yield made
    made.stop_all()


def gauge(made: Rig, name: str) -> dict[str, float]:
    """Return the values of a gauge that are not 0, by its only label."""
    series = made.offload.gauges()[f"kvoffload_{name}"]
    return {"".join(labels): value for labels, value in series.items() if value}


def shown(lives: Lives, made: Rig) -> tuple[str, int]:
    """Return what metric and event say that the start did, and how many blocks it adopted."""
    (result,) = gauge(made, "host_adoption")
    (event,) = lives.opened
    adopted = made.count("adopted_blocks")
    assert (event.adoption.value, event.blocks) == (result, adopted)
    return result, adopted


def test_the_first_start_says_that_nothing_was_left(lives: Lives) -> None:
    assert shown(lives, lives.begin()) == ("nothing_left", 0)


def test_a_start_without_host_path_has_no_result() -> None:
    with rig() as made:
        assert gauge(made, "host_adoption") == {}
        assert gauge(made, "host_attach_seconds") == {}


def test_until_the_ranks_have_reported_a_start_is_opening(lives: Lives) -> None:
    made = lives.begin(opens=False)
    assert gauge(made, "host_adoption") == {"opening": 1}
    assert lives.opened == []


def test_adopted_blocks_and_those_that_loads_read_are_counted_once(lives: Lives) -> None:
    before = lives.live()
    made = lives.begin()
    assert shown(lives, made) == ("adopted", before)
    made.run(PROMPT)
    read = made.count("load_blocks", "loaded")
    assert 0 < read < before
    assert made.count("adopted_hit_blocks") == read
    made.forget_device()
    made.run(PROMPT)
    assert made.count("load_blocks", "loaded") > read
    assert made.count("adopted_hit_blocks") == read


def fail(*_: object) -> None:
    raise OSError("no such device")


@pytest.mark.parametrize(
    "cause", [Adoption.RESET, Adoption.TABLE_REFUSED, Adoption.OTHER_KV, Adoption.FAILED]
)
def test_metric_event_and_log_say_why_nothing_was_adopted(
    lives: Lives, cause: Adoption, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload_reference.plugin._kind_of", lambda identity: "same")
    lives.live(weights_id="a")
    if cause is Adoption.RESET:
        lives.begin(weights_id="a").offload.reset()
    lives.stop_all()
    if cause is Adoption.TABLE_REFUSED:
        (table,) = lives.folder.glob("same/0/table")
        table.write_bytes(b"KV")
    if cause is Adoption.FAILED:
        monkeypatch.setattr(host_catalog, "read_table", fail)
    with capture_logs() as logs:
        made = lives.begin(weights_id="b" if cause is Adoption.OTHER_KV else "a")
    assert shown(lives, made) == (cause.value, 0)
    if cause is not Adoption.FAILED:
        (line,) = [line for line in logs if line["event"] == "host_memory_not_adopted"]
        assert line["cause"] == cause.value


def test_weights_that_are_not_identified_in_time_are_a_reason(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives.live()
    made = lives.begin(opens=False)
    catalog: Any = made.offload.catalogs[Tier.HOST]
    monkeypatch.setattr(catalog, "_identified", lambda found: None)
    made.portal.advance()
    made.step()
    assert gauge(made, "host_adoption") == {"opening": 1}
    made.pass_time(host_catalog._PATIENCE_S)
    made.step()
    made.drain()
    assert shown(lives, made) == ("not_identified", 0)


def test_the_time_of_attaching_is_that_of_the_slowest_rank(lives: Lives) -> None:
    made = lives.begin(opens=False)
    made.portal.advance()
    made.step()
    first, second = made.workers
    second._memory.prepared_s = 2.5
    first._memory.prepared_s = 0.0
    made.run(text(2, BLOCK))
    assert gauge(made, "host_attach_seconds") == {}
    first._memory.prepared_s = 1.5
    made.run(text(3, BLOCK))
    assert gauge(made, "host_attach_seconds") == {"": 2.5}


def test_the_time_of_attaching_is_reported_once_although_nothing_else_is_new(lives: Lives) -> None:
    made = lives.begin()
    worker = made.workers[0]
    while worker.take_report() is not None:
        pass
    worker._memory.prepared_s = 1.5
    report = worker.take_report()
    assert report is not None
    assert [status.file.seconds for status in report.below if status.file] == [1.5]
    assert worker.take_report() is None


def test_bytes_of_stopped_engines_are_counted_and_those_of_running_ones_are_not(lives: Lives) -> None:
    assert gauge(lives.begin(weights_id="a"), "host_orphan_bytes") == {}
    with capture_logs() as logs:
        made = lives.begin(weights_id="b")  # another kind of engine
    (stopped,) = [kept.size for kept in list_kept(lives.folder) if kept.is_orphan]
    assert stopped > 0
    assert gauge(made, "host_orphan_bytes") == {"": stopped}
    (line,) = [line for line in logs if line["event"] == "host_memory_of_others"]
    assert (line["orphans"], line["orphan_bytes"], line["in_use_bytes"]) == (1, stopped, 0)


def test_bytes_of_stopped_engines_are_counted_again_once_they_are_bounded(lives: Lives) -> None:
    lives.begin(weights_id="a")
    made = lives.begin(weights_id="b", host_orphan_bytes=1)
    assert gauge(made, "host_orphan_bytes")
    made.pass_time(host_catalog._SETTLED_LOOKS * host_catalog._LOOK_S + 1)
    assert gauge(made, "host_orphan_bytes") == {}
    assert [kept for kept in list_kept(lives.folder) if kept.is_orphan] == []
