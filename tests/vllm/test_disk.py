from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from kvoffload.disk.folder import lock_folder
from kvoffload.disk.open_folder import open_folder
from kvoffload.disk.tier_key import TierKey
from kvoffload.logs import ROOT
from tests.vllm.engine_rig import MARKS, Reported, check_same
from tests.vllm.stock import checkpoints
from tests.vllm.tiers_rig import CACHED, HOST_BLOCKS, KINDS, LOAD, PROMPTS, living

pytestmark = MARKS


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
        with living(kind, folder) as life:
            assert life.restored == 0
            answers = life.ask()
            assert not any(answer.cached for answer in answers.values())
            life.push_out()
            assert not life.on_disk()  # only blocks that were found again are written
            life.put_on_disk()
            life.push_out()
            check_same(life.ask(), answers)
            assert life.copied(LOAD) > 0
            life.push_out()
            for name, one in PROMPTS.items():
                life.rig.ask(name, one)
            life.rig.step()
            life.rig.abort(*PROMPTS)
            life.rig.check_clean()
        return Before(folder, answers)

    return live


@pytest.mark.parametrize(
    ("kind", "share"), [*((kind, share) for kind in KINDS for share in (1, 10)), ("qwen3", 20)]
)
def test_r18_the_next_engine_finds_all_put_blocks(
    before: Callable[[checkpoints.Kind], Before], kind: checkpoints.Kind, share: int, tmp_path: Path
) -> None:
    """On a tenth of the host, a prompt has more than a quarter of the blocks; on a twentieth, more than all."""
    was = before(kind)
    with living(kind, was.copy(tmp_path), host_blocks=HOST_BLOCKS[kind] // share) as life:
        assert life.restored > 0
        answers = life.ask_without_device()
        check_same(answers, was.answers)
        assert {answer.cached for answer in answers.values()} == {CACHED}
        assert life.copied(LOAD) > 0
        life.rig.check_clean()


def test_r18_no_block_from_before_a_reset_is_found_even_after_a_restart(
    before: Callable[[checkpoints.Kind], Before], tmp_path: Path
) -> None:
    was = before("qwen3")
    folder = was.copy(tmp_path)
    with living("qwen3", folder) as life:
        life.rig.forget()
        at_start = life.copied(LOAD)
        answers = life.ask()
        check_same(answers, was.answers)
        assert not any(answer.cached for answer in answers.values())
        assert life.copied(LOAD) == at_start
        life.rig.check_clean()
    with living("qwen3", folder) as life:
        assert life.restored == 0


def test_r18_other_weights_of_the_same_shapes_find_nothing(
    before: Callable[[checkpoints.Kind], Before], tmp_path: Path
) -> None:
    folder = before("qwen3").copy(tmp_path)
    checkpoint = checkpoints.make("qwen3", tmp_path / "others", seed=1)
    with living("qwen3", folder, checkpoint=checkpoint) as life:
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
        life.put_on_disk()
    with living("qwen3", folder, extra=extra) as life:
        assert life.restored > 0
        check_same(life.ask(), was.answers)
        assert life.copied(LOAD) > 0
        life.rig.check_clean()
    assert uses == {b"slot", b"index", b"batch", b"weights"}


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
        assert not life.copied(LOAD)
        life.rig.check_clean()
    holder.close()
    logging.getLogger(ROOT).removeHandler(caplog.handler)
    assert f"{place} is in use by process {os.getpid()} on " in caplog.text
