"""Counters and histograms that events update inline, their snapshots, and an iterator over all series.

The engine's thread updates the counters, and any thread may take a snapshot. There is no lock, so that the engine never
waits for a scrape. If the engine counts an event during the snapshot, the snapshot may include only part of the event.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

from kvoffload.bus.bus import Bus, Tick
from kvoffload.model import events, facts
from kvoffload.model.causes import MissCause
from kvoffload.model.wire import LOWER_TIERS, Tier
from kvoffload.telemetry.catalogue import (
    CATALOGUE,
    Answer,
    Hook,
    Kind,
    Labels,
    LoadWait,
    LookupResult,
    Metric,
    Series,
)

# The maximum number of samples that a series keeps between two calls of `take_samples`, which are about a second apart.
_KEPT = 1 << 14
_HIT = (LookupResult.HIT.value,)
_MISS = (LookupResult.MISS.value,)
_OPTED_OUT = (LookupResult.OPTED_OUT.value,)
_DEVICE, _HOST = (Tier.DEVICE.value,), (Tier.HOST.value,)
_COMPUTED, _NOTHING = ("computed",), ("nothing",)
_BEHIND = (MissCause.BEHIND_MISS.value,)
_FOUND_THERE, _MISSING_THERE, _NO_ANSWER = ((answer.value,) for answer in Answer)


class _LabelsOf(dict[Any, Labels]):
    """Caches the label values of enum members and of tuples of members, because reading an enum's `value` is slow."""

    def __missing__(self, key: Any) -> Labels:  # noqa: ANN401  # members of any enum
        members = key if isinstance(key, tuple) else (key,)
        labels = self[key] = tuple(member.value for member in members)
        return labels


_LABELS = _LabelsOf()


