"""Host memory in files: what the next engine finds, and what it must not use."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.model import facts
from kvoffload.model.causes import Adoption
from kvoffload.model.errors import ConfigError, DiskError
from kvoffload.model.ids import SlotId
from kvoffload.model.wire import Tier
from kvoffload.node.file_systems import free_bytes
from kvoffload.node.folder import list_kept, remove_kept
from kvoffload.node.table import HostTable, boot_id, table_bytes
from kvoffload.runtime import host_catalog
from kvoffload.runtime.host_catalog import HostCatalog
from kvoffload.transfer.arena import Arena
from tests.captured_logs import capture_logs
from tests.gates import ManualExecutor
from tests.mounts import mounted
from tests.reference.rig import BLOCK, KINDS, Engines, Rig, as_original, rig, slot_bytes, text
from tests.runtime.manual_portal import ManualPortal

PROMPT = text(1, 10 * BLOCK)
BLOCKS_OF_MOST_PAGES = 150 * 2**20 // slot_bytes("full")
NONE: Mapping[str, object] = {}

StartEngine = Callable[..., Rig]


@pytest.fixture
def start(engines: Engines, shared_memory: Path) -> StartEngine:
    """Return a function that ends the previous engine and starts another one in the test's folder."""
    engines.settings["host_path"] = shared_memory

    def begin(
        kind: str = "full", ranks: int = 1, extra: Mapping[str, object] = NONE, **options: object
    ) -> Rig:
        return engines.next(kind, ranks=ranks, **extra, **options)

    return begin


def loaded(made: Rig) -> int:
    """Serve the prompt; return how many blocks the host had."""
    made.run(PROMPT)
    made.assert_clean()
    return made.count("load_blocks", "loaded")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("verify", ["off", "full"])
def test_the_next_engine_finds_the_blocks_of_the_one_before(
    start: StartEngine, kind: str, ranks: int, verify: str
) -> None:
    extra = {"verify": verify}
    made = start(kind, ranks, extra)
    made.run(PROMPT)
    made.forget_device()
    before = loaded(made)
    assert before > 0
    for _ in range(2):
        made = start(kind, ranks, extra)
        assert loaded(made) == before


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("first", "second"), [(200, 64), (40, 200), (200, 190)])
def test_the_next_engine_may_have_more_or_fewer_slots(
    start: StartEngine, ranks: int, first: int, second: int
) -> None:
    start(ranks=ranks, host_blocks=first).run(PROMPT)
    for host_blocks in (second, first):
        made = start(ranks=ranks, host_blocks=host_blocks)
        assert loaded(made) == len(PROMPT) // BLOCK - 1
        assert made.offload.core.state.pool.capacity == host_blocks


def killed(root: Path) -> Path:
    """Return a copy of the folder as it is now: what an engine leaves that is killed now."""
    copy = Path(shutil.copytree(root, root / "copy" / "of"))
    for path in copy.glob("*/*/rank*"):
        as_original(path)
    return copy


def killed_while_storing(made: Rig, root: Path, prompt: tuple[int, ...] = PROMPT) -> tuple[Path, set[SlotId]]:
    """Return what an engine leaves that is killed while it stores a prompt, and the slots under its copies."""
    made.hold()
    made.submit(prompt)
    for _ in range(5):
        made.step()
    written = {slot for job in made.offload.state.jobs.open.values() for slot in job.slots}
    assert written
    left = killed(root)
    made.release()
    made.drain()
    return left, written


def kept_back(made: Rig) -> set[int]:
    pool = made.offload.state.pool
    return {slot for slot in range(pool.capacity) if pool.state(SlotId(slot)) is SlotState.QUARANTINED}


def indexed(made: Rig) -> dict[int, bytes]:
    return {int(slot): bytes(key) for key, slot in made.offload.state.pool.index.items()}


