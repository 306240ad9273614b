"""Parses the queries of all dashboards and rules with PromQL's own parser."""

from __future__ import annotations

from collections.abc import Iterator

import promql_parser
import yaml

from dashboards.generate.boards import BOARDS, Query
from dashboards.generate.files import FOLDER
from dashboards.generate.promql import substitute


def all_queries() -> Iterator[Query]:
    return (query for board in BOARDS for panel in board.panels for query in panel.queries)


def rule_expressions() -> Iterator[str]:
    for name in ("recording", "alerts"):
        groups = yaml.safe_load((FOLDER / "rules" / f"{name}.yml").read_text())["groups"]
        yield from (rule["expr"] for group in groups for rule in group["rules"])


def metrics_in(expr: str) -> set[str]:
    """Return the names of the series that a PromQL expression selects."""
    found: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name, f"a selector without a name: {expr}"
            found.add(node.name)

    promql_parser.walk(promql_parser.parse(substitute(expr, "10s", "1h")), visit)
    return found
