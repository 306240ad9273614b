"""The dashboards and their parts, read from the YAML files in this folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import product
from pathlib import Path

import msgspec

from dashboards.generate.promql import choose_engines, values_of
from kvoffload.model.wire import LOWER_TIERS

Limits = tuple[tuple[int | float, str], ...]
"""Pairs of a value and a colour's name. A number gets the colour of the largest value that it reaches.

The first value is ignored, so that lower numbers get the first colour too.
"""


class Expect(Enum):
    """The required result of a query while a small workload stores, loads and evicts.

    A query of the engine's own series may return nothing if the engine does not serve these series.
    """

    ACTIVITY = "activity"  # a number other than 0 at least once
    SERIES = "series"  # any number
    ZERO = "zero"  # always 0


class Kind(Enum):
    """The forms in which a panel shows the results of its queries."""

    LINES = "lines"
    STACK = "stack"
    NUMBER = "number"  # one number, at the end of the time range
    TABLE = "table"  # a row for each engine and a column for each query, at the end of the time range
    HEATMAP = "heatmap"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a dashboard. The fields have the same names in the YAML files."""


class Query(Part, frozen=True):
    """One query of a panel.

    Args:
        legend: the legend of each series. `{{label}}` stands for the value of a label.
        promql: the query in PromQL, as `choose_engines` accepts it.
        expects: the required result when `make observe` checks the dashboards.
        unit: the unit in a table's column; by default the panel's unit.
        limits: the colours of numbers in a table's column, in the form of `Panel.limits`.
        texts: the words in place of numbers in a table's column, in the form of `Panel.texts`.
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
        """Whether the query reads the engine's own series, which only vLLM serves."""
        return "vllm:" in self.promql

    @property
    def names(self) -> tuple[str, ...]:
        """All legends that the query's series can have; empty if the catalogue does not list a label's values."""
        labels = re.findall(r"\{\{(\w+)\}\}", self.legend)
        values = [values_of(self.promql, label) for label in labels]
        pattern = re.sub(r"\{\{\w+\}\}", "{}", self.legend)
        return tuple(pattern.format(*each) for each in product(*values))


class Panel(Part, frozen=True):
    """One panel.

    Args:
        title: the panel's heading.
        shows: what the panel shows.
        when_wrong: what a problem looks like in the panel, and the remedy.
        unit: Grafana's name for the unit. For a unit that Grafana does not know, `si:` scales numbers and shows the
            unit, and `suffix:` only shows the unit. `percentunit` shows 1, as in metrics that end in `_ratio`, as 100 %.
        queries: the queries that the panel shows.
        kind: the form in which the panel shows the results.
        width: the panel's width, as a number of the screen's 24 columns. The widths in a row sum to a multiple of 24.
        maximum: the maximum of the axis; None to let Grafana choose.
        limits: the colours of numbers.
        texts: the words to show in place of numbers. `<0` and `>0` stand for all negative and all positive numbers.
        labels: additional columns of a table with the values of labels: the column's heading, by the label's name.
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
        """Whether Grafana evaluates the panel's queries only once, at the end of the time range."""
        return self.kind in (Kind.NUMBER, Kind.TABLE)

    @property
    def description(self) -> str:
        """The text that the panel's info sign shows."""
        return f"{self.shows}\n\n**When it looks wrong:** {self.when_wrong}"

    @property
    def names(self) -> list[str]:
        """The legends of all series in the panel, which each have a fixed colour; empty for tables and limits."""
        if self.limits or self.kind is Kind.TABLE:
            return []
        return [name for query in self.queries for name in query.names]


class Row(Part, frozen=True):
    """Panels under one heading. A panel that does not fit the screen's 24 columns begins a new line."""

    title: str
    panels: tuple[Panel, ...]


class Board(Part, frozen=True):
    """One dashboard.

    Args:
        name: the name of the dashboard's file, and the end of the dashboard's identifier in Grafana.
        title: the title in Grafana's list of dashboards.
        about: the question that the dashboard answers.
        rows: the rows of panels, from top to bottom.
    """

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> Iterator[Panel]:
        return (panel for row in self.rows for panel in row.panels)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Return the values of the variable `tier`; empty if no query has this variable. The first is the default."""
        has_variable = any("$tier" in query.expr for panel in self.panels for query in panel.queries)
        return tuple([tier.value for tier in LOWER_TIERS]) if has_variable else ()


BOARDS = tuple(
    msgspec.yaml.decode(Path(__file__).with_name(f"{name}.yml").read_bytes(), type=Board)
    for name in ("overview", "why", "transfers", "tiers", "capacity")
)
"""All dashboards, in the order in which an operator needs them."""
