from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvoffload.model.wire import Direction, Tier
from kvoffload.telemetry.catalogue import TierState, tier_state
from kvoffload.telemetry.exporter import KVOffloadCollector
from tests.conservation import conservation
from tests.reference.rig import BLOCK, KINDS, Rig, open_loads, rig, slot_bytes, text
from tests.reference.test_disk import MORE, PROMPT, StartEngine, copied, leave_on_disk
from tests.reference.test_disk import start as start  # this imports a fixture


@pytest.mark.parametrize("ranks", [1, 2])
def test_spills_and_fetches_are_counted_for_the_disk_tier(start: StartEngine, ranks: int) -> None:
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
    assert counted.samples("kvoffload_load_wait_seconds", "fetch") == 1
    assert counted.distributions["kvoffload_load_wait_seconds"]["fetch",].total > 0
    assert conservation(counted, drained=True) == []


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_tokens_by_source_add_up_to_the_prompts(start: StartEngine, kind: str) -> None:
    made = start(kind)

    def sources() -> dict[str, int]:
        return made.counts().by_label("kvoffload_prompt_tokens_total")

    def check() -> None:
        served = [prompt for prompt, _, stream in made.streams if stream.stats.generated_tokens]
        assert sum(sources().values()) == sum(map(len, served))

    leave_on_disk(made)
    check()
    before = sources()
    made.run(PROMPT)
    assert sources()["disk"] - before.get("disk", 0) == made.count("fetched_tokens", "disk") > 0
    check()
    made.run((*PROMPT, *text(50, 3)))
    assert sources()["device"] > before.get("device", 0)
    made.forget_device()
    before = sources()
    made.run(PROMPT)
    assert sources()["host"] > before.get("host", 0)
    check()

    made.forget_device()
    made.hold()
    before = sources()
    failing, gone = made.submit(PROMPT), made.submit(MORE[-1])
    made.step()
    made.engine.abort(gone.request_id)
    for ticket in open_loads(made):
        ticket.fail()
    made.release()
    made.drain()
    assert failing.stats.external_tokens == 0
    assert sources()["computed"] - before["computed"] == len(PROMPT)
    assert sources().get("host", 0) == before.get("host", 0)
    check()

    preempted = made.submit(text(60, 5 * BLOCK), 8)
    while preempted.stats.generated_tokens < 3:
        made.step()
    assert made.engine.preempt(preempted.request_id)
    made.drain()
    check()
    made.assert_outputs()


def test_series_of_a_lower_tier_are_served_only_with_this_tier(start: StartEngine) -> None:

    def series(made: Rig) -> set[str]:
        registry = CollectorRegistry()
        registry.register(KVOffloadCollector(made.offload))
        return set(generate_latest(registry).decode().splitlines())

    with rig() as alone:
        alone.run(PROMPT)
        served = {line for line in series(alone) if not line.startswith("#")}
    assert not [
        line for line in served if re.search('="(disk|remote|on_disk|in_remote|fetch|tier_opening)"', line)
    ]
    assert len(served) <= 450  # a disk tier and a remote tier together have 750 series
    with_disk = start()
    assert tier_state(with_disk.offload, Tier.DISK) is TierState.OPEN
    more = {line.partition(" ")[0] for line in series(with_disk)}
    assert 'kvoffload_capacity_slots{tier="disk"}' in more
    assert 'kvoffload_load_wait_seconds_count{reason="fetch"}' in more
    assert not [line for line in more if "remote" in line and not line.startswith("#")]
