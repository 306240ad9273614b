from __future__ import annotations

import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvoffload.disk.folder import lock_folder
from kvoffload.disk.open_folder import open_folder
from kvoffload.disk.tier_key import TierKey
from kvoffload.logs import ROOT
from kvoffload.model.causes import TierOutcome
from kvoffload.model.events import TierCopyEnded
from kvoffload.model.wire import Direction
from tests.vllm.engine_rig import MARKS, Asked, Reported, Rig, check_same, offloading
from tests.vllm.stock import checkpoints, engines

pytestmark = MARKS

KINDS: tuple[checkpoints.Kind, ...] = ("qwen3", "gemma3", "lfm2")
HOST_BLOCKS = {"qwen3": 80, "gemma3": 160, "lfm2": 120}
"""Fetches may fill a quarter of these slots, and any prompt's blocks must fit in that quarter."""


def draw(seed: int, count: int, blocks: int, tokens: int) -> dict[str, Asked]:
    chance = random.Random(seed)
    length = blocks * engines.BLOCK + 9
    texts = [tuple(chance.choices(range(256), k=length)) for _ in range(count)]
    return {f"s{seed}n{number}": Asked(text, tokens) for number, text in enumerate(texts)}


PROMPTS, OTHERS = draw(1, 3, 6, 8), draw(2, 16, 10, 1)


@dataclass
class Life:
    """An engine with a disk, which is open or could not be opened."""

    rig: Rig
    copies: list[TierCopyEnded]
    restored: int

    def fetched(self) -> int:
        return sum(
            copy.blocks
            for copy in self.copies
            if (copy.direction, copy.outcome) == (Direction.LOAD, TierOutcome.DONE)
        )

    def on_disk(self) -> int:
        return len(self.disk.pool.index)

    @property
    def disk(self) -> Any:
        return self.rig.side.core.state.disk

    def wait_for_disk(self) -> None:
        """Step until the disk is open or could not be opened.

        An idle engine stops stepping after `disk_drain_s`, so this function also serves requests.
        """
        rig, asked = self.rig, {"opens": Asked((1, 2, 3), 1)}

        def serve() -> bool:
            return not rig.scheduler.has_requests() and rig.run(asked) == {}

        rig.until(lambda: self.disk.is_open or self.disk.is_closed or serve())

    def push_out(self) -> None:
        """Evict all prompts' blocks from device and host. Blocks that were found again are still on the disk."""
        self.rig.run(OTHERS)
        assert self.rig.scheduler.reset_prefix_cache()

    def ask(self, asked: Mapping[str, Asked] = PROMPTS) -> dict[str, Reported]:
        return {name: self.rig.run({name: one})[name] for name, one in asked.items()}


@contextmanager
def living(
    kind: checkpoints.Kind,
    folder: Path,
    checkpoint: Path | None = None,
    host_blocks: int | None = None,
    **options: Any,
) -> Iterator[Life]:
    """Run an engine whose disk is in `folder` during the `with` block.

    The engine's process counts as started now, because weights that are newer than the process are refused.
    """
    extra = {"disk_path": str(folder / "disk"), "disk_bytes": "32MiB", **options.pop("extra", {})}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvoffload_vllm.kv_identity.process_began_ns", time.time_ns)
        with offloading(
            kind, folder, host_blocks or HOST_BLOCKS[kind], extra=extra, checkpoint=checkpoint, **options
        ) as rig:
            life = Life(rig, [], 0)
            rig.side.bus.count(TierCopyEnded, life.copies.append)
            life.wait_for_disk()
            life.restored = life.on_disk()
            yield life


@dataclass(frozen=True)
class Before:
    """The folder that the first engine has left, and the first engine's answers."""

    folder: Path
    answers: dict[str, Reported]

    def copy(self, folder: Path) -> Path:
        return shutil.copytree(self.folder, folder / "copy")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Callable[[checkpoints.Kind], Before]:
    @cache
    def live(kind: checkpoints.Kind) -> Before:
        folder = tmp_path_factory.mktemp(kind)
        checkpoints.make(kind, folder / kind)
        with living(kind, folder) as life:
            assert life.restored == 0
            answers = life.ask()
            assert not any(answer.cached for answer in answers.values())
            life.push_out()
            assert not life.on_disk()  # only blocks that were found again are written
            life.ask()
            while grows(life):
                pass
            life.push_out()
            check_same(life.ask(), answers)
            assert life.fetched() > 0
            life.push_out()
            for name, one in PROMPTS.items():
                life.rig.ask(name, one)
            life.rig.step()
            life.rig.abort(*PROMPTS)
            life.rig.check_clean()
        return Before(folder, answers)

    return live


def grows(life: Life) -> bool:
    """Serve the prompts again; return whether more blocks are on the disk afterwards.

    A block that is still being stored is only spilled in a later round.
    """
    had = life.on_disk()
    life.ask()
    life.rig.finish()
    return life.on_disk() > had


