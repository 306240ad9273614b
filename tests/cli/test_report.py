from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dashboards.generate.colours import COLOURS as DASHBOARDS
from kvoffload.cli.exits import Exit
from kvoffload.cli.figures import COLOURS, Account, add_up
from kvoffload.cli.journal_lines import Lines
from kvoffload.cli.main import main
from kvoffload.cli.report import render
from kvoffload.model.wire import Direction
from kvoffload.telemetry.records import BEGUN

# The demo runs long enough for host memory to become ready, even on a busy machine, and the host must evict.
_TIGHT = (
    "demo --model tiny --conversations 6 --turns 4 --first-tokens 400 --turn-tokens 30 --answer-tokens 5 "
    "--device-blocks 80 --host-bytes 4MiB"
)


def account_of(journal: Path) -> Account:
    return add_up(Lines(journal))


def write(journal: Path, *messages: Mapping[str, object]) -> None:
    """Write numbered lines to a journal, one second apart."""
    lines = [{"seq": number, "t": float(number), **message} for number, message in enumerate(messages, 1)]
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


class Reading(HTMLParser):
    """Collects a page's counters, its headings, and its references to other resources."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", text)
        self.counters = {(name, labels): int(number.replace(",", "")) for name, labels, number in rows}
        self.headings = re.findall("<h2[^>]*>(.*?)</h2>", text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        self.references += [
            str(named[key]) for key in named if key in ("src", "href", "srcset", "xlink:href")
        ]
        self.ids += [str(named["id"])] if "id" in named else []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    journal = tmp_path_factory.mktemp("run") / "journal.jsonl"
    # Run in a separate process: the demo sets up logging, which would otherwise affect the whole module.
    command = [sys.executable, "-m", "kvoffload", *_TIGHT.split(), "--config", f"journal_path={journal}"]
    subprocess.run(command, check=True, capture_output=True)
    assert main(["report", str(journal)]) == Exit.OK
    return journal, Path(f"{journal}.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_shows_the_journals_numbers(run: tuple[Path, str]) -> None:
    journal, text = run
    reading = Reading(text)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for way in Direction:
        copied = [x for x in lines if x["event"] == "RankReported" and x["direction"] == way.value]
        assert reading.counters["kvoffload_transfer_bytes_total", f"host, {way.value}"] == sum(
            x["copied_bytes"] for x in copied
        )
    lookups = [x for x in lines if x["event"] == "LookupAnswered"]
    found = reading.counters["kvoffload_lookup_tokens_total", "hit"]
    assert found == sum(x["hit_tokens"] for x in lookups) > 0
    outcomes = Counter[str]()
    for x in lines:
        if x["event"] == "StoreEnded":
            outcomes[x["outcome"]] += x["blocks"]
    for outcome, blocks in (+outcomes).items():
        assert reading.counters["kvoffload_store_blocks_total", outcome] == blocks
        assert re.search(rf">{outcome}</text>", text)
        assert re.search(rf">{blocks:,}</text>", text)
    first = [x for x in lines if x["event"] == "FirstTokenReached" and x["found"] == "host"]
    assert f"host: {len(first):,}, p50 " in text


@pytest.mark.slow
def test_json_has_the_pages_numbers(run: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    journal, page = run
    assert main(["report", str(journal), "--json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    counters = {(one["metric"], ", ".join(one["labels"])): one["value"] for one in found["counters"]}
    assert counters == Reading(page).counters
    assert found["provenance"]["engine"]["name"] == "reference"
    assert (found["missing"], found["problem"]) == ([], None)
    for source, times in found["first_token_ms"].items():
        assert (
            f"{source}: {times['requests']:,}, p50 {times['p50']:,.1f} ms, p99 {times['p99']:,.1f} ms" in page
        )
    assert sum(times["requests"] for times in found["first_token_ms"].values()) >= 6 * 4


def test_the_page_names_the_engine_and_the_model(run: tuple[Path, str]) -> None:
    journal, text = run
    begun = json.loads(journal.read_text().splitlines()[0])
    assert begun["event"] == BEGUN
    for part in (
        begun["kvoffload"],
        begun["began"],
        begun["host"],
        begun["cpu"],
        "host_bytes",
        "random weights",
    ):
        assert escape(str(part)) in text, part


@pytest.mark.slow
def test_the_host_slots_at_the_end_are_the_stored_slots_without_the_evicted_ones(
    run: tuple[Path, str],
) -> None:
    account = account_of(run[0])
    stored = account.counted.count("kvoffload_store_blocks_total", "stored")
    evicted = account.counted.total("kvoffload_evicted_blocks_total")
    assert evicted > 0
    assert account.slots[-1][1] == {"ready": stored - evicted}


@pytest.mark.slow
def test_a_page_loads_no_other_resource(run: tuple[Path, str]) -> None:
    text = run[1]
    reading = Reading(text)
    assert all(reference.startswith("#") for reference in reading.references)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(reading.tags)
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert not re.search(r"url\((?!#)|@import", text)
    assert set(re.findall(r"https?://[^\"]*", text)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert len(reading.ids) == len(set(reading.ids))


def test_text_from_a_journal_is_escaped_in_the_page(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&"
    journal = tmp_path / "journal"
    begun = {"event": BEGUN, "kvoffload": evil, "engine": {"name": evil}, "settings": {evil: evil}}
    write(journal, begun, {"event": "BlocksOffered", "blocks": 3})
    lines = Lines(journal, words=evil)
    page = render(add_up(lines), lines)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;") == 5


def test_the_page_uses_the_dashboards_colours() -> None:
    assert {key: DASHBOARDS[key] for key in COLOURS} == COLOURS


def test_without_matplotlib_one_line_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    journal = tmp_path / "journal"
    write(journal, {"event": "BlocksOffered", "blocks": 3})
    assert main(["report", str(journal)]) == Exit.USAGE
    error = capsys.readouterr().err
    assert "install kvoffload[report]" in error
    assert error.count("\n") == 1
    assert main(["report", str(journal), "--json"]) == Exit.OK
    assert list(tmp_path.iterdir()) == [journal]


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "No such file"), ("", "is empty"), ("hello\n", "line 1: not JSON"), ("{}\n", "line 1")],
)
def test_a_file_that_is_not_a_journal_is_reported_and_nothing_is_written(
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


def test_bytes_that_are_not_utf8_are_escaped(tmp_path: Path) -> None:
    """The model's path may contain bytes that are not UTF-8. JSON represents them as lone surrogates."""
    path = tmp_path / "journal"
    engine = {"name": "vllm", "version": "1", "model": "/models/\udcff"}
    write(path, {"event": BEGUN, "engine": engine}, {"event": "BlocksOffered", "blocks": 3})
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
def test_a_folder_is_not_a_journal(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path), "--last", "1h"]) == Exit.USAGE
    assert capsys.readouterr().err == f"kvoffload: error: {tmp_path}: Is a directory\n"


