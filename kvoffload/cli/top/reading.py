"""A metrics page as numbers, and what has changed between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from kvoffload.model.errors import KVOffloadError
from kvoffload.telemetry.catalogue import BY_NAME, CATALOGUE, Kind, Metric
from kvoffload.telemetry.snapshot import Labels

_PREFIX = "kvoffload_"
_SUFFIXES = ("_bucket", "_sum", "_count")
_OLDEST_PIN = "kvoffload_oldest_pin_timestamp_seconds"


class PageError(KVOffloadError):
    """Raised when a page is not kvoffload's metrics; whoever named it must act."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One scrape. Several engines of one server are added up.

    Args:
        at: when, in monotonic seconds.
        numbers: by the name of the series and its labels, in the catalogue's order; a bucket's bound comes last.
    """

    at: float
    numbers: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    def number(self, name: str, *labels: str) -> float:
        """Return one number; one that is missing is 0."""
        return self.numbers.get(name, {}).get(labels, 0.0)

    def total(self, name: str) -> float:
        """Return the sum over all labels."""
        return sum(self.numbers.get(name, {}).values())


@dataclass(frozen=True, slots=True)
class Change:
    """Two scrapes of the same life of a server.

    Args:
        now: the later one.
        before: the earlier one; None for the first.
    """

    now: Reading
    before: Reading | None = None

    @property
    def seconds(self) -> float:
        """Time between them; 0 where there is only one."""
        return self.now.at - self.before.at if self.before is not None else 0.0

    def added(self, name: str, *labels: str) -> float:
        """Return what was added to a counter; since the server's start where there is only one reading."""
        before = self.before.number(name, *labels) if self.before is not None else 0.0
        return self.now.number(name, *labels) - before

    def rate(self, name: str, *labels: str) -> float | None:
        """Return a counter's growth per second, None where there is only one reading."""
        return self.added(name, *labels) / self.seconds if self.seconds > 0 else None

    def total_rate(self, name: str) -> float | None:
        """Return the growth per second of a counter's sum over all labels, None where there is only one reading."""
        if self.before is None or self.seconds <= 0:
            return None
        return (self.now.total(name) - self.before.total(name)) / self.seconds

    def mean(self, histogram: str, *labels: str) -> float | None:
        """Return the mean of the samples that came since the reading before; None without any."""
        samples = self.added(f"{histogram}_count", *labels)
        return self.added(f"{histogram}_sum", *labels) / samples if samples > 0 else None


def parse_page(text: str, at: float) -> Reading:
    """Return a page's numbers.

    Raises:
        PageError: it is no page of metrics, or none of kvoffload's is on it.
    """
    numbers: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            if family.name.startswith(_PREFIX):
                for sample in family.samples:
                    _add(numbers, sample.name, sample.labels, sample.value)
    except ValueError as error:
        raise PageError(f"it is no page of metrics: {error}") from error
    if not numbers:
        raise PageError("none of kvoffload's metrics is there: is offloading switched on in that server?")
    return Reading(at, numbers)


def has_restarted(now: Reading, before: Reading) -> bool:
    """Whether a counter has become smaller: the server is another one."""
    counters = [metric.name for metric in CATALOGUE if metric.kind is Kind.COUNTER]
    return any(now.total(name) < before.total(name) for name in counters)


def _add(numbers: dict[str, dict[Labels, float]], name: str, given: Mapping[str, str], value: float) -> None:
    metric = _metric(name)
    if metric is None:  # of another version
        return
    names: Iterable[str] = metric.label_names
    if name.endswith("_bucket"):
        names = (*names, "le")
    labels = tuple(given.get(one, "") for one in names)
    series = numbers.setdefault(name, {})
    series[labels] = _JOIN.get(metric.name, _sum)(series[labels], value) if labels in series else value


def _metric(name: str) -> Metric | None:
    if name in BY_NAME:
        return BY_NAME[name]
    stem = next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), "")
    return BY_NAME.get(stem)


def _sum(one: float, other: float) -> float:
    return one + other


def _earliest(one: float, other: float) -> float:
    """The older of two pins; 0 stands for none."""
    return min(one, other) if one and other else one or other


_JOIN: Mapping[str, Callable[[float, float], float]] = {
    _OLDEST_PIN: _earliest,
    "kvoffload_degraded": max,
    "kvoffload_net_benefit_negative": max,
    "kvoffload_break_even_tokens": max,
}
