from __future__ import annotations

import json
import re
from typing import Any

import yaml

from dashboards.generate.files import FOLDER
from dashboards.pictures.__main__ import SHOWN, TAKEN
from dashboards.pictures.boards import shown, unfit
from tests.tooling.scripts import ROOT

SOURCES = FOLDER / "pictures" / "grafana"


def test_every_kind_of_panel_can_be_drawn() -> None:
    (known,) = re.findall(
        r"^const KINDS = {(.*)};$", (SOURCES / "board.jsx").read_text(encoding="utf-8"), re.MULTILINE
    )
    boards = sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))
    panels = [panel for path in boards for panel in json.loads(path.read_text())["panels"]]
    assert {panel["type"] for panel in panels} - {"row"} <= set(re.findall(r"(\w+):", known))


def test_every_picture_is_shown_in_a_document() -> None:
    shown = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    taken = {path.name for path in (FOLDER / "pictures").glob("*.png")}
    assert taken == {f"{name}.png" for name in SHOWN}
    assert [name for name in taken if f"dashboards/pictures/{name}" not in shown] == []


def test_every_picture_shows_the_current_dashboard() -> None:
    """The text behind a panel's info icon is not in the picture, so the text may change."""
    taken = json.loads(TAKEN.read_text())
    assert taken == {name: shown(name) for name in SHOWN}, "run `make screenshot` on a quiet machine"


def test_a_picture_of_an_empty_panel_a_plot_of_zeros_or_a_loss_is_rejected() -> None:
    def panel(title: str, kind: str, *answers: dict[str, Any]) -> dict[str, Any]:
        return {"title": title, "type": kind, "targets": [{"answer": [one]} for one in answers]}

    def captured(*panels: dict[str, Any]) -> dict[str, Any]:
        return {"board": {"panels": [{"title": "a row", "type": "row"}, *panels]}}

    zeros, ones = ({"values": [[0, value], [5, value]]} for value in ("0", "1"))
    unknown = {"values": [[0, "NaN"]]}
    gain, loss, never = ({"value": [5, value]} for value in ("2.5", "-1.42", "NaN"))
    good = [
        panel("a plot", "timeseries", zeros, ones),
        panel("a number", "stat", {"value": [5, "0"]}),
        panel("Net seconds saved", "stat", gain),
    ]
    assert unfit(captured(*good)) == []
    bad = [
        panel("empty", "stat"),
        panel("zeros", "timeseries", zeros, unknown),
        panel("dark", "heatmap", zeros),
        panel("Net seconds saved", "stat", loss),
        panel("Net seconds saved", "stat", never),
    ]
    assert unfit(captured(*good, *bad)) == [
        "empty: no data",
        "zeros: nothing but zeros",
        "dark: nothing but zeros",
        "Net seconds saved: -1.42, so no gain",
        "Net seconds saved: NaN, so no gain",
    ]


def test_the_components_have_the_version_of_the_containers_grafana() -> None:
    packages = json.loads((SOURCES / "package.json").read_text())["dependencies"]
    locked = json.loads((SOURCES / "package-lock.json").read_text())["packages"]
    image = yaml.safe_load((FOLDER / "compose.yml").read_text())["services"]["grafana"]["image"]
    minor = image.rpartition(":")[2].rpartition(".")[0]
    for name, version in packages.items():
        assert locked[f"node_modules/{name}"]["version"] == version
    assert {packages[name].rpartition(".")[0] for name in ("@grafana/ui", "@grafana/data")} == {minor}


def test_the_lock_names_no_registry() -> None:
    assert "://" not in re.sub(r'"url": "[^"]*"', "", (SOURCES / "package-lock.json").read_text())
