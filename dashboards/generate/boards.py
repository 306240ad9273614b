"""The dashboards and their parts. The YAML files in this folder describe the panels, in the order on the screen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import product
from pathlib import Path

import msgspec

from dashboards.generate.promql import choose_engines, values_of

Limits = tuple[tuple[int | float, str], ...]
"""Pairs of a value and a colour's name. A number gets the colour of the largest value that it reaches.

The first value is ignored, so that lower numbers get the first colour too.
"""


class Expect(Enum):
    """What a query must return while a small workload stores, loads and evicts.

    A query of the engine's own series must return something only if the engine serves these series.
    """

    ACTIVITY = "activity"  # a number other than 0
    SERIES = "series"  # a number, which may be 0
    ZERO = "zero"  # the number 0, always


class Kind(Enum):
    """How a panel shows the results of its queries."""

    LINES = "lines"
    STACK = "stack"
    NUMBER = "number"  # one number for the whole time range
    # A row for each engine and a column for each query, for the whole time range.
    TABLE = "table"
    HEATMAP = "heatmap"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a dashboard, with the fields that the YAML files use."""


class Query(Part, frozen=True):
    """One query of a panel.

    Args:
        legend: the legend of each series. `{{label}}` stands for the value of a label.
        promql: the query in PromQL, in the form that `choose_engines` takes.
        expects: what the query must return when the dashboards are checked.
        unit: the unit in a table's column; by default the panel's unit.
        limits: the colours in a table's column, in the form of `Panel.limits`.
        texts: the words in a table's column, in the form of `Panel.texts`.
    """

    legend: str
    promql: str = msgspec.field(name="expr")
    expects: Expect = Expect.ACTIVITY
    unit: str = ""
    limits: Limits = ()
    texts: Mapping[str, str] = {}

    @property
    def expr(self) -> str:
        """The query in PromQL, with Grafana's variables."""
        return choose_engines(self.promql)

    @property
    def is_of_engine(self) -> bool:
        """Whether the query reads series of the engine itself. Only vLLM serves such series."""
        return "vllm:" in self.promql

    @property
    def names(self) -> tuple[str, ...]:
        """All texts that the legend can show; empty if the legend shows the bounds of buckets."""
        labels = re.findall(r"\{\{(\w+)\}\}", self.legend)
        values = [values_of(self.promql, label) for label in labels]
        pattern = re.sub(r"\{\{\w+\}\}", "{}", self.legend)
        return tuple(pattern.format(*each) for each in product(*values))


class Panel(Part, frozen=True):
    """One panel.

    Args:
        title: the panel's heading.
        shows: what the panel shows.
        when_wrong: how a problem looks in this panel, and what to do then.
        unit: Grafana's name for the unit. `si:` before an unknown unit scales its numbers; `suffix:` only shows the
            unit.
        queries: the queries that the panel shows.
        kind: how the queries are drawn.
        width: how many of the screen's 24 columns the panel takes.
        maximum: the maximum of the axis, if the numbers have a natural maximum.
        limits: the colours of numbers.
        texts: words that are shown instead of numbers. `<0` and `>0` stand for all negative and all positive numbers.
        labels: additional columns of a table, which show labels: the label's name, and the column's heading.
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
        """Whether the panel's queries are evaluated only once, at the end of the time range."""
        return self.kind in (Kind.NUMBER, Kind.TABLE)

    @property
    def description(self) -> str:
        """The text that the panel's info sign shows."""
        return f"{self.shows}\n\n**When it looks wrong:** {self.when_wrong}"

    @property
    def names(self) -> list[str]:
        """The names of everything in the panel that has a colour of its own."""
        if self.limits or self.kind is Kind.TABLE:
            return []
        return [name for query in self.queries for name in query.names]


class Row(Part, frozen=True):
    """Panels under one heading. The screen has 24 columns; panels that do not fit begin a new line."""

    title: str
    panels: tuple[Panel, ...]


class Board(Part, frozen=True):
    """One dashboard.

    Args:
        name: the name of the dashboard's file. Its identifier ends with this name.
        title: the title in Grafana's list of dashboards.
        about: the question that the dashboard answers.
        rows: the rows of panels, from top to bottom.
        tiers: the values of the variable `tier`; the first value is the default. Empty if the dashboard does not have
            this variable.
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
"""All dashboards, in the order in which an operator needs them."""