def test_a_truncated_journal_is_shown_up_to_the_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "journal.jsonl"
    line = json.dumps({"seq": 5, "t": 1.5, "event": "BlocksOffered", "blocks": 3})
    later = json.dumps({"seq": 8, "t": 2.5, "event": "BlocksOffered", "blocks": 4})
    journal.write_text(f"{line}\n{later}\n{line[:10]}")
    assert main(["report", str(journal)]) == Exit.FAILED
    page = (tmp_path / "journal.jsonl.html").read_text()
    assert "The journal ends early, at line 3" in page
    assert "Events are missing: 2, numbers " in page
    assert "the journal ends early" in capsys.readouterr().err
    assert Reading(page).counters == {("kvoffload_offered_blocks_total", ""): 7}


def test_lower_tiers_have_a_figure_if_there_are_copies(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    copy = {
        "event": "RankReported", "job": 1, "rank": 0, "direction": "load", "outcome": "done",
        "copied_bytes": 2**20, "queue_s": 0.0, "copy_s": 0.5, "tier": "remote",
    }  # fmt: skip
    write(journal, copy, {"event": "FirstTokenReached", "request": "a", "found": "remote", "seconds": 0.25})
    assert main(["report", str(journal)]) == Exit.OK
    page = (tmp_path / "journal.jsonl.html").read_text()
    assert "Transfers with the remote tier" in page
    assert "Transfers with the disk tier" not in page
    assert "remote: 1, p50 250.0 ms" in page


def test_numbers_beyond_an_axis_are_drawn_at_its_end(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    huge = 10**400
    copy = {
        "event": "RankReported", "job": 1, "rank": 0, "direction": "load", "outcome": "done",
        "copied_bytes": huge, "queue_s": 0.0, "copy_s": 0.5, "tier": "host",
    }  # fmt: skip
    lookup = {
        "event": "LookupAnswered",
        "request": "a",
        "device_tokens": huge,
        "hit_blocks": 1,
        "miss_blocks": 1,
    }
    write(
        journal,
        copy,
        lookup | {"hit_tokens": huge, "miss_tokens": huge, "cause": "evicted"},
        {"event": "StoreScheduled", "job": 1, "blocks": huge},
        {"event": "StoreEnded", "outcome": "stored", "blocks": huge},
        {"event": "FirstTokenReached", "request": "a", "found": "host", "seconds": 1e308},
    )
    assert main(["report", str(journal)]) == Exit.OK


def test_a_second_process_in_the_same_file_begins_without_slots(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    store = {"event": "StoreScheduled", "job": 1, "blocks": 3}
    lines = [{"seq": 1, "t": 1.0, **store}, {"seq": 2, "t": 1.0, **store}, {"seq": 1, "t": 2.0, **store}]
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    records = Lines(journal)
    assert [slots["filling"] for _, slots in add_up(records).slots] == [3, 6, 3]
    assert records.gaps == []


@pytest.mark.parametrize("where", ["missing/page.html", "folder", "journal.jsonl"])
def test_a_file_that_cannot_be_written_is_reported(
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
