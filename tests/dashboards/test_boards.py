from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dashboards.generate.boards import BOARDS
from dashboards.generate.boards import Kind as PanelKind
from dashboards.generate.colours import COLOURS, LIMITS
from dashboards.generate.files import FILES, FOLDER
from dashboards.generate.grafana import check_colours
from dashboards.generate.promql import ENGINE_LABELS, VLLM_SERIES, choose_engines, substitute
from kvoffload.telemetry.catalogue import BY_NAME, CATALOGUE, Kind
from tests.dashboards.queries import all_queries, metrics_in, rule_expressions

PANELS = [panel for board in BOARDS for panel in board.panels]
ADDED_BY_PROMETHEUS = {"ALERTS"}


def names_in_use(expressions: Iterator[str]) -> set[str]:
    return {name for expr in expressions for name in metrics_in(expr)}


def test_the_files_are_those_that_the_generator_writes() -> None:
    stale = [path.name for path, make in FILES.items() if not path.exists() or path.read_text() != make()]
    assert stale == [], "run `make dashboards`"
    written = {path for path in FILES if path.suffix == ".json"}
    assert set((FOLDER / "grafana" / "dashboards").iterdir()) == written


def test_panels_and_rules_use_every_metric_and_only_metrics_that_exist() -> None:
    on_panels = names_in_use(query.expr for query in all_queries())
    in_rules = names_in_use(rule_expressions())
    groups = yaml.safe_load((FOLDER / "rules" / "recording.yml").read_text())["groups"]
    recorded = {rule["record"] for group in groups for rule in group["rules"]}
    assert {metric.name for metric in CATALOGUE} - {base(name) for name in on_panels | in_rules} == set()
    assert {base(name) for name in on_panels} - set(BY_NAME) - VLLM_SERIES == ADDED_BY_PROMETHEUS
    assert {base(name) for name in in_rules} - set(BY_NAME) - recorded - VLLM_SERIES == set()
    assert on_panels >= VLLM_SERIES


def test_worth_it_is_the_sign_of_the_net_seconds() -> None:
    """Check that two panels and a table column show the same expression. Below 0 they are red, and one panel
    says NO.
    """
    panels = {panel.title: panel for panel in BOARDS[0].panels}
    worth, net = panels["Worth it"], panels["Net seconds saved"]
    (column,) = [query for query in panels["Engines"].queries if query.legend == "net saved"]
    assert worth.queries[0].expr == net.queries[0].expr == choose_engines("$net")
    assert column.expr.replace(f" by ({ENGINE_LABELS})", "") == net.queries[0].expr
    assert worth.limits == net.limits == ((-1, "red"), (0, "grey"), (1e-9, "green"))
    assert column.limits == ((-1, "red"), (0, "green"))
    assert worth.texts == {"<0": "NO", "0": "not measured", ">0": "yes"}
    board = json.loads(next(path for path in FILES if path.name == "overview.json").read_text())
    (drawn,) = [panel for panel in board["panels"] if panel["title"] == "Worth it"]
    _, *ranges = drawn["fieldConfig"]["defaults"]["mappings"]
    assert [(one["options"]["from"], one["options"]["to"]) for one in ranges] == [(None, -1e-9), (1e-9, None)]
    assert [one["options"]["result"]["text"] for one in ranges] == ["NO", "yes"]


