// Draws a dashboard from its JSON and the answers to its queries, with the components that Grafana publishes
// (@grafana/ui, @grafana/data) in Grafana's own grid. Two things are not Grafana's: the page around the panels,
// and the cells of heatmaps and the choice of table columns, whose panels Grafana does not publish.
import {
  FieldConfigOptionsRegistry, FieldType, ThemeContext, applyFieldOverrides, createTheme, dateTime, getDisplayProcessor,
  getFieldDisplayName, identityOverrideProcessor, toDataFrame,
} from "@grafana/data";
import { BigValue, GlobalStyles, PanelChrome, Table, TimeSeries, UPlotChart, UPlotConfigBuilder } from "@grafana/ui";
import { createRoot } from "react-dom/client";

const COLUMNS = 24, CELL_HEIGHT = 30, GAP = 8; // as in Grafana
const WIDTH = 1500;
const LINES = {
  drawStyle: "line", lineInterpolation: "linear", lineWidth: 1, fillOpacity: 0, gradientMode: "none",
  showPoints: "auto", pointSize: 5, spanNulls: false, stacking: { mode: "none", group: "A" }, axisPlacement: "auto",
  axisColorMode: "text", axisBorderShow: false, axisCenteredZero: false, scaleDistribution: { type: "linear" },
  thresholdsStyle: { mode: "off" }, hideFrom: { legend: false, tooltip: false, viz: false },
};
const STANDARD = ["unit", "min", "max", "decimals", "displayName", "noValue", "color", "mappings", "thresholds", "links"];

const theme = createTheme({ colors: { mode: "dark" } });
const { name, from, to, board } = window.captured;
const timeRange = { from: dateTime(from * 1000), to: dateTime(to * 1000), raw: { from: "now-1h", to: "now" } };

const legend = (format, labels) => format.replace(/{{\s*(\w+)\s*}}/g, (_, label) => labels[label] ?? "");

function registry(config) {
  const items = new FieldConfigOptionsRegistry();
  const custom = new Set([...Object.keys(LINES), ...Object.keys(config.defaults.custom ?? {})]);
  for (const rule of config.overrides ?? [])
    for (const one of rule.properties) if (one.id.startsWith("custom.")) custom.add(one.id.slice(7).split(".")[0]);
  const add = (id, path, isCustom) => items.register({
    id, path, isCustom, name: id, process: identityOverrideProcessor, shouldApply: () => true,
    override: () => null, editor: () => null, getItemsCount: () => 0,
  });
  for (const id of STANDARD) add(id, id, false);
  for (const id of custom) add(`custom.${id}`, id, true);
  return items;
}

function frames(panel) {
  const found = [];
  for (const target of panel.targets ?? [])
    for (const series of target.answer) {
      const points = series.values ?? [series.value];
      found.push({
        refId: target.refId,
        fields: [
          { name: "Time", type: FieldType.time, values: points.map(([at]) => at * 1000), config: {} },
          {
            name: "Value", type: FieldType.number, values: points.map(([, value]) => Number(value)), labels: series.metric,
            config: { displayNameFromDS: legend(target.legendFormat ?? "", series.metric) || undefined },
          },
        ],
      });
    }
  return found;
}

function styled(panel, data) {
  const config = panel.fieldConfig;
  const byType = panel.type === "timeseries" ? { custom: LINES, color: { mode: "palette-classic" } } : {};
  const defaults = {
    color: { mode: "thresholds" }, thresholds: { mode: "absolute", steps: [{ value: -Infinity, color: "green" }] },
    ...byType, ...config.defaults, custom: { ...byType.custom, ...config.defaults.custom },
  };
  for (const step of defaults.thresholds.steps) step.value ??= -Infinity;
  return applyFieldOverrides({
    data: data.map((one) => toDataFrame(one)), fieldConfig: { defaults, overrides: config.overrides ?? [] }, theme,
    replaceVariables: (text) => text, timeZone: "utc", fieldConfigRegistry: registry(config),
  });
}

function Lines({ panel, width, height }) {
  const data = styled(panel, frames(panel));
  if (!data.length) return <Empty />;
  return <TimeSeries frames={data} width={width} height={height} timeRange={timeRange} timeZone="utc" structureRev={1}
    legend={panel.options.legend} options={panel.options} />;
}

function Number_({ panel, width, height }) {
  const data = styled(panel, frames(panel));
  if (!data.length) return <Empty />;
  const each = width / data.length;
  return <div style={{ display: "flex" }}>{data.map((frame, place) => {
    const field = frame.fields[1];
    const value = { ...field.display(field.values.at(-1)), title: data.length > 1 ? getFieldDisplayName(field, frame, data) : undefined };
    return <BigValue key={place} value={value} width={each} height={height} theme={theme} colorMode={panel.options.colorMode ?? "value"}
      graphMode="none" textMode={panel.options.textMode ?? "auto"} justifyMode="auto" />;
  })}</div>;
}

