// Draws one dashboard from its JSON and its queries' answers (`window.captured`), with the components that Grafana
// publishes (@grafana/ui, @grafana/data) on Grafana's grid. Grafana does not publish its heatmap panel, its table
// transformations and the page around the panels: those parts are drawn here.
import "@fontsource/inter/400.css";
import "@fontsource/inter/500.css";
import {
  FieldConfigOptionsRegistry, FieldType, ThemeContext, applyFieldOverrides, createTheme, dateTime, getDisplayProcessor,
  getFieldDisplayName, identityOverrideProcessor, toDataFrame,
} from "@grafana/data";
import { BigValue, GlobalStyles, PanelChrome, TimeSeries, UPlotChart, UPlotConfigBuilder } from "@grafana/ui";
import { TableNG } from "@grafana/ui/unstable"; // what the table panel of this Grafana uses
import { createRoot } from "react-dom/client";

const COLUMNS = 24, ROW_HEIGHT = 30, GAP = 8; // Grafana's grid
const WIDTH = 1500;
// What Grafana's time series panel takes for settings that the JSON leaves out.
const LINES = {
  drawStyle: "line", lineInterpolation: "linear", lineWidth: 1, fillOpacity: 0, gradientMode: "none",
  showPoints: "auto", pointSize: 5, spanNulls: false, stacking: { mode: "none", group: "A" }, axisPlacement: "auto",
  axisColorMode: "text", axisBorderShow: false, axisCenteredZero: false, scaleDistribution: { type: "linear" },
  thresholdsStyle: { mode: "off" }, hideFrom: { legend: false, tooltip: false, viz: false },
};
const STANDARD = ["unit", "min", "max", "decimals", "displayName", "noValue", "color", "mappings", "thresholds", "links"];

const theme = createTheme({ colors: { mode: "dark" } });
const { from, to, board } = window.captured;
const timeRange = { from: dateTime(from * 1000), to: dateTime(to * 1000), raw: { from: "now-1h", to: "now" } };

const number = (text) => (text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text));
const finite = (text) => (Number.isFinite(number(text)) ? number(text) : null); // Grafana's graphs skip the others
const legend = (format, labels) => format.replace(/{{\s*(\w+)\s*}}/g, (_, label) => labels[label] ?? "");

/** Every setting that the panel's JSON may change, for applyFieldOverrides. */
function settings({ defaults, overrides = [] }) {
  const custom = new Set([...Object.keys(LINES), ...Object.keys(defaults.custom ?? {})]);
  for (const { properties } of overrides)
    for (const { id } of properties) if (id.startsWith("custom.")) custom.add(id.slice(7).split(".")[0]);
  const registry = new FieldConfigOptionsRegistry();
  const add = (id, isCustom) => registry.register({
    id: isCustom ? `custom.${id}` : id, path: id, isCustom, name: id, process: identityOverrideProcessor, shouldApply: () => true,
    override: () => null, editor: () => null,
  });
  STANDARD.forEach((id) => add(id, false));
  custom.forEach((id) => add(id, true));
  return registry;
}

function styled(panel, frames) {
  const { defaults: own, overrides = [] } = panel.fieldConfig;
  const isLines = panel.type === "timeseries";
  const defaults = {
    color: { mode: isLines ? "palette-classic" : "thresholds" },
    thresholds: { mode: "absolute", steps: [{ value: null, color: "green" }] },
    ...own, custom: { ...(isLines && LINES), ...own.custom },
  };
  const steps = defaults.thresholds.steps.map((step) => ({ ...step, value: step.value ?? -Infinity }));
  return applyFieldOverrides({
    data: frames.map((one) => toDataFrame(one)), theme, timeZone: "utc", fieldConfigRegistry: settings(panel.fieldConfig),
    fieldConfig: { defaults: { ...defaults, thresholds: { ...defaults.thresholds, steps } }, overrides },
    replaceVariables: (text) => text,
  });
}

function answers(panel) {
  return styled(panel, panel.targets.flatMap(({ refId, legendFormat = "", answer }) => answer.map(({ metric, value, values = [value] }) => ({
    refId,
    fields: [
      { name: "Time", type: FieldType.time, values: values.map(([at]) => at * 1000), config: {} },
      {
        name: "Value", type: FieldType.number, values: values.map(([, text]) => finite(text)), labels: metric,
        config: { displayNameFromDS: legend(legendFormat, metric) || undefined },
      },
    ],
  }))));
}

function Graph({ panel, width, height }) {
  const frames = answers(panel);
  if (!frames.length) return <Empty />;
  return <TimeSeries frames={frames} width={width} height={height} timeRange={timeRange} timeZone="utc" structureRev={1}
    legend={panel.options.legend} options={panel.options} />;
}

function Stat({ panel, width, height }) {
  const frames = answers(panel);
  if (!frames.length) return <Empty />;
  return <div style={{ display: "flex" }}>{frames.map((frame, place) => {
    const field = frame.fields[1];
    const value = field.display(field.values.at(-1));
    if (frames.length > 1) value.title = getFieldDisplayName(field, frame, frames);
    return <BigValue key={place} value={value} width={width / frames.length} height={height} theme={theme}
      colorMode={panel.options.colorMode ?? "value"} graphMode="none" textMode={panel.options.textMode ?? "auto"} />;
  })}</div>;
}

