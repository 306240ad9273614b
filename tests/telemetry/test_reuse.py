from __future__ import annotations

import os
import tracemalloc
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload.model.ids import BlockKey, GroupId
from kvoffload.telemetry.catalogue import CAPACITIES
from kvoffload.telemetry.reuse import SAMPLE_KEYS, ReuseCurve
from tests.bench.trace import PaperEngine, Tiers
from tests.bench.trace_file import Prompt, Trace, read_trace
from tests.keys import block_key
from tests.telemetry.traffic import TOKENS, chats

TIMES = tuple(CAPACITIES.values())
POINTS = 1.5


def prompt(keys: Sequence[BlockKey]) -> Prompt:
    return Prompt(0.0, len(keys) * TOKENS + 1, tuple(keys))


def replayed(trace: Trace, host: int, disk: int = 0) -> float:
    """Return the tokens that an exact replay finds, in per cent."""
    engine = PaperEngine(Tiers("exact", host, disk), set(), trace.block_tokens)
    for each in trace.prompts:
        engine.serve(each)
    return 100 * engine.count["hit"] / engine.count["tokens"]


def make_curve(host: int, disk: int, size: int = SAMPLE_KEYS) -> ReuseCurve:
    curve = ReuseCurve(tuple(CAPACITIES), size=size)
    curve.host, curve.most_host = host, host * max(TIMES)
    for name, times in CAPACITIES.items():
        curve.disks[name].capacity = int(times * disk)
    return curve


def followed(trace: Trace, host: int, disk: int, size: int = SAMPLE_KEYS) -> ReuseCurve:
    curve = make_curve(host, disk, size)
    for each in trace.prompts:
        curve.request(each.keys, (each.tokens - 1) // trace.block_tokens)
    return curve


def errors(trace: Trace, host: int, disk: int, curve: ReuseCurve) -> dict[str, float]:
    """Return by how many points the curve differs from an exact replay, for each tier and capacity."""
    tokens = sum(each.tokens for each in trace.prompts) / (100 * trace.block_tokens)
    found = {}
    for name, times in CAPACITIES.items():
        on_host, on_disk = int(times * host), int(times * disk)
        found[f"host {on_host}"] = curve.host_hits(on_host) / tokens - replayed(trace, on_host)
        found[f"disk {on_disk}"] = curve.disk_hits(name) / tokens - replayed(trace, host, on_disk)
    return found


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace(TOKENS, [prompt(keys) for keys in chats(7, 8000)])


@pytest.mark.slow
@pytest.mark.parametrize(("host", "disk"), [(1600, 1600), (3200, 12_800)])
def test_a_sample_predicts_what_an_exact_replay_finds(trace: Trace, host: int, disk: int) -> None:
    curve = followed(trace, host, disk)
    assert curve.rate < 0.7
    off = errors(trace, host, disk, curve)
    assert max(map(abs, off.values())) <= POINTS, off
    assert max(map(abs, off.values())) <= 100 * curve.margin


CHAIN = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(CHAIN, min_size=1, max_size=30), st.integers(1, 20))
@example([[0], [0, 0], [0, 0], [2, 0], [2], [0]], 2)  # a hit on the host is no use of the disk's block
def test_property_without_a_sample_the_hits_are_those_of_an_lru_tier(
    prompts: list[list[int]], capacity: int
) -> None:
    """Keys stand for a whole prefix, so prompts share blocks exactly as far as they are equal."""
    keyed = [
        [block_key(str(chain[: depth + 1]).encode(), GroupId(0)) for depth in range(len(chain))]
        for chain in prompts
    ]
    trace = Trace(TOKENS, [prompt(keys) for keys in keyed])
    curve = followed(trace, capacity, 4 * capacity)
    tokens = sum(each.tokens for each in trace.prompts) / (100 * TOKENS)
    assert curve.host_hits(capacity) / tokens == pytest.approx(replayed(trace, capacity))
    for name, times in CAPACITIES.items():
        on_disk = int(4 * times * capacity)
        assert curve.disk_hits(name) / tokens == pytest.approx(replayed(trace, capacity, on_disk))


def test_a_hot_block_outside_the_sample_is_counted() -> None:
    """One block is looked up 1,000 times beside blocks that never return: half of all lookups find it."""
    found = []
    for seed in range(8):
        other = [BlockKey(b"%d" % number) for number in range(1000)]
        hot = block_key(b"hot %d" % seed, GroupId(0))
        curve = ReuseCurve(size=64)
        for key in other:
            curve.request((hot, key), 2)
        found.append(curve.host_hits(10) / curve.lookups)
    assert found == pytest.approx([0.5] * 8, abs=0.25)


@pytest.mark.slow
def test_memory_stays_under_4_mib_however_many_blocks_are_used() -> None:
    keys = (BlockKey(number.to_bytes(36, "big")) for number in range(30_000))
    tracemalloc.start()
    try:
        curve = make_curve(host=20_000, disk=20_000)
        for key in keys:
            for _ in range(2):  # found again, so the disk gets it too
                curve.request((key,), 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert curve.rate < 0.3
    assert 2**20 < peak < 4 * 2**20


def test_a_restart_begins_anew_and_grows_surer() -> None:
    curve = make_curve(host=100, disk=100, size=64)
    assert (curve.margin, curve.lookups, curve.unknown(100, 0)) == (1.0, 0.0, 0.0)
    margins = []
    for requests in (100, 3000):
        for keys in chats(requests, requests):
            curve.request(keys, len(keys))
        margins.append(curve.margin)
    assert 1 > margins[0] > 2 * margins[1] > 0
    # An earlier process may have had as many blocks as fit; they count as new only because the engine had just started.
    assert curve.unknown(100, 0) == 100


def test_new_lookups_count_twice_as_much_as_halved_ones() -> None:
    one, two = BlockKey(b"1"), BlockKey(b"2")
    curve = ReuseCurve()
    curve.request((one,), 1)
    curve.request((one,), 1)
    curve.halve()
    curve.request((two,), 1)
    assert [curve.host_hits(5), curve.lookups] == pytest.approx([0.5, 2.0])


TRACES = sorted(Path(os.environ.get("KVOFFLOAD_TRACES", "none")).glob("*.jsonl*"))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(not TRACES, reason="KVOFFLOAD_TRACES names no folder with traces")
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_whole_traces_are_predicted_at_every_capacity(path: Path) -> None:
    trace = read_trace(path)
    distinct = len({key for each in trace.prompts for key in each.keys})
    for host, times in product((distinct // 100, distinct // 30, distinct // 10), (1, 8)):
        off = errors(trace, host, host * times, followed(trace, host, host * times))
        assert max(map(abs, off.values())) <= POINTS, (host, off)