@pytest.mark.parametrize("kind", KINDS)
def test_r18_the_next_engine_finds_all_put_blocks(
    before: Callable[[checkpoints.Kind], Before], kind: checkpoints.Kind, tmp_path: Path
) -> None:
    was = before(kind)
    with living(kind, was.copy(tmp_path)) as life:
        assert life.restored > 0
        answers = life.ask()
        check_same(answers, was.answers)
        assert {answer.cached for answer in answers.values()} == {6 * engines.BLOCK}
        assert life.fetched() > 0
        life.rig.check_clean()


def test_r18_no_block_from_before_a_reset_is_found_even_after_a_restart(
    before: Callable[[checkpoints.Kind], Before], tmp_path: Path
) -> None:
    was = before("qwen3")
    folder = was.copy(tmp_path)
    with living("qwen3", folder) as life:
        life.rig.forget()
        answers = life.ask()
        check_same(answers, was.answers)
        assert not any(answer.cached for answer in answers.values())
        assert not life.fetched()
        life.rig.check_clean()
    with living("qwen3", folder) as life:
        assert life.restored == 0


def test_r18_other_weights_of_the_same_shapes_find_nothing(
    before: Callable[[checkpoints.Kind], Before], tmp_path: Path
) -> None:
    folder = before("qwen3").copy(tmp_path)
    checkpoint = checkpoints.make("qwen3", tmp_path / "others", seed=1)
    with living("qwen3", folder, checkpoint) as life:
        assert life.restored == 0
        assert not any(answer.cached for answer in life.ask().values())
        life.rig.check_clean()
    assert len(list(folder.glob("disk/*/replica0"))) == 2


def test_r18_with_a_key_only_blocks_written_with_this_key_are_found(
    before: Callable[[checkpoints.Kind], Before], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was, path, uses, mac = before("qwen3"), tmp_path / "key", set[bytes](), TierKey.mac

    def seen(key: TierKey, context: bytes, *data: bytes | memoryview) -> bytes:
        uses.update(word for word in (b"slot", b"index", b"batch", b"weights") if context.startswith(word))
        return mac(key, context, *data)

    monkeypatch.setattr(TierKey, "mac", seen)
    path.touch(mode=0o600)
    path.write_bytes(bytes(32))
    folder, extra = was.copy(tmp_path), {"tier_key_file": str(path)}
    with living("qwen3", folder, extra=extra) as life:
        assert life.restored == 0
        life.ask()
        while grows(life):
            pass
    with living("qwen3", folder, extra=extra) as life:
        assert life.restored > 0
        check_same(life.ask(), was.answers)
        assert life.fetched() > 0
        life.rig.check_clean()
    assert {b"slot", b"index", b"batch", b"weights"} <= uses


def test_a_second_engine_on_a_disk_logs_the_first_and_serves_without_the_disk(
    before: Callable[[checkpoints.Kind], Before], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    was = before("qwen3")
    folder = was.copy(tmp_path)
    (place,) = folder.glob("disk/*/replica0")
    holder = lock_folder(open_folder(place))
    logging.getLogger(ROOT).addHandler(caplog.handler)
    with living("qwen3", folder) as life:
        check_same(life.ask(), was.answers)
        assert not life.fetched()
        life.rig.check_clean()
    holder.close()
    logging.getLogger(ROOT).removeHandler(caplog.handler)
    assert f"{place} is in use by process {os.getpid()} on " in caplog.text


# -- LoRA: vLLM's hashes know an adapter by its name and path ------------------------------------------------------------


def test_r18_an_adapter_with_other_bytes_at_the_same_path_finds_nothing(tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    (name, asked), *_ = PROMPTS.items()
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    checkpoints.make("qwen3", tmp_path / "qwen3")
    answers = []
    for seed in range(2):
        checkpoints.make_adapter(tmp_path / "adapter", seed)
        with living("qwen3", tmp_path, enable_lora=True, max_lora_rank=8) as life:
            for number in range(3):
                life.rig.ask(f"{name}a{number}", asked, lora_request=adapter)
                life.rig.finish()
            first, *later = [life.rig.reported[f"{name}a{number}"] for number in range(3)]
            assert first.cached == 0
            assert all(one.cached for one in later)  # the device still has the blocks of the same adapter
            assert life.on_disk() == life.restored == (6 if seed else 0)
            base = [life.rig.run({f"{name}b{number}": asked})[f"{name}b{number}"] for number in range(3)]
            assert base[0].cached == (6 * engines.BLOCK if seed else 0)
            life.rig.finish()
            assert life.on_disk() == 6  # the blocks that were computed without the adapter
            life.rig.check_clean()
        answers.append(first.tokens)
    assert answers[0] != answers[1]
