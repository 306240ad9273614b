"""`kvoffload bench scale` and `convoy`: what they say and write with the smallest settings, and what they refuse."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from kvoffload.bench import results, summary
from kvoffload.bench.scale import growth
from kvoffload.bench.scale.engineless import BLOCK_TOKENS, Engineless, Speeds
from kvoffload.cli.exits import CommandError
from kvoffload.cli.main import main

_SMALL = "--tracked 20 40 --pairs 2 --blocks 8 16 --samples 4 --slots 64 128 --requests 700 --pool 200"
SCALE = ["bench", "scale", *_SMALL.split()]
CONVOY = ["bench", "convoy", "--requests", "3", "--prefix-tokens", "64", "--repeats", "2"]


@pytest.fixture(scope="module")
def scale(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What it saved, and the picture beside it."""
    folder = tmp_path_factory.mktemp("scale")
    assert main([*SCALE, "--json", "--save", str(folder / "new"), "--plot", str(folder / "plot.svg")]) == 0
    (saved,) = (folder / "new").iterdir()
    return {**json.loads(saved.read_text()), "plot": (folder / "plot.svg").read_text(), "path": saved}


@pytest.mark.slow
def test_all_that_was_asked_for_is_in_what_it_saves(scale: dict[str, Any]) -> None:
    assert [(case["tracked"], case["work"]) for case in scale["idle"]] == [
        (count, work) for count in (20, 40) for work in ("nothing happens", "a request comes and goes")
    ]
    assert [case["blocks"] for case in scale["lookup"]] == [8, 16, 0]
    assert [case["slots"] for case in scale["memory"]] == [64, 128]
    assert len(scale["growth"]["readings"]) == growth.READINGS
    assert scale["growth"]["readings"][-1]["requests"] >= 700
    assert any(one["found"] > 0 for one in scale["growth"]["readings"])
    assert scale["bench"] == "scale"
    assert {"cpu", "cores", "memory_gib", "load", "python", "kvoffload"} <= scale["machine"].keys()
    assert "20 GiB/s" in scale["method"]


@pytest.mark.slow
def test_the_picture_is_whole_and_needs_nothing_else(scale: dict[str, Any]) -> None:
    root = ElementTree.fromstring(scale["plot"])
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("Python memory of a host slot" in text for text in texts)
    assert not [each for each in root.iter() if any("href" in name for name in each.attrib)]


@pytest.mark.slow
def test_the_readmes_table_is_made_of_what_was_saved(scale: dict[str, Any]) -> None:
    table = summary.render(scale["path"].parent)
    assert "| `scale` | hooks per step with 40 requests that do nothing" in table
    assert "bytes a slot, 128 slots" in table


@pytest.mark.slow
def test_the_table_shows_each_part_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SCALE, "--parts", "lookup"]) == 0
    told = capsys.readouterr().out
    assert "A lookup" in told
    assert "bytes each" not in told


def test_nothing_is_measured_that_could_not_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SCALE, "--plot", str(tmp_path / "none" / "plot.svg")]) == 2
    assert "plot.svg cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("options", ["--parts everything", "--gib-per-s 0", "--slots 0", "--step-ms nan"])
def test_bad_options_are_refused(options: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "scale", *options.split()])
    assert ended.value.code == 2


def test_a_run_too_short_to_be_divided_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SCALE, "--requests", "100"]) == 2
    assert "--requests 100 is too few" in capsys.readouterr().err


# -- the side without an engine -----------------------------------------------------------------------------------


def test_copies_take_the_time_of_their_bytes() -> None:
    """A block of 1 GiB at 1 GiB/s takes a second: with steps of a quarter, four steps pass."""
    rig = Engineless(8, 32, Speeds(gib_per_s=1.0, block_kib=2**20, step_ms=250.0))
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


@pytest.mark.slow
def test_a_stream_ends_with_every_law_kept_and_many_hits() -> None:
    readings = list(growth.stream(growth.LEAST, 4000, Speeds()))
    assert [one.requests >= growth.LEAST * (number + 1) / 10 for number, one in enumerate(readings)] == [
        True
    ] * 10
    assert readings[-1].found > 0.1
    assert all(one.step_us > 0 for one in readings)


def rig_keys(count: int) -> list[Any]:
    return [bytes([number]) * 36 for number in range(count)]


# -- a convoy -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_convoy_loads_its_prefix_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CONVOY, "--json", "--save", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["loads"]["median"] == 1.0
    assert told["loaded_bytes"]["one"] > 0
    assert told["computed_tokens"]["median"] < told["recomputed_tokens"]["median"]
    assert "3 requests with one prefix of 64 tokens" in summary.render(tmp_path)


@pytest.mark.slow
def test_a_convoys_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CONVOY, "--repeats", "1"]) == 0
    assert "1.00x  met" in capsys.readouterr().out


def test_a_prefix_that_is_not_of_whole_blocks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "convoy", "--prefix-tokens", "100"]) == 2
    assert "not a multiple of 16" in capsys.readouterr().err


# -- what is kept -------------------------------------------------------------------------------------------------


def test_results_are_kept_by_bench_and_machine(tmp_path: Path) -> None:
    about = {"cpu": "Some(R) Processor @ 2.50GHz", "cores": 2}
    path = results.save("one", {"machine": about, "found": 1}, tmp_path / "new")
    assert path.name == "one-some-2-50ghz-2-cores.json"
    told = json.loads(path.read_text())
    assert (told["bench"], told["machine"], told["found"]) == ("one", about, 1)
    assert results.save("one", {"machine": about, "found": 2}, path.parent) == path
    assert json.loads(path.read_text())["found"] == 2
    assert results.slug({"gpu": "Maker X100", "cpu": "any"}) == "maker-x100"


def test_what_is_too_large_or_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="over 30000"):
        results.save("one", {"found": "x" * 30_000}, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="cannot be written"):
        results.save("one", {}, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.timeout(20)
def test_what_ends_the_bench_ends_its_process_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = growth.Reading(1, 1.0, 1.0, 1.0, 1.0, 1.0)
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho '{json.dumps(reading.to_plain())}'\nexec sleep 60\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))

    def told(first: growth.Reading) -> None:
        sys.exit(f"after {first.requests}")

    with pytest.raises(SystemExit, match="after 1"):
        growth.measure(growth.LEAST, 4000, Speeds(), told)
