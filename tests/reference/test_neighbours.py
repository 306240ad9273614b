"""Engines on one machine that read each other's host memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvoffload.core.tiers import NodeTier
from kvoffload.model.causes import Adoption, NodeLoss
from kvoffload.model.ids import JobId, SlotId
from kvoffload.model.wire import CopyJob, Direction, Tier
from kvoffload.node.neighbour import Neighbour
from kvoffload.runtime.host_catalog import HostCatalog
from kvoffload.runtime.node_catalog import FOLLOW_S, SCAN_S, NodeCatalog
from kvoffload.telemetry.catalogue import TierState, tier_state
from kvoffload.transfer import node
from tests.captured_logs import capture_logs
from tests.gates import ManualExecutor
from tests.reference.rig import BLOCK, KINDS, Engines, Rig, as_original, rig, text

PROMPT = text(1, 10 * BLOCK)
BLOCKS = len(PROMPT) // BLOCK - 1  # the last token is computed, and with it the last block


@pytest.fixture
def engines(engines: Engines, shared_memory: Path) -> Engines:
    """Return what starts engines in one folder."""
    engines.settings["host_path"] = shared_memory
    return engines


def look(made: Rig) -> NodeCatalog:
    """Let an engine look at its neighbours."""
    made.pass_time(SCAN_S + 2 * FOLLOW_S)
    made.step()
    catalog = made.offload.catalogs[Tier.NODE]
    assert isinstance(catalog, NodeCatalog)
    return catalog


def fetched(made: Rig, prompt: tuple[int, ...] = PROMPT) -> int:
    """Serve a prompt, and check its tokens; return how many blocks were fetched from other engines for it."""
    before = made.count("tier_blocks", "node", "load", "done")
    made.run(prompt)
    made.assert_clean()
    return made.count("tier_blocks", "node", "load", "done") - before


def test_a_neighbour_is_followed_at_once_after_the_look_that_has_found_it(engines: Engines) -> None:
    """Looks run on a thread, so the coroutine may wait again before the first one has ended."""
    owner, reader = engines.start(), engines.start()
    catalog = reader.offload.catalogs[Tier.NODE]
    assert isinstance(catalog, NodeCatalog)
    executor = catalog._executor
    assert isinstance(executor, ManualExecutor)
    executor._held = True
    reader.pass_time(SCAN_S)
    reader.pass_time(SCAN_S)
    assert executor.waiting == 1
    executor._held = False
    executor.run_next()
    reader.pass_time(0.0)
    assert [*map(len, catalog.neighbours.values())] == [0]
    owner.run(PROMPT)
    reader.pass_time(2 * FOLLOW_S)
    assert sum(map(len, catalog.neighbours.values())) > 0


def losses(made: Rig) -> dict[str, float]:
    made.step()
    series = made.offload.gauges()["kvoffload_node_lost_blocks_total"]
    return {cause: count for (cause,), count in series.items() if count}


def held(made: Rig) -> dict[SlotId, bytes]:
    return {slot: key for key, slot in made.offload.state.pool.index.items()}


def processes_of(folder: Path) -> int:
    return len(json.loads((folder / "owner.json").read_text())["processes"])


def host_of(made: Rig) -> HostCatalog:
    catalog = made.offload.catalogs[Tier.HOST]
    assert isinstance(catalog, HostCatalog)
    return catalog


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("verify", ["off", "sample", "full"])
def test_an_engine_finds_what_another_one_holds(
    engines: Engines, kind: str, ranks: int, replicas: int, verify: str
) -> None:
    first, second = [engines.start(kind, ranks=ranks, replicas=replicas, verify=verify) for _ in range(2)]
    assert fetched(first) == 0
    first.forget_device()
    first.run(PROMPT)
    loaded = first.count("load_blocks", "loaded")
    look(second)
    assert fetched(second) == loaded > 0
    assert second.count("fetched_tokens", "node") > 0
    assert losses(second) == {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_read_each_others_memory_in_huge_pages(
    huge_pages: Path, engines: Engines, ranks: int
) -> None:
    first, second = [engines.start(ranks=ranks, host_hugetlbfs=huge_pages, verify="full") for _ in range(2)]
    first.run(PROMPT)
    look(second)
    assert fetched(second) == BLOCKS
    assert losses(second) == {}


def test_each_engine_finds_what_any_other_one_holds_and_what_it_fetched_is_its_own(engines: Engines) -> None:
    made = [engines.start(host_blocks=200 + 30 * number) for number in range(3)]
    prompts = [text(seed, 10 * BLOCK) for seed in range(3)]
    for each, prompt in zip(made, prompts, strict=True):
        each.run(prompt)
    for each in made:
        assert len(look(each).neighbours) == 2
        series = each.offload.gauges()
        assert series["kvoffload_neighbours"] == {(): 2}
        assert series["kvoffload_neighbour_blocks"][()] == sum(
            len(held(other)) for other in made if other is not each
        )
        others = [prompt for prompt, owner in zip(prompts, made, strict=True) if owner is not each]
        assert [fetched(each, prompt) for prompt in others] == [BLOCKS, BLOCKS]
        each.forget_device()
        assert [fetched(each, prompt) for prompt in others] == [0, 0]
        assert each.count("load_blocks", "loaded") == 4 * BLOCKS


def test_blocks_that_a_neighbour_stores_later_are_found_and_those_that_it_evicts_are_not(
    engines: Engines,
) -> None:
    first, second = engines.start(host_blocks=15), engines.start()
    look(second)
    first.run(PROMPT)
    look(second)
    assert fetched(second) == BLOCKS
    first.run(text(2, 12 * BLOCK))
    first.run(text(3, 12 * BLOCK))
    look(second)
    third = engines.start()
    look(third)
    assert fetched(third) == BLOCKS  # from the second engine


def test_an_engine_alone_has_no_neighbours_and_looks_for_no_block(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeTier, "look_for", None)
    made = engines.start()
    assert look(made).is_empty
    assert fetched(made) == 0
    assert tier_state(made.offload, Tier.NODE) is TierState.OPEN


def test_a_prompt_that_no_neighbour_has_seen_costs_one_search(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engines.start(), engines.start()
    first.run(PROMPT)
    look(second)
    asked: list[int] = []
    find = NodeCatalog.find

    def count(self: NodeCatalog, keys: Any) -> Any:  # noqa: ANN401
        asked.append(len(keys))
        return find(self, keys)

    monkeypatch.setattr(NodeCatalog, "find", count)
    assert fetched(second, text(2, 10 * BLOCK)) == 0
    assert asked == [1]
    assert fetched(second) == BLOCKS
    assert asked == [1, 1, BLOCKS]


@pytest.mark.parametrize(
    ("first", "second"),
    [({"verify": "off"}, {"verify": "full"}), ({"weights_id": "a"}, {"weights_id": "b"})],
    ids=["other checksums", "other weights"],
)
def test_r21_engines_whose_blocks_differ_are_no_neighbours(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, first: dict[str, Any], second: dict[str, Any]
) -> None:
    monkeypatch.setattr("kvoffload_reference.plugin._kind_of", lambda identity: "same")
    engines.start(**first).run(PROMPT)
    made = engines.start(**second)
    assert look(made).is_empty
    assert fetched(made) == 0


def test_with_node_share_off_an_engine_reads_no_other_and_is_read(engines: Engines) -> None:
    first, second = engines.start(node_share=False), engines.start()
    first.run(PROMPT)
    second.run(text(2, 10 * BLOCK))
    assert Tier.NODE not in first.offload.catalogs
    assert fetched(first, text(2, 10 * BLOCK)) == 0
    look(second)
    assert fetched(second) == BLOCKS


def test_an_engine_whose_folder_is_gone_says_once_that_it_reads_no_other(engines: Engines) -> None:
    engines.start().run(PROMPT)
    made = engines.start()
    look(made)
    remove(engines, made)
    with capture_logs() as logs:
        for _ in range(5):
            assert look(made).is_empty
    assert [line["event"] for line in logs].count("neighbours_not_read") == 1
    assert fetched(made) == 0


def times_open(table: Path) -> int:
    links = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return links.count(table)


def test_a_reset_while_another_engine_is_found_leaves_no_file_open(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = engines.start(), engines.start()
    owner.run(PROMPT)
    follow, table = Neighbour.follow, host_of(owner).shared[0] / "table"  # type: ignore[index]

    def reset_meanwhile(self: Neighbour) -> bool:
        reader.offload.reset()
        return follow(self)

    before = times_open(table)  # by its owner
    monkeypatch.setattr(Neighbour, "follow", reset_meanwhile)
    assert look(reader).is_empty
    assert times_open(table) == before


# -- memory that changes before or during a copy ----------------------------------------------------------------------


def strike(engines: Engines, owner: Rig) -> None:
    """Let the owner's copies write its slots."""
    table = host_of(owner)._table
    assert table is not None
    for slot in held(owner):
        table.invalidate(slot)


