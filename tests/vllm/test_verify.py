from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.model.ids import SlotId
from tests.vllm.engine_rig import MARKS, Asked, Reports, Rig, offloading, prompt, same, truth
from tests.vllm.stock import checkpoints

pytestmark = MARKS


@pytest.fixture(scope="module", params=checkpoints.KINDS)
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Rig]:
    with offloading(request.param, folder, extra={"verify": "full"}) as rig:
        yield rig


@pytest.fixture
def rig(engine: Rig) -> Iterator[Rig]:
    engine.reported.clear()
    engine.forget()
    yield engine
    engine.check_clean()


def ready_slots(rig: Rig) -> list[SlotId]:
    pool = rig.side.core.state.pool
    return [slot for slot in map(SlotId, range(pool.capacity)) if pool.state(slot) == SlotState.READY]


def flip(rig: Rig, slot: int) -> None:
    rig.pump._arena.pages(slot)[0][5] ^= 0x40


def test_intact_blocks_are_loaded(rig: Rig) -> None:
    asked = Asked(prompt(1), 12)
    expected = truth(rig, asked)
    rig.put_on_host_only(asked.prompt)
    before = rig.counts
    reported = rig.run({"a": asked})["a"]
    gained = rig.counts.minus(before)
    assert same(reported, expected)
    assert reported.cached > 0
    assert gained.count("kvoffload_load_blocks_total", "loaded") > 0
    assert gained.count("kvoffload_load_blocks_total", "corrupt") == 0


def test_blocks_with_a_flipped_bit_are_detected_counted_and_recomputed(rig: Rig) -> None:
    asked = Asked(prompt(2), 12)
    expected = truth(rig, asked)
    rig.forget()
    rig.put_on_host_only(asked.prompt)
    before, lost = rig.counts, rig.slots(SlotState.QUARANTINED)
    for slot in ready_slots(rig):
        flip(rig, slot)
    with Reports(rig) as reports:
        reported = rig.run({"a": asked})["a"]
    gained = rig.counts.minus(before)
    corrupt = gained.count("kvoffload_load_blocks_total", "corrupt")
    assert same(reported, expected)
    assert (reports.received, reports.failed) == (["a"], ["a"])
    assert gained.count("kvoffload_load_blocks_total", "loaded") == 0
    assert rig.slots(SlotState.QUARANTINED) - lost == corrupt > 0
    assert gained.count("kvoffload_transfers_total", "host", "load", "corrupt") == 1
    rig.forget()  # removes corrupt blocks that no load has read