@dataclass(frozen=True, slots=True)
class Distribution:
    """One series of a histogram.

    Args:
        counts: the number of samples in each bucket, not cumulative. The last bucket has the samples above all bounds.
        total: the sum of the samples.
    """

    counts: tuple[int, ...]
    total: float

    @property
    def samples(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of all counters and histograms, by metric name and label values. A missing series counts as 0."""

    counts: Mapping[str, Mapping[Labels, int]] = field(default_factory=dict)
    distributions: Mapping[str, Mapping[Labels, Distribution]] = field(default_factory=dict)

    def count(self, name: str, *labels: str) -> int:
        """Return the value of the counter's series with the given label values."""
        return self.counts.get(name, {}).get(labels, 0)

    def total(self, name: str) -> int:
        """Return the sum of all series of a counter."""
        return sum(self.counts.get(name, {}).values())

    def by_label(self, name: str, *leading: str) -> dict[str, int]:
        """Return the nonzero values of a counter by the last label, the largest value first.

        Args:
            name: the counter's name.
            leading: the values of all labels except the last one.
        """
        ordered = sorted(self.counts.get(name, {}).items(), key=lambda item: -item[1])
        return {labels[-1]: number for labels, number in ordered if number and labels[:-1] == leading}

    def samples(self, name: str, *labels: str) -> int:
        """Return the number of samples in the histogram's series with the given label values."""
        series = self.distributions.get(name, {}).get(labels)
        return series.samples if series else 0

    def minus(self, earlier: Snapshot) -> Snapshot:
        """Return each counter's increase since `earlier`, without unchanged counters and without histograms."""
        added = {
            name: Counter(series) - Counter(earlier.counts.get(name, {}))
            for name, series in self.counts.items()
        }
        return Snapshot({name: series for name, series in added.items() if series})


class Histogram:
    """Counts the samples in each bucket. If `kept` is a list, the histogram also appends each sample to the list.

    A sample that equals a bound counts in the bucket below the bound.
    """

    __slots__ = ("bounds", "counts", "kept", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.kept: list[float] | None = None

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        if self.kept is not None and len(self.kept) < _KEPT:
            self.kept.append(value)

    def copy(self) -> Distribution:
        return Distribution(tuple(self.counts), self.total)


class Counters:
    """All counters and histograms of the catalogue that events update.

    Args:
        tiers: the engine's tiers below the host; by default all lower tiers, which is right for events of any engine.
    """

    def __init__(self, tiers: Set[Tier] = frozenset(LOWER_TIERS)) -> None:
        self.tiers = tiers
        self.changes = 0
        """This number increases whenever something is counted, except for hook times, which every tick adds."""
        self._counts: dict[str, dict[Labels, int]] = {
            metric.name: dict.fromkeys(metric.series_with(tiers), 0)
            for metric in CATALOGUE
            if metric.kind is Kind.COUNTER and metric.read is None
        }
        self._histograms: dict[str, dict[Labels, Histogram]] = {
            metric.name: {labels: Histogram(metric.buckets) for labels in metric.series_with(tiers)}
            for metric in CATALOGUE
            if metric.kind is Kind.HISTOGRAM
        }
        self._hooks = {labels[0]: one for labels, one in self._histograms["kvoffload_hook_seconds"].items()}
        waits = self._histograms["kvoffload_load_wait_seconds"].items()
        self.waits = {LoadWait(wait): series for (wait,), series in waits}
        """The histograms of requests' waits; `NetBenefit` adds the samples."""
        self._hit_tokens = self._histograms["kvoffload_hit_tokens"][()]
        self._prompt_tokens = self._counts["kvoffload_prompt_tokens_total"]
        self._first_tokens = self._histograms["kvoffload_first_token_seconds"]
        self._lookup_blocks = self._counts["kvoffload_lookup_blocks_total"]
        self._lookup_tokens = self._counts["kvoffload_lookup_tokens_total"]
        self._fetched_tokens = self._counts["kvoffload_fetched_tokens_total"]
        self._misses = self._counts["kvoffload_miss_blocks_total"]

    def subscribe(self, bus: Bus) -> None:
        """Start to count the bus's messages, and the seconds that its hooks take.

        The hooks of many steps are counted at once, which takes much less time than counting those of each step.
        """
        observers: list[tuple[type, Callable[[Any], None]]] = [*self._by_event().items()]
        observers += [(each, partial(self.hooks, bus.hook.steps)) for each in (Tick, events.RequestsEnded)]
        for cls, count in observers:
            named: Any = partial(count)  # a bound method's `__qualname__` cannot be set
            named.__qualname__ = "counters"
            bus.count(cls, named)

    def hooks(self, steps: deque[dict[Hook, float]], _: Tick | events.RequestsEnded | None = None) -> None:
        """Add samples for steps, and remove the steps: for each hook of a step, the seconds that the hook has taken."""
        hooks = self._hooks
        while steps:
            for name, seconds in steps.popleft().items():
                # Every step has hooks to count, so `Histogram.observe` is inlined.
                one = hooks[name]
                one.counts[bisect_left(one.bounds, seconds)] += 1
                one.total += seconds
                if one.kept is not None and len(one.kept) < _KEPT:
                    one.kept.append(seconds)

    def add(self, name: str, *labels: str) -> None:
        self.changes += 1
        self._counts[name][labels] += 1

    @property
    def counts(self) -> Mapping[str, Mapping[Labels, int]]:
        """The counters, by name and label values. Only the engine's thread may read them; see `snapshot`."""
        return self._counts

    def keep_samples(self) -> None:
        """From now on, keep each series' samples, up to `_KEPT`, until `take_samples` returns them."""
        for series in self._histograms.values():
            for one in series.values():
                one.kept = []

    def take_samples(self, metrics: Iterable[Metric] = CATALOGUE) -> dict[str, dict[Labels, list[float]]]:
        """Return the metrics' samples since the last call, without empty series. Call this method on the engine's thread."""
        taken: dict[str, dict[Labels, list[float]]] = {}
        for metric in metrics:
            for labels, one in self._histograms.get(metric.name, {}).items():
                if one.kept:
                    taken.setdefault(metric.name, {})[labels], one.kept = one.kept, []
        return taken

    def snapshot(self) -> Snapshot:
        """Return a copy of all counters and histograms. Any thread may call this method."""
        counts = {name: series.copy() for name, series in self._counts.items()}
        distributions = {
            name: {labels: one.copy() for labels, one in series.items()}
            for name, series in self._histograms.items()
        }
        return Snapshot(counts, distributions)

    def _by_event(self) -> dict[type, Callable[[Any], None]]:
        classes = {cls for metric in CATALOGUE for cls in metric.counts}
        return {cls: self._adder(cls) for cls in classes} | {
            events.LookupAnswered: self._count_lookup,
            events.FirstTokenReached: self._count_first_token,
            facts.TierAnswered: self._count_answer,
        }

    def _adder(self, cls: type[events.Event]) -> Callable[[events.Event], None]:
        """Return a function that adds an event to all metrics that count events of the class `cls`."""
        series_of: dict[str, dict[Labels, Any]] = {**self._counts, **self._histograms}
        counted = []
        for metric in CATALOGUE:
            if cls in metric.counts:
                labels = attrgetter(*metric.label_names) if metric.labels else None
                amount = _reader(metric.counts[cls])
                name, values = metric.where or (None, ())
                counted.append((metric.kind, series_of[metric.name], labels, amount, _reader(name), values))

        def add(event: events.Event) -> None:
            self.changes += 1
            for kind, series, labels, amount, where, values in counted:
                if where is None or where(event) in values:
                    place = () if labels is None else _LABELS[labels(event)]
                    number = 1 if amount is None else amount(event)
                    if kind is Kind.HISTOGRAM:
                        series[place].observe(number)
                    else:
                        series[place] += number

        return add

    def _count_lookup(self, event: events.LookupAnswered) -> None:
        self.changes += 1
        if hits := event.hit_blocks:
            self._lookup_blocks[_HIT] += hits
            self._lookup_tokens[_HIT] += event.hit_tokens
            self._hit_tokens.observe(event.hit_tokens)
        if misses := event.miss_blocks:
            result = _OPTED_OUT if event.opted_out else _MISS
            self._lookup_blocks[result] += misses
            self._lookup_tokens[result] += event.miss_tokens
            if event.cause is not None:
                self._misses[_LABELS[event.cause]] += 1
                self._misses[_BEHIND] += misses - 1
        for tier, count in event.fetched:
            self._fetched_tokens[_LABELS[tier]] += count

    def _count_first_token(self, event: events.FirstTokenReached) -> None:
        self.changes += 1
        found = _NOTHING if event.found is None else _LABELS[event.found]
        self._first_tokens[found].observe(event.seconds)
        tokens = self._prompt_tokens
        tokens[_DEVICE] += event.device_tokens
        tokens[_HOST] += event.host_tokens
        tokens[_COMPUTED] += event.computed_tokens
        for tier, count in event.fetched:
            tokens[_LABELS[tier]] += count

    def _count_answer(self, fact: facts.TierAnswered) -> None:
        self.changes += 1
        asked = self._counts["kvoffload_remote_asked_blocks_total"]
        asked[_FOUND_THERE] += len(fact.found)
        asked[_MISSING_THERE] += len(fact.missing)
        asked[_NO_ANSWER] += fact.unanswered
        if not fact.unanswered:
            self._histograms["kvoffload_remote_ask_seconds"][()].observe(fact.seconds)


def _reader(name: str | None) -> Callable[[object], Any] | None:
    """Return an `attrgetter` for the field, or None if there is no field. An `attrgetter` is faster than `getattr`."""
    return attrgetter(name) if name is not None else None


# -- all series ---------------------------------------------------------------------------------------------------


class Source(Protocol):
    """The part of an engine's scheduler side that exporters use."""

    @property
    def counters(self) -> Counters: ...

    def gauges(self, metrics: Iterable[Metric] = CATALOGUE, /) -> Mapping[str, Series]:
        """Return the series of each of the metrics that has a reader, by the metric's name.

        A metric whose reader fails is left out. Any thread may call this method.
        """


def all_series(
    counts: Mapping[str, Series],
    gauges: Mapping[str, Series],
    samples: Mapping[str, Mapping[Labels, Any]],
    metrics: Iterable[Metric] = CATALOGUE,
) -> Iterator[tuple[Metric, Mapping[Labels, Any]]]:
    """Yield the metrics with their series.

    Args:
        counts: the series of the counters that events increase, by metric name.
        gauges: the series of the metrics that have a reader, by metric name.
        samples: the series of the histograms, by metric name, with values of any type.
        metrics: the metrics to yield.
    """
    for metric in metrics:
        counted = samples if metric.kind is Kind.HISTOGRAM else counts
        yield metric, (counted if metric.read is None else gauges).get(metric.name, {})
