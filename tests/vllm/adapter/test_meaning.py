"""Workers share blocks only if the descriptions of their blocks' bytes are equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvoffload.disk.folder import DiskPlace
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import BlockKey, JobId, Rank, SlotId
from kvoffload.model.wire import CopyJob, Direction, Tier, TransferPlan, TransferReport
from kvoffload.remote.address import MooncakeAddress, RemotePlace
from kvoffload.runtime.tier_kinds import Places
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.testing import FakeClock
from kvoffload.transfer.layout import DeviceLayout
from kvoffload_vllm.layout import layout_of_caches, meaning_of_caches
from tests.captured_logs import capture_logs
from tests.remote.fake_store import FakeStore
from tests.runtime.manual_portal import ManualPortal
from tests.runtime.parts import IDENTITY
from tests.vllm.adapter.test_layout import BLOCKS, config, older, placed

HEADS, TOKENS, CONTENT = 2, 4, 8
PAGE = HEADS * TOKENS * CONTENT


def view(blocks: int = BLOCKS, *, tokens_first: bool = False) -> torch.Tensor:
    """Return a layer's cache of shape [blocks, heads, tokens, content]. In memory, tokens may come before heads."""
    if tokens_first:
        return torch.zeros(blocks, TOKENS, HEADS, CONTENT, dtype=torch.int8).transpose(1, 2)
    return torch.zeros(blocks, HEADS, TOKENS, CONTENT, dtype=torch.int8)


def layer(backend: str) -> Any:
    return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))


def layout(
    cache: torch.Tensor | None = None, backend: str = "FLASH_ATTN", blocks: int = BLOCKS
) -> DeviceLayout:
    """Return the layout of a worker with one layer, as the connector would register it."""
    caches = {"l0": view(blocks) if cache is None else cache}
    made = config(placed(blocks * PAGE, ["l0"], blocks * PAGE, PAGE), blocks=blocks)
    meaning = meaning_of_caches(caches, made, {"l0": layer(backend)})
    return replace(layout_of_caches(caches, made), meaning=meaning)


CASES: dict[str, tuple[Callable[[], DeviceLayout], bool]] = {
    "the order of dimensions differs": (lambda: layout(view(tokens_first=True)), False),
    "the backend differs": (lambda: layout(backend="FLASHINFER"), False),
    "the shape differs": (lambda: layout(view().reshape(BLOCKS, HEADS, CONTENT, TOKENS)), False),
    "all is alike": (layout, True),
    "only the number of blocks differs": (lambda: layout(blocks=BLOCKS + 4), True),
}


class Worker:
    def __init__(self, layout: DeviceLayout, places: Places) -> None:
        self.portal, settings = ManualPortal(FakeClock()), OffloadConfig(host_bytes=2**20, disk_bytes=2**20)
        self.side = WorkerSide(Rank(0), 1, settings, self.portal, clock=self.portal.clock, places=places)
        self.side.register(layout)
        self.portal.advance()

    def report(self) -> TransferReport:
        report = self.side.take_report()
        assert report is not None
        return report

    def copy(self, way: Direction) -> CopyOutcome:
        job = CopyJob(JobId(1), way, Tier.REMOTE, (SlotId(0),), (BlockKey(b"key"),), "namespace")
        self.side.start_stores(TransferPlan(below=(job,)))
        (ended,) = self.report().jobs
        return ended.outcome

    def close(self) -> None:
        self.side.close()
        self.portal.close()


def slot_file(folder: Path, layout: DeviceLayout) -> bytes:
    """Start a worker on this folder; return the id of the slot file that the worker opens or creates."""
    worker = Worker(layout, {Tier.DISK: DiskPlace(folder, lambda: IDENTITY)})
    (status,) = worker.report().below
    file = status.file
    worker.close()
    assert file is not None
    return file.file_id


@pytest.mark.parametrize(("make", "finds"), CASES.values(), ids=CASES)
def test_r18_a_worker_uses_blocks_on_disk_only_if_their_description_is_the_same(
    tmp_path: Path, make: Callable[[], DeviceLayout], *, finds: bool
) -> None:
    first = slot_file(tmp_path, layout())
    with capture_logs() as lines:
        again = slot_file(tmp_path, make())
    assert (again == first) is finds
    replaced = [line["reason"] for line in lines if line["event"] == "slot_file_replaced"]
    assert len(replaced) == (0 if finds else 1)
    assert all("another attention backend or order of dimensions" in reason for reason in replaced)


@pytest.mark.parametrize(("make", "finds"), CASES.values(), ids=CASES)
def test_r18_a_worker_uses_blocks_in_a_store_only_if_their_description_is_the_same(
    make: Callable[[], DeviceLayout], monkeypatch: pytest.MonkeyPatch, *, finds: bool
) -> None:
    store = FakeStore()
    monkeypatch.setattr("kvoffload.runtime.tier_kinds.open_store", lambda *_: store)
    places = {Tier.REMOTE: RemotePlace(MooncakeAddress("nowhere", 1), lambda: IDENTITY)}
    writer, reader = Worker(layout(), places), Worker(make(), places)
    for worker in (writer, reader):
        worker.report()
        assert [status.works for status in worker.report().below] == [True]
    assert writer.copy(Direction.STORE) is CopyOutcome.DONE
    assert reader.copy(Direction.LOAD) is (CopyOutcome.DONE if finds else CopyOutcome.CORRUPT)
    writer.close()
    reader.close()


def older_meaning(cache: Any, blocks: int = BLOCKS) -> str:
    made = config(older(1, ["l0"]), blocks=blocks)
    return meaning_of_caches({"l0": cache}, made, {})


def test_keys_and_values_outside_or_inside_a_block_differ_before_0_29() -> None:
    """Before 0.29 each backend had one of these layouts. The number of blocks must not change the description."""

    def outside(blocks: int) -> torch.Tensor:
        return torch.zeros(2, blocks, TOKENS, HEADS, CONTENT)

    def inside(blocks: int) -> torch.Tensor:
        return torch.zeros(blocks, 2, TOKENS, HEADS, CONTENT)

    assert older_meaning(outside(7)) == older_meaning(outside(9), blocks=9)
    assert older_meaning(inside(7)) == older_meaning(inside(9), blocks=9)
    assert older_meaning(inside(7)) != older_meaning(outside(7))


def test_the_place_of_a_dimension_of_one_element_does_not_matter() -> None:
    one = torch.zeros(BLOCKS, 1, TOKENS, CONTENT)
    assert older_meaning(one) == older_meaning(one.as_strided(one.shape, (TOKENS * CONTENT, 1, CONTENT, 1)))
