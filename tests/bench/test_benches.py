"""Tests of the benches, with small settings. The tests of benches that need vLLM are in tests/vllm."""

from __future__ import annotations

import ctypes
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvoffload.cli.exits import CommandError, Exit
from kvoffload.disk.slot_file import SlotFile
from kvoffload.model.wire import Direction
from kvoffload.transfer import host_copier
from kvoffload.transfer.runs import CopyRuns
from tests.bench import copy_lanes, trace_node, worker
from tests.bench.__main__ import main
from tests.bench.beside import CHECKOUT, running
from tests.bench.copy_rig import Rig, WrongBytes
from tests.bench.disk_opening import opening
from tests.bench.hints import CLAIMS, draw_sessions, replay, with_sessions
from tests.bench.lines import HEADLINES, line, median_interval
from tests.bench.trace import CoreEngine, PaperEngine, Tiers, play
from tests.bench.trace_file import GROUP, Prompt, Trace, read_trace
from tests.bench.workloads import draw_workload
from tests.keys import block_key

COPIES = "--copies-only --mib 1 --block-kib 64 --repeats 2"
PAGE = 4096


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.tools("ibverbs")
@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("copy --mib 1 --page-kib 4 --repeats 2", 8),
        (f"disk {COPIES}", 4),
        ("engine --model tiny --pairs 1 --conversations 2", 4),
        ("node --mib 1 --page-kib 4 --repeats 2 --slots 600", 9),
        ("node --engines --model tiny --prompts 2", 5),
        ("loads --requests 30 --links slow --loads light", 8),
        (f"remote {COPIES}", 8),
        ("scale --blocks 8 --samples 4 --slots 64", 10),
        ("verify --mib 1 --block-kib 64 --repeats 2", 4),
        (f"worker --turns 2 --steps 2 --beside {CHECKOUT}", 6),
    ],
)
def test_a_bench_measures_and_prints_its_lines(
    command: str,
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # the disk bench measures the disk of the current folder
    assert main([*command.split(), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [line["median"] > 0 for line in printed["lines"]] == [True] * lines
    assert not list(tmp_path.iterdir())


def test_the_opening_of_an_index_is_measured(tmp_path: Path) -> None:
    assert all(line.median > 0 for line in opening(tmp_path, 10_000, 1))


def break_copies(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[CopyRuns], None]) -> None:
    """Make the host copier call `spoil` with the runs of each copy after the copy."""

    def copy(runs: CopyRuns) -> None:
        host_copier.copy_by_memmove(runs)
        spoil(runs)

    monkeypatch.setattr(host_copier, "choose_copy", lambda **_: copy)


def flip(address: int) -> None:
    ctypes.c_ubyte.from_address(address).value ^= 1


def last_byte(runs: CopyRuns) -> None:
    flip(int(runs.target[-1] + runs.size[-1]) - 1)


def byte_behind(runs: CopyRuns) -> None:
    """Flip a byte of a page that follows a written page, but that the copy did not write."""
    flip(int(np.setdiff1d(runs.target + PAGE, runs.target)[0]))


@pytest.mark.parametrize("spoil", [last_byte, byte_behind])
@pytest.mark.parametrize("way", list(Direction))
def test_a_copy_that_moves_a_wrong_byte_is_not_timed(
    way: Direction, spoil: Callable[[CopyRuns], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_copies(monkeypatch, spoil)
    with (
        Rig(PAGE, 2**20) as rig,
        pytest.raises(WrongBytes, match=f"{way.value}, .* 1 bytes are wrong on the"),
    ):
        rig.check(way)


def test_a_load_of_wrong_bytes_during_stores_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt: list[CopyRuns] = []

    def once(runs: CopyRuns) -> None:
        if not spoilt:
            last_byte(runs)
        spoilt.append(runs)

    break_copies(monkeypatch, once)
    with pytest.raises(WrongBytes, match="differs"):
        list(copy_lanes.measure_loads(2**20, 1))


def test_wrong_bytes_from_the_disk_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = SlotFile.read

    def flipped(file: SlotFile, slot: int, data: Sequence[memoryview]) -> None:
        read(file, slot, data)
        data[0][100] ^= 1

    monkeypatch.setattr(SlotFile, "read", flipped)
    assert main(["disk", *COPIES.split(), "--dir", str(tmp_path)]) == Exit.USAGE
    assert "a load of the disk ended as corrupt" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("block", [16, 512])
def test_the_core_finds_the_tokens_of_a_trace_that_the_simple_model_finds(tmp_path: Path, block: int) -> None:
    draws, path, new = random.Random(1), tmp_path / "trace.jsonl", iter(range(1, 10_000))
    talks = [[0] for _ in range(12)]
    rows = []
    for at in range(120):
        talk = draws.choice(talks)
        talk += [next(new) for _ in range(draws.randint(1, 2))]
        if len(talk) > 9:
            del talk[1:]
        tokens = block * len(talk) - draws.randrange(block)
        rows.append({"timestamp": 100 * at, "input_length": tokens, "hash_ids": talk.copy()})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read_trace(path)
    assert trace.block_tokens == block
    for tiers in (Tiers("host", 400), Tiers("node", 400, node=True), Tiers("host, store of all", 400, 0, 0)):
        paper, core = (play(kind, tiers, trace, 3) for kind in (PaperEngine, CoreEngine))
        assert paper["hit"] == core["hit"] > 0
        for what in ("asked", "put", "read"):
            assert paper[what] == core[what]
    assert main(["trace", "--trace", str(path), "--engines", "2"]) == 0


def test_engines_of_a_machine_read_fetched_blocks_again_only_if_they_do_not_keep_them() -> None:
    trace = draw_workload("agents", 40)
    alone = trace_node.replay(trace, 2, 10_000, trace_node.WAYS["kept"], node=False)
    found = {name: trace_node.replay(trace, 2, 10_000, leave) for name, leave in trace_node.WAYS.items()}
    assert found["kept"].hit == found["cold end"].hit > alone.hit
    assert found["dropped"].read > found["kept"].read == found["cold end"].read > alone.read == 0


@pytest.mark.parametrize(
    ("samples", "at_least", "at_most", "is_met"),
    [
        ([0.99], 0.99, None, True),
        ([0.989], 0.99, None, False),
        ([1.1], None, 1.1, True),
        ([1.11], None, 1.1, False),
        ([0.5, 1.1, 9.0], None, 1.1, True),
        ([5.0], None, None, None),
    ],
)
def test_the_median_meets_a_target_or_misses_it(
    samples: Sequence[float], at_least: float | None, at_most: float | None, is_met: bool | None
) -> None:
    assert line("it", samples, at_least=at_least, at_most=at_most).is_met is is_met


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (20, 6), (40, 14)])
def test_the_ends_of_an_interval_follow_the_binomial_distribution(count: int, rank: int) -> None:
    assert median_interval(list(range(count, 0, -1))) == (rank, count + 1 - rank)
    assert median_interval([1.0] * 5) == (-math.inf, math.inf)


def test_the_page_has_at_most_25_headlines() -> None:
    assert sum(map(len, HEADLINES.values())) <= 25


@pytest.mark.parametrize("bench", ["instructions", "worker"])
def test_a_folder_without_our_packages_is_no_other_build(
    bench: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([bench, "--beside", str(tmp_path)])
    assert "is no checkout of this repository" in capsys.readouterr().err


def test_a_script_that_fails_is_an_error_with_its_words() -> None:
    with (
        running("worker_steps.py", ["no number", "1"], CHECKOUT) as ask,
        pytest.raises(CommandError, match="no number"),
    ):
        ask()


def test_a_workers_figures_are_divided_by_those_of_the_same_turn() -> None:
    mine = [{"store_us": each, "load_us": 9.0, "wakes": 1.0} for each in (1.0, 10.0, 3.0)]
    other = [{"store_us": each, "load_us": 6.0, "wakes": 2.0} for each in (2.0, 20.0, 12.0)]
    found = {one.what: one.median for one in worker.lines(mine, other)}
    assert [*found.values()] == [3, 0.5, 9, 1.5, 1, 0.5]
    assert len([*worker.lines(mine)]) == 3


def test_agents_that_name_ended_sessions_find_more() -> None:
    trace = draw_sessions(60)
    found = {name: replay(trace, 1, CLAIMS[name]) for name in ("none", "all sessions")}
    assert found["all sessions"] > found["none"] + 0.03


def test_prompts_of_a_trace_that_continue_each_other_are_a_session() -> None:
    texts = ("abc", "abd", "abce", "xyz")
    prompts = [Prompt(0.0, 9, tuple(block_key(char.encode(), GROUP) for char in text)) for text in texts]
    turns = with_sessions(Trace(1, prompts)).prompts
    assert [turn.is_last_turn for turn in turns] == [False, True, True, True]
    assert turns[0].session == turns[2].session
