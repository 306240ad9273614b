"""The table of generated files. Each path has the function that returns the file's content."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from dashboards.generate.boards import BOARDS
from dashboards.generate.grafana import places, render
from dashboards.generate.rules import ALERTS, render_rules, render_runbook

FOLDER = Path(__file__).resolve().parent.parent

FILES: dict[Path, Callable[[], str]] = {
    **{
        FOLDER / "grafana" / "dashboards" / f"{board.name}.json": partial(render, board, places(BOARDS))
        for board in BOARDS
    },
    FOLDER / "rules" / "alerts.yml": partial(render_rules, ALERTS),
    FOLDER / "RUNBOOK.md": partial(render_runbook, ALERTS),
}
