"""`kvoffload bench scale`: what it says and writes with the smallest settings, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvoffload.bench import results
from kvoffload.bench.scale import engineless
from kvoffload.bench.scale.engineless import BLOCK_TOKENS, Engineless
from kvoffload.cli.exits import CommandError
from kvoffload.cli.main import main

_SMALL = "--tracked 20 40 --pairs 2 --blocks 8 16 --samples 4 --slots 64 128"
SCALE = ["bench", "scale", *_SMALL.split()]


@pytest.mark.slow
def test_all_that_was_asked_for_is_in_what_it_saves(tmp_path: Path) -> None:
    assert main([*SCALE, "--json", "--save", str(tmp_path / "new")]) == 0
    (saved,) = (tmp_path / "new").iterdir()
    reported = json.loads(saved.read_text())
    what = [line["what"] for line in reported["lines"]]
    for wanted in (
        *(
            f"hooks per step with {count} requests that do nothing: nothing happens, over 10"
            for count in (20, 40)
        ),
        *(f"the search behind a lookup, {blocks}" for blocks in ("8 blocks", "16 blocks", "a miss")),
        *(f"a slot's memory, full, {slots} slots" for slots in (64, 128)),
    ):
        assert any(wanted in line for line in what), wanted
    assert all(line["median"] > 0 for line in reported["lines"])
    assert reported["bench"] == "scale"
    assert {"cpu", "cores", "memory_gib", "load", "python", "kvoffload"} <= reported["machine"].keys()
    assert "20 GiB/s" in reported["method"]


@pytest.mark.slow
def test_the_table_shows_each_part_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SCALE, "--parts", "lookup"]) == 0
    reported = capsys.readouterr().out
    assert "the whole lookup" in reported
    assert "a slot's memory" not in reported


@pytest.mark.parametrize("options", ["--parts everything", "--slots 0", "--pairs none"])
def test_bad_options_are_refused(options: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "scale", *options.split()])
    assert ended.value.code == 2


# -- the side without an engine -----------------------------------------------------------------------------------


def test_copies_take_the_time_of_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that takes a second to copy, in steps of a quarter: four steps pass."""
    monkeypatch.setattr(engineless, "BLOCK_S", 1.0)
    monkeypatch.setattr(engineless, "STEP_S", 0.25)
    rig = Engineless(8, 32)
    keys = rig_keys(1)
    rig.hold("a", keys)
    pool = rig.side.core.state.pool
    for _ in range(3):
        rig.step()
        assert not pool.index
    rig.step()
    assert list(pool.index) == keys


def test_what_was_stored_is_found_and_loaded_and_nothing_is_left() -> None:
    rig = Engineless(8, 64)
    keys = rig_keys(3)
    rig.hold("first", keys)
    rig.drain()
    again = rig.seen("again", keys)
    assert rig.lookup(again) == 3 * BLOCK_TOKENS
    table = rig.allocated(again, 4, 3 * BLOCK_TOKENS)
    loaded = [*rig.step().loaded, *rig.step().loaded]
    assert loaded == [again]
    rig.step([(again, 3 * BLOCK_TOKENS)])
    rig.ended(again, 3 * BLOCK_TOKENS, table)
    assert not rig.side.audit()
    assert rig.hook_s > 0


def rig_keys(count: int) -> list[Any]:
    return [bytes([number]) * 36 for number in range(count)]


# -- what is kept -------------------------------------------------------------------------------------------------


def test_results_are_kept_by_bench_and_machine(tmp_path: Path) -> None:
    about = {"cpu": "Some(R) Processor @ 2.50GHz", "cores": 2}
    path = results.save("one", {"machine": about, "found": 1}, tmp_path / "new")
    assert path.name == "one-some-2-50ghz-2-cores.json"
    reported = json.loads(path.read_text())
    assert (reported["bench"], reported["machine"], reported["found"]) == ("one", about, 1)
    assert results.save("one", {"machine": about, "found": 2}, path.parent) == path
    assert json.loads(path.read_text())["found"] == 2
    assert results.slug({"gpu": "Maker X100", "cpu": "any"}) == "maker-x100"


def test_what_is_too_large_or_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="over 30000"):
        results.save("one", {"machine": {}, "found": "x" * 30_000}, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="cannot be written"):
        results.save("one", {"machine": {}}, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