// Rows are label sets, columns the queries, as Grafana's "merge" and "organize" would make of instant tables.
function Rows({ panel, width, height }) {
  const organize = (panel.transformations ?? []).find((one) => one.id === "organize")?.options ?? {};
  const renamed = organize.renameByName ?? {}, excluded = organize.excludeByName ?? {};
  const rows = new Map(), labels = new Set(), columns = [];
  for (const target of panel.targets) {
    const column = `Value #${target.refId}`;
    columns.push(column);
    for (const { metric, value } of target.answer) {
      const shown = Object.entries(metric).filter(([label]) => label !== "__name__" && !excluded[label]);
      const key = JSON.stringify(shown.sort());
      shown.forEach(([label]) => labels.add(label));
      rows.set(key, { ...Object.fromEntries(shown), ...rows.get(key), [column]: Number(value[1]) });
    }
  }
  const order = organize.indexByName ?? {};
  const names = [...labels, ...columns].filter((one) => !excluded[one]).sort((one, other) => (order[one] ?? 99) - (order[other] ?? 99));
  const [frame] = styled(panel, [{
    fields: names.map((one) => ({
      name: renamed[one] ?? one, type: labels.has(one) ? FieldType.string : FieldType.number,
      values: [...rows.values()].map((row) => row[one] ?? null), config: {},
    })),
  }]);
  return <Table data={frame} width={width} height={height} timeRange={timeRange} />;
}

function Heatmap({ panel, width, height }) {
  const buckets = panel.targets[0].answer.map(({ metric, values }) => ({ le: Number(metric.le), values: new Map(values) }))
    .sort((one, other) => one.le - other.le);
  if (!buckets.length) return <Empty />;
  const times = [...new Set(buckets.flatMap((one) => [...one.values.keys()]))].sort((one, other) => one - other);
  const counts = buckets.map((one, place) => times.map((at) =>
    Math.max(0, Number(one.values.get(at) ?? 0) - (place ? Number(buckets[place - 1].values.get(at) ?? 0) : 0))));
  const most = Math.max(...counts.flat(), 1e-9);
  const used = counts.map((row) => row.some((one) => one > 0));
  const last = used.lastIndexOf(true), first = Math.max(0, used.indexOf(true));
  const unit = panel.options.yAxis?.unit ?? panel.fieldConfig.defaults.unit;
  const display = getDisplayProcessor({ field: { type: FieldType.number, config: { unit } }, theme });
  const text = (place) => { const { text: shown, suffix = "" } = display(buckets[Math.round(place)]?.le); return shown + suffix; };
  const config = new UPlotConfigBuilder("utc");
  config.addScale({ scaleKey: "x", isTime: true, orientation: 0, direction: 1, range: () => [from * 1000, to * 1000] });
  config.addScale({ scaleKey: "y", isTime: false, orientation: 1, direction: 1, range: () => [first - 0.5, last + 0.5] });
  config.addAxis({ scaleKey: "x", placement: "bottom", isTime: true, timeZone: "utc", theme, grid: { show: false } });
  config.addAxis({ scaleKey: "y", placement: "left", theme, size: 60, grid: { show: false },
    splits: () => buckets.map((_, place) => place).filter((place) => place >= first && place <= last), formatValue: text });
  config.addHook("drawClear", (plot) => {
    const wide = plot.valToPos(times[1] * 1000, "x", true) - plot.valToPos(times[0] * 1000, "x", true);
    counts.forEach((row, place) => row.forEach((count, at) => {
      if (!count) return;
      const x = plot.valToPos(times[at] * 1000, "x", true), top = plot.valToPos(place + 0.5, "y", true);
      plot.ctx.fillStyle = `rgba(255, 153, 48, ${0.15 + 0.85 * Math.sqrt(count / most)})`;
      plot.ctx.fillRect(x - wide, top, wide, plot.valToPos(place - 0.5, "y", true) - top - 1);
    }));
  });
  const series = { scaleKey: "y", theme, lineWidth: 0, pointSize: 0, show: true };
  config.addSeries(series);
  return <UPlotChart config={config} data={[times.map((at) => at * 1000), times.map(() => null)]} width={width} height={height} />;
}

const Empty = () => <div style={{ display: "grid", placeItems: "center", height: "100%", opacity: 0.6 }}>No data</div>;
const KINDS = { timeseries: Lines, stat: Number_, heatmap: Heatmap, table: Rows };

function Placed({ panel }) {
  const { x, y, w, h } = panel.gridPos;
  const column = (WIDTH - GAP * (COLUMNS - 1)) / COLUMNS;
  const width = w * column + (w - 1) * GAP, height = h * CELL_HEIGHT + (h - 1) * GAP;
  const style = { position: "absolute", left: x * (column + GAP), top: y * (CELL_HEIGHT + GAP), width, height };
  if (panel.type === "row") return <div style={{ ...style, ...theme.typography.h5, paddingTop: 4 }}>⌄ {panel.title}</div>;
  const Kind = KINDS[panel.type];
  return <div style={style} data-panel={panel.title}>
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
      <div style={{ position: "relative", height: bottom * (CELL_HEIGHT + GAP) }}>
        {board.panels.map((panel) => <Placed key={panel.id} panel={panel} />)}
      </div>
    </div>
  </ThemeContext.Provider>;
}

createRoot(document.getElementById("root")).render(<Board />);
