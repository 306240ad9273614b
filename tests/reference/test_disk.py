from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from xxhash import xxh3_64_intdigest

from kvoffload.disk.index import load_index, start_index
from kvoffload.disk.open_folder import open_folder
from kvoffload.disk.tier_key import TierKey
from kvoffload.model.causes import TierOutcome
from kvoffload.model.wire import Direction, Tier
from kvoffload.telemetry.catalogue import TierState, tier_state
from kvoffload.telemetry.exporter import KVOffloadCollector
from tests.captured_logs import capture_logs
from tests.conservation import conservation
from tests.core.below import disk_of
from tests.reference.rig import BLOCK, KINDS, TIMEOUT_S, Engines, Rig, open_loads, rig, slot_bytes, text

PROMPT = text(1, 10 * BLOCK)
MORE = [text(seed, 10 * BLOCK) for seed in range(2, 12)]

NONE: Mapping[str, object] = {}

StartEngine = Callable[..., Rig]


@pytest.fixture
def start(engines: Engines, tmp_path: Path) -> StartEngine:
    """Return a function that ends the previous engine and starts another one on the test's folder."""

    def begin(
        kind: str = "full",
        folder: str = "disk",
        ranks: int = 1,
        extra: Mapping[str, object] = NONE,
        host_blocks: int | None = None,
    ) -> Rig:
        disk_bytes = ranks * (4096 + 400 * (slot_bytes(kind) + 4096))
        settings = {"disk_path": tmp_path / folder, "disk_bytes": disk_bytes, **extra}
        usual = {"full": 48, "recurrent": 160}.get(kind, 192)
        return engines.next(kind, ranks=ranks, host_blocks=host_blocks or usual, **settings)

    return begin


def copied(made: Rig, direction: Direction, outcome: TierOutcome = TierOutcome.DONE) -> int:
    return made.count("tier_blocks", "disk", direction.value, outcome.value)


def fetched(made: Rig) -> int:
    """Serve the prompt; return how many blocks came from the disk."""
    made.run(PROMPT)
    made.assert_clean()
    return copied(made, Direction.LOAD)


def leave_on_disk(made: Rig) -> None:
    """Serve the prompt twice so that its blocks spill, then remove the blocks from the device and the host."""
    made.run(PROMPT)
    made.run(PROMPT)
    settle(made)
    made.forget_device()
    for prompt in MORE:
        made.run(prompt)
        made.forget_device()
    settle(made)


def leave_files(start: StartEngine, **options: object) -> None:
    """Leave blocks on the disk, and end their engine by starting another one on another folder."""
    leave_on_disk(start(**options))
    start(folder="another")


def settle(made: Rig) -> None:
    for _ in range(10):
        made.step()
    made.drain()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_r18_the_next_engine_finds_all_put_blocks(start: StartEngine, kind: str, ranks: int) -> None:
    made = start(kind, ranks=ranks)
    leave_on_disk(made)
    assert copied(made, Direction.STORE) > 0
    assert copied(made, Direction.LOAD) == 0
    for is_first in (True, False, False):
        made = made if is_first else start(kind, ranks=ranks)
        assert fetched(made) > 0
        assert made.count("load_blocks", "loaded") > 0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("host_blocks", "most"),
    [
        (48, 29),  # longer than half of the host
        (12, 30),  # longer than the host, on which a block of the warm start has no room in between
    ],
)
def test_the_next_engine_finds_a_whole_long_prefix_and_reads_its_blocks_once(
    start: StartEngine, ranks: int, host_blocks: int, most: int
) -> None:
    prompt = text(1, 29 * BLOCK + 1)
    writes_all = {"disk_min_hits": 0}
    start(ranks=ranks, extra=writes_all).run(prompt, 1)
    start(folder="another")
    made = start(ranks=ranks, extra=writes_all, host_blocks=host_blocks)
    made.run(prompt, 1)
    assert made.count("load_blocks", "loaded") == 29
    assert 29 <= copied(made, Direction.LOAD) <= most
    made.assert_clean()


def test_a_prefix_longer_than_the_host_reaches_the_disk_over_several_turns(start: StartEngine) -> None:
    prompt, written = text(1, 29 * BLOCK + 1), list[int]()
    made = start(extra={"disk_min_hits": 0}, host_blocks=12)
    for _ in range(8):
        loaded = made.count("load_blocks", "loaded")
        made.run(prompt, 1)
        settle(made)
        made.forget_device()
        written.append(copied(made, Direction.STORE))
    assert written[0] == 12
    assert written[-1] == 29
    assert made.count("load_blocks", "loaded") - loaded == 29
    made.assert_clean()