def write_others(engines: Engines, owner: Rig) -> None:
    """Let the owner evict all its blocks for others."""
    for seed in range(50, 58):
        owner.run(text(seed, 30 * BLOCK))


def reset(engines: Engines, owner: Rig) -> None:
    assert owner.offload.reset()


def reset_another(engines: Engines, owner: Rig) -> None:
    assert engines.start().offload.reset()


def doubt(engines: Engines, owner: Rig) -> None:
    host_of(owner).distrust()


def remove(engines: Engines, owner: Rig) -> None:
    shutil.rmtree(host_of(owner).shared[0])  # type: ignore[index]


def cut(engines: Engines, owner: Rig) -> None:
    """Cut a rank's file after the engine has opened it. The engine itself would not survive the next use of it."""
    path = host_of(owner).shared[0]  # type: ignore[index]
    shutil.copy(path / "rank0", path / "copy")
    as_original(path / "copy")
    os.truncate(path / "copy", 4096)
    os.rename(path / "copy", path / "rank0")


def take_over(engines: Engines, owner: Rig) -> None:
    """Start another engine with the owner's memory."""
    engines.stop(owner)
    engines.start().run(text(60, 10 * BLOCK))


def start_smaller(engines: Engines, owner: Rig) -> None:
    """Start an engine that cuts the owner's memory, and ends before its first step."""
    engines.stop(owner)
    with rig(host_blocks=2, extra=engines.settings, starts_ready=False):
        pass


