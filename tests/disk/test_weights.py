from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from xxhash import xxh3_128

from kvoffload.disk.tier_key import TierKey
from kvoffload.disk.weights import snapshot_commit, weights_identity
from kvoffload.model.errors import DiskError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


Identify = Callable[..., str]


def later() -> int:
    return time.time_ns() + 10**10


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def identify(memory: Path) -> Identify:
    return partial(weights_identity, memory=memory, now_ns=later)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "parts").mkdir(parents=True)
    (folder / "config.json").write_text('{"rope_theta": 10000}')
    (folder / "parts" / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    return folder


def snapshot(tmp_path: Path) -> Path:
    """Create a model's folder as in a Hugging Face cache."""
    blobs = tmp_path / "models--org--name" / "blobs"
    folder = tmp_path / "models--org--name" / "snapshots" / COMMIT
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    (blobs / "abc").write_text("weights")
    (folder / "model.safetensors").symlink_to("../../blobs/abc")
    return folder


def test_a_snapshot_is_identified_by_its_commit(tmp_path: Path, identify: Identify, memory: Path) -> None:
    assert identify(snapshot(tmp_path)) == f"commit {COMMIT}"
    assert not memory.exists()


@pytest.mark.parametrize("is_link", [False, True])
def test_a_snapshot_with_a_changed_file_is_digested(
    tmp_path: Path, identify: Identify, is_link: bool
) -> None:
    folder = snapshot(tmp_path)
    path = tmp_path / "mine.json" if is_link else folder / "config.json"
    path.write_text("changed by hand")
    if is_link:
        (folder / "config.json").symlink_to(path)
    assert snapshot_commit(folder) is None
    assert identify(folder).startswith("digest ")


def test_an_empty_snapshot_and_another_folder_have_no_commit(tmp_path: Path, model: Path) -> None:
    folder = snapshot(tmp_path)
    for other in (folder.with_name("main"), folder.parent.with_name("other") / COMMIT):
        shutil.copytree(folder, other, symlinks=True)
        assert snapshot_commit(other) is None
    (folder / "model.safetensors").unlink()
    assert snapshot_commit(folder) is None
    assert snapshot_commit(model) is None


@pytest.mark.parametrize("name", ["config.json", "parts/model.safetensors"])
def test_one_changed_byte_changes_the_identity_even_with_the_same_size_and_time(
    identify: Identify, model: Path, name: str
) -> None:
    before, path = identify(model), model / name
    was, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns) == (was.st_size, was.st_mtime_ns)
    assert identify(model) != before


def test_names_in_the_folder_are_part_of_the_identity_but_not_its_path_or_hidden_files(
    tmp_path: Path, identify: Identify, model: Path
) -> None:
    before = identify(model)
    (model / ".cache").mkdir()
    (model / ".cache" / "lock").touch()
    moved = model.rename(tmp_path / "moved")
    assert identify(moved) == before
    (moved / "config.json").rename(moved / "settings.json")
    assert identify(moved) != before


def watch_hashing(monkeypatch: pytest.MonkeyPatch, seen: Callable[[bytes], object]) -> None:
    """Call a function with each chunk of data that is hashed."""
    real = xxh3_128

    class Watched:
        def __init__(self, data: bytes = b"") -> None:
            self._state = real(data)
            self.hexdigest = self._state.hexdigest

        def update(self, data: bytes) -> None:
            self._state.update(data)
            seen(data)

    monkeypatch.setattr("kvoffload.disk.weights.xxh3_128", Watched)


UNREADABLE = {"list": "[1]", "other types": '{"1:2": ["x"]}', "deep": "[" * 100_000, "not UTF-8": "\udcff"}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_a_digest_is_computed_once_and_again_if_it_cannot_be_read(
    identify: Identify, memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    before, read = identify(model), list[bytes]()
    watch_hashing(monkeypatch, read.append)
    assert (identify(model), read) == (before, [])
    memory.write_text(text, errors="surrogateescape")
    assert identify(model) == before
    assert sum(map(len, read)) == 256_000 + len('{"rope_theta": 10000}')


@pytest.mark.parametrize("since_ns", [10**6, -(10**15)], ids=["a moment ago", "the clock was set back"])
def test_the_digest_of_a_recently_changed_file_is_not_remembered(
    identify: Identify, model: Path, monkeypatch: pytest.MonkeyPatch, since_ns: int
) -> None:
    changed = max(path.stat().st_ctime_ns for path in model.rglob("*"))
    identify(model, now_ns=lambda: changed + since_ns)
    read = list[bytes]()
    watch_hashing(monkeypatch, read.append)
    identify(model)
    assert sum(map(len, read)) > 256_000


def test_digests_are_computed_again_if_they_cannot_be_saved(tmp_path: Path, model: Path) -> None:
    memory = tmp_path / "missing" / "memory"
    assert weights_identity(model, memory) == weights_identity(model, memory)


def test_weights_that_change_while_they_are_read_are_refused(
    identify: Identify, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(_: bytes) -> None:
        with (model / "parts" / "model.safetensors").open("ab") as file:
            file.write(b"more")

    (model / "config.json").unlink()
    watch_hashing(monkeypatch, append)
    monkeypatch.setattr("kvoffload.disk.weights._CHUNK", 1000 * 256)
    with pytest.raises(DiskError, match="changes while it is read"):
        identify(model)


def test_a_folder_without_files_has_no_identity(tmp_path: Path, identify: Identify) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DiskError, match="the folder has no files"):
        identify(tmp_path / "empty")


def test_r18_a_file_that_changed_since_it_was_loaded_has_no_identity(identify: Identify, model: Path) -> None:
    known = identify(model)
    changed = max(path.stat().st_ctime_ns for path in model.rglob("*.*"))
    assert identify(model, loaded_ns=changed) == known
    with pytest.raises(DiskError, match="has changed since this engine started"):
        identify(model, loaded_ns=changed - 1)


@pytest.mark.parametrize("key", [None, TierKey(bytes(32))], ids=["no key", "key"])
def test_r18_with_a_tier_key_forged_saved_digests_are_ignored(
    identify: Identify, memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch, key: TierKey | None
) -> None:
    before, read = identify(model, key=key), list[bytes]()
    watch_hashing(monkeypatch, read.append)
    assert (identify(model, key=key), read) == (before, [])
    data = memory.read_bytes()
    at = data.index(b'"', data.rindex(b", ")) + 1
    memory.write_bytes(data[:at] + b"0" * 32 + data[at + 32 :])
    assert (identify(model, key=key) == before) is (key is not None)
