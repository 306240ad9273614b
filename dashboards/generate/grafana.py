"""Renders dashboards as Grafana's JSON. No other module depends on Grafana."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.generate.boards import Board, Kind, Limits, Panel, Query
from dashboards.generate.colours import COLOURS, GREY, LIMITS, of_tier
from dashboards.generate.promql import VARIABLES, choose_engines
from kvoffload.model.wire import Direction, Tier

TAG = "kvoffload"
_SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
_HEIGHTS = {Kind.NUMBER: 4, Kind.TABLE: 6, Kind.HEATMAP: 9}
_HEIGHT = 8
_COLUMNS = 24
_LONG_LEGEND = 8  # a panel with more names hides series that are 0 in the whole time range
_ZEROS = model.MatcherConfig(id_val="byValue", options={"reducer": "allIsZero"})
_HIDDEN = {"legend": True, "tooltip": True, "viz": False}
# The minimum width of a table's column in pixels. With Grafana's default of 150, the last columns would be cut off.
_MIN_WIDTH = 100
# The builder writes these fields for every variable, but only interval variables have them.
_INTERVAL_ONLY = ("auto", "auto_min", "auto_count")

_SIGNS: Mapping[str, tuple[float | None, float | None]] = {"<0": (None, -1e-9), ">0": (1e-9, None)}

_ALL_VARIABLES = "${__url_time_range}&${__all_variables}"

PanelBuilder = stat.Panel | timeseries.Panel | heatmap.Panel | table.Panel
Places = Mapping[str, str]
"""The URL of each panel, by its title."""


def places(boards: Iterable[Board]) -> Places:
    """Return the URL of each panel, by the panel's title."""
    return {
        panel.title: f"/d/{TAG}-{board.name}?viewPanel=panel-{number}&{_ALL_VARIABLES}"
        for board in boards
        for number, panel in _numbered(board)
    }


def check_colours(boards: Iterable[Board]) -> None:
    """Check that every series has a colour.

    Raises:
        SystemExit: some have none; the message lists all of them, and the files that need them.
    """
    missing = {name for board in boards for panel in board.panels for name in panel.names} - COLOURS.keys()
    in_figures = missing & {label.value for label in (*Tier, *Direction)}
    follow = {name for tier in Tier if tier.value in in_figures for name in of_tier(tier, GREY)}
    lacking = {
        "COLOURS of kvoffload/cli/figures.py (tiers and directions)": in_figures,
        "dashboards/generate/colours.py": missing - in_figures - follow,
    }
    if missing:
        texts = [f"{file}: {', '.join(sorted(names))}" for file, names in lacking.items() if names]
        raise SystemExit(f"colours are missing in {'; in '.join(texts)}")


def render(board: Board, links: Places) -> str:
    """Return a dashboard as Grafana's JSON. If a panel's text names other panels, the panel has links to them."""
    built = _dashboard(board, links).build()
    plain = json.loads(json.dumps(built, cls=JSONEncoder))
    for number, panel in enumerate(plain["panels"], start=1):
        panel["id"] = number
        if panel["type"] == "table":
            # The builder writes an option that newer versions of Grafana do not have.
            panel["options"].pop("footer")
    for variable in plain["templating"]["list"]:
        for name in _INTERVAL_ONLY:
            variable.pop(name, None)
    return json.dumps(plain, indent=2, sort_keys=True) + "\n"


def _numbered(board: Board) -> Iterator[tuple[int, Panel]]:
    """Yield the id and the panel for each panel. Rows have ids too, so the panels' ids have gaps."""
    number = 0
    for row in board.rows:
        number += 1
        for panel in row.panels:
            number += 1
            yield number, panel


def _dashboard(board: Board, links: Places) -> build.Dashboard:
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
        .link(_link())
        .annotation(_resets())
    )
    for name, label in VARIABLES.items():
        made = made.with_variable(_variable(name, label))
    if board.tiers:
        made = made.with_variable(_tier_variable(board.tiers))
    for element in _placed(board, links):
        made = made.with_row(element) if isinstance(element, build.Row) else made.with_panel(element)
    return made


def _placed(board: Board, links: Places) -> Iterator[build.Row | PanelBuilder]:
    """Yield all rows and panels with their positions, from left to right in lines of 24 columns."""
    y = 0
    for row in board.rows:
        yield build.Row(row.title).grid_pos(model.GridPos(x=0, y=y, w=_COLUMNS, h=1))
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + height
            height = _HEIGHTS.get(panel.kind, _HEIGHT)
            yield _panel(panel, links).grid_pos(model.GridPos(x=x, y=y, w=panel.width, h=height))
            x += panel.width
        y += height


def _panel(panel: Panel, links: Places) -> PanelBuilder:
    made = _MAKERS[panel.kind](panel)
    made = made.title(panel.title).description(panel.description).datasource(_SOURCE).unit(panel.unit)
    made = made.links([_panel_link(title, links[title]) for title in _named(panel) if title in links])
    for number, query in enumerate(panel.queries):
        made = made.with_target(_target(panel, query, _ref(number)))
    if panel.maximum is not None:
        made = made.max(panel.maximum)
    return made if panel.kind is Kind.HEATMAP else made.min(0)


def _target(panel: Panel, query: Query, ref: str) -> prometheus.Dataquery:
    target = (
        prometheus.Dataquery().ref_id(ref).datasource(_SOURCE).expr(query.expr).legend_format(query.legend)
    )
    if panel.kind is Kind.HEATMAP:
        return target.range().format(PromQueryFormat.HEATMAP)
    if panel.kind is Kind.TABLE:
        return target.instant().format(PromQueryFormat.TABLE)
    return target.instant() if panel.is_instant else target.range()


