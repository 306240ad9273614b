"""Which files are generated, and from what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from dashboards.generate.boards import BOARDS
from dashboards.generate.grafana import render
from dashboards.generate.runbook import render_runbook

FOLDER = Path(__file__).resolve().parent.parent
RULES = FOLDER / "rules" / "alerts.yml"

FILES: dict[Path, Callable[[], str]] = {
    **{FOLDER / "grafana" / "dashboards" / f"{board.name}.json": partial(render, board) for board in BOARDS},
    FOLDER / "RUNBOOK.md": partial(render_runbook, RULES),
}
