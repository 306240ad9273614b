from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload.disk.folder import describe, lock_folder, make_folder
from kvoffload.disk.identity import KVIdentity, groups_of
from kvoffload.disk.open_folder import open_folder
from kvoffload.model.engine import EngineShape
from kvoffload.model.errors import DiskError
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import GroupId

IDENTITY = KVIdentity(
    engine="engine 1.0",
    weights="commit 1234",
    keys="sha256 seed",
    parallel={"tensor": 2, "pipeline": 1},
    settings={"kv type": "bfloat16"},
    groups=(("full", 16, None, False),),
)


def test_each_identity_has_its_own_folder(tmp_path: Path) -> None:
    others = [
        replace(IDENTITY, engine="engine 1.1"),
        replace(IDENTITY, weights="commit 1235"),
        replace(IDENTITY, keys="sha256 other seed"),
        replace(IDENTITY, parallel={"tensor": 1, "pipeline": 2}),
        replace(IDENTITY, settings={"kv type": "fp8"}),
        replace(IDENTITY, groups=(("full", 32, None, False),)),
        replace(IDENTITY, groups=(("sliding_window", 16, 128, False),)),
    ]
    same = replace(IDENTITY, parallel={"pipeline": 1, "tensor": 2})  # the same parts in another order
    folders = {make_folder(tmp_path, each, 0).path for each in (IDENTITY, same, *others)}
    folders.add(make_folder(tmp_path, IDENTITY, 1).path)
    assert len(folders) == len(others) + 2


def test_the_folder_has_a_description_of_its_identity(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "not" / "there", IDENTITY, 0)
    assert describe(folder, IDENTITY) == describe(folder, IDENTITY) == []
    (path,) = (one for one in folder.path.parent.iterdir() if one != folder.path)
    said = json.loads(path.read_text())
    assert (path.name, said["weights"], said["format"]) == ("identity.json", "commit 1234", 1)


@pytest.mark.parametrize(
    ("found", "differ"),
    [
        (replace(IDENTITY, weights="commit 1", settings={}).as_parts(), ["settings", "weights"]),
        ({}, sorted(IDENTITY.as_parts())),
        (["a list"], []),
        (7, []),
        (None, []),
    ],
    ids=["other KV", "no parts", "a list", "a number", "cut by a power failure"],
)
def test_the_description_of_other_kv_is_replaced_and_the_parts_that_differ_are_returned(
    tmp_path: Path, found: object, differ: list[str]
) -> None:
    folder = make_folder(tmp_path, IDENTITY, 0)
    path = folder.path.parent / "identity.json"
    path.write_text("" if found is None else json.dumps(found))
    assert describe(folder, IDENTITY) == differ
    assert json.loads(path.read_text())["weights"] == "commit 1234"


def test_only_this_user_can_open_the_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "made", IDENTITY, 0).path
    (folder / "lock").touch(0o644)
    folder.chmod(0o755)
    make_folder(tmp_path / "made", IDENTITY, 0).close()
    for path in (folder, folder.parent, tmp_path / "made"):
        assert path.stat().st_mode & 0o777 == 0o700
    lock_folder(open_folder(folder)).close()
    assert (folder / "lock").stat().st_mode & 0o777 == 0o600


def test_an_identity_has_every_property_of_each_group() -> None:
    full = GroupSpec(GroupId(0), AttentionKind.FULL, 16)
    window = GroupSpec(GroupId(1), AttentionKind.SLIDING_WINDOW, 16, 128)
    shape = EngineShape((full, window), ranks=1, device_blocks=8, step_tokens=16)
    assert groups_of(shape) == (("full", 16, None, False), ("sliding_window", 16, 128, False))


def test_a_file_at_the_folders_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("")
    with pytest.raises(DiskError, match="disk_path: the folder"):
        make_folder(tmp_path / "disk", IDENTITY, 0)


def test_the_error_for_a_folder_in_use_names_the_process(tmp_path: Path) -> None:
    held = lock_folder(open_folder(tmp_path))
    with pytest.raises(
        DiskError, match=r"in use by process \d+ on .*; give each engine a disk_path of its own"
    ):
        lock_folder(open_folder(tmp_path))
    held.close()
    lock_folder(open_folder(tmp_path)).close()
