from __future__ import annotations

import pytest

from kvoffload.model.wire import Direction, Tier
from kvoffload.telemetry.catalogue import TierState, tier_state
from tests.conservation import conservation, slot_problems
from tests.reference.rig import rig, slot_bytes
from tests.reference.test_disk import PROMPT, StartEngine, copied, leave_on_disk
from tests.reference.test_disk import start as start  # This is a fixture.


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
    assert made.offload.gauges()["kvoffload_load_wait_seconds_total"]["fetch",] > 0
    assert conservation(counted, drained=True) == []


def test_the_disks_slots_sum_to_its_capacity_and_the_hosts_to_theirs(start: StartEngine) -> None:
    made = start()
    leave_on_disk(made)
    gauges = made.offload.gauges()
    disk = made.offload.core.state.disk
    assert disk is not None
    assert slot_problems(gauges) == []
    assert gauges["kvoffload_tier_state"]["disk", "open"] == 1
    assert gauges["kvoffload_slots"]["disk", "ready"] == len(disk.pool.index) > 0
    assert gauges["kvoffload_slot_bytes"]["disk",] == 4096
    assert not any(gauges["kvoffload_open_jobs"].values())
    assert gauges["kvoffload_capacity_slots"]["disk",] == disk.capacity


def test_a_disk_that_some_rank_fails_is_failing_until_it_works_again(start: StartEngine) -> None:
    made = start()
    disk = made.offload.core.state.disk
    assert disk is not None
    disk.failing.add(made.workers[0]._rank)
    assert tier_state(made.offload, Tier.DISK) is TierState.FAILING
    disk.failing.clear()
    assert tier_state(made.offload, Tier.DISK) is TierState.OPEN


def test_without_a_disk_its_state_is_off() -> None:
    with rig() as made:
        made.run(PROMPT)
        states = made.offload.gauges()["kvoffload_tier_state"]
        assert [labels for labels, flag in states.items() if flag] == [("disk", "off"), ("remote", "off")]
