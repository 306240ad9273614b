from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main
from kvoffload.node.folder import Kept, Owner, list_kept
from kvoffload.node.processes import Process, this_process
from tests.reference.rig import rig, text


@contextmanager
def engine(folder: Path, weights: str) -> Iterator[None]:
    """Run an engine with host memory in `folder`. Engines with other weights are of another kind."""
    with rig(host_blocks=20, extra={"host_path": folder, "weights_id": weights}) as made:
        made.drain()
        made.run(text(1, 20))
        yield


@pytest.fixture
def folder(shared_memory: Path) -> Iterator[Path]:
    """Yield a host_path with the memory of two stopped engines and of one that runs."""
    for weights in ("a", "b"):
        with engine(shared_memory, weights):
            pass
    with engine(shared_memory, "c"):
        yield shared_memory


def run(capsys: pytest.CaptureFixture[str], *argv: object, code: int = Exit.OK) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["host-memory", *map(str, argv)]) == code
    return capsys.readouterr()


def names(folder: Path, *, orphans: bool) -> list[str]:
    return [str(kept.path.relative_to(folder)) for kept in list_kept(folder) if kept.is_orphan is orphans]


def test_each_engines_memory_is_listed_with_its_state_and_sum(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = run(capsys, folder)
    heading, *rows, empty, total = out.splitlines()
    assert (heading.split(), empty) == (["folder", "bytes", "since", "state", "processes"], "")
    states = {row.split()[0]: row.split()[5:] for row in rows}
    (used,) = names(folder, orphans=False)
    assert states == {
        **{name: ["orphan", "-"] for name in names(folder, orphans=True)},
        used: ["in", "use", str(os.getpid())],
    }
    assert "of 2 stopped engines; its tmpfs has " in total


def test_the_list_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(run(capsys, folder, "--json")[0])
    assert (answer["schema"], answer["kind"], answer["path"]) == (1, "host-memory", str(folder))
    assert answer["left_bytes"] > 0
    assert answer["removed"] == []
    assert [one["is_orphan"] for one in answer["folders"]].count(True) == 2
    for one in answer["folders"]:
        assert Path(one["folder"]).parent.name == one["kind"]
        assert one["bytes"] > 20 * 1024
        assert one["since"] > 1e9
        assert one["engine"]
        running = [{"pid": os.getpid(), "state": "running"}]
        assert one["processes"] == ([] if one["is_orphan"] else running)


def test_orphans_are_removed_and_memory_in_use_stays(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orphans, used = names(folder, orphans=True), names(folder, orphans=False)
    out, _ = run(capsys, folder, "--orphans")
    assert [line.split(":")[0] for line in out.splitlines()] == [f"removed {name}" for name in orphans]
    assert [str(kept.path.relative_to(folder)) for kept in list_kept(folder)] == used
    assert run(capsys, folder, "--orphans")[0] == "nothing was removed\n"


@pytest.mark.parametrize("is_absolute", [True, False])
def test_one_folder_is_removed(folder: Path, is_absolute: bool, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = names(folder, orphans=True)
    answer = json.loads(
        run(capsys, folder, "--remove", folder / first if is_absolute else first, "--json")[0]
    )
    assert [one["folder"] for one in answer["removed"]] == [str(folder / first)]
    assert names(folder, orphans=True) == [second]


def test_memory_in_use_is_never_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (used,), (orphan, _) = names(folder, orphans=False), names(folder, orphans=True)
    _, err = run(capsys, folder, "--remove", used, "--remove", orphan, code=Exit.FAILED)
    assert err == f"kvoffload: error: {folder / used} stays: an engine uses it\n"
    assert names(folder, orphans=False) == [used]
    assert orphan not in names(folder, orphans=True)


def test_an_engine_that_takes_an_orphan_in_the_last_moment_keeps_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is older than the engine that found its memory again."""
    before = list_kept(folder)
    monkeypatch.setattr("kvoffload.node.folder.list_kept", lambda root: before)
    with engine(folder, "a"):
        _, err = run(capsys, folder, "--orphans", code=Exit.FAILED)
    assert err.count("stays: an engine uses it by now") == 1
    monkeypatch.undo()
    assert len(list_kept(folder)) == 2


def test_folders_in_which_no_engine_has_begun_are_left_alone(
    shared_memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shared_memory / "photos" / "2026"
    own.mkdir(parents=True)
    (own / "a").write_text("mine")
    out, _ = run(capsys, shared_memory, "--orphans")
    assert out == "nothing was removed\n"
    assert (own / "a").read_text() == "mine"
    assert "has no engine's memory" in run(capsys, shared_memory)[0]


def test_processes_that_may_still_write_are_named(
    shared_memory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = this_process()._replace(started=1)
    other = Process(7, 1, "pid:[1]")
    owner = Owner("e", (this_process(),), (other, ended))
    kept = Kept(shared_memory / "kind" / "0", 1, 0, 0.0, owner, is_orphan=True)
    monkeypatch.setattr("kvoffload.node.folder.list_kept", lambda root: [kept])
    (folder,) = json.loads(run(capsys, shared_memory, "--json")[0])["folders"]
    assert folder["processes"] == [
        {"pid": os.getpid(), "state": "running"},
        {"pid": 7, "state": "of another container"},
    ]
    assert run(capsys, shared_memory)[0].splitlines()[1].endswith(f"orphan  {os.getpid()}, 7?")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing", "cannot be read (No such file"),
        ("file", "cannot be read (Not a directory)"),
        ("", "it must be on"),
    ],
)
def test_a_path_without_host_memory_is_one_line(
    path: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    out, err = run(capsys, tmp_path / path, code=Exit.USAGE)
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_a_folder_that_is_not_in_the_list_is_an_error_that_names_those_that_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (used,) = names(folder, orphans=False)
    _, err = run(capsys, folder, "--remove", "other/0", code=Exit.USAGE)
    assert "no engine's folder below" in err
    assert used in err
    assert len(list_kept(folder)) == 3


def test_the_list_imports_no_engine_library(shared_memory: Path) -> None:
    """An operator who must free memory at once should not wait for torch."""
    program = (
        "import sys; from kvoffload.cli.main import load; from argparse import Namespace as N; from pathlib import Path; "
        "load('host-memory').run(N(path=Path(sys.argv[1]), remove=[], orphans=False, json=False)); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, shared_memory], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("False\n")
