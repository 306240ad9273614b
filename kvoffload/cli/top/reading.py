"""The numbers of a metrics page, engine by engine, and their changes over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from kvoffload.cli.exits import printable
from kvoffload.model.errors import KVOffloadError
from kvoffload.telemetry.catalogue import BY_NAME, CATALOGUE, Kind, Metric
from kvoffload.telemetry.snapshot import Labels

_PREFIX = "kvoffload_"
_SUFFIXES = ("_bucket", "_sum", "_count")
_ENGINE = "engine"  # vLLM's label: one server may run several engines
_KEPT = 61  # readings of one engine


class PageError(KVOffloadError):
    """Raised when a page has no metrics of kvoffload."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One scrape of one engine.

    Args:
        at: monotonic seconds.
        numbers: by the series' name and its labels, in the catalogue's order; a bucket's bound comes last.
    """

    at: float
    numbers: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    def number(self, name: str, *labels: str) -> float:
        """Return one number; a missing one is 0."""
        return self.numbers.get(name, {}).get(labels, 0.0)

    def total(self, name: str) -> float:
        """Return the sum over all labels."""
        return sum(self.numbers.get(name, {}).values())


@dataclass(frozen=True, slots=True)
class Change:
    """Two readings of the same life of an engine.

    Args:
        now: the later one.
        before: the earlier one; None where there is only one.
    """

    now: Reading
    before: Reading | None = None

    @property
    def seconds(self) -> float:
        """Time between them; 0 where there is only one."""
        return self.now.at - self.before.at if self.before is not None else 0.0

    def added(self, name: str, *labels: str) -> float:
        """Return what was added to a counter; since the engine's start where there is only one reading."""
        before = self.before.number(name, *labels) if self.before is not None else 0.0
        return self.now.number(name, *labels) - before

    def total_added(self, name: str) -> float:
        """Return what was added to a counter's sum over all labels."""
        return self.now.total(name) - (self.before.total(name) if self.before is not None else 0.0)

    def rate(self, name: str, *labels: str) -> float | None:
        """Return a counter's growth per second, None where there is only one reading."""
        return self.added(name, *labels) / self.seconds if self.seconds > 0 else None

    def total_rate(self, name: str) -> float | None:
        """Return the growth per second of a counter's sum over all labels, None where there is only one reading."""
        return self.total_added(name) / self.seconds if self.seconds > 0 else None

    def quantile(self, at: float, histogram: str, *labels: str) -> float | None:
        """Return a quantile of the samples between the readings, as Prometheus estimates it; None without samples."""
        bounds = (*BY_NAME[histogram].buckets, math.inf)
        counts = [self.added(f"{histogram}_bucket", *labels, repr(float(bound))) for bound in bounds]
        rank = at * counts[-1]
        if counts[-1] <= 0:
            return None
        place = next(number for number, count in enumerate(counts) if count >= rank)
        if math.isinf(bounds[place]):
            return bounds[place - 1]
        lower, below = (bounds[place - 1], counts[place - 1]) if place else (0.0, 0.0)
        return lower + (bounds[place] - lower) * (rank - below) / (counts[place] - below)


@dataclass(frozen=True, slots=True)
class History:
    """The last readings of one engine, all of one life.

    Args:
        readings: oldest first; never empty.
        restarts: how often the engine restarted while it was watched.
    """

    readings: tuple[Reading, ...]
    restarts: int = 0

    @property
    def now(self) -> Reading:
        return self.readings[-1]

    @property
    def window(self) -> Change:
        """From the oldest reading that is kept to the newest."""
        return Change(self.now, self.readings[0] if len(self.readings) > 1 else None)

    def after(self, reading: Reading) -> History:
        """Return the history with one more reading; a restart clears it."""
        if has_restarted(reading, self.now):
            return History((reading,), self.restarts + 1)
        return History((*self.readings, reading)[-_KEPT:], self.restarts)

    def changes(self) -> list[Change]:
        """Return the change from each reading to the next."""
        return [
            Change(after, before) for before, after in zip(self.readings, self.readings[1:], strict=False)
        ]


def parse_page(text: str, at: float) -> dict[str, Reading]:
    """Return a page's readings by engine; a server with one engine may not name it.

    Raises:
        PageError: it is not a page of metrics, or it has none of kvoffload's.
    """
    engines: dict[str, dict[str, dict[Labels, float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            if family.name.startswith(_PREFIX):
                for sample in family.samples:
                    numbers = engines.setdefault(printable(sample.labels.get(_ENGINE, "")), {})
                    _add(numbers, sample.name, sample.labels, sample.value)
    except Exception as error:  # the parser raises anything on text that is no page of metrics
        raise PageError(f"it is not a page of metrics: {str(error) or type(error).__name__}") from error
    if not engines:
        raise PageError("it has no metrics of kvoffload: is offloading switched on in that server?")
    return {name: Reading(at, numbers) for name, numbers in engines.items()}


def has_restarted(now: Reading, before: Reading) -> bool:
    """Whether a counter has become smaller: the engine restarted."""
    counters = [metric.name for metric in CATALOGUE if metric.kind is Kind.COUNTER]
    return any(now.total(name) < before.total(name) for name in counters)


def _add(numbers: dict[str, dict[Labels, float]], name: str, given: Mapping[str, str], value: float) -> None:
    metric = _metric(name)
    if metric is None:  # of another version
        return
    names: Iterable[str] = metric.label_names
    labels = tuple(printable(given.get(one, "")) for one in names)
    if name.endswith("_bucket"):
        if "le" not in given:
            raise ValueError(f"a bucket of {name} has no bound, the label le")
        labels = (*labels, repr(float(given["le"])))
    series = numbers.setdefault(name, {})
    series[labels] = series.get(labels, 0.0) + value
    if not math.isfinite(series[labels]):
        raise ValueError(f"{name} is {value}")


def _metric(name: str) -> Metric | None:
    if name in BY_NAME:
        return BY_NAME[name]
    stem = next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), "")
    return BY_NAME.get(stem)
