from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvoffload.bus.bus import Bus
from kvoffload.cli.demo import session
from kvoffload.cli.demo.engines import audit
from kvoffload.cli.main import main
from kvoffload.model import events
from kvoffload.model.wire import Direction
from kvoffload.telemetry.catalogue import BY_NAME, CATALOGUE, Kind
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.exporter import KVOffloadCollector
from kvoffload.telemetry.records import Record, Summary, read_journal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from kvoffload.cli.demo.engines import Engines

pytestmark = pytest.mark.slow

TURNS = 4 * 7

UNREPORTED = {"kvoffload_audits_total", "kvoffload_hook_seconds", "kvoffload_load_wait_seconds"}
"""Metrics on the scheduler's side that no event reports, so a journal does not contain them."""

Reported = tuple[list[Record], dict[str, dict[tuple[str, ...], float]], dict[str, Any]]


@pytest.fixture
def reported(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Reported:
    """Run a demo that evicts blocks. Return the journal's records, the final metrics, and the printed table."""
    pages: list[bytes] = []

    def scrape(engines: Engines) -> list[str]:
        registry = CollectorRegistry()
        registry.register(KVOffloadCollector(engines.offload))
        pages.append(generate_latest(registry))
        return audit(engines)

    monkeypatch.setattr(session, "audit", scrape)
    path = tmp_path / "journal"
    # Use enough turns for some hits, and so little host memory that blocks are evicted however fast copies
    # are.
    tight = ["--turns", "7", "--host-bytes", "1600KiB", "--config", f"journal_path={path}"]
    assert main([*small, *tight, "--device-blocks", "40", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["offloading"]
    return list(read_journal(path)), parsed(pages[0].decode()), table


def parsed(page: str) -> dict[str, dict[tuple[str, ...], float]]:
    series: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            metric = BY_NAME[re.sub("_(bucket|count|sum)$", "", sample.name)]
            labels = tuple(sample.labels[name] for name in metric.label_names)
            series.setdefault(sample.name, {})[labels] = sample.value
    return series


def test_the_journal_and_the_metrics_page_agree(reported: Reported) -> None:
    records, page, _ = reported
    assert [record.sequence for record in records] == list(range(1, len(records) + 1))
    bus, counters = Bus(), Counters(tiers=set())
    counters.subscribe(bus)
    for record in records:
        bus.publish(record.message)
    counted = counters.snapshot()
    assert counted.count("kvoffload_lookup_blocks_total", "hit") > 0
    for metric in CATALOGUE:
        if metric.kind is Kind.COUNTER and metric.read is None and metric.name not in UNREPORTED:
            assert counted.counts[metric.name] == page.get(metric.name, {}), metric.name
        if metric.kind is Kind.HISTOGRAM and metric.name not in UNREPORTED:
            for labels, series in counted.distributions[metric.name].items():
                assert series.samples == page[f"{metric.name}_count"][labels], metric.name
                assert series.total == page[f"{metric.name}_sum"][labels], metric.name


def test_the_journal_and_the_table_agree(reported: Reported) -> None:
    """Sum the counts directly from the journal's events, without `Counters`."""
    records, _, table = reported
    played = after_warming_up(records)
    assert table["stored_blocks"] == by(played, events.StoreEnded, "outcome")
    assert table["stored_blocks"]["stored"] > 0
    assert sum(table["stored_blocks"].values()) == by(played, events.BlocksOffered).total()
    assert table["loaded_blocks"] == by(played, events.LoadEnded, "outcome")
    assert table["evicted_blocks"] == by(played, events.BlocksEvicted, "cause") != {}
    for direction, name in ((Direction.STORE, "stored_bytes"), (Direction.LOAD, "loaded_bytes")):
        copies = [one for one in of(played, events.RankReported) if one.direction is direction]
        assert table[name] == sum(one.copied_bytes for one in copies) > 0
    missed: Counter[str] = Counter()
    for one in of(played, events.LookupAnswered):
        if one.cause is not None:
            missed[one.cause.value] += 1
            missed["behind_miss"] += one.miss_blocks - 1
    assert table["missed_blocks"] == +missed != {}


def after_warming_up(records: Sequence[Record]) -> list[events.Event]:
    """Return the conversations' events. The warm-up requests come first, and their copies end before the
    conversations.
    """
    seen = [
        at
        for at, record in enumerate(records)
        if isinstance(record.message, Summary) and record.message.name == "RequestSeen"
    ]
    return [record.message for record in records[seen[-TURNS] :] if isinstance(record.message, events.Event)]


def of(reported: Iterable[events.Event], cls: type[Any]) -> list[Any]:
    return [one for one in reported if isinstance(one, cls)]


def by(reported: Iterable[events.Event], cls: type[Any], label: str | None = None) -> Counter[str]:
    blocks: Counter[str] = Counter()
    for one in of(reported, cls):
        blocks[getattr(one, label).value if label else ""] += one.blocks
    return blocks