// The transformations "merge" and "organize" of instant queries: a row for each set of labels, a column for each query.
function Rows({ panel, width, height }) {
  const organize = (panel.transformations ?? []).find(({ id }) => id === "organize")?.options ?? {};
  const { renameByName: names = {}, excludeByName: without = {}, indexByName: places = {} } = organize;
  const column = ({ refId }) => (panel.targets.length > 1 ? `Value #${refId}` : "Value");
  const rows = new Map(), labels = new Set(), values = panel.targets.map(column);
  for (const target of panel.targets)
    for (const { metric, value } of target.answer) {
      const shown = Object.entries(metric).filter(([label]) => label !== "__name__").sort();
      shown.forEach(([label]) => labels.add(label));
      const key = JSON.stringify(shown);
      rows.set(key, { ...Object.fromEntries(shown), ...rows.get(key), [column(target)]: finite(value[1]) });
    }
  if (!rows.size) return <Empty />;
  const columns = [...labels, ...values].filter((one) => !without[one]);
  columns.sort((one, other) => (places[one] ?? columns.length) - (places[other] ?? columns.length));
  const [frame] = styled(panel, [{
    fields: columns.map((one) => ({
      name: names[one] ?? one, type: labels.has(one) ? FieldType.string : FieldType.number,
      values: [...rows.values()].map((row) => row[one] ?? null), config: {},
    })),
  }]);
  return <TableNG data={frame} width={width} height={height} structureRev={1} timeRange={timeRange} />;
}

function Heatmap({ panel, width, height }) {
  const buckets = panel.targets[0].answer.map(({ metric, values }) => ({ le: number(metric.le), values: new Map(values) }));
  if (!buckets.length) return <Empty />;
  buckets.sort((one, other) => one.le - other.le);
  const times = [...new Set(buckets.flatMap(({ values }) => [...values.keys()]))].sort((one, other) => one - other);
  const upTo = (place, at) => Number(buckets[place]?.values.get(at) ?? 0); // buckets are cumulative
  const counts = buckets.map((_, place) => times.map((at) => Math.max(0, upTo(place, at) - upTo(place - 1, at))));
  const most = Math.max(...counts.flat(), Number.MIN_VALUE);
  const used = counts.map((row) => row.some((count) => count > 0));
  const [first, last] = [Math.max(0, used.indexOf(true)), used.lastIndexOf(true)];

  const unit = panel.options.yAxis?.unit ?? panel.fieldConfig.defaults.unit;
  const display = getDisplayProcessor({ field: { type: FieldType.number, config: { unit } }, theme });
  const name = (place) => {
    const { text, suffix = "" } = display(buckets[place].le);
    return buckets[place].le === Infinity ? "more" : text + suffix;
  };
  const config = new UPlotConfigBuilder("utc");
  config.addScale({ scaleKey: "x", isTime: true, orientation: 0, direction: 1, range: () => [from * 1000, to * 1000] });
  config.addScale({ scaleKey: "y", isTime: false, orientation: 1, direction: 1, range: () => [first - 0.5, last + 0.5] });
  config.addAxis({ scaleKey: "x", placement: "bottom", isTime: true, timeZone: "utc", theme, grid: { show: false } });
  config.addAxis({
    scaleKey: "y", placement: "left", theme, size: 90, grid: { show: false }, formatValue: name,
    splits: () => Array.from({ length: last - first + 1 }, (_, place) => first + place),
  });
  config.addSeries({ scaleKey: "y", theme, lineWidth: 0, pointSize: 0, show: true });
  config.addHook("drawClear", (plot) => {
    const at = (time) => plot.valToPos(time * 1000, "x", true), level = (place) => plot.valToPos(place, "y", true);
    const wide = at(times[1]) - at(times[0]);
    counts.forEach((row, place) => row.forEach((count, column) => {
      if (!count) return;
      plot.ctx.fillStyle = `rgba(255, 153, 48, ${0.15 + 0.85 * Math.sqrt(count / most)})`;
      plot.ctx.fillRect(at(times[column]) - wide, level(place + 0.5), wide, level(place - 0.5) - level(place + 0.5) - 1);
    }));
  });
  return <UPlotChart config={config} data={[times.map((at) => at * 1000), times.map(() => null)]} width={width} height={height} />;
}

const Empty = () => <div style={{ display: "grid", placeItems: "center", height: "100%", opacity: 0.6 }}>No data</div>;
const KINDS = { timeseries: Graph, stat: Stat, heatmap: Heatmap, table: Rows };

function Placed({ panel }) {
  const { x, y, w, h } = panel.gridPos;
  const column = (WIDTH - GAP * (COLUMNS - 1)) / COLUMNS;
  const width = w * (column + GAP) - GAP, height = h * (ROW_HEIGHT + GAP) - GAP;
  const style = { position: "absolute", left: x * (column + GAP), top: y * (ROW_HEIGHT + GAP), width, height };
  if (panel.type === "row") return <div style={{ ...style, ...theme.typography.h5, paddingTop: 4 }}>{panel.title}</div>;
  const Kind = KINDS[panel.type];
  return <div style={style}>
    <PanelChrome title={panel.title} description={panel.description} width={width} height={height}>
      {(inner, tall) => <Kind panel={panel} width={inner} height={tall} />}
    </PanelChrome>
  </div>;
}

function Board() {
  const bottom = Math.max(...board.panels.map(({ gridPos: { y, h } }) => y + h));
  return <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <div id="board" style={{ width: WIDTH + 32, padding: 16, background: theme.colors.background.canvas }}>
      <div style={{ ...theme.typography.h3, marginBottom: 12 }}>{board.title}</div>
      <div style={{ position: "relative", height: bottom * (ROW_HEIGHT + GAP) }}>
        {board.panels.map((panel) => <Placed key={panel.id} panel={panel} />)}
      </div>
    </div>
  </ThemeContext.Provider>;
}

createRoot(document.getElementById("root")).render(<Board />);
