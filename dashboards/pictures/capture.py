"""What Grafana would ask for the dashboards: every panel of the JSON with its queries' answers of a real Prometheus."""

from __future__ import annotations

import json
from typing import Any

from dashboards.generate.files import FOLDER
from dashboards.observe.prometheus import SCRAPE_S, ObserveError, Prometheus
from dashboards.observe.substitute import substitute

BOARDS = FOLDER / "grafana" / "dashboards"
_RATE = f"{5 * SCRAPE_S}s"
_MAX_POINTS = 240  # a step a pixel or so; Grafana chooses likewise


def capture(prometheus: Prometheus, start: float, end: float) -> list[dict[str, Any]]:
    """Return each dashboard's JSON with the answers under every target's `answer`.

    Raises:
        ObserveError: Prometheus refuses a query.
    """
    boards = []
    for path in sorted(BOARDS.glob("*.json")):
        board: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                target["answer"] = _answer(prometheus, target, start, end)
        boards.append({"name": path.stem, "from": start, "to": end, "board": board})
    return boards


def _answer(prometheus: Prometheus, target: dict[str, Any], start: float, end: float) -> list[Any]:
    expr = substitute(target["expr"], _RATE, f"{max(int(end - start), 1)}s")
    if target.get("instant"):
        found = prometheus.get("query", query=expr, time=end)
    else:
        step = max(SCRAPE_S, int((end - start) / _MAX_POINTS))
        found = prometheus.get("query_range", query=expr, start=start, end=end, step=step)
    if found["resultType"] not in ("vector", "matrix"):
        raise ObserveError(f"{expr} gives a {found['resultType']}, which no panel can show")
    series: list[Any] = found["result"]
    return series
