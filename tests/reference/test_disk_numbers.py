"""What an operator sees of the disk: each number has its tier, and the laws hold for each of them."""

from __future__ import annotations

import pytest

from kvoffload.model.transfer import Direction
from kvoffload.telemetry.labels import TierState
from kvoffload.telemetry.snapshot import conservation
from tests.reference.rig import Rig, rig, slot_bytes
from tests.reference.test_disk import PROMPT, StartEngine, copied, leave_on_disk
from tests.reference.test_disk import start as start  # a fixture


@pytest.mark.parametrize("ranks", [1, 2])
def test_spills_and_fetches_are_counted_under_the_disk(start: StartEngine, ranks: int) -> None:
    made = start(ranks=ranks)
    leave_on_disk(made)
    made.run(PROMPT)
    blocks = {way: copied(made, way) for way in Direction}
    assert all(blocks.values())
    for way, count in blocks.items():
        assert made.count("tier_scheduled_blocks", "disk", way.value) == count
        assert made.count("tier_blocks", "disk", way.value, "done") == count
        assert made.count("transfer_bytes", "disk", way.value) == count * ranks * slot_bytes("full", ranks)
    assert made.count("fetched_tokens", "disk") == made.count("lookup_tokens", "hit") > 0
    assert made.count("lookups_deferred", "fetch") > 0
    counted = made.offload.counters.snapshot()
    assert counted.samples("kvoffload_first_token_seconds", "disk") == 1
    assert made.offload.gauges().benefit["kvoffload_load_wait_seconds_total"]["fetch",] > 0
    assert conservation(counted, drained=True) == []


def test_the_disks_slots_sum_to_its_capacity_and_the_hosts_to_theirs(start: StartEngine) -> None:
    made = start()
    leave_on_disk(made)
    gauges = made.offload.gauges()
    assert gauges.problems() == []
    assert gauges.disk.state is TierState.OPEN
    assert gauges.disk.slots["ready"] == len(made.offload.core.state.disk.pool.index) > 0  # type: ignore[union-attr]
    assert gauges.disk.slot_bytes == 4096
    assert not any(gauges.disk.open_jobs.values())
    assert gauges.numbers()["kvoffload_capacity_slots"]["disk",] == gauges.disk.capacity_slots


def test_a_disk_that_some_rank_fails_is_failing_until_it_works_again(start: StartEngine) -> None:
    made = start()
    disk = made.offload.core.state.disk
    assert disk is not None
    disk.failing.add(made.workers[0]._rank)
    assert made.offload.gauges().disk.state is TierState.FAILING
    disk.failing.clear()
    assert made.offload.gauges().disk.state is TierState.OPEN


def test_without_a_disk_its_state_is_off() -> None:
    with rig() as made:
        made.run(PROMPT)
        assert _states(made) == {"off": 1}


def _states(made: Rig) -> dict[str, float]:
    states = made.offload.gauges().numbers()["kvoffload_tier_state"]
    return {state: flag for (_, state), flag in states.items()}
