"""`kvoffload bench trace`: paper and the real core find the same of a trace, a store finds what one engine would; bad traces are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kvoffload.bench.trace import CoreEngine, PaperEngine, Tiers, play, read_trace, route
from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main

TIERS = [
    Tiers("host", 40),
    Tiers("host, disk", 40, 200),
    Tiers("host, store after a hit", 40, 0, 1),
    Tiers("host, store of all", 40, 0, 0),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Conversations of some turns that begin alike, as a trace."""
    draws, path, new = random.Random(1), tmp_path / "trace.jsonl", iter(range(1, 10_000))
    talks = [[0] for _ in range(12)]
    rows = []
    for at in range(120):
        talk = draws.choice(talks)
        talk += [next(new) for _ in range(draws.randint(1, 2))]
        if len(talk) > 9:
            del talk[1:]
        tokens = 512 * len(talk) - draws.randint(0, 511)
        rows.append(
            {"timestamp": 100 * at, "input_length": tokens, "output_length": 9, "hash_ids": talk.copy()}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_core_finds_what_is_worked_out_on_paper(trace: Path) -> None:
    prompts = list(read_trace(trace))
    for tiers in (TIERS[0], TIERS[3]):
        roomy = tiers._replace(host=400)  # beside so small a host a fetch has room for a part
        paper, core = (play(kind, roomy, prompts, 3) for kind in (PaperEngine, CoreEngine))
        assert paper["hit"] == core["hit"] > 0
        assert paper["asked"] == core["asked"]
        assert paper["put"] == core["put"]


def test_each_tier_below_finds_more_and_a_store_of_all_what_one_engine_would(trace: Path) -> None:
    prompts = list(read_trace(trace))
    host, disk, few, every = (play(PaperEngine, tiers, prompts, 3)["hit"] for tiers in TIERS)
    assert host <= disk <= every
    assert host < few < every
    assert every == play(PaperEngine, Tiers("all", 10**6), prompts, 1)["hit"]
    sticky = play(PaperEngine, TIERS[0], prompts, 3, is_sticky=True)["hit"]
    assert host < sticky <= every


def test_a_conversation_stays_where_it_is(trace: Path) -> None:
    prompts = list(read_trace(trace))
    by_talk: dict[bytes, set[int]] = {}
    for prompt, engine in zip(prompts, route(prompts, 3, is_sticky=True), strict=True):
        if len(prompt.keys) > 1:
            by_talk.setdefault(prompt.keys[1], set()).add(engine)
    assert all(len(engines) == 1 for engines in by_talk.values())
    assert set.union(*by_talk.values()) == {0, 1, 2}


def test_it_prints_hits_and_what_the_network_carries(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "trace", "--trace", str(trace), "--engines", "2", "--json"]
    assert main(command) == 0
    printed = json.loads(capsys.readouterr().out)
    lines = {line["what"]: line["median"] for line in printed["lines"]}
    assert lines["2 engines, in turn, host, store of all: read from the store"] > 0
    assert lines["core, the first 120 requests, 2 engines, in turn, host, store of all: tokens hit"] > 0
    assert lines["speed of an engine's network from which a fetch beats computing"] == pytest.approx(26.214)
    assert str(trace) not in json.dumps(printed)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "cannot be read"), ("", "no requests"), ('{"timestamp": 1}\n', "line 1: no request")],
)
def test_what_is_no_trace_is_refused(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text)
    assert main(["bench", "trace", "--trace", str(path)]) == Exit.USAGE
    assert said in capsys.readouterr().err
