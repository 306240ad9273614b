from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffload.disk.folder import caution, describe, lock_folder, make_folder
from kvoffload.disk.index import NotAnIndex, load_index, remove_index, start_index
from kvoffload.disk.open_folder import close_locked, lock, open_folder
from kvoffload.disk.slot_file import open_slot_file
from kvoffload.disk.weights import weights_identity
from kvoffload.model.errors import DiskError
from tests.disk.blocks import open_descriptors, shape_of
from tests.disk.test_folder import IDENTITY
from tests.disk.test_index_format import put
from tests.disk.test_index_log import HEADER


def identify(folder: Path) -> None:
    model = folder / "model"
    model.mkdir()
    (model / "weights").touch()
    weights_identity(model, folder / "weights.json")


USES: dict[str, Callable[[Path], object]] = {
    "identity.json": lambda folder: describe(open_folder(folder).make("replica0"), IDENTITY),
    "index": lambda folder: load_index(open_folder(folder), HEADER.slots),
    "lock": lambda folder: lock_folder(open_folder(folder)),
    "slots0": lambda folder: open_slot_file(open_folder(folder), shape_of(0), 4),
    "weights.json": identify,
}


def put_in_place(path: Path, kind: str) -> None:
    victim = path.parent / "victim"
    victim.write_text("precious")
    match kind:
        case "link":
            path.symlink_to(victim)
        case "hard link":
            os.link(victim, path)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "other owner":
            path.touch(0o600)
            os.chown(path, 1234, 1234)
        case _:
            path.touch()
            path.chmod(0o620)


OTHER_OWNER = pytest.param(
    "other owner",
    marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user"),
)
KINDS = ["link", "hard link", "pipe", OTHER_OWNER, "mode"]


@pytest.mark.parametrize("kind", [*KINDS, "folder"])
@pytest.mark.parametrize("name", USES)
def test_an_unsafe_file_is_refused_and_its_target_is_unchanged(tmp_path: Path, name: str, kind: str) -> None:
    put_in_place(tmp_path / name, kind)
    with pytest.raises(DiskError, match=rf"{name} is not used: its owner is \d+, its mode \S+, .* must be"):
        USES[name](tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_index_replaces_any_file_with_its_name(tmp_path: Path, kind: str) -> None:
    put_in_place(tmp_path / "index.new", kind)
    start_index(open_folder(tmp_path), HEADER).close()
    assert (tmp_path / "index").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "index").stat().st_uid == os.geteuid()
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("kind", ["link", "file", OTHER_OWNER, "mode"])
@pytest.mark.parametrize("is_parent", [True, False])
def test_an_unsafe_folder_is_refused(tmp_path: Path, kind: str, *, is_parent: bool) -> None:
    path = tmp_path / IDENTITY.fingerprint / "replica0"
    path = path.parent if is_parent else path
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        path.touch()
    else:
        path.mkdir()
        path.chmod(0o777 if kind == "mode" else 0o700)
        os.chown(path, 1234 if kind == "other owner" else -1, -1)
    files = open_descriptors()
    with pytest.raises(DiskError, match=r"is not used: its owner .* must be a folder of user"):
        make_folder(tmp_path, IDENTITY, 0)
    assert open_descriptors() == files


@pytest.mark.parametrize(("bits", "who"), [(0o022, "every user"), (0o020, "every user of its group")])
def test_a_root_that_others_can_write_to_causes_a_warning_unless_it_is_sticky(
    tmp_path: Path, bits: int, who: str
) -> None:
    root = tmp_path / "disk"
    assert caution(root) == ""
    root.mkdir()
    root.chmod(0o755)
    assert caution(root) == ""
    root.chmod(0o755 | bits)
    assert caution(root / "below").startswith(f"{who} may rename")
    root.chmod(0o1755 | bits)
    assert caution(root) == ""


def test_r10_an_index_is_erased_even_if_its_folder_was_moved_and_the_reset_reports_it(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir(mode=0o700)
    folder = open_folder(tmp_path / "place")
    index = start_index(folder, HEADER)
    index.append([put(1)])
    (tmp_path / "place").rename(tmp_path / "moved")
    os.link(tmp_path / "moved" / "index", tmp_path / "kept")
    (tmp_path / "place").mkdir(mode=0o700)
    with pytest.raises(DiskError, match="is not the folder any more"):
        remove_index(folder, index)
    assert not (tmp_path / "moved" / "index").exists()
    (tmp_path / "kept").rename(tmp_path / "moved" / "index")
    with pytest.raises(NotAnIndex, match="erased by a reset"):
        load_index(open_folder(tmp_path / "moved"), HEADER.slots)
    index.close()
    folder.close()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    held = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    lock(held)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    close_locked(held)
    again = os.open(tmp_path / "lock", os.O_RDWR)
    try:
        lock(again)  # raises if the child still has the lock
        close_locked(again)
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for descriptor in (*ready, *go):
            os.close(descriptor)


def test_a_write_of_0_bytes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = start_index(open_folder(tmp_path), HEADER)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="wrote nothing"):
        index.append([put(1)])
