"""`kvoffload report` and `kvoffload demo --report`: what the page says is what was counted, and it needs nothing else."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections import Counter
from html import escape
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from dashboards.generate.colours import COLOURS as DASHBOARDS
from kvoffload.cli.exits import Exit
from kvoffload.cli.journal_lines import Lines
from kvoffload.cli.main import main
from kvoffload.cli.report.account import Account, add_up
from kvoffload.cli.report.figures import COLOURS, Bars, Figure, Table, Tick
from kvoffload.cli.report.page import Page, render
from kvoffload.core.machine import SlotState
from kvoffload.model.transfer import Direction
from kvoffload.telemetry.journal_reader import BEGUN
from kvoffload.telemetry.labels import label_of

if TYPE_CHECKING:
    from pathlib import Path
from statistics import median

# Long enough that the host has memory before it is over, on a busy machine too; the host evicts.
_TIGHT = (
    "demo --model tiny --conversations 6 --turns 4 --first-tokens 400 --turn-tokens 30 --answer-tokens 5 "
    "--device-blocks 80 --host-bytes 4MiB"
)


def account_of(journal: Path) -> Account:
    return add_up(Lines(journal))


class Reading(HTMLParser):
    """Tables by the id of their figure, and everything that names something outside the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[str] = []
        self.references: list[str] = []
        self._name = ""
        self._cell: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        self.references += [f"{tag} {key}" for key in named if key in ("src", "href", "srcset", "xlink:href")]
        if tag in ("figure", "section"):
            self._name = named.get("id") or tag
        elif tag == "tr":
            self.tables.setdefault(self._name, []).append([])
        elif tag in ("td", "th"):
            self._cell = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._cell is not None:
            self.tables[self._name][-1].append("".join(self._cell))
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)

    def number(self, table: str, row: str, column: int) -> int:
        """Return one whole number of a table."""
        (found,) = [line for line in self.tables[table] if line[0] == row]
        return int(found[column].replace(",", ""))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """One demo's page, its journal and its JSON."""
    folder = tmp_path_factory.mktemp("run")
    page, journal = folder / "demo.html", folder / "journal.jsonl"
    # A process of its own: the demo sets up logging, which a fixture for the whole module would leave behind.
    command = [sys.executable, "-m", "kvoffload.cli", *_TIGHT.split(), "--json", "--report", str(page)]
    answer = subprocess.run(
        [*command, "--config", f"journal_path={journal}"], check=True, capture_output=True
    )
    return page, journal, json.loads(answer.stdout)


@pytest.mark.slow
def test_the_demos_page_has_the_demos_numbers(run: tuple[Path, Path, dict[str, Any]]) -> None:
    page, _, reported = run
    reading = Reading(page.read_text())
    offloading = reported["offloading"]
    missed = {cause.replace("_", " "): blocks for cause, blocks in offloading["missed_blocks"].items()}
    behind = missed.pop("behind miss")
    assert f"{behind:,} more blocks lay behind" in page.read_text()
    assert {row[0]: int(row[1].replace(",", "")) for row in reading.tables["misses"][1:]} == missed
    assert reading.number("transfers", "loads", 2) == offloading["loaded_bytes"] > 0
    assert reading.number("transfers", "stores", 2) == offloading["stored_bytes"] > 0
    for tier in ("device", "host"):
        tokens = reported["with_offloading"][f"{tier}_tokens"]
        assert reading.number("hits", tier, 1) == tokens
        assert reading.number("section", f"prompt tokens reused from the {tier}", 2) == tokens
    assert reading.number("hits", "all prompts", 1) == reported["with_offloading"]["prompt_tokens"]
    turns = reported["workload"]["conversations"] * (reported["workload"]["turns"] - 1)
    for how in ("with", "without"):
        (row,) = [r for r in reading.tables["first-tokens"] if r[0] == f"returning turns, {how}"]
        median = 1000 * reported[f"{how}_offloading"]["returning_ttft_s"]["p50"]
        assert row[1:3] == [str(turns), f"{median:,.1f}"]
    assert offloading["evicted_blocks"]


