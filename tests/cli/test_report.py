from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvoffload.cli.exits import Exit
from kvoffload.cli.figures import COLOURS, add_up
from kvoffload.cli.journal_lines import Lines
from kvoffload.cli.main import main
from kvoffload.cli.report import render
from kvoffload.model.wire import Direction, Tier
from kvoffload.telemetry.records import BEGUN


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
def page(demo_journal: Path) -> str:
    assert main(["report", str(demo_journal)]) == Exit.OK
    return Path(f"{demo_journal}.html").read_text(encoding="utf-8")


def test_every_tier_and_direction_has_a_colour() -> None:
    assert {label.value for label in (*Tier, *Direction)} - set(COLOURS) == set()


def test_a_tier_without_a_colour_is_drawn_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for label in ("disk", "store"):
        monkeypatch.delitem(COLOURS, label)
    journal = tmp_path / "journal"
    copy = {
        "event": "RankReported",
        "job": 1,
        "rank": 0,
        "tier": "disk",
        "direction": "store",
        "outcome": "done",
    }
    write(
        journal,
        {"event": "FirstTokenReached", "request": "a", "found": "disk", "seconds": 0.25},
        {**copy, "copied_bytes": 2**20, "queue_s": 0.0, "copy_s": 1.0},
    )
    assert main(["report", str(journal)]) == Exit.OK
    page = (tmp_path / "journal.html").read_text()
    assert "disk: 1, p50 250.0 ms" in page
    assert "Transfers with the disk tier" in page


@pytest.mark.slow
def test_the_page_shows_the_journals_numbers(demo_journal: Path, page: str) -> None:
    reading = Reading(page)
    lines = [json.loads(line) for line in demo_journal.read_text().splitlines()]
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
        assert re.search(rf">{outcome}</text>", page)
        assert re.search(rf">{blocks:,}</text>", page)
    first = [x for x in lines if x["event"] == "FirstTokenReached" and x["found"] == "host"]
    assert f"host: {len(first):,}, p50 " in page


@pytest.mark.slow
def test_json_has_the_pages_numbers(
    demo_journal: Path, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(demo_journal), "--json"]) == Exit.OK
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
    texts = [one["text"] for one in found["advice"]]
    assert [text for text in texts if escape(text) not in page] == []
    assert main(["advise", str(demo_journal)]) == Exit.OK
    assert capsys.readouterr().out.splitlines() == texts
    assert {one["about"] for one in found["advice"]} >= {"host", "disk", "stores", "trust"}


@pytest.mark.slow
def test_the_page_names_the_engine_and_the_model(demo_journal: Path, page: str) -> None:
    begun = json.loads(demo_journal.read_text().splitlines()[0])
    assert begun["event"] == BEGUN
    named = [
        *(str(begun[key]) for key in ("kvoffload", "began", "host", "cpu")),
        "host_bytes",
        "random weights",
    ]
    assert [part for part in named if escape(part) not in page] == []


@pytest.mark.slow
def test_the_host_slots_at_the_end_are_the_stored_slots_without_the_evicted_ones(demo_journal: Path) -> None:
    account = add_up(Lines(demo_journal))
    stored = account.counted.count("kvoffload_store_blocks_total", "stored")
    evicted = account.counted.total("kvoffload_evicted_blocks_total")
    assert evicted > 0
    assert account.slots[-1][1] == {"ready": stored - evicted}


