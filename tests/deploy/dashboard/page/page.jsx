// Draws a dashboard from its JSON with Grafana's own components. The layout is Grafana's: 24 columns, cells of 30 pixels.
import "@fontsource/inter/400.css";
import "@fontsource/inter/500.css";
import * as grafana from "@grafana/data";
import { BigValue, GlobalStyles, PanelChrome, PanelContextProvider, TimeSeries, VizRepeater } from "@grafana/ui";
import { TableNG } from "@grafana/ui/unstable";
import { createRoot } from "react-dom/client";
import { lastValueFrom } from "rxjs";
import { asked, fill, frames, marks, problems, range, scrape, variables } from "./data.js";

const [CELL, GAP, HEAD, WIDTH] = [30, 8, 64, Number(asked.get("width"))]; // pixels
const COLUMN = (WIDTH - 4 * GAP - 23 * GAP) / 24;
const theme = grafana.createTheme({ colors: { mode: asked.get("theme") } });
const STANDARD = ["unit", "min", "max", "decimals", "displayName", "color", "noValue", "mappings", "thresholds"];
const muted = { color: theme.colors.text.secondary };

const transformers = new Map(Object.values(grafana.standardTransformers).map((one) => [one.id, one])); // some are listed twice
grafana.standardTransformersRegistry.setInit(() =>
  [...transformers.values()].map((one) => ({ id: one.id, name: one.name, transformation: async () => one, editor: () => null })),
);

// The options of fields that a panel may have: in Grafana its plugin says which.
function registry({ title, fieldConfig }) {
  const rules = fieldConfig.overrides.flatMap(({ properties }) => properties.map(({ id }) => id));
  const custom = Object.keys(fieldConfig.defaults.custom).map((name) => `custom.${name}`);
  const found = new grafana.FieldConfigOptionsRegistry();
  for (const id of new Set([...STANDARD, ...custom, ...rules])) {
    const isCustom = id.startsWith("custom.");
    if (!isCustom && !STANDARD.includes(id)) problems.push(`${title}: the option ${id} is not known`);
    const lowest = (steps) => steps.map((one) => ({ ...one, value: one.value ?? -Infinity }));
    const process = (value) => (id === "thresholds" && value ? { ...value, steps: lowest(value.steps) } : value);
    const path = isCustom ? id.slice("custom.".length) : id;
    found.register({ id, path, isCustom, process, name: id, settings: {}, shouldApply: () => true, editor: () => null, override: () => null });
  }
  return found;
}

function Stat({ panel, data, width, height }) {
  const { reduceOptions, graphMode, text, colorMode, justifyMode, textMode, wideLayout, orientation } = panel.options;
  const shared = { graphMode, text, colorMode, justifyMode, textMode, wideLayout, theme };
  const replaceVariables = (value) => value;
  const getValues = () => grafana.getFieldDisplayValues({ fieldConfig: panel.fieldConfig, reduceOptions, replaceVariables, theme, data });
  const draw = ({ value, alignmentFactors, width, height, count }) => (
    <BigValue {...shared} value={value.display} count={count} alignmentFactors={alignmentFactors} width={width} height={height} />
  );
  const align = grafana.getDisplayValueAlignmentFactors;
  const size = { width, height, source: data, renderCounter: 0, itemSpacing: 3, orientation, autoGrid: true };
  return <VizRepeater {...size} getValues={getValues} getAlignmentFactors={align} renderValue={draw} />;
}

function Lines({ panel, data, width, height, shown }) {
  const size = { width, height, frames: data, timeRange: range, timeZone: "utc", structureRev: 1, options: panel.options };
  const mark = (config) => config.addHook("draw", (plot) => shown.forEach((one) => drawMark(plot, one)));
  return <TimeSeries {...size} legend={panel.options.legend} children={(config) => (mark(config), null)} />;
}

function drawMark({ ctx, bbox, valToPos }, { at, color }) {
  const [x, bottom] = [Math.round(valToPos(at, "x", true)), bbox.top + bbox.height];
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = theme.visualization.getColorByName(color);
  ctx.lineWidth = 2;
  ctx.setLineDash([6, 6]);
  ctx.stroke(new Path2D(`M ${x} ${bbox.top} V ${bottom}`));
  ctx.fill(new Path2D(`M ${x - 6} ${bottom + 8} H ${x + 6} L ${x} ${bottom} Z`));
  ctx.restore();
}

