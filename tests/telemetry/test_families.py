from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from kvoffload.model.wire import LOWER_TIERS
from kvoffload.telemetry import families
from kvoffload.telemetry.catalogue import BY_NAME, CATALOGUE, Kind
from kvoffload.telemetry.families import Families

CLASSES: dict[type, Any] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
LABELS = ["model_name", "engine"]


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    for exported in families._exported.values():  # by tests of other files
        REGISTRY.unregister(exported)
    families._exported.clear()
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)
    families._exported.clear()


def make(*engines: int, model: str = "m") -> Families:
    return Families(CLASSES, LABELS, {engine: [model, str(engine)] for engine in engines or (0,)})


def value(name: str, engine: int = 0, model: str = "m", **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": model, "engine": str(engine), **labels})


def test_a_lower_tiers_metrics_are_served_from_its_first_message_and_all_others_at_once() -> None:
    made = make(0, 1)

    def served() -> list[list[float | None]]:
        samples = {
            (one.name, frozenset(one.labels.items())): one.value
            for family in REGISTRY.collect()
            for one in family.samples
        }
        found = []
        for metric in CATALOGUE:
            suffix = "_count" if metric.kind is Kind.HISTOGRAM else ""
            for labels in metric.series:
                named = dict(zip(metric.label_names, labels, strict=True))
                both = [{"model_name": "m", "engine": engine, **named} for engine in "01"]
                found.append([samples.get((metric.name + suffix, frozenset(one.items()))) for one in both])
        return found

    alone = sum(len(metric.series_with(set())) for metric in CATALOGUE)
    assert served().count([0, 0]) == alone
    made.observe({"kvoffload_tier_state": {f"{tier.value},open": 0 for tier in LOWER_TIERS}}, 1)
    assert served().count([0, 0]) == alone
    assert served().count([None, 0]) == sum(len(metric.series) for metric in CATALOGUE) - alone > 90


def test_a_message_changes_only_its_engines_metrics() -> None:
    made = make(0, 1)
    message = {
        "kvoffload_lookup_blocks_total": {"hit": 3},
        "kvoffload_resets_total": {"": 1},
        "kvoffload_slots": {"host,ready": 4},
        "kvoffload_transfer_seconds": {"host,load": [0.5, 0.004]},
    }
    made.observe(message, 1)
    made.observe(message, 1)
    assert [value("kvoffload_lookup_blocks_total", engine, result="hit") for engine in (0, 1)] == [0, 6]
    assert value("kvoffload_resets_total", 1) == 2
    assert value("kvoffload_slots", 1, tier="host", state="ready") == 4
    copies = {"tier": "host", "direction": "load"}
    assert value("kvoffload_transfer_seconds_count", 1, **copies) == 4
    assert value("kvoffload_transfer_seconds_sum", 1, **copies) == pytest.approx(1.008)
    assert value("kvoffload_transfer_seconds_bucket", 1, le="0.005", **copies) == 2


def test_unknown_metrics_labels_and_engines_are_ignored() -> None:
    made = make()
    made.observe({"kvoffload_of_tomorrow_total": {"x": 1}}, 0)
    made.observe({"kvoffload_lookup_blocks_total": {"hit,more": 1}}, 0)
    made.observe({"kvoffload_resets_total": {"": 1}}, 7)
    assert value("kvoffload_resets_total") == 0
    made.observe({"kvoffload_tier_state": {"of tomorrow,open": 1}, "kvoffload_resets_total": {"": 1}}, 0)
    assert value("kvoffload_resets_total") == 1


def test_a_second_engines_metrics_replace_the_first_engines() -> None:
    first, second = make(model="one"), make(model="two")
    for made in (first, second, second):
        made.observe({"kvoffload_resets_total": {"": 1}}, 0)
    assert [value("kvoffload_resets_total", model=model) for model in ("one", "two")] == [None, 2]


def test_a_second_engine_with_the_same_labels_starts_at_0_and_counts_once() -> None:
    first = make()
    first.observe({"kvoffload_resets_total": {"": 5}, "kvoffload_capacity_slots": {"host": 9}}, 0)
    second = make()
    assert value("kvoffload_resets_total") == 0
    assert value("kvoffload_capacity_slots", tier="host") == 0
    for made in (first, second):
        made.observe({"kvoffload_resets_total": {"": 1}}, 0)
    assert value("kvoffload_resets_total") == 1


def test_metrics_with_other_labels_replace_the_earlier_metrics() -> None:
    make()
    Families(CLASSES, ["model_name"], {0: ["m"]})
    assert value("kvoffload_resets_total") is None
    assert REGISTRY.get_sample_value("kvoffload_resets_total", {"model_name": "m"}) == 0


def test_metrics_are_registered_again_after_they_were_unregistered() -> None:
    make()
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("kvoffload_"):
            REGISTRY.unregister(collector)
    make()
    assert value("kvoffload_resets_total") == 0


def test_a_name_that_another_package_uses_is_an_error() -> None:
    Counter("kvoffload_resets_total", "of another package")
    with pytest.raises(ValueError, match="Duplicated"):
        make()


# -- metric classes of other libraries --------------------------------------------------------------------------------


class Alien:
    """A metric with Ray's interface. It is in no registry and cannot be unregistered."""

    def __init__(self, name: str, documentation: str, labelnames: list[str], **options: object) -> None:
        self.name, self.labelnames, self.options = name, labelnames, options
        self.children: dict[tuple[object, ...], Alien] = {}
        self.reported: list[float] = []

    def labels(self, *values: object) -> Alien:
        assert len(values) == len(self.labelnames)
        return self.children.setdefault(values, Alien(self.name, "", self.labelnames, **self.options))

    def observe(self, value: float) -> None:
        self.reported.append(value)


def test_metrics_of_classes_without_a_registry_can_be_created_twice() -> None:
    aliens: dict[type, Any] = dict.fromkeys([Counter, Gauge, Histogram], Alien)
    for _ in range(2):
        made = Families(aliens, LABELS, {0: ["m", 0]})
    made.observe({"kvoffload_hook_seconds": {"step": [0.1, 0.2]}}, 0)
    child = made._metrics["kvoffload_hook_seconds"].children["m", 0, "step"]
    assert child.reported == [0.1, 0.2]
    assert child.options == {"buckets": list(BY_NAME["kvoffload_hook_seconds"].buckets)}
    gauge = made._metrics["kvoffload_capacity_slots"]
    assert gauge.options == {"multiprocess_mode": "mostrecent"}