@pytest.mark.slow
def test_a_page_loads_no_other_resource(page: str) -> None:
    reading = Reading(page)
    assert all(reference.startswith("#") for reference in reading.references)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(reading.tags)
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert not re.search(r"url\((?!#)|@import", page)
    assert set(re.findall(r"https?://[^\"]*", page)) == {
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


def test_without_matplotlib_one_line_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    journal = tmp_path / "journal"
    write(journal, {"event": "BlocksOffered", "blocks": 3})
    assert main(["report", str(journal)]) == Exit.USAGE
    error = capsys.readouterr().err
    assert "pip install 'kvoffload[report]'" in error
    assert error.count("\n") == 1
    assert main(["report", str(journal), "--json"]) == Exit.OK
    assert list(tmp_path.iterdir()) == [journal]


def test_bytes_that_are_not_utf8_are_escaped(tmp_path: Path) -> None:
    """The model's path may contain bytes that are not UTF-8. JSON represents them as lone surrogates."""
    path = tmp_path / "journal"
    engine = {"name": "vllm", "version": "1", "model": "/models/\udcff"}
    write(path, {"event": BEGUN, "engine": engine}, {"event": "BlocksOffered", "blocks": 3})
    assert main(["report", str(path)]) == Exit.OK
    assert r"model /models/\udcff" in path.with_name("journal.html").read_text(encoding="utf-8")


def copied(**fields: object) -> dict[str, object]:
    report = {"event": "RankReported", "job": 1, "rank": 0, "direction": "load", "outcome": "done"}
    return {**report, "copied_bytes": 2**20, "queue_s": 0.0, "copy_s": 0.5, **fields}


def test_lower_tiers_have_a_figure_if_there_are_copies(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    first = {"event": "FirstTokenReached", "request": "a", "found": "remote", "seconds": 0.25}
    write(journal, copied(tier="remote"), first)
    assert main(["report", str(journal)]) == Exit.OK
    page = (tmp_path / "journal.html").read_text()
    assert "Transfers with the remote tier" in page
    assert "Transfers with the disk tier" not in page
    assert "remote: 1, p50 250.0 ms" in page


def test_tokens_of_requests_that_opted_out_are_no_misses(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    lookup = {"event": "LookupAnswered", "request": "a", "device_tokens": 0, "hit_blocks": 0, "hit_tokens": 0}
    write(journal, {**lookup, "miss_blocks": 2, "miss_tokens": 32, "cause": None, "opted_out": True})
    assert main(["report", str(journal)]) == Exit.OK
    page = (tmp_path / "journal.html").read_text()
    assert Reading(page).counters == {
        ("kvoffload_lookup_blocks_total", "opted_out"): 2,
        ("kvoffload_lookup_tokens_total", "opted_out"): 32,
    }
    assert re.search(r">opted_out</text>", page)
    assert not re.search(r">miss</text>", page)


def test_numbers_beyond_an_axis_are_drawn_at_its_end(tmp_path: Path) -> None:
    journal, huge = tmp_path / "journal", 10**400
    lookup = {"request": "a", "hit_blocks": 1, "miss_blocks": 1, "cause": "evicted"}
    tokens = {"device_tokens": huge, "hit_tokens": huge, "miss_tokens": huge}
    write(
        journal,
        copied(tier="host", copied_bytes=huge),
        {"event": "LookupAnswered", **lookup, **tokens},
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


def test_figures_over_time_have_the_same_axis(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    lookup = {
        "event": "LookupAnswered",
        "request": "a",
        "hit_blocks": 1,
        "miss_blocks": 1,
        "cause": "evicted",
    }
    write(
        journal,
        {"event": "BlocksOffered", "blocks": 3},
        {**lookup, "device_tokens": 100, "hit_tokens": 200, "miss_tokens": 100},
        copied(tier="host"),
        {"event": "FirstTokenReached", "request": "a", "found": "host", "seconds": 0.25},
        {"event": "StoreScheduled", "job": 1, "blocks": 2},
        {"event": "BlocksOffered", "blocks": 3},
    )
    assert main(["report", str(journal)]) == Exit.OK
    page = (tmp_path / "journal.html").read_text()
    axes = re.findall(r'matplotlib\.axis_1">(.*?)matplotlib\.axis_2">', page, re.S)
    ticks = [re.findall(r">([\d.]+)</text>", axis) for axis in axes if ">seconds</text>" in axis]
    assert (len(ticks), ticks[0][0], ticks[0][-1]) == (4, "0", "5")
    assert all(one == ticks[0] for one in ticks)


def test_the_page_begins_with_what_was_found_and_says_from_when_blocks_could_be_held(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    lookup = {
        "event": "LookupAnswered",
        "request": "a",
        "hit_blocks": 1,
        "miss_blocks": 1,
        "cause": "evicted",
    }
    settings = {"host_bytes": 2**28, "recurrent_prefix_boundaries": True, "disk_path": None}
    write(
        journal,
        {"event": BEGUN, "settings": settings},
        {**lookup, "device_tokens": 100, "hit_tokens": 250, "miss_tokens": 50},
        {**lookup, "device_tokens": 0, "hit_tokens": 0, "miss_tokens": 100, "cause": None, "opted_out": True},
        {"event": "CapacityGrown", "slots": 4},
        {"event": "FirstTokenReached", "request": "a", "found": "host", "seconds": 0.25},
        {"event": "FirstTokenReached", "request": "b", "found": None, "seconds": 2.0},
        {
            "event": "MetricsSampled",
            "values": {"kvoffload_prefill_seconds_saved_total": 10, "kvoffload_load_wait_seconds_sum": 0.5},
        },
    )
    assert main(["report", str(journal), "--last", "10m"]) == Exit.OK
    said = re.findall("<p>(.*?)</p>", (tmp_path / "journal.html").read_text())
    assert said[0] == (
        "<strong>Of 400 prompt tokens 25% were found on the device, 62% on the host or a tier below it. "
        "First token, median by what was found: 2,000 ms (nothing), 250 ms (host). "
        "So far loads have saved 10.0 s of prefill and cost 0.5 s, net 9.5 s.</strong>"
    )
    assert "host_bytes 256.0 MiB; recurrent_prefix_boundaries true" in said
    assert (
        "Host memory had room for blocks from 2.0 s on. What came before, such as a warm-up, counts too."
        in said
    )
    assert "Only a part of the journal: last 600 s." in said