CHANGES: list[tuple[Callable[[Engines, Rig], None], NodeLoss]] = [
    (strike, NodeLoss.TORN),
    (write_others, NodeLoss.TORN),
    (reset, NodeLoss.GONE),
    (reset_another, NodeLoss.GONE),
    (doubt, NodeLoss.GONE),
    (remove, NodeLoss.GONE),
    (take_over, NodeLoss.GONE),
    (start_smaller, NodeLoss.GONE),
]


@pytest.mark.parametrize("moment", ["before", "during", "after"])
@pytest.mark.parametrize(("change", "cause"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_r21_memory_that_changes_before_or_during_a_copy_is_computed(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Engines, Rig], None],
    cause: NodeLoss,
    moment: str,
) -> None:
    owner, reader = engines.start(host_blocks=40), engines.start(host_blocks=80)
    owner.run(PROMPT)
    look(reader)
    plain, changed = node._Reader.read, list[str]()

    def read(*args: Any) -> int:  # noqa: ANN401
        if moment != "after" and not changed:
            changed.append(moment)
            if moment == "before":
                change(engines, owner)
        size = plain(*args)
        if changed == ["during"]:
            changed.append("over")
            change(engines, owner)
        return size

    monkeypatch.setattr(node._Reader, "read", read)
    if moment == "after":
        change(engines, owner)
        monkeypatch.undo()
    assert fetched(reader) == 0
    lost = losses(reader)
    assert lost in ({cause.value: BLOCKS}, {"gone": BLOCKS})
    assert moment == "after" or lost == {cause.value: BLOCKS}
    reader.forget_device()
    assert fetched(reader) == 0
    reader.check()


def test_r21_a_file_that_ends_too_early_is_gone(engines: Engines) -> None:
    owner, reader = engines.start(), engines.start()
    owner.run(PROMPT)
    look(reader)
    cut(engines, owner)
    assert fetched(reader) == 0
    assert losses(reader) == {"gone": BLOCKS}


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_r21_with_checksums_changed_bytes_of_another_engine_are_found(engines: Engines, verify: str) -> None:
    owner, reader = [engines.start(verify=verify) for _ in range(2)]
    owner.run(PROMPT)
    path = host_of(owner).shared[0] / "rank0"  # type: ignore[index]
    data = bytearray(path.read_bytes())
    data[4096:] = bytes(byte ^ 1 for byte in data[4096:])
    with path.open("r+b") as file:
        file.write(data)
    look(reader)
    with capture_logs() as logs:
        assert fetched(reader) == 0
    assert reader.count("tier_blocks", "node", "load", "corrupt") == BLOCKS
    (line,) = [line for line in logs if line["event"] == "blocks_corrupt"]
    assert (line["engine"], line["blocks"]) == ("0", BLOCKS)


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_r21_a_block_that_one_rank_cannot_read_is_lost_for_all(
    engines: Engines, ranks: int, replicas: int
) -> None:
    owner, reader = [engines.start(ranks=ranks, replicas=replicas) for _ in range(2)]
    owner.run(PROMPT)
    look(reader)
    (host_of(owner).shared[0] / f"rank{ranks // 2}").unlink()  # type: ignore[index]
    assert fetched(reader) == 0
    assert losses(reader) == {"gone": BLOCKS}