@pytest.mark.slow
def test_a_journals_page_has_the_journals_numbers(
    run: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, journal, _ = run
    target = tmp_path / "journal.html"
    assert main(["report", str(journal), "-o", str(target)]) == Exit.OK
    reading, account = Reading(target.read_text()), account_of(journal)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for way in Direction:
        copied = [x for x in lines if x["event"] == "RankReported" and x["direction"] == way.value]
        assert reading.number("transfers", f"{way.value}s", 1) == len(copied) > 0
        assert reading.number("transfers", f"{way.value}s", 2) == sum(x["copied_bytes"] for x in copied)
    lookups = [x for x in lines if x["event"] == "LookupAnswered"]
    assert reading.number("hits", "host", 1) == sum(x["hit_tokens"] for x in lookups) > 0
    assert account.counted.total("kvoffload_miss_blocks_total") == sum(x["miss_blocks"] for x in lookups)
    (begun,) = [x for x in lines if x["event"] == BEGUN]
    assert account.lines == len(lines) - 1
    text = target.read_text()
    for part in (
        begun["kvoffload"],
        begun["began"],
        begun["host"],
        begun["cpu"],
        "host_bytes",
        "random weights",
    ):
        assert escape(str(part)) in text, part
    assert re.findall("<h2[^>]*>(.*?)</h2>", text) == [
        "Time to first token, by what was found",
        "Hit ratio by tier",
        "Host slots by state",
        "Transfers",
        "Lookups that missed, by cause",
        "Offered blocks by outcome",
    ]
    first = [x for x in lines if x["event"] == "FirstTokenReached"]
    for found, label in (("host", "on the host"), ("nothing", "nothing")):
        times = sorted(x["seconds"] for x in first if x["found"] == found)
        (row,) = [row for row in reading.tables["first-tokens"] if row[0] == label]
        assert row[1:3] == [f"{len(times):,}", f"{1000 * median(times):,.1f}"]
    outcomes = Counter[str]()
    for x in lines:
        if x["event"] == "StoreEnded":
            outcomes[x["outcome"].replace("_", " ")] += x["blocks"]
    assert {row[0]: int(row[1].replace(",", "")) for row in reading.tables["stores"][1:]} == +outcomes
    stored = account.counted.count("kvoffload_store_blocks_total", "stored")
    evicted = account.counted.total("kvoffload_evicted_blocks_total")
    assert account.occupancy[-1].slots == {"pinned": 0, "ready": stored - evicted, "filling": 0}
    assert account.capacity is not None
    assert max(sum(one.slots.values()) for one in account.occupancy) <= account.capacity


@pytest.mark.slow
def test_a_page_needs_nothing_but_itself(run: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    target = tmp_path / "journal.html"
    main(["report", str(run[1]), "-o", str(target)])
    for page in (run[0], target):
        text = page.read_text()
        reading = Reading(text)
        assert not reading.references
        assert not {"script", "link", "img", "iframe", "object", "embed"} & set(reading.tags)
        assert "default-src 'none'; style-src 'unsafe-inline'" in text
        assert not re.search(r"url\(|@import|https?:", text)


def test_what_is_written_is_text_and_never_markup() -> None:
    evil = "<script>alert(1)</script>\"'&"
    figure = Figure(
        "x", evil, evil, evil, "<path/>", Table((evil,), ((evil,),)), evil, (), (Tick(0.5, evil),), {}
    )
    bars = Bars("y", evil, evil, {evil: 3}, evil)
    page = render(
        Page(evil, evil, False, [evil], {evil: evil}, [figure, bars], Table((evil,), ((evil,),)), [evil])
    )
    assert "<script" not in page
    assert 'alert(1)</script>"' not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;") > 15


def test_colours_are_the_dashboards() -> None:
    assert {key: DASHBOARDS[key] for key in COLOURS} == COLOURS
    assert COLOURS.keys() >= set(map(label_of, SlotState)) - {"empty"}
    assert COLOURS.keys() >= {way.value for way in Direction}


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "No such file"), ("", "is empty"), ("hello\n", "line 1: not JSON"), ("{}\n", "line 1")],
)
def test_what_is_no_journal_is_said_and_nothing_is_written(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, target = tmp_path / "journal.jsonl", tmp_path / "page.html"
    if text is not None:
        journal.write_text(text)
    assert main(["report", str(journal), "-o", str(target)]) == Exit.USAGE
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"journal.jsonl"}