def test_r20_an_engine_killed_while_it_adopts_blocks_leaves_them(
    start: StartEngine, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = start()
    made.run(PROMPT)
    before = indexed(made)
    left = list[Path]()
    identify = HostTable.identify

    def killed_first(table: HostTable, fingerprint: str) -> None:
        left.append(killed(shared_memory))
        identify(table, fingerprint)

    monkeypatch.setattr(HostTable, "identify", killed_first)
    start()
    monkeypatch.undo()
    assert indexed(start(host_path=left[0])) == before


@pytest.mark.parametrize("ranks", [1, 2])
def test_r20_an_engine_killed_in_the_middle_of_stores_leaves_its_other_blocks(
    start: StartEngine, shared_memory: Path, ranks: int
) -> None:
    made = start(ranks=ranks)
    made.run(PROMPT)
    before = indexed(made)
    left, written = killed_while_storing(made, shared_memory, text(2, 8 * BLOCK))
    made = start(host_path=left, ranks=ranks)
    assert indexed(made) == before
    # This process is the one that was killed, so its copies may still write.
    made.pass_time(2)
    made.step()
    assert kept_back(made) == written
    assert loaded(made) == len(PROMPT) // BLOCK - 1


def test_r20_slots_under_copies_of_a_killed_engine_come_back_once_its_processes_have_ended(
    start: StartEngine, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, _ = killed_while_storing(start(), shared_memory)
    runs: list[bool | None] = [True]
    monkeypatch.setattr(host_catalog, "may_run", lambda process: runs[0])
    made = start(host_path=left)
    pool = made.offload.state.pool
    assert pool.count(SlotState.QUARANTINED)
    for answer in (None, True, False):
        runs[0] = answer
        made.pass_time(2)
        made.step()
        assert (pool.count(SlotState.QUARANTINED) == 0) == (answer is False)
    made.run(PROMPT)
    made.assert_clean()


@pytest.mark.parametrize("resets_at", ["once it stores", "before the blocks are adopted"])
def test_r20_slots_under_copies_that_began_after_a_reset_stay_unused_too(
    start: StartEngine, shared_memory: Path, monkeypatch: pytest.MonkeyPatch, resets_at: str
) -> None:
    start().run(PROMPT)
    made = start(drains=resets_at == "once it stores")
    assert made.engine.reset_prefix_cache()
    made.drain()
    made.run(text(2, 5 * BLOCK))
    left, written = killed_while_storing(made, shared_memory)
    monkeypatch.setattr(host_catalog, "may_run", lambda process: True)
    made = start(host_path=left)
    assert kept_back(made) == written
    assert indexed(made) == {}


def test_r20_slots_under_copies_of_a_killed_engine_stay_unused_although_another_ranks_file_is_missing(
    start: StartEngine, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = start(ranks=2)
    made.hold()
    made.submit(PROMPT)
    for _ in range(5):
        made.step()
    left = killed(shared_memory)
    made.release()
    made.drain()
    (path,) = left.glob("reference-*/0/rank0")
    path.unlink()
    monkeypatch.setattr(host_catalog, "may_run", lambda process: True)
    pool = start(ranks=2, host_path=left).offload.state.pool
    assert pool.count(SlotState.QUARANTINED)


def reasons(start: StartEngine, **options: object) -> tuple[Rig, list[str]]:
    """Start the next engine; return it and why it adopted nothing."""
    with capture_logs() as logs:
        made = start(**options)
    return made, [line["reason"] for line in logs if line["event"] == "host_memory_not_adopted"]


def test_r20_nothing_is_found_after_a_reset(start: StartEngine) -> None:
    made = start()
    made.run(PROMPT)
    assert made.engine.reset_prefix_cache()
    made.run(PROMPT)
    made, (reason,) = reasons(start)
    assert "was reset" in reason
    assert loaded(made) == 0


def test_r20_a_reset_before_the_blocks_are_adopted_drops_them(start: StartEngine) -> None:
    start().run(PROMPT)
    made = start(drains=False)
    assert made.engine.reset_prefix_cache()
    made.drain()
    assert indexed(made) == {}
    assert loaded(made) == 0
    made, reason = reasons(start)
    assert reason
    assert loaded(made) == 0


def test_r20_a_reset_while_the_table_is_written_closes_it(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().run(PROMPT)
    real = HostTable.create

    def create(*words: Any) -> HostTable:  # noqa: ANN401
        made = real(*words)
        assert running[0].engine.reset_prefix_cache()
        return made

    running = [start(drains=False, starts_ready=False)]
    monkeypatch.setattr(HostTable, "create", create)
    running[0].pass_time()
    running[0].drain()
    monkeypatch.undo()
    assert indexed(running[0]) == {}
    running[0].run(PROMPT)
    _, (reason,) = reasons(start)
    assert "was reset" in reason


def test_r20_a_reset_while_the_fingerprint_is_written_closes_the_table(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = [start(drains=False, starts_ready=False)]
    real = HostTable.identify

    def reset() -> str:
        assert running[0].engine.reset_prefix_cache()
        return boot_id()

    def identify(self: HostTable, fingerprint: str) -> None:
        monkeypatch.setattr("kvoffload.node.table.boot_id", reset)
        real(self, fingerprint)
        monkeypatch.undo()

    monkeypatch.setattr(HostTable, "identify", identify)
    running[0].pass_time()
    running[0].drain()
    running[0].run(PROMPT)
    _, (reason,) = reasons(start)
    assert "was reset" in reason


def test_r20_nothing_is_found_after_the_core_was_in_doubt(start: StartEngine) -> None:
    made = start()
    made.run(PROMPT)
    made.offload.state.pool._counts[0] += 1
    assert made.offload.audit()
    _, (reason,) = reasons(start)
    assert "in doubt" in reason


def test_r20_other_weights_find_nothing_in_the_folder(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload_reference.plugin._kind_of", lambda identity: "same")
    start(extra={"weights_id": "a"}).run(PROMPT)
    made, (reason,) = reasons(start, extra={"weights_id": "b"})
    assert "other weights" in reason
    assert loaded(made) == 0
    assert loaded(start(extra={"weights_id": "b"})) > 0


@pytest.mark.parametrize(
    ("name", "kept"), [("rank0", 0), ("rank1", 0), ("table", 0), ("rank1", 4096), ("rank1", -4096)]
)
def test_r20_without_one_of_its_files_or_a_part_of_it_nothing_is_found(
    start: StartEngine, engines: Engines, shared_memory: Path, name: str, kept: int
) -> None:
    """`kept` is how many bytes of the file are left, or fewer than it had. 0 stands for no file."""
    start(ranks=2).run(PROMPT)
    engines.stop_all()
    (path,) = shared_memory.glob(f"reference-*/0/{name}")
    if kept:
        os.truncate(path, kept if kept > 0 else path.stat().st_size + kept)
    else:
        path.unlink()
    made = start(ranks=2)
    assert indexed(made) == {}
    assert loaded(made) == 0


@pytest.mark.parametrize("late", ["rank0", "table"])
def test_r20_in_a_copy_of_a_folder_that_an_engine_uses_nothing_is_found(
    start: StartEngine, shared_memory: Path, late: str
) -> None:
    """A copy takes a while, so one of its files is from before other blocks took the slots, and one from after."""
    made = start(host_blocks=12)
    made.run(PROMPT)
    copy = Path(shutil.copytree(shared_memory, shared_memory / "copy" / "of"))
    made.run(text(2, 10 * BLOCK))
    (path,) = shared_memory.glob(f"reference-*/0/{late}")
    shutil.copy(path, copy / path.relative_to(shared_memory))
    made = start(host_blocks=12, host_path=copy)
    assert indexed(made) == {}
    assert loaded(made) == 0


@pytest.mark.parametrize("host_blocks", [200, 120, 240])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_ends_before_its_first_step_leaves_what_it_found(
    start: StartEngine, engines: Engines, ranks: int, host_blocks: int
) -> None:
    start(ranks=ranks).run(PROMPT)
    engines.stop_all()
    for _ in range(2):
        with rig(ranks=ranks, host_blocks=host_blocks, extra=engines.settings, starts_ready=False):
            pass
    assert loaded(start(ranks=ranks)) == len(PROMPT) // BLOCK - 1


def test_r20_an_engine_whose_scheduler_has_not_taken_the_table_over_leaves_none(
    start: StartEngine, engines: Engines
) -> None:
    """Once the ranks have reported, copies could have changed the bytes that the earlier engine's table names."""
    start().run(PROMPT)
    engines.stop_all()
    with rig(host_blocks=200, extra=engines.settings, starts_ready=False) as made:
        for worker in made.workers:
            worker.take_report()
    made, (reason,) = reasons(start)
    assert "other files" in reason
    assert loaded(made) == 0


def test_r20_a_reset_before_the_first_step_forgets_what_the_engine_before_left(
    start: StartEngine, engines: Engines
) -> None:
    start().run(PROMPT)
    engines.stop_all()
    with rig(host_blocks=200, extra=engines.settings, starts_ready=False) as made:
        assert made.offload.reset()
    made = start()
    assert indexed(made) == {}
    assert loaded(made) == 0


def test_r20_a_reset_that_cannot_remove_the_table_says_so(
    start: StartEngine, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().run(PROMPT)
    engines.stop_all()

    def fail(folder: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    with rig(host_blocks=200, extra=engines.settings, starts_ready=False) as made:
        monkeypatch.setattr(host_catalog, "remove_table", fail)
        assert not made.offload.reset()
        monkeypatch.undo()
        made.pass_time()
        made.drain()
        assert indexed(made) == {}
        made.run(PROMPT)
        made.assert_clean()


def test_r20_slots_under_old_copies_are_kept_back_although_the_kv_cannot_be_identified(
    start: StartEngine, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, written = killed_while_storing(start(), shared_memory)

    def fail(self: HostCatalog, found: object) -> None:
        raise DiskError("the weights cannot be read")

    monkeypatch.setattr(HostCatalog, "_identified", fail)
    made = start(host_path=left)
    assert kept_back(made) == written
    made.run(PROMPT)
    made.assert_clean()


def test_slots_wait_at_most_ten_seconds_for_the_identity_of_what_is_in_them(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the limit, a start that reads all weights would offload nothing for minutes."""
    start().run(PROMPT)
    identifier = ManualExecutor()
    real = ManualPortal.new_executor

    def new_executor(self: ManualPortal, purpose: str, threads: int = 1) -> ManualExecutor:
        return identifier if purpose == "host-identity" else real(self, purpose, threads)

    monkeypatch.setattr(ManualPortal, "new_executor", new_executor)
    with capture_logs() as logs:
        made = start(drains=False)
        made.step(9)
        made.step(1)
        assert made.offload.state.pool.capacity == 0
        for _ in range(5):  # one for each fact
            made.step(1)
    assert [line["cause"] for line in logs if line["event"] == "host_memory_not_adopted"] == [
        "not_identified"
    ]
    assert (indexed(made), made.offload.state.pool.capacity) == ({}, 200)
    made.run(PROMPT)
    identifier.run_next()
    monkeypatch.undo()
    # What this engine stored is found, because its KV was identified in the end.
    assert loaded(start()) == len(PROMPT) // BLOCK - 1


@pytest.mark.parametrize("verify", [("off", "full"), ("full", "off")])
def test_another_verify_finds_nothing(start: StartEngine, verify: tuple[str, str]) -> None:
    start(extra={"verify": verify[0]}).run(PROMPT)
    made = start(extra={"verify": verify[1]})
    assert indexed(made) == {}
    made.run(PROMPT)
    made.assert_clean()


def test_with_verify_a_flipped_byte_of_the_next_life_is_found(
    start: StartEngine, engines: Engines, shared_memory: Path
) -> None:
    start(extra={"verify": "full"}).run(PROMPT)
    engines.stop_all()
    (path,) = shared_memory.glob("reference-*/0/rank0")
    with path.open("r+b") as file:
        file.seek(4096)
        data = bytearray(file.read(12 * 1024))
        file.seek(4096)
        file.write(bytes(byte ^ 1 for byte in data))
    made = start(extra={"verify": "full"})
    made.run(PROMPT)
    assert made.count("load_blocks", "corrupt") > 0
    made.drain()


@pytest.mark.parametrize("part", range(12))
def test_r20_a_damaged_table_costs_blocks_and_never_a_wrong_answer(
    start: StartEngine, engines: Engines, shared_memory: Path, part: int
) -> None:
    """Flip bytes all over the table: of its header, of sequence numbers, times of use and records."""
    start(host_blocks=20).run(PROMPT)
    before = indexed(start(host_blocks=20))
    engines.stop_all()
    (path,) = shared_memory.glob("reference-*/0/table")
    data = bytearray(path.read_bytes())
    chance = random.Random(part)
    for _ in range(1 + 40 * (part % 3)):
        data[chance.randrange(len(data)) if part < 8 else chance.randrange(200)] ^= 1 << chance.randrange(8)
    path.write_bytes(data[: chance.randrange(len(data))] if part == 11 else data)
    made = start(host_blocks=20)
    assert indexed(made).items() <= before.items()
    made.run(PROMPT)
    made.assert_clean()


def test_blocks_that_must_not_outlive_their_engine_are_not_found(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = start()
    made.run(text(2, 6 * BLOCK))
    found = indexed(made)
    monkeypatch.setattr(facts, "RequestSeen", partial(facts.RequestSeen, persists=False))
    made.run(PROMPT)
    assert len(indexed(made)) > len(found)
    monkeypatch.undo()
    assert indexed(start()) == found


def test_a_block_that_is_stored_again_before_it_is_adopted_has_one_slot(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_catalog, "_PART", 4)
    start().run(PROMPT)
    made = start(starts_ready=False, drains=False)
    made.submit(PROMPT)
    made.portal.advance()
    made.drain()
    assert made.count("store_blocks", "stored") > 0
    made.assert_clean()
    assert len(indexed(made)) == len(PROMPT) // BLOCK


def test_a_block_that_the_table_lists_twice_is_adopted_once(start: StartEngine) -> None:
    """An engine that is killed while it adopts may have stored a block again that it had not adopted yet."""
    made = start()
    made.run(PROMPT)
    catalog: Any = made.offload.catalogs[Tier.HOST]
    for slot, key in indexed(made).items():
        catalog._table.publish(slot + 100, key, 0.0)
    made = start()
    assert made.count("adopted_blocks") == len(PROMPT) // BLOCK
    made.run(PROMPT)
    made.assert_clean()
    again: Any = start()
    assert again.offload.catalogs[Tier.HOST].adopted == len(PROMPT) // BLOCK


def test_the_least_recently_used_adopted_blocks_are_evicted_first(start: StartEngine) -> None:
    prompts = [text(seed, 5 * BLOCK) for seed in range(10, 14)]
    made = start(host_blocks=24)
    for prompt in (*prompts, prompts[0]):
        made.run(prompt)
        made.pass_time(2)
    order = [made.offload.state.pool.key(slot) for slot in made.offload.state.pool.order]
    made = start(host_blocks=24)
    pool = made.offload.state.pool
    assert [pool.key(slot) for slot in pool.order] == order


def test_two_engines_use_two_folders_and_each_is_found_again(
    start: StartEngine, engines: Engines, shared_memory: Path
) -> None:
    made, other = start(), engines.start()
    other.run(text(2, 8 * BLOCK))
    made.run(PROMPT)
    engines.stop_all()
    assert len(list(shared_memory.glob("reference-*/[01]/table"))) == 2
    first, second = indexed(engines.start()), indexed(engines.start())
    assert first
    assert second
    assert not {*first.values()} & {*second.values()}


def test_files_can_be_removed_at_the_end(start: StartEngine, engines: Engines, shared_memory: Path) -> None:
    made = start(extra={"host_keep": False})
    made.run(PROMPT)
    (folder,) = shared_memory.glob("reference-*/0")
    assert {path.name for path in folder.iterdir()} > {"rank0", "table"}
    (folder / "notes").write_bytes(b"tokens of prompts")
    engines.stop_all()
    assert {path.name for path in folder.iterdir()} == {"lock", "owner.json"}


def test_files_are_for_this_user_only(start: StartEngine, shared_memory: Path) -> None:
    start()
    modes = {
        path.relative_to(shared_memory): path.stat().st_mode & 0o777 for path in shared_memory.rglob("*")
    }
    assert {mode for path, mode in modes.items() if (shared_memory / path).is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if not (shared_memory / path).is_dir()} == {0o600}


def test_a_folder_that_is_not_on_a_tmpfs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"host_path: .* is on \w+; it must be on tmpfs"):
        Rig(extra={"host_path": tmp_path})


def test_a_tmpfs_with_room_for_the_slots_and_not_for_their_table_is_refused(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 200 * slot_bytes("full")
    monkeypatch.setattr("kvoffload.node.file_systems.free_bytes", lambda root: room)
    with pytest.raises(ConfigError, match=r"host_path: the tmpfs of .* has .* left, and host_bytes needs"):
        start()
    room += 2 * table_bytes(200, 1)
    start().run(PROMPT)


def test_a_start_that_asks_for_too_much_leaves_the_memory_of_stopped_engines(
    start: StartEngine, engines: Engines, shared_memory: Path
) -> None:
    start(weights_id="other").run(PROMPT)
    engines.stop_all()
    (kept,) = list_kept(shared_memory)
    with pytest.raises(ConfigError, match="host_bytes"):
        start(host_blocks=2**50 // slot_bytes("full"))
    assert kept.path in [each.path for each in list_kept(shared_memory)]
    assert loaded(start(weights_id="other")) > 0


def test_a_table_that_cannot_be_written_is_an_adoption_that_failed(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    start().run(PROMPT)
    monkeypatch.setattr(HostTable, "create", fail)
    made: Any = start()
    assert made.offload.catalogs[Tier.HOST].adoption is Adoption.FAILED
    assert made.offload.catalogs[Tier.HOST].adopted == made.count("adopted_blocks") == 0
    assert loaded(made) == 0


def test_a_description_that_cannot_be_written_costs_no_block(
    start: StartEngine, engines: Engines, shared_memory: Path
) -> None:
    start().run(PROMPT)
    engines.stop_all()
    (path,) = shared_memory.glob("reference-*/0/identity.json")
    path.unlink()
    (path / "folder").mkdir(parents=True)
    with capture_logs() as logs:
        assert loaded(start()) > 0
    assert "host_memory_not_described" in {line["event"] for line in logs}
    assert loaded(start()) > 0


def test_a_tmpfs_that_fills_up_while_memory_grows_leaves_the_slots_that_are_ready(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, chunks = os.posix_fallocate, list[int]()

    def fallocate(descriptor: int, offset: int, size: int) -> None:
        if offset == 4096 + len(chunks) * 16 * 1024:
            chunks.append(offset)
        if len(chunks) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, offset, size)

    monkeypatch.setattr("kvoffload.runtime.rank_memory.slots_in_chunk", lambda layout: 16)
    monkeypatch.setattr("kvoffload.runtime.worker_side.Arena", partial(Arena, chunk_bytes=16 * 1024))
    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    monkeypatch.setattr("kvoffload.transfer.host_file._has_room", lambda descriptor, size: False)
    with capture_logs() as logs:
        made = start()
    monkeypatch.undo()
    assert [line["ready_slots"] for line in logs if line["event"] == "host_memory_refused"] == [32]
    assert made.offload.state.pool.capacity == 32
    made.run(PROMPT)
    made.assert_clean()


# -- memory in huge pages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("verify", ["off", "full"])
def test_the_next_engine_finds_blocks_in_huge_pages(
    start: StartEngine, huge_pages: Path, ranks: int, verify: str
) -> None:
    extra = {"verify": verify, "host_hugetlbfs": huge_pages}
    made = start(ranks=ranks, extra=extra)
    made.run(PROMPT)
    made.forget_device()
    before = loaded(made)
    assert before > 0
    for host_blocks in (200, 190, 200):
        assert loaded(start(ranks=ranks, extra=extra, host_blocks=host_blocks)) == before
    assert len(os.listdir(huge_pages)) == ranks


@pytest.mark.parametrize("into_pages", [True, False])
def test_memory_that_moves_into_huge_pages_or_out_begins_empty_and_leaves_nothing(
    start: StartEngine, huge_pages: Path, into_pages: bool
) -> None:
    both = [NONE, {"host_hugetlbfs": huge_pages}]
    before, after = both if into_pages else reversed(both)
    start(extra=before).run(PROMPT)
    with capture_logs() as logs:
        made = start(extra=after)
    assert [line["reason"] for line in logs if line["event"] == "host_memory_replaced"] == [
        "host_hugetlbfs is another, or the folder is a copy"
    ]
    assert loaded(made) == 0
    assert len(os.listdir(huge_pages)) == into_pages


@pytest.mark.parametrize("in_pages", [True, False])
def test_r20_an_engine_on_a_copy_of_the_folder_leaves_the_memory_of_the_first_as_it_is(
    start: StartEngine, shared_memory: Path, huge_pages: Path, in_pages: bool
) -> None:
    """Links in the copy lead to the memory of the first engine."""
    pool = {"host_hugetlbfs": huge_pages}
    start(extra=pool).run(PROMPT)
    copy = Path(shutil.copytree(shared_memory, shared_memory / "copy" / "of", symlinks=True))
    beside = start(host_path=copy, extra=pool if in_pages else NONE)
    assert indexed(beside) == {}
    beside.run(text(2, 10 * BLOCK))
    assert len(os.listdir(huge_pages)) == 1 + in_pages
    assert loaded(start(extra=pool)) == len(PROMPT) // BLOCK - 1


def test_removed_memory_gives_its_huge_pages_back(
    start: StartEngine, engines: Engines, shared_memory: Path, huge_pages: Path
) -> None:
    start(extra={"host_hugetlbfs": huge_pages})
    engines.stop_all()
    (kept,) = list_kept(shared_memory)
    assert kept.size > 200 * slot_bytes("full")
    assert remove_kept(kept)
    assert os.listdir(huge_pages) == []


def test_a_pool_of_huge_pages_that_is_too_small_is_an_error_that_says_how_to_enlarge_it(
    start: StartEngine, huge_pages: Path
) -> None:
    with pytest.raises(ConfigError, match=r"the pool of .* has 2\d\d\.\d MiB left.*vm\.nr_hugepages"):
        start(extra={"host_hugetlbfs": huge_pages}, host_blocks=2**30 // slot_bytes("full"))


def test_a_tmpfs_without_room_for_the_table_of_memory_in_huge_pages_is_an_error_that_names_it(
    start: StartEngine, huge_pages: Path
) -> None:
    with (
        mounted("tmpfs", "size=64k") as root,
        pytest.raises(ConfigError, match=r"the tmpfs of .* has .* left, and host_bytes needs .* more"),
    ):
        start(host_path=root, extra={"host_hugetlbfs": huge_pages})


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_folder_that_is_not_on_a_hugetlbfs_is_an_error(
    start: StartEngine, tmp_path: Path, is_missing: bool
) -> None:
    folder = tmp_path / "missing" if is_missing else tmp_path
    with pytest.raises(ConfigError, match="No such file" if is_missing else "must be on hugetlbfs"):
        start(extra={"host_hugetlbfs": folder})


def test_a_folder_for_huge_pages_in_which_no_file_can_be_made_is_an_error_that_names_it(
    start: StartEngine,
) -> None:
    problem = "host_hugetlbfs: {} is not a folder in which this user can make files"
    with (
        mounted("hugetlbfs", "pagesize=2M,ro") as folder,
        pytest.raises(ConfigError, match=problem.format(folder)),
    ):
        start(extra={"host_hugetlbfs": folder})


def test_huge_pages_that_an_engine_set_aside_and_did_not_use_are_those_of_the_next(
    start: StartEngine, engines: Engines, huge_pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool has too few pages for both: the engine ended while its memory grew."""
    settings: dict[str, Any] = {"extra": {"host_hugetlbfs": huge_pages}, "host_blocks": BLOCKS_OF_MOST_PAGES}
    with monkeypatch.context() as patched:
        patched.setattr("kvoffload.transfer.arena.Arena.is_growing", False)
        start(**settings, drains=False)
        engines.stop_all()
    assert start(**settings).offload.state.pool.capacity == BLOCKS_OF_MOST_PAGES


def test_memory_of_stopped_engines_on_the_tmpfs_is_no_room_in_a_pool_of_huge_pages(
    start: StartEngine, shared_memory: Path, huge_pages: Path
) -> None:
    for weights in ("others", "ours"):
        start(extra={"weights_id": weights})
    hog = os.open(huge_pages / "hog", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(hog, 0, free_bytes(huge_pages))
    os.close(hog)
    with pytest.raises(ConfigError, match=r"the pool of .* has 0 B left"):
        start(extra={"weights_id": "ours", "host_hugetlbfs": huge_pages})
    assert len(list_kept(shared_memory)) == 2