def test_blocks_of_an_engine_that_has_ended_are_found_until_its_memory_is_removed(
    engines: Engines, shared_memory: Path
) -> None:
    owner, reader = engines.start(), engines.start()
    owner.run(PROMPT)
    engines.stop(owner)
    look(reader)
    assert fetched(reader) == BLOCKS
    shutil.rmtree(next(shared_memory.iterdir()) / "0")
    assert look(reader).is_empty


def test_r21_a_copy_that_hangs_keeps_its_slots_and_the_request_is_computed(engines: Engines) -> None:
    owner, reader = engines.start(), engines.start()
    owner.run(PROMPT)
    look(reader)
    executor: Any = reader.workers[0]._tiers[Tier.NODE].calls._executor
    assert isinstance(executor, ManualExecutor)
    executor.hold()
    stream = reader.submit(PROMPT)
    for _ in range(20):
        reader.step(1.0)
    assert reader.engine.statistics().waiting == 0
    executor.release()
    reader.drain()
    reader.assert_outputs()
    assert stream is not None


def test_r20_a_rank_that_closes_under_a_copy_stays_among_those_that_may_write(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = engines.start(), engines.start()
    owner.run(PROMPT)
    (target,) = look(reader).places([next(iter(held(owner).values()))])  # type: ignore[list-item]
    worker, plain = reader.workers[0], node._Reader.read
    path = host_of(reader).shared[0]  # type: ignore[index]

    def read(*args: Any) -> int:  # noqa: ANN401
        worker.close()
        return plain(*args)

    monkeypatch.setattr(node._Reader, "read", read)
    before = processes_of(path)
    worker._tiers[Tier.NODE].submit(
        CopyJob(JobId(99), Direction.LOAD, Tier.NODE, (SlotId(5),), (target,), ())
    )
    assert processes_of(path) == before


def test_hints_of_neighbours_that_have_left_are_not_fetched(engines: Engines) -> None:
    owner, reader = engines.start(), engines.start(host_blocks=12)
    owner.run(PROMPT)
    look(reader)
    assert fetched(reader) == BLOCKS
    owner.offload.reset()
    look(reader)
    reader.run(text(2, 12 * BLOCK))  # evicts what was fetched
    reader.forget_device()
    scheduled = reader.count("tier_scheduled_blocks", "node", "load")
    assert fetched(reader) == 0
    assert reader.count("tier_scheduled_blocks", "node", "load") == scheduled


# -- resets -----------------------------------------------------------------------------------------------------------


def test_r21_after_a_reset_of_any_engine_none_that_runs_reads_another(engines: Engines) -> None:
    first, second, third = [engines.start() for _ in range(3)]
    first.run(PROMPT)
    look(second)
    assert fetched(second) == BLOCKS
    first.offload.reset()
    for each in (first, second, third):
        assert look(each).is_empty
    assert fetched(third) == 0
    first.forget_device()
    assert fetched(first) == 0


def test_r21_engines_that_start_after_a_reset_share_only_what_they_have_computed(engines: Engines) -> None:
    """Otherwise a restart of the engine that was reset would fetch its old blocks back from one that has copied them."""
    first, second = [engines.start() for _ in range(2)]
    first.run(PROMPT)
    look(second)
    assert fetched(second) == BLOCKS
    first.offload.reset()
    engines.stop(first)
    later, last = [engines.start() for _ in range(2)]
    assert set(look(later).neighbours) == {"2"}
    assert fetched(later) == 0
    look(last)
    assert fetched(last) == BLOCKS
    assert set(look(last).neighbours) == {"0"}


def test_r21_after_another_engines_reset_a_restart_adopts_nothing(engines: Engines) -> None:
    first, second = [engines.start() for _ in range(2)]
    second.run(PROMPT)
    first.offload.reset()
    engines.stop(second)
    made = engines.start()
    assert host_of(made).adoption is Adoption.RESET
    made.run(PROMPT)
    assert made.count("load_blocks", "loaded") == 0


def test_r21_a_reset_before_the_ranks_have_reported_counts_too(engines: Engines) -> None:
    first, second = [engines.start() for _ in range(2)]
    first.run(PROMPT)
    with rig(host_blocks=200, extra=engines.settings, starts_ready=False) as early:
        early.offload.reset()
    assert look(second).is_empty
    assert fetched(second) == 0