def test_bytes_that_are_no_text_are_written_as_an_escape(tmp_path: Path) -> None:
    """The model's path may not be UTF-8; JSON keeps its bytes as lone surrogates."""
    path = tmp_path / "journal"
    engine = {"name": "vllm", "version": "1", "model": "/models/\udcff"}
    lines = [
        {"seq": 0, "t": 1, "event": BEGUN, "engine": engine},
        {"seq": 1, "t": 1, "event": "BlocksOffered", "blocks": 3},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(path)]) == Exit.OK
    assert r"model /models/\udcff" in path.with_name("journal.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["report", "timeline"])
def test_escapes_of_a_journal_do_not_reach_the_terminal(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal\x1b]0;title\x07"
    path.write_text(
        json.dumps({"seq": 1, "t": 1, "event": "BlocksOffered", "blocks": 3, "\x1b[2J": 1}) + "\n"
    )
    assert main([command, str(path)]) == Exit.USAGE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.rstrip("\n").isprintable()
    assert "?[2J" in said


@pytest.mark.parametrize("command", ["report", "timeline"])
def test_a_folder_is_no_journal(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path), "--last", "1h"]) == Exit.USAGE
    assert capsys.readouterr().err == f"kvoffload: error: {tmp_path}: Is a directory\n"


def test_a_journal_that_is_cut_off_is_shown_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "journal.jsonl"
    line = json.dumps({"seq": 5, "t": 1.5, "event": "BlocksOffered", "blocks": 3})
    later = json.dumps({"seq": 8, "t": 2.5, "event": "BlocksOffered", "blocks": 4})
    journal.write_text(f"{line}\n{later}\n{line[:10]}")
    assert main(["report", str(journal)]) == Exit.FAILED
    page = (tmp_path / "journal.jsonl.html").read_text()
    assert "The journal ends early, at line 3" in page
    assert "2 lines are missing" in page
    assert "it ends early" in capsys.readouterr().err
    account = account_of(journal)
    assert (account.dropped_lines, account.processes) == (2, 1)
    assert account.counted.total("kvoffload_offered_blocks_total") == 7


def test_a_store_that_engines_share_has_its_tiles_and_its_plot(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    copy = {
        "event": "RankReported", "job": 1, "rank": 0, "direction": "load", "outcome": "done",
        "copied_bytes": 2**20, "queue_s": 0.0, "copy_s": 0.5, "tier": "remote",
    }  # fmt: skip
    found = {"event": "LookupAnswered", "request": "a", "device_tokens": 0, "hit_blocks": 3, "miss_blocks": 0}
    found |= {
        "hit_tokens": 48,
        "miss_tokens": 0,
        "cause": None,
        "fetched_tokens": 1048,
        "fetched_from": "remote",
    }
    asked = {"event": "RemoteAnswered", "request": "a", "namespace": "x", "found": 3, "missing": 4}
    first = {"event": "FirstTokenReached", "request": "a", "found": "remote", "seconds": 0.25}
    messages = [asked, {**asked, "found": 0, "missing": 0, "unanswered": 5}, copy, found, first]
    lines = [{"seq": number, "t": float(number), **message} for number, message in enumerate(messages, 1)]
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["report", str(journal)]) == Exit.OK
    page = (tmp_path / "journal.jsonl.html").read_text()
    assert "Transfers with the shared store" in page
    assert "Transfers with the disk" not in page
    tiles = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", page))
    assert tiles["first token p50, found in the store"] == "250.0 ms"
    assert tiles["bytes written to, read from store"] == "0 B / 1.0 MiB"
    assert tiles["blocks asked for that the store had"] == "25.0%"
    assert tiles["tokens fetched from the store"] == "1,048"


def test_processes_that_share_a_file_are_distinguished(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    store = {"event": "StoreScheduled", "job": 1, "blocks": 3}
    lines = [{"seq": 1, "t": 1.0, **store}, {"seq": 2, "t": 1.0, **store}, {"seq": 1, "t": 2.0, **store}]
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    account = account_of(journal)
    assert account.processes == 2
    assert [one.slots["filling"] for one in account.occupancy] == [6, 3]


@pytest.mark.parametrize("where", ["missing/page.html", "folder", "journal.jsonl"])
def test_a_file_that_cannot_be_written_is_said(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "journal.jsonl"
    text = '{"seq":1,"t":1.0,"event":"BlocksOffered","blocks":3}\n'
    journal.write_text(text)
    (tmp_path / "folder").mkdir()
    code = Exit.USAGE if where == journal.name else Exit.OUTPUT
    assert main(["report", str(journal), "-o", str(tmp_path / where)]) == code
    assert where in capsys.readouterr().err
    assert journal.read_text() == text
    assert {path.name for path in tmp_path.iterdir()} == {"journal.jsonl", "folder"}


def test_a_demo_whose_page_cannot_be_written_does_not_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "run", lambda _: pytest.fail("it began"))
    assert main(["demo", "--report", str(tmp_path / "missing" / "page.html")]) == Exit.OUTPUT
    assert "cannot be written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
