"""Renders boards as Grafana's JSON. The only place that knows Grafana."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.generate.colours import COLOURS
from dashboards.generate.promql import series
from dashboards.generate.words import Board, Kind, Panel, Query

TAG = "kvoffload"
_SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
_HEIGHTS = {Kind.NUMBER: 4, Kind.HEATMAP: 9}
_HEIGHT = 8
_COLUMNS = 24
_INTERVAL_ONLY = ("auto", "auto_min", "auto_count")  # the builder writes them for every kind of variable

PanelBuilder = stat.Panel | timeseries.Panel | heatmap.Panel


def render(board: Board) -> str:
    """Return a board's JSON, as a file of Grafana holds it."""
    built = _dashboard(board).build()
    plain = json.loads(json.dumps(built, cls=JSONEncoder))
    for number, panel in enumerate(plain["panels"], start=1):
        panel["id"] = number
    for variable in plain["templating"]["list"]:
        for name in _INTERVAL_ONLY:
            variable.pop(name, None)
    return json.dumps(plain, indent=2, sort_keys=True) + "\n"


def _dashboard(board: Board) -> build.Dashboard:
    made = (
        build.Dashboard(board.title)
        .uid(f"{TAG}-{board.name}")
        .description(board.about)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(build.DatasourceVariable("datasource").label("data source").type("prometheus"))
        .with_variable(_instances())
        .link(_link())
        .annotation(_resets())
    )
    for element in _placed(board):
        made = made.with_row(element) if isinstance(element, build.Row) else made.with_panel(element)
    return made


def _placed(board: Board) -> Iterator[build.Row | PanelBuilder]:
    """Rows and panels with their places: panels from left to right, a new line where 24 columns are full."""
    y = 0
    for row in board.rows:
        yield build.Row(row.title).grid_pos(model.GridPos(x=0, y=y, w=_COLUMNS, h=1))
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + height
            height = _HEIGHTS.get(panel.kind, _HEIGHT)
            yield _panel(panel).grid_pos(model.GridPos(x=x, y=y, w=panel.width, h=height))
            x += panel.width
        y += height


def _panel(panel: Panel) -> PanelBuilder:
    made = _MAKERS[panel.kind](panel)
    made = made.title(panel.title).description(panel.description).datasource(_SOURCE).unit(panel.unit)
    for number, query in enumerate(panel.queries):
        made = made.with_target(_target(panel, query, chr(ord("A") + number)))
    if panel.maximum is not None:
        made = made.max(panel.maximum)
    return made if panel.kind is Kind.HEATMAP else made.min(0)


def _target(panel: Panel, query: Query, ref: str) -> prometheus.Dataquery:
    target = (
        prometheus.Dataquery().ref_id(ref).datasource(_SOURCE).expr(query.expr).legend_format(query.legend)
    )
    if panel.kind is Kind.HEATMAP:
        return target.range().format(PromQueryFormat.HEATMAP)
    return target.instant() if panel.kind is Kind.NUMBER else target.range()


def _number(panel: Panel) -> stat.Panel:
    last = common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    made = stat.Panel().reduce_options(last).graph_mode(common.BigValueGraphMode.NONE)
    if panel.texts:
        results = {number: model.ValueMappingResult(text=text) for number, text in panel.texts.items()}
        made = made.mappings([model.ValueMap(options=results)])
    name = next((name for query in panel.queries for name in query.names), None)
    limits = panel.limits or ((0.0, COLOURS[name] if name else COLOURS["other"]),)
    steps = [
        model.Threshold(value=value if place else None, color=colour)
        for place, (value, colour) in enumerate(limits)
    ]
    return made.thresholds(build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))


def _lines(panel: Panel) -> timeseries.Panel:
    legend = (
        common_builders.VizLegendOptions()
        .display_mode(common.LegendDisplayMode.LIST)
        .placement(common.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    made = (
        timeseries.Panel()
        .legend(legend)
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).hide_zeros(True))
        .show_points(common.VisibilityMode.NEVER)
        .line_width(1)
    )
    if panel.kind is Kind.STACK:
        stack = common_builders.StackingConfig().group("A").mode(common.StackingMode.NORMAL)
        made = made.stacking(stack).fill_opacity(60).line_width(0)
    for query in panel.queries:
        for name in query.names:
            made = made.override_by_name(name, _style(panel, name))
    return made


def _style(panel: Panel, name: str) -> list[model.DynamicConfigValue]:
    properties = [
        model.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": COLOURS[name]}),
    ]
    if panel.kind is Kind.STACK and name == "capacity":  # a line over the stack, not a part of it
        properties += [
            model.DynamicConfigValue(id_val="custom.stacking", value={"mode": "none", "group": "A"}),
            model.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
            model.DynamicConfigValue(id_val="custom.lineWidth", value=2),
        ]
    return properties


def _heatmap(panel: Panel) -> heatmap.Panel:
    colours = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    return (
        heatmap.Panel()
        .calculate(False)
        .color(colours)
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
        .show_legend()
        .filter_values(heatmap.FilterValueRange().le(1e-9))
    )


_MAKERS: dict[Kind, Callable[[Panel], PanelBuilder]] = {
    Kind.LINES: _lines,
    Kind.STACK: _lines,
    Kind.NUMBER: _number,
    Kind.HEATMAP: _heatmap,
}


def _instances() -> build.QueryVariable:
    query: dict[str, object] = {
        "query": "label_values(kvoffload_capacity_slots, instance)",
        "refId": "instance",
        "qryType": 1,
    }
    return (
        build.QueryVariable("instance")
        .label("instance")
        .datasource(_SOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(model.VariableOption(text=["All"], value=["$__all"], selected=True))
    )


def _link() -> build.DashboardLink:
    return (
        build.DashboardLink("kvoffload")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .include_vars(True)
        .keep_time(True)
    )


def _resets() -> build.AnnotationQuery:
    expr = f"sum(increase({series('kvoffload_resets_total')}[$__rate_interval])) > 0"
    return (
        build.AnnotationQuery()
        .name("resets")
        .datasource(_SOURCE)
        .enable(True)
        .icon_color(COLOURS["resets"])
        .expr(expr)
    )