def key_file(path: Path) -> dict[str, object]:
    """Write a key file, with a key made from its name; return the setting that names the file."""
    path.touch(mode=0o600)
    path.write_text(path.name * 32)
    return {"tier_key_file": str(path)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_r18_the_next_engine_finds_put_blocks_only_with_the_same_tier_key(
    start: StartEngine, tmp_path: Path, ranks: int
) -> None:
    key, other = key_file(tmp_path / "a"), key_file(tmp_path / "b")
    leave_on_disk(start(ranks=ranks, extra=key))
    found = [fetched(start(ranks=ranks, extra=extra)) > 0 for extra in ({}, other, key)]
    assert found == [False, False, True]


def forge(folder: Path, key: TierKey | None) -> None:
    """Replace the bytes of every block, and replace the index by one with matching checksums."""
    size = slot_bytes("full")
    with open_folder(folder, folder.parent.name) as opened, (folder / "slots0").open("r+b") as file:
        found = load_index(opened, 2**20, key)
        assert found is not None
        for slot in found.entries.records["slot"].tolist():
            file.seek(4096 + slot * (-size // 4096 * -4096))
            file.write(b"\x01" * size)
        found.entries.records["sums"] = xxh3_64_intdigest(b"\x01" * size)
        start_index(opened, replace(found.header, key=None), found.entries).close()


@pytest.mark.parametrize("has_key", [False, True])
def test_r17_with_a_tier_key_blocks_forged_with_their_checksums_are_not_served(
    start: StartEngine, tmp_path: Path, has_key: bool
) -> None:
    key, extra = TierKey(b"a" * 32) if has_key else None, key_file(tmp_path / "a") if has_key else {}
    leave_files(start, extra=extra)
    [folder] = tmp_path.glob("disk/*/replica0")
    forge(folder, None if key is None else key.of(folder.parent.name))
    made = start(extra=extra)
    # Without a key, the engine serves the forged blocks, so the tokens differ.
    with nullcontext() if has_key else pytest.raises(AssertionError):
        made.run(PROMPT)
    assert (copied(made, Direction.LOAD) > 0) is not has_key


def test_no_file_and_no_log_line_contains_the_tier_key(start: StartEngine, tmp_path: Path) -> None:
    with capture_logs() as lines:
        leave_files(start, extra={**key_file(tmp_path / "a"), "journal_path": str(tmp_path / "journal")})
    texts = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert texts.pop("a") == b"a" * 32
    assert {"journal", "identity.json", "index", "slots0"} <= set(texts)
    texts["log"] = repr(lines).encode()
    for name, found in texts.items():
        assert b"a" * 8 not in found, name
        assert b"a".hex().encode() * 8 not in found, name


@pytest.mark.parametrize("has_key", [False, True])
def test_r18_renamed_files_of_other_weights_are_not_served(
    start: StartEngine, tmp_path: Path, has_key: bool
) -> None:
    key = key_file(tmp_path / "a") if has_key else {}
    leave_on_disk(start(extra={**key, "weights_id": "one"}))
    start(extra={**key, "weights_id": "two"})
    start(folder="another")
    one, two = sorted(tmp_path.glob("disk/*/replica0"), key=lambda path: path.parent.stat().st_ctime_ns)
    shutil.rmtree(two)
    one.rename(two)
    assert fetched(start(extra={**key, "weights_id": "two"})) == 0


def test_r18_after_a_reset_only_this_process_finds_blocks_and_only_later_ones(start: StartEngine) -> None:
    made = start()
    leave_on_disk(made)
    assert made.offload.reset()
    assert fetched(made) == 0
    leave_on_disk(made)
    assert fetched(made) > 0
    assert fetched(start()) == 0


def test_r18_a_reset_before_the_index_was_read_removes_its_blocks(start: StartEngine, tmp_path: Path) -> None:
    leave_files(start)
    extra = {"disk_path": tmp_path / "disk", "disk_bytes": 4096 + 400 * (slot_bytes("full") + 4096)}
    with rig("full", host_blocks=48, extra=extra, starts_ready=False) as second:
        assert second.offload.reset()
        assert not list(tmp_path.glob("disk/*/replica0/index")), "a process killed now leaves it to the next"
        leave_on_disk(second)
        assert disk_of(second.offload.state).is_open
        second.assert_clean()
    assert fetched(start()) == 0


def test_blocks_with_flipped_bits_on_the_disk_are_computed_again(start: StartEngine, tmp_path: Path) -> None:
    leave_files(start)
    [path] = tmp_path.glob("disk/*/replica0/slots0")
    data = bytearray(path.read_bytes())
    for place in range(4096, len(data), 512):
        data[place] ^= 1
    path.write_bytes(data)
    made = start()
    assert fetched(made) == 0
    assert copied(made, Direction.LOAD, TierOutcome.CORRUPT) > 0


def test_files_swapped_between_ranks_are_replaced(start: StartEngine, tmp_path: Path) -> None:
    leave_files(start, ranks=2)
    first, second = sorted(tmp_path.glob("disk/*/replica0/slots*"))
    first.rename(first.with_name("kept"))
    second.rename(first)
    first.with_name("kept").rename(second)
    assert fetched(start(ranks=2)) == 0


@pytest.mark.parametrize("has_key", [False, True])
def test_on_a_smaller_disk_the_blocks_of_the_remaining_slots_are_found(
    start: StartEngine, tmp_path: Path, has_key: bool
) -> None:
    key = key_file(tmp_path / "a") if has_key else {}
    made = start(extra=key)
    made.run(MORE[0])
    made.run(MORE[0])
    settle(made)
    old = copied(made, Direction.STORE)
    made.forget_device()
    leave_on_disk(made)
    new = copied(made, Direction.STORE) - old
    assert min(old, new) > 2
    smaller = {"disk_bytes": 4096 + new * (-slot_bytes("full") // 4096 * -4096)}
    made = start(extra={**smaller, **key})
    assert disk_of(made.offload.state).pool.room == new
    gauges = made.offload.gauges()
    slots = [count for (tier, _), count in gauges["kvoffload_slots"].items() if tier == "disk"]
    assert gauges["kvoffload_capacity_slots"]["disk",] == sum(slots) == new
    [path] = tmp_path.glob("disk/*/replica0/slots0")
    assert path.stat().st_blocks * 512 < smaller["disk_bytes"] + 64 * 1024
    assert len(disk_of(made.offload.state).pool.index) == new
    made.run(MORE[0])
    assert copied(made, Direction.LOAD) == min(old, new)
    assert copied(made, Direction.LOAD, TierOutcome.CORRUPT) == 0
    made.assert_clean()


def test_copies_that_ended_while_no_step_was_made_are_not_abandoned(start: StartEngine) -> None:
    made = start()
    made.run(PROMPT)
    made.portal.disks[0].hold()
    made.submit(PROMPT)
    made.drain_requests()
    made.drain()
    made.pass_time(10 * TIMEOUT_S)
    made.portal.disks[0].release()
    made.run(PROMPT)
    settle(made)
    assert copied(made, Direction.STORE) > 0
    assert copied(made, Direction.STORE, TierOutcome.ABANDONED) == 0
    made.assert_clean()


# -- metrics ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_spills_and_fetches_are_counted_for_the_disk_tier(start: StartEngine, ranks: int) -> None:
    made = start(ranks=ranks)
    leave_on_disk(made)
    made.run(PROMPT)
    for way in Direction:
        count = copied(made, way)
        assert count == made.count("tier_scheduled_blocks", "disk", way.value) > 0
        assert made.count("transfer_bytes", "disk", way.value) == count * ranks * slot_bytes("full", ranks)
    assert made.count("fetched_tokens", "disk") == made.count("lookup_tokens", "hit") > 0
    assert made.count("lookups_deferred", "fetch") > 0
    counted = made.counts()
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
    while tickets := open_loads(made):  # the batch, then each of its jobs by itself
        for ticket in tickets:
            ticket.fail()
        made.step()
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
    lower = re.compile('="(node|disk|remote|on_node|on_disk|in_remote|fetch|tier_opening)"')
    assert not [line for line in served if lower.search(line)]
    assert len(served) <= 530  # a disk tier and a remote tier together have 750 series
    with_disk = start()
    assert tier_state(with_disk.offload, Tier.DISK) is TierState.OPEN
    more = {line.partition(" ")[0] for line in series(with_disk)}
    assert 'kvoffload_capacity_slots{tier="disk"}' in more
    assert 'kvoffload_load_wait_seconds_count{reason="fetch"}' in more
    assert not [line for line in more if "remote" in line and not line.startswith("#")]