@pytest.mark.slow
@pytest.mark.tools("promtool")
def test_engines_that_wait_longer_than_they_save_have_a_negative_net(tmp_path: Path) -> None:
    engines = {"a": (1, 4), "b": (4, 1)}
    series = [
        {"series": f'{name}{{instance="{engine}"{labels}}}', "values": f"0+{number}x20"}
        for engine, (saved, waited) in engines.items()
        for name, labels, number in (
            ("kvoffload_prefill_seconds_saved_total", "", saved),
            ("kvoffload_load_wait_seconds_sum", ', reason="own_load"', waited),
            ("kvoffload_interference_seconds_total", ', direction="load"', 0),
        )
    ]
    net = substitute(choose_engines("$net_per_engine"), "5m", "10m")
    cases = [
        {"eval_time": "15m", "expr": f"round({net})", "exp_samples": [
            {"labels": '{instance="a"}', "value": -30}, {"labels": '{instance="b"}', "value": 30},
        ]}
    ]  # fmt: skip
    file = tmp_path / "test.yml"
    file.write_text(
        json.dumps({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": cases}]})
    )
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_headings_of_tables_fit_their_columns() -> None:
    """Tables have up to thirteen columns, so Grafana cuts off long headings."""
    tables = [panel for panel in PANELS if panel.kind is PanelKind.TABLE]
    headings = [query.legend for panel in tables for query in panel.queries if len(panel.queries) > 1]
    assert [heading for heading in headings if len(heading) > 13] == []


def test_long_legends_leave_out_series_of_zeros() -> None:
    boards = [json.loads(make()) for path, make in FILES.items() if path.suffix == ".json"]
    drawn = {panel["title"]: panel for board in boards for panel in board["panels"] if panel["type"] != "row"}
    for panel in PANELS:
        overrides = drawn[panel.title]["fieldConfig"].get("overrides", [])
        hides = any(one["matcher"]["id"] == "byValue" for one in overrides)
        assert hides is (len(panel.names) > 8), panel.title


def test_every_panel_explains_its_numbers_and_what_to_do() -> None:
    for panel in PANELS:
        assert panel.unit, panel.title
        assert panel.queries, panel.title
        assert panel.shows.endswith("."), panel.title
        assert panel.when_wrong.endswith("."), panel.title
        assert len(panel.when_wrong.split()) >= 5, panel.title


def test_all_missing_colours_are_listed_with_the_files_that_need_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_colours(BOARDS)
    for name in ("disk", "disk total", "load", "margin", "on_disk", "on_node"):
        monkeypatch.delitem(COLOURS, name)
    with pytest.raises(SystemExit) as refused:
        check_colours(BOARDS)
    assert refused.value.code == (
        "colours are missing in COLOURS of kvoffload/cli/figures.py (tiers and directions): disk, load; "
        "in dashboards/generate/colours.py: margin, on_node"
    )


def test_every_name_or_value_has_a_colour_and_names_on_one_panel_have_different_colours() -> None:
    for panel in PANELS:
        assert len({COLOURS[name] for name in panel.names}) == len(panel.names), panel.title
        limits = [*panel.limits, *(limit for query in panel.queries for limit in query.limits)]
        assert {colour for _, colour in limits} <= set(LIMITS), panel.title
        assert limits or panel.names or panel.kind in (PanelKind.TABLE, PanelKind.HEATMAP), panel.title
    assert set(COLOURS) == {name for panel in PANELS for name in panel.names}
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in COLOURS.values())


def test_panels_point_to_alerts_and_panels_that_exist() -> None:
    groups = yaml.safe_load((FOLDER / "rules" / "alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    titles = {panel.title for panel in PANELS}
    texts = [panel.description for panel in PANELS]
    texts += [rule["annotations"]["runbook"] for group in groups for rule in group["rules"]]
    for text in texts:
        assert set(re.findall(r"KVOffload\w+", text)) <= alerts
        pointed = {title for title in re.findall(r"`([^`]+)`", text) if title[0].isupper()}
        assert pointed <= titles, text


def test_panels_fill_the_width_of_each_row() -> None:
    for board in BOARDS:
        for row in board.rows:
            beyond = sum(panel.width for panel in row.panels) % 24
            assert not beyond, (
                f"board {board.name}, row {row.title!r}: the last line is {beyond} of 24 columns wide"
            )


def test_panels_show_shares_from_0_to_1_as_per_cent() -> None:
    assert [panel.title for panel in PANELS if panel.unit == "percent"] == []  # Grafana shows 1 as 1 %


def test_a_metric_name_missing_from_the_catalogue_raises() -> None:
    with pytest.raises(ValueError, match="not in the catalogue"):
        choose_engines("sum by (cause) (kvoffload_nothing_total)")
    with pytest.raises(ValueError, match="has no outcome vanished"):
        choose_engines('kvoffload_load_blocks_total{outcome=~"loaded|vanished"}')
    with pytest.raises(ValueError, match="not among the engine's metrics"):
        choose_engines("rate(vllm:nothing[$__rate_interval])")


def test_each_series_of_a_query_is_filtered_by_the_chosen_engines() -> None:
    query = 'rate(kvoffload_resets_total[$__range]) + on ($engine_labels) kvoffload_slots{tier="disk"}'
    chosen = substitute(choose_engines(query), "5s", "1h")
    every = 'namespace=~".*", pod=~".*", instance=~".*", model_name=~".*", engine=~".*"'
    on = "namespace, pod, instance, model_name, engine"
    assert chosen == (
        f'rate(kvoffload_resets_total{{{every}}}[1h]) + on ({on}) kvoffload_slots{{{every}, tier="disk"}}'
    )


def base(name: str) -> str:
    """Return the catalogue's name of a series, without the suffix that a histogram's parts have."""
    stem = re.sub("_(bucket|sum|count)$", "", name)
    return stem if stem in BY_NAME and BY_NAME[stem].kind is Kind.HISTOGRAM else name