function Table({ panel, data, width, height }) {
  const { sortBy, cellHeight } = panel.options;
  const size = { width, height, data: data[0], timeRange: range, structureRev: 1, enableVirtualization: true, resizable: true };
  return <TableNG {...size} sortBy={sortBy} cellHeight={cellHeight} fieldConfig={panel.fieldConfig} getActions={() => []} />;
}

const Nothing = () => <div style={{ ...muted, padding: 40, textAlign: "center" }}>No data</div>;
const KINDS = { stat: Stat, timeseries: Lines, table: Table };

async function draw(panel, known, marked) {
  const { x, y, w, h } = panel.gridPos;
  const [width, height] = [w * COLUMN + (w - 1) * GAP, h * CELL + (h - 1) * GAP];
  let data = (await Promise.all(panel.targets.map((target) => frames(panel, target, known, width)))).flat();
  const interpolate = (text) => fill(text, known, scrape);
  data = await lastValueFrom(grafana.transformDataFrame(panel.transformations ?? [], data, { interpolate }));
  const { fieldConfig, title, description, type } = panel;
  const fieldConfigRegistry = registry(panel);
  data = grafana.applyFieldOverrides({ data, fieldConfig, fieldConfigRegistry, replaceVariables: interpolate, theme, timeZone: "utc" });
  grafana.cacheFieldDisplayNames(data);
  const Kind = KINDS[type];
  if (!Kind) problems.push(`${title}: the page cannot draw a panel of type ${type}`);
  const shown = marked.filter(({ panels }) => panels.includes(panel.id));
  const inside = (width, height) =>
    data.length || type === "stat" ? <Kind {...{ panel, data, width, height, shown }} /> : <Nothing />;
  const style = { position: "absolute", left: 2 * GAP + x * (COLUMN + GAP), top: HEAD + y * (CELL + GAP), width, height };
  const padding = type === "table" ? "none" : "md";
  const frame = { title, description, width, height, padding, loadingState: grafana.LoadingState.Done };
  return <div key={panel.id} style={style}><PanelChrome {...frame}>{inside}</PanelChrome></div>;
}

function Head({ dashboard, known }) {
  const box = { border: `1px solid ${theme.colors.border.medium}`, padding: "4px 8px" };
  const style = { position: "absolute", left: 2 * GAP, top: 2 * GAP, width: WIDTH - 4 * GAP, display: "flex", gap: 16, alignItems: "center" };
  const times = `${range.from.utc().format("YYYY-MM-DD HH:mm:ss")} to ${range.to.utc().format("HH:mm:ss")} UTC`;
  const boxes = Object.values(known).map(({ label, value }) => <span key={label} style={box}><span style={muted}>{label}</span> {value}</span>);
  return <div style={style}><span style={{ fontSize: 18 }}>{dashboard.title}</span>{boxes}<span style={{ ...muted, marginLeft: "auto" }}>{times}</span></div>;
}

const dashboard = await (await fetch("/dashboard.json")).json();
const known = await variables(dashboard);
const marked = await marks(dashboard, known);
await Promise.all([400, 500].map((weight) => document.fonts.load(`${weight} 14px Inter`))); // texts are measured
const panels = await Promise.all(dashboard.panels.map((panel) => draw(panel, known, marked)));
const height = HEAD + Math.max(...dashboard.panels.map(({ gridPos }) => gridPos.y + gridPos.h)) * (CELL + GAP) + GAP;
const page = { position: "relative", width: WIDTH, height, background: theme.colors.background.canvas, color: theme.colors.text.primary };
const context = { eventBus: new grafana.EventBusSrv(), sync: () => 0, app: "panel-viewer", canAddAnnotations: () => false };
createRoot(document.getElementById("root")).render(
  <grafana.ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <PanelContextProvider value={context}><div id="page" style={page}><Head {...{ dashboard, known }} />{panels}</div></PanelContextProvider>
  </grafana.ThemeContext.Provider>,
);
setTimeout(() => Object.assign(document, { problems, title: "drawn" }), 2000); // the panels measure their texts and draw once more
