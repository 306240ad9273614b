from __future__ import annotations

import copy
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import promql_parser
import pytest

from dashboards.generate.files import FOLDER
from dashboards.generate.promql import ENGINE_LABELS, VARIABLES, VLLM_SERIES, substitute
from kvoffload.model.wire import LOWER_TIERS
from tests.dashboards.queries import metrics_in

FILES = sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))
SCHEMAS = Path(__file__).parent / "grafana_schema"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(request.param.read_text())
    return plain


def panels_of(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def check(name: str, value: object) -> None:
    jsonschema.validate(value, json.loads((SCHEMAS / f"{name}.json").read_text()))


def check_board(board: dict[str, Any]) -> None:
    plain = copy.deepcopy(board)
    for annotation in plain["annotations"]["list"]:
        # The published type lacks this field, because the data source defines it.
        annotation.pop("expr", None)
    check("dashboard", plain)
    for panel in panels_of(plain):
        check(f"{panel['type']}_options", panel["options"])
        if panel["type"] != "stat":
            check(f"{panel['type']}_field_config", panel["fieldConfig"]["defaults"].get("custom", {}))


def test_every_dashboard_matches_grafanas_types(board: dict[str, Any]) -> None:
    check_board(board)


def test_a_misspelt_field_or_value_is_found(board: dict[str, Any]) -> None:
    lines = next(number for number, panel in enumerate(board["panels"]) if panel["type"] == "timeseries")

    def refuses(*path: str, **wrong: object) -> bool:
        spoilt = copy.deepcopy(board)
        part = spoilt["panels"][lines]
        for name in path:
            part = part[name]
        part.update(wrong)
        with pytest.raises(jsonschema.ValidationError):
            check_board(spoilt)
        return True

    assert refuses("fieldConfig", "defaults", "custom", lineWidht=1)
    assert refuses("options", "legend", displayMode="lsit")
    assert refuses(datasuorce=SOURCE)


def test_every_panel_has_a_description_and_names_no_data_source_or_engine(board: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    tier = variables.pop("tier", None)
    assert (tier is not None) is (board["uid"] == "kvoffload-tiers")
    assert list(variables) == ["datasource", "namespace", "pod", "instance", "model", "engine"]
    assert variables["datasource"]["type"] == "datasource"
    for name, variable in variables.items():
        if name != "datasource":
            assert variable["datasource"] == SOURCE
            assert variable["allValue"] == ".*"
    for panel in panels_of(board):
        assert "When it looks wrong" in panel["description"], panel["title"]
        assert panel["datasource"] == SOURCE
        assert all(target["datasource"] == SOURCE for target in panel["targets"])


def test_the_lower_tiers_dashboard_shows_one_tier_and_marks_rows_for_only_one_tier() -> None:
    (board,) = [json.loads(path.read_text()) for path in FILES if path.stem == "tiers"]
    tiers = [each.value for each in LOWER_TIERS]
    (tier,) = [variable for variable in board["templating"]["list"] if variable["name"] == "tier"]
    assert (tier["type"], tier["query"], tier["current"]["value"]) == ("custom", ",".join(tiers), tiers[0])
    assert not tier.get("multi")
    row = ""
    for panel in board["panels"]:
        row = panel["title"] if panel["type"] == "row" else row
        for target in panel.get("targets", []):
            assert ("$tier" in target["expr"]) is not row.startswith("Only of the "), panel["title"]


def test_every_query_is_valid_and_selects_the_chosen_engines(board: dict[str, Any]) -> None:
    for panel in panels_of(board):
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            selected = metrics_in(target["expr"])
            assert all(name.startswith("kvoffload_") or name in VLLM_SERIES | {"ALERTS"} for name in selected)
            for name, label in VARIABLES.items():
                assert target["expr"].count(f'{label}=~"${name}"') >= len(selected)


def test_panels_have_unique_ids_and_do_not_overlap(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        x, y, width, height = (panel["gridPos"][name] for name in "xywh")
        cells = set(product(range(x, x + width), range(y, y + height)))
        assert not taken & cells, panel["title"]
        assert x + width <= 24
        taken |= cells


def test_boards_can_be_distinguished_and_link_to_each_other() -> None:
    assert [path.stem for path in FILES] == ["capacity", "overview", "tiers", "transfers", "why"]
    boards = [json.loads(path.read_text()) for path in FILES]
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == 5
    assert all(board["links"][0]["tags"] == board["tags"] == ["kvoffload"] for board in boards)


def test_a_panel_links_to_every_dashboard_that_its_text_names() -> None:
    boards = {board["uid"]: board for board in (json.loads(path.read_text()) for path in FILES)}
    links = 0
    for board in boards.values():
        for panel in panels_of(board):
            named = {title for title in re.findall("`([^`]+)`", panel["description"]) if title[0].isupper()}
            assert {link["title"] for link in panel.get("links", [])} == named
            for link in panel.get("links", []):
                uid, number = re.match(r"/d/([\w-]+)\?viewPanel=panel-(\d+)&", link["url"]).groups()  # type: ignore[union-attr]
                (target,) = [one for one in panels_of(boards[uid]) if one["id"] == int(number)]
                assert target["title"] == link["title"]
                links += 1
    assert links > 30


def test_the_first_panel_is_a_table_with_one_row_per_engine() -> None:
    (overview,) = [json.loads(path.read_text()) for path in FILES if path.stem == "overview"]
    first = panels_of(overview)[0]
    assert (first["type"], first["title"]) == ("table", "Engines")
    columns = ENGINE_LABELS.split(", ")
    for target in first["targets"]:
        assert (target["format"], target["instant"]) == ("table", True)
        parsed = promql_parser.parse(substitute(target["expr"], "10s", "1h"))
        by = set(re.findall(r"by \(([^)]*)\)", parsed.prettify()))
        assert all(set(columns) <= set(one.split(", ")) for one in by), target["expr"]
    organised = first["transformations"][1]["options"]
    order = organised["indexByName"]
    assert sorted(columns, key=order.__getitem__) == sorted(order, key=order.__getitem__)[: len(columns)]
