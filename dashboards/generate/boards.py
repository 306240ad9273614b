"""The dashboards and their parts. Panels are in the YAML files of this folder, in the order on the screen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import product
from pathlib import Path

import msgspec

from dashboards.generate.promql import choose_engines, values_of

Limits = tuple[tuple[int | float, str], ...]
"""Names of colours, each with the lowest value that gets it; the first colour's value is ignored."""


class Expect(Enum):
    """What a query must return while a small workload stores, loads and evicts.

    Queries of the engine's own series must return an answer if the engine serves these series.
    """

    ACTIVITY = "activity"  # something other than 0
    SERIES = "series"  # an answer, which may be 0
    ZERO = "zero"  # an answer, always 0


class Kind(Enum):
    """How a panel shows its queries."""

    LINES = "lines"
    STACK = "stack"
    NUMBER = "number"  # over the whole time range
    TABLE = "table"  # a row for each engine, a column for each query; over the whole time range
    HEATMAP = "heatmap"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a dashboard, as in the files."""


class Query(Part, frozen=True):
    """One query of a panel.

    Args:
        legend: the legend of each series; `{{label}}` stands for a label's value.
        promql: the query, in the form for `choose_engines`.
        expects: the result that the query must have.
        unit: the unit of a table's column; by default the panel's unit.
        limits: colours of a table's column, as for a panel.
        texts: texts of a table's column, as for a panel.
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
        """Whether the query reads the engine's own series, which only vLLM serves."""
        return "vllm:" in self.promql

    @property
    def names(self) -> tuple[str, ...]:
        """Every text that the legend can show; empty if the legend is a bucket's bound."""
        labels = re.findall(r"\{\{(\w+)\}\}", self.legend)
        values = [values_of(self.promql, label) for label in labels]
        pattern = re.sub(r"\{\{\w+\}\}", "{}", self.legend)
        return tuple(pattern.format(*each) for each in product(*values))


class Panel(Part, frozen=True):
    """One panel.

    Args:
        title: the panel's heading.
        shows: what the panel shows.
        when_wrong: what looks wrong, and what to do then.
        unit: Grafana's name of the unit; `si:` scales a unit that Grafana does not know, `suffix:` only shows it.
        queries: the queries that the panel shows.
        kind: how the queries are drawn.
        width: the number of columns, of 24.
        maximum: the maximum of the axis, if there is a natural one.
        limits: colours by value.
        texts: words shown for numbers; `<0` and `>0` stand for all negative and all positive numbers.
        labels: additional columns of a table by label, with their headings.
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
        """Whether the panel's queries are evaluated once, at the end of the time range."""
        return self.kind in (Kind.NUMBER, Kind.TABLE)

    @property
    def description(self) -> str:
        """The text behind the panel's info sign."""
        return f"{self.shows}\n\n**When it looks wrong:** {self.when_wrong}"

    @property
    def names(self) -> list[str]:
        """The names of everything that has its own colour."""
        if self.limits or self.kind is Kind.TABLE:
            return []
        return [name for query in self.queries for name in query.names]


class Row(Part, frozen=True):
    """Panels under one heading, in lines of 24 columns."""

    title: str
    panels: tuple[Panel, ...]


class Board(Part, frozen=True):
    """One dashboard.

    Args:
        name: the name of the board's file, and the end of its identifier.
        title: the title in Grafana's list.
        about: the question that the board answers.
        rows: from top to bottom.
        tiers: values of the variable `tier`, the first of which is chosen at first; empty if the board has no such
            variable.
    """

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]
    tiers: tuple[str, ...] = ()

    @property
    def panels(self) -> Iterator[Panel]:
        return (panel for row in self.rows for panel in row.panels)


BOARDS = tuple(
    msgspec.yaml.decode(Path(__file__).with_name(f"{name}.yml").read_bytes(), type=Board)
    for name in ("overview", "why", "transfers", "tiers")
)
"""The dashboards, in the order in which an operator needs them."""
