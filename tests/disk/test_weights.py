from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from xxhash import xxh3_128

from kvoffload.disk.tier_key import TierKey
from kvoffload.disk.weights import snapshot_commit, weights_identity
from kvoffload.model.errors import DiskError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def later() -> int:
    return time.time_ns() + 10**10


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


def test_a_snapshot_is_identified_by_its_commit(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    assert weights_identity(folder, tmp_path / "memory") == f"commit {COMMIT}"
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize("is_link", [False, True])
def test_a_snapshot_with_a_changed_file_is_digested(tmp_path: Path, is_link: bool) -> None:
    folder = snapshot(tmp_path)
    path = tmp_path / "mine.json" if is_link else folder / "config.json"
    path.write_text("changed by hand")
    if is_link:
        (folder / "config.json").symlink_to(path)
    assert snapshot_commit(folder) is None
    assert weights_identity(folder, tmp_path / "memory").startswith("digest ")


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
    tmp_path: Path, model: Path, name: str
) -> None:
    memory = tmp_path / "memory"
    before = weights_identity(model, memory, now_ns=later)
    path = model / name
    was, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns) == (was.st_size, was.st_mtime_ns)
    assert weights_identity(model, memory, now_ns=later) != before


def test_names_in_the_folder_are_part_of_the_identity_but_not_its_path_or_hidden_files(
    tmp_path: Path, model: Path
) -> None:
    before = weights_identity(model, tmp_path / "memory")
    (model / ".cache").mkdir()
    (model / ".cache" / "lock").touch()
    moved = model.rename(tmp_path / "moved")
    assert weights_identity(moved, tmp_path / "memory") == before
    (moved / "config.json").rename(moved / "settings.json")
    assert weights_identity(moved, tmp_path / "memory") != before


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the length of each chunk of data that is hashed."""
    sizes: list[int] = []
    real = xxh3_128

    class Counting:
        def __init__(self, data: bytes = b"") -> None:
            self._state = real(data)

        def update(self, data: bytes) -> None:
            sizes.append(len(data))
            self._state.update(data)

        def hexdigest(self) -> str:
            return self._state.hexdigest()

    monkeypatch.setattr("kvoffload.disk.weights.xxh3_128", Counting)
    return sizes


def test_a_digest_is_computed_once(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "memory"
    before = weights_identity(model, memory, now_ns=later)
    sizes = reads(monkeypatch)
    assert weights_identity(model, memory, now_ns=later) == before
    assert sizes == []
    memory.write_text('["nonsense"]')
    assert weights_identity(model, memory, now_ns=later) == before
    assert sum(sizes) == 256_000 + len('{"rope_theta": 10000}')


@pytest.mark.parametrize("since_ns", [10**6, -(10**15)], ids=["a moment ago", "the clock was set back"])
def test_the_digest_of_a_recently_changed_file_is_not_remembered(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, since_ns: int
) -> None:
    memory = tmp_path / "memory"
    changed = max(path.stat().st_ctime_ns for path in model.rglob("*"))
    weights_identity(model, memory, now_ns=lambda: changed + since_ns)
    sizes = reads(monkeypatch)
    weights_identity(model, memory, now_ns=later)
    assert sum(sizes) > 256_000


def test_digests_are_computed_again_if_they_cannot_be_saved(tmp_path: Path, model: Path) -> None:
    memory = tmp_path / "missing" / "memory"
    assert weights_identity(model, memory) == weights_identity(model, memory)


def test_weights_that_change_while_they_are_read_are_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model / "parts" / "model.safetensors"
    real = xxh3_128

    class Interfering:
        def __init__(self) -> None:
            self._state = real()

        def update(self, data: bytes) -> None:
            self._state.update(data)
            with path.open("ab") as file:
                file.write(b"more")

        def hexdigest(self) -> str:
            return self._state.hexdigest()

    (model / "config.json").unlink()
    monkeypatch.setattr("kvoffload.disk.weights.xxh3_128", Interfering)
    monkeypatch.setattr("kvoffload.disk.weights._CHUNK", 1000 * 256)
    with pytest.raises(DiskError, match="changes while it is read"):
        weights_identity(model, tmp_path / "memory")


def test_a_folder_without_files_has_no_identity(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DiskError, match="the folder has no files"):
        weights_identity(empty, tmp_path / "memory")


def test_r18_a_file_that_changed_since_it_was_loaded_has_no_identity(tmp_path: Path, model: Path) -> None:
    memory = tmp_path / "memory"
    known = weights_identity(model, memory, now_ns=later)
    changed = max(path.stat().st_ctime_ns for path in model.rglob("*.*"))
    assert weights_identity(model, memory, loaded_ns=changed) == known
    with pytest.raises(DiskError, match="has changed since this engine started"):
        weights_identity(model, memory, loaded_ns=changed - 1)


@pytest.mark.parametrize("key", [None, TierKey(bytes(32))], ids=["no key", "key"])
def test_r18_with_a_tier_key_forged_saved_digests_are_ignored(
    key: TierKey | None, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    before = weights_identity(model, memory, key=key, now_ns=later)
    sizes = reads(monkeypatch)
    assert weights_identity(model, memory, key=key, now_ns=later) == before
    assert sizes == []
    data = memory.read_bytes()
    at = data.index(b'"', data.rindex(b", ")) + 1
    memory.write_bytes(data[:at] + b"0" * 32 + data[at + 32 :])
    assert (weights_identity(model, memory, key=key, now_ns=later) == before) is (key is not None)
