"""The parts of a dashboard, without anything of Grafana's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


class Expect(Enum):
    """What a query must give while a small workload runs that stores, loads and evicts."""

    ACTIVITY = auto()  # something other than 0
    SERIES = auto()  # an answer; 0 is the good case
    ZERO = auto()  # an answer, and never anything but 0
    ENGINE = auto()  # an answer where the engine serves the series, and no error anywhere


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel.

    Args:
        expr: PromQL, with Grafana's variables.
        legend: of each of its series; `{{label}}` stands for a label's value.
        names: every name that the legend can become, where they are known; each has its colour.
        expects: what it must give.
        unit: of a table's column; by default the panel's.
        limits: of a table's column, as a panel's.
        texts: of a table's column, as a panel's.
    """

    expr: str
    legend: str
    names: tuple[str, ...] = ()
    expects: Expect = Expect.ACTIVITY
    unit: str = ""
    limits: tuple[tuple[float, str], ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)


class Kind(Enum):
    """How a panel shows its queries."""

    LINES = auto()
    STACK = auto()
    NUMBER = auto()  # over the whole time range
    TABLE = auto()  # a row an engine, a column a query; over the whole time range
    HEATMAP = auto()


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Args:
        title: what it is about.
        shows: what is seen.
        when_wrong: what looks wrong, and what to do then.
        unit: as Grafana names it.
        queries: what is drawn.
        kind: how.
        width: of 24 columns.
        maximum: of the axis, where it has a natural one.
        limits: colours from a value upwards; the first one's value does not count.
        texts: words in place of numbers.
        labels: of a table, the labels that are its first columns, and their headings.
    """

    title: str
    shows: str
    when_wrong: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    width: int = 8
    maximum: float | None = None
    limits: tuple[tuple[float, str], ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_instant(self) -> bool:
        """Whether its queries are evaluated once, at the end of the time range."""
        return self.kind in (Kind.NUMBER, Kind.TABLE)

    @property
    def description(self) -> str:
        """The text behind the panel's info sign."""
        return f"{self.shows}\n\n**When it looks wrong:** {self.when_wrong}"


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading. Their widths fill lines of 24 columns."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard.

    Args:
        name: of its file, and the end of its identifier.
        title: as Grafana lists it.
        about: the question that it answers.
        rows: from top to bottom.
        tiers: values of its variable `tier`, the first one chosen; none if it has no such variable.
    """

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]
    tiers: tuple[str, ...] = ()

    @property
    def panels(self) -> Iterator[Panel]:
        """All panels."""
        return (panel for row in self.rows for panel in row.panels)
