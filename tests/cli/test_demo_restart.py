"""`demo --disk DIR --restart`: engines in processes of their own, killed for real, and what they find again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffload.cli.demo.compare import compare
from kvoffload.cli.demo.engine_process import Served
from kvoffload.cli.demo.play import Play
from kvoffload.cli.demo.processes import Variant
from kvoffload.cli.demo.restart import RestartResult, render
from kvoffload.cli.demo.results import Quantiles
from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_was_written_before_a_kill_is_found_after_it(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Long enough for several writes of the index before the kill; `small` can be over before the first one.
    longer = ["--first-tokens", "1600", "--answer-tokens", "20", "--device-blocks", "220"]
    code = main([*small, *longer, "--disk", str(tmp_path), "--restart", "--json"])
    said = capsys.readouterr()
    assert code == Exit.OK, said.err
    found = json.loads(said.out)
    assert (found["kind"], found["passed"], found["killed_in_turn"]) == ("restart", True, 3)
    assert found["before"]["stored"] > found["before"]["spilled"] > 0
    assert 0 < found["after"]["fetched"] <= found["disk_blocks"]
    computed = {name: one["computed_tokens"] for name, one in found["variants"].items()}
    assert computed["disk"] < computed["host"] <= computed["without"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--restart"], "--restart needs --disk"),
        (["--disk", ".", "--restart", "--turns", "2"], "--restart needs at least 3 --turns"),
        (["--disk", ".", "--config", "disk_path=/x"], "disk_path is set twice"),
        (["--disk", "/nosuch"], "--disk /nosuch: no folder can be made in it"),
    ],
)
def test_what_cannot_be_is_said_before_an_engine_starts(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *argv]) == Exit.USAGE
    assert problem in capsys.readouterr().err


def test_the_table_says_what_was_not_written_and_why() -> None:
    slow, fast = (Variant(Quantiles(3, p50, 2 * p50), None, 900, 10, 20) for p50 in (12.8, 3.2))
    nothing = compare(Play((), 0.0), Play((), 0.0))
    result = RestartResult(
        killed_in_turn=3,
        variants={"without": slow, "host": slow, "disk": fast},
        sooner=4.0,
        before=Served(stored=10, spilled=6, dropped=1, written_bytes=2**20),
        disk_blocks=6,
        after=Served(fetched=5, read_bytes=2**19),
        agreements={"disk": nothing},
        broken_laws=("disk: a law",),
    )
    lines = render(result)
    assert lines[0].endswith("12,800 -> 3,200 ms (4.0x). Outputs DIFFER, or laws are BROKEN.")
    assert "not written 3 not found again yet, or still to be written; 1 evicted first" in lines
    assert "after it    6 blocks were found on the disk, 5 of them fetched (512.0 KiB)" in lines
    assert "audit       disk: a law" in lines
    [times] = [line for line in lines if line.startswith("first token")]
    assert times.split("p50/p99")[1].split() == ["12,800/25,600", "ms"] * 2 + ["3,200/6,400", "ms"]