def _named(panel: Panel) -> list[str]:
    """Return the titles in a panel's text, which are between backticks, without duplicates."""
    return list(dict.fromkeys(re.findall("`([^`]+)`", panel.description)))


def _ref(number: int) -> str:
    return chr(ord("A") + number)


def _number(panel: Panel) -> stat.Panel:
    last = common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    made = stat.Panel().reduce_options(last).graph_mode(common.BigValueGraphMode.NONE)
    if panel.texts:
        made = made.mappings([_mapping(panel.texts), *_signs(panel.texts)])
    steps = [model.Threshold(value=value, color=colour) for value, colour in _steps(panel.limits)]
    steps = steps or [model.Threshold(value=None, color=COLOURS[panel.names[0]])]
    return made.thresholds(build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))


def _steps(limits: Limits) -> list[tuple[float | None, str]]:
    """Return pairs of the lowest number that gets a colour and the colour. The first number is None."""
    return [(value if place else None, LIMITS[colour]) for place, (value, colour) in enumerate(limits)]


def _mapping(texts: Mapping[str, str]) -> model.ValueMap:
    return model.ValueMap(
        options={
            number: model.ValueMappingResult(text=text)
            for number, text in texts.items()
            if number not in _SIGNS
        }
    )


def _signs(texts: Mapping[str, str]) -> list[model.RangeMap]:
    """Return Grafana's mappings for the words that stand for all negative or all positive numbers."""
    return [
        model.RangeMap(
            options=model.DashboardRangeMapOptions(*_SIGNS[sign], model.ValueMappingResult(text=text))
        )
        for sign, text in texts.items()
        if sign in _SIGNS
    ]


def _table(panel: Panel) -> table.Panel:
    """Return a table with a row for each combination of labels, usually one for each engine.

    The table hides labels without a heading. If the panel has only one query, the table shows only the labels and no
    number.
    """
    shown = panel.queries if len(panel.queries) > 1 else ()
    headings = {f"Value #{_ref(number)}": query.legend for number, query in enumerate(shown)}
    hidden = ("Time", "__name__", "job", *(() if shown else ("Value",)))
    labels = {label: name for name, label in VARIABLES.items()} | dict(panel.labels)
    order = {name: place for place, name in enumerate((*labels, *headings))}
    made = (
        table.Panel()
        .cell_options(common.TableAutoCellOptions())
        .filterable(True)
        .min_width(_MIN_WIDTH)
        .with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            model.DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": dict.fromkeys(hidden, True),
                    "indexByName": order,
                    "renameByName": labels | headings,
                },
            )
        )
    )
    for query in shown:
        made = made.override_by_name(query.legend, _column(query))
    return made


def _column(query: Query) -> list[model.DynamicConfigValue]:
    properties = [model.DynamicConfigValue(id_val="unit", value=query.unit)] if query.unit else []
    if query.texts:
        options = {number: {"text": text} for number, text in query.texts.items()}
        properties.append(
            model.DynamicConfigValue(id_val="mappings", value=[{"type": "value", "options": options}])
        )
    if query.limits:
        steps = [{"value": value, "color": colour} for value, colour in _steps(query.limits)]
        properties.append(
            model.DynamicConfigValue(id_val="thresholds", value={"mode": "absolute", "steps": steps})
        )
        properties.append(
            model.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-background"})
        )
    return properties


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
    for name in panel.names:
        made = made.override_by_name(name, _style(panel, name))
    if len(panel.names) > _LONG_LEGEND:
        made = made.with_override(_ZEROS, [model.DynamicConfigValue(id_val="custom.hideFrom", value=_HIDDEN)])
    return made


def _style(panel: Panel, name: str) -> list[model.DynamicConfigValue]:
    properties = [
        model.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": COLOURS[name]}),
    ]
    # The capacity is a line above the stack, not a part of the stack.
    if panel.kind is Kind.STACK and name == "capacity":
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
    Kind.TABLE: _table,
    Kind.HEATMAP: _heatmap,
}


def _variable(name: str, label: str) -> build.QueryVariable:
    """Return a variable that filters by a label. It offers only values of engines that earlier variables select."""
    before = list(VARIABLES.items())[: list(VARIABLES).index(name)]
    chosen = ", ".join(f'{one}=~"${other}"' for other, one in before)
    query: dict[str, object] = {
        "query": f"label_values(kvoffload_capacity_slots{{{chosen}}}, {label})",
        "refId": name,
        "qryType": 1,
    }
    return (
        build.QueryVariable(name)
        .label(name)
        .datasource(_SOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(model.VariableOption(text=["All"], value=["$__all"], selected=True))
    )


def _tier_variable(tiers: tuple[str, ...]) -> build.CustomVariable:
    options = [model.VariableOption(text=tier, value=tier, selected=tier == tiers[0]) for tier in tiers]
    return build.CustomVariable("tier").values(",".join(tiers)).options(options).current(options[0])


def _panel_link(title: str, url: str) -> build.DashboardLink:
    return build.DashboardLink(title).type(model.DashboardLinkType.LINK).url(url)


def _link() -> build.DashboardLink:
    return (
        build.DashboardLink("kvoffload")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .include_vars(True)
        .keep_time(True)
    )


def _resets() -> build.AnnotationQuery:
    expr = choose_engines("sum(increase(kvoffload_resets_total[$__rate_interval])) > 0")
    return (
        build.AnnotationQuery()
        .name("resets")
        .datasource(_SOURCE)
        .enable(True)
        .icon_color(COLOURS["reset"])
        .expr(expr)
    )
