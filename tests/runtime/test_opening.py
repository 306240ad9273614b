from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest

from kvoffload.disk.folder import lock_folder, make_folder
from kvoffload.disk.open_folder import LOCK_PAUSE_S
from kvoffload.model.ids import Rank
from kvoffload.model.wire import Tier, TierStatus, TransferReport
from kvoffload.remote.address import MooncakeAddress, RemotePlace
from kvoffload.runtime.tiers_side import OPENING_S
from kvoffload.testing import FakeClock
from tests.captured_logs import capture_logs
from tests.remote.fake_store import FakeStore
from tests.runtime.manual_portal import ManualPortal
from tests.runtime.parts import IDENTITY, Side

Warned = Callable[[], list[tuple[str, str]]]


@pytest.fixture
def warned() -> Iterator[Warned]:
    """Yield a function that returns the tier and stage of each warning so far."""
    with capture_logs() as lines:
        yield lambda: [(one["tier"], one["stage"]) for one in lines if one["event"] == "tier_still_opening"]


def held() -> ManualPortal:
    """Return a portal whose disk thread does not run."""
    portal = ManualPortal(FakeClock())
    portal.index.hold()
    return portal


def steps(side: Side, count: int, each_s: float = 0.5) -> None:
    for _ in range(count):
        side.clock.jump(each_s)
        side.step()


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
    tmp_path: Path, warned: Warned, monkeypatch: pytest.MonkeyPatch, tier: str, stage: str
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
            side = Side(portal=True, remote=RemotePlace(MooncakeAddress("nowhere", 1), lambda: IDENTITY))
        steps(side, int(2 * OPENING_S) - 4)
        assert warned() == []
        steps(side, 4)
        assert warned() == [(tier, stage)]
        steps(side, 1000)
        assert len(warned()) == 1
        side.close()


def test_the_warning_says_that_the_index_is_being_read(
    tmp_path: Path, warned: Warned, monkeypatch: pytest.MonkeyPatch
) -> None:
    portal = held()
    side = Side(portal=portal, disk=tmp_path)
    monkeypatch.setattr("kvoffload.runtime.disk_catalog.load_index", lambda *_: steps(side, 200))
    portal.index.release()
    assert warned() == [("disk", "index")]
    side.close()


def test_an_idle_engine_logs_no_warning(tmp_path: Path, warned: Warned) -> None:
    side = Side(portal=held(), disk=tmp_path)
    steps(side, 30, each_s=600.0)
    assert warned() == []
    side.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_disk_that_opened_or_failed_causes_no_warning(
    tmp_path: Path, warned: Warned, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    if fails:
        gone = mock.Mock(side_effect=OSError("gone"))
        monkeypatch.setattr("kvoffload.runtime.disk_catalog.make_folder", gone)
    side = Side(portal=True, disk=tmp_path)
    steps(side, 500)
    assert warned() == []
    side.close()


def test_a_disk_that_failed_behind_a_locked_folder_causes_no_warning(tmp_path: Path, warned: Warned) -> None:
    holder = lock_folder(make_folder(tmp_path, IDENTITY, 0))
    side = Side(portal=True, disk=tmp_path, opens_files=False)
    side.side.reported([TransferReport(Rank(0), (), 8, below=(TierStatus(Tier.DISK, False),))])
    holder.close()
    side.portal.advance(LOCK_PAUSE_S)
    steps(side, 200)
    assert warned() == []
    side.close()
