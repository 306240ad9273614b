from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvoffload.disk.folder import lock_folder, make_folder
from kvoffload.disk.open_folder import LOCK_PAUSE_S
from kvoffload.model.ids import Rank
from kvoffload.model.wire import TransferReport
from kvoffload.remote.address import MooncakeAddress, RemotePlace
from kvoffload.runtime.tiers_side import OPENING_S
from kvoffload.testing import FakeClock
from tests.captured_logs import capture_logs
from tests.remote.fake_store import FakeStore
from tests.runtime.manual_portal import ManualPortal
from tests.runtime.parts import IDENTITY, Side

NOWHERE = MooncakeAddress("nowhere", 1)


@pytest.fixture
def logged() -> Iterator[list[dict[str, Any]]]:
    with capture_logs() as lines:
        yield lines


def held() -> ManualPortal:
    """Return a portal whose disk thread does not run."""
    portal = ManualPortal(FakeClock())
    portal.index.hold()
    return portal


def steps(side: Side, count: int, each_s: float = 0.5) -> None:
    for _ in range(count):
        side.clock.jump(each_s)
        side.step()


def warnings(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["tier"], line["stage"]) for line in lines if line["event"] == "tier_still_opening"]


@pytest.mark.parametrize(
    ("tier", "stage"),
    [
        ("disk", "identity of the weights"),
        ("disk", "lock of the folder"),
        ("disk", "slot files of the ranks"),
        ("remote", "connection"),
    ],
)
def test_one_warning_names_the_stage_of_a_tier_that_opens_for_over_a_minute(
    tmp_path: Path, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tier: str, stage: str
) -> None:
    store = FakeStore()
    store.fails = True
    monkeypatch.setattr("kvoffload.runtime.remote_catalog.open_store", lambda *_: store)
    folder = make_folder(tmp_path, IDENTITY, 0)
    with lock_folder(folder) if stage == "lock of the folder" else nullcontext():
        if stage == "identity of the weights":
            side = Side(portal=held(), disk=tmp_path)
        elif tier == "disk":
            side = Side(portal=True, disk=tmp_path, opens_files=stage != "slot files of the ranks")
        else:
            side = Side(portal=True, remote=RemotePlace(NOWHERE, lambda: "print"))
        steps(side, int(2 * OPENING_S) - 4)
        assert warnings(logged) == []
        steps(side, 4)
        assert warnings(logged) == [(tier, stage)]
        steps(side, 1000)
        assert len(warnings(logged)) == 1
        side.close()


def test_the_warning_says_that_the_index_is_being_read(
    tmp_path: Path, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    portal = held()
    side = Side(portal=portal, disk=tmp_path)
    monkeypatch.setattr("kvoffload.runtime.disk_catalog.load_index", lambda *_: steps(side, 200))
    portal.index.release()
    assert warnings(logged) == [("disk", "index")]
    side.close()


def test_an_idle_engine_logs_no_warning(tmp_path: Path, logged: list[dict[str, Any]]) -> None:
    side = Side(portal=held(), disk=tmp_path)
    steps(side, 30, each_s=600.0)
    assert warnings(logged) == []
    side.close()


def test_a_disk_that_opened_or_failed_causes_no_warning(
    tmp_path: Path, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Side(portal=True, disk=tmp_path)
    steps(opened, 500)
    opened.close()

    def fail(*_: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr("kvoffload.runtime.disk_catalog.make_folder", fail)
    failed = Side(portal=True, disk=tmp_path)
    steps(failed, 500)
    failed.close()
    assert warnings(logged) == []


def test_a_disk_that_failed_behind_a_locked_folder_causes_no_warning(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    holder = lock_folder(make_folder(tmp_path, IDENTITY, 0))
    side = Side(portal=True, disk=tmp_path, opens_files=False)
    side.side.reported([TransferReport(Rank(0), (), 8, disk_works=False)])
    holder.close()
    side.portal.advance(LOCK_PAUSE_S)
    steps(side, 200)
    assert warnings(logged) == []
    side.close()
