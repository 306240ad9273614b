"""The dashboards, and the parts of one. Their panels are in the YAML files beside this, in the order of the screen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import product
from pathlib import Path

import msgspec

from dashboards.generate.promql import choose_engines, values_of

Limits = tuple[tuple[int | float, str], ...]
"""Names of colours from a value upwards; the first one's value does not count."""


class Expect(Enum):
    """What a query must give while a small workload runs that stores, loads and evicts.

    Queries of the engine's own series must give an answer if the engine serves these series.
    """

    ACTIVITY = "activity"  # something other than 0
    SERIES = "series"  # an answer; 0 is the good case
    ZERO = "zero"  # an answer, and never anything but 0


class Kind(Enum):
    """How a panel shows its queries."""

    LINES = "lines"
    STACK = "stack"
    NUMBER = "number"  # over the whole time range
    TABLE = "table"  # a row an engine, a column a query; over the whole time range
    HEATMAP = "heatmap"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a dashboard, as the files hold it."""


class Query(Part, frozen=True):
    """One query of a panel.

    Args:
        legend: of each of its series; `{{label}}` stands for a label's value.
        promql: as `choose_engines` takes it.
        expects: what it must give.
        unit: of a table's column; by default the panel's.
        limits: of a table's column, as a panel's.
        texts: of a table's column, as a panel's.
    """

    legend: str
    promql: str = msgspec.field(name="expr")
    expects: Expect = Expect.ACTIVITY
    unit: str = ""
    limits: Limits = ()
    texts: Mapping[str, str] = {}

    @property
    def expr(self) -> str:
        """PromQL, with Grafana's variables."""
        return choose_engines(self.promql)

    @property
    def is_of_engine(self) -> bool:
        """Whether it asks for the engine's own series, which only vLLM serves."""
        return "vllm:" in self.promql

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that the legend can become; none where it is a bucket's bound."""
        labels = re.findall(r"\{\{(\w+)\}\}", self.legend)
        values = [values_of(self.promql, label) for label in labels]
        pattern = re.sub(r"\{\{\w+\}\}", "{}", self.legend)
        return tuple(pattern.format(*each) for each in product(*values))


class Panel(Part, frozen=True):
    """One panel.

    Args:
        title: what it is about.
        shows: what is seen.
        when_wrong: what looks wrong, and what to do then.
        unit: as Grafana names it; `si:` scales a unit that Grafana does not know, `suffix:` only shows it.
        queries: what is drawn.
        kind: how.
        width: of 24 columns.
        maximum: of the axis, where it has a natural one.
        limits: its colours by value.
        texts: words in place of numbers.
        labels: of a table, labels that are columns beside those of an engine, and their headings.
    """

    title: str
    shows: str
    when_wrong: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    width: int = 8
    maximum: int | float | None = None
    limits: Limits = ()
    texts: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}

    @property
    def is_instant(self) -> bool:
        """Whether its queries are evaluated once, at the end of the time range."""
        return self.kind in (Kind.NUMBER, Kind.TABLE)

    @property
    def description(self) -> str:
        """The text behind the panel's info sign."""
        return f"{self.shows}\n\n**When it looks wrong:** {self.when_wrong}"

    @property
    def names(self) -> list[str]:
        """The names of everything that is drawn in a colour of its own."""
        if self.limits or self.kind is Kind.TABLE:
            return []
        return [name for query in self.queries for name in query.names]


class Row(Part, frozen=True):
    """Panels under one heading. Their widths fill lines of 24 columns."""

    title: str
    panels: tuple[Panel, ...]


class Board(Part, frozen=True):
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


BOARDS = tuple(
    msgspec.yaml.decode(Path(__file__).with_name(f"{name}.yml").read_bytes(), type=Board)
    for name in ("overview", "why", "transfers", "tiers")
)
"""In the order in which an operator needs them."""
