// What Grafana's server and its data source for Prometheus do: variables, intervals, queries, frames, marks.
import { FieldType, dateTime, rangeUtil } from "@grafana/data";

export const asked = new URLSearchParams(location.search);
const number = (name) => Number(asked.get(name));
export const [from, to, scrape] = [number("from"), number("to"), number("scrape")]; // seconds
const [begin, end] = [dateTime(from * 1000), dateTime(to * 1000)];
export const range = { from: begin, to: end, raw: { from: begin, to: end } };
export const problems = []; // what the page could not do as it was told

async function prometheus(path, query) {
  const answer = await (await fetch(`/api/v1/${path}?${new URLSearchParams(query)}`)).json();
  if (answer.status !== "success") problems.push(`${query.query}: ${answer.error}`);
  return answer.data ?? { result: [] };
}

// The value of each variable of the dashboard: that of the page's address, else the first one there is.
export async function variables(dashboard) {
  const found = {};
  for (const { name, label, query } of dashboard.templating.list) {
    const [, selector, key] = /^label_values\((.*),\s*(\w+)\)$/.exec(query.query ?? "") ?? [];
    if (!key) continue; // the data source
    const values = await prometheus(`label/${key}/values`, { "match[]": selector, start: from, end: to });
    found[name] = { label, value: asked.get(`var-${name}`) ?? [...values].sort()[0] ?? "" };
  }
  return found;
}

// `interval`: seconds between two points.
export function fill(text, known, interval) {
  const span = Math.round(to - from);
  const times = { __interval: interval, __rate_interval: Math.max(interval + scrape, 4 * scrape), __range: span };
  return text.replace(/\$(\w+)/g, (whole, name) => (name in times ? `${times[name]}s` : known[name]?.value ?? whole));
}

const named = (format, labels) => (format ?? "").replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? "");

// The frames of one query of a panel. `width`: of the panel, in pixels.
export async function frames(panel, target, known, width) {
  const interval = rangeUtil.calculateInterval(range, panel.maxDataPoints ?? Math.round(width), `${scrape}s`).intervalMs / 1000;
  const query = fill(target.expr, known, interval);
  const whole = (at) => Math.floor(at / interval) * interval;
  const { result } = target.instant
    ? await prometheus("query", { query, time: to })
    : await prometheus("query_range", { query, start: whole(from), end: whole(to), step: interval });
  const series = result.map(({ metric, value, values }) => ({ labels: metric, points: values ?? [value] }));
  const time = (rows) => ({ name: "Time", type: FieldType.time, config: { interval: interval * 1000 }, values: rows.map(([at]) => at * 1000) });
  const values = (rows) => rows.map(([, text]) => Number(text));
  if (target.format !== "table") {
    return series.map(({ labels, points }) => {
      const config = { displayNameFromDS: named(target.legendFormat, labels) };
      const value = { name: "Value", type: FieldType.number, labels, config, values: values(points) };
      return { refId: target.refId, length: points.length, fields: [time(points), value] };
    });
  }
  const rows = series.flatMap(({ labels, points }) => points.map((point) => ({ labels, point })));
  if (!rows.length) return [];
  const names = [...new Set(series.flatMap(({ labels }) => Object.keys(labels)))];
  const texts = names.map((name) => ({ name, type: FieldType.string, config: {}, values: rows.map(({ labels }) => labels[name] ?? "") }));
  const points = rows.map(({ point }) => point);
  const value = { name: panel.targets.length > 1 ? `Value #${target.refId}` : "Value", type: FieldType.number, config: {}, values: values(points) };
  return [{ refId: target.refId, length: rows.length, fields: [time(points), ...texts, value] }];
}

// The marks of the dashboard's annotations: one where points without a gap begin.
export async function marks(dashboard, known) {
  const found = [];
  for (const one of dashboard.annotations.list) {
    const step = rangeUtil.intervalToSeconds(one.step);
    const { result } = await prometheus("query_range", { query: fill(one.expr, known, step), start: from, end: to, step });
    for (const { values } of result) {
      const begins = values.filter(([at], i) => !i || at - values[i - 1][0] > step);
      found.push(...begins.map(([at]) => ({ at: at * 1000, color: one.iconColor, panels: one.filter.ids })));
    }
  }
  return found;
}
