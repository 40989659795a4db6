// Plots over steps or time, by uPlot: a raw line, a smoothed one over it, a band, marks of events, points with errors.

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { el, fill, quantity, withUnit } from "./dom.js";

const COLOURS = 8;
const MARK_COLOURS = {
  restart: "--bad", stall: "--warn", alert: "--bad", plan: "--c4", update: "--c6", evaluation: "--c1", other: "--muted",
};
const HEIGHT = 168;
const NEAR_PX = 6; // the cursor is at a mark

let palette = {};
document.addEventListener("themechange", () => {
  palette = {};
});

/** The present colour of a CSS variable, for canvases. */
export function colour(variable) {
  palette[variable] ??= getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
  return palette[variable];
}

/** The n-th colour of series, as a CSS variable. */
export const colourOf = (number) => `--c${(number % COLOURS) + 1}`;

/** Exponential moving mean without the bias of its start. `weight` of the past: 0 (none) to below 1. */
export function smoothed(values, weight) {
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

/** How far two numbers are apart: 0 where it is their rounding alone, for which there are no ticks. */
const spread = (least, greatest) => (greatest - least > 1e-9 * Math.max(Math.abs(least), Math.abs(greatest)) ? greatest - least : 0);

/** Draw a plot in `host`, whose width it takes.
 *
 * `spec`: title, caption, unit ("share", "s", "bytes" or a word), xLabel, x, lines [{name, colour, mean, low, high, x,
 * dash}], marks [{x, kind, text}], points [{x, y, error, text, colour}], smoothing, group (of synced cursors), height,
 * onPick(x). A line may have an x of its own. Returns {set(changes), reset(), destroy()}. */
export function plot(host, spec) {
  let chart = null;
  let shape = "";
  let shown = [0, 1]; // of the x axis
  const reading = el("p", { class: "reading" });
  const canvas = el("div", { class: "plot-area" });
  const note = el("p", { class: "plot-note", hidden: true });
  const frame = el("figure", { class: "plot", tabindex: 0, "aria-label": `${spec.title}. Left and right: along the curve.`, onkeydown: onKey },
    el("figcaption", {}, el("h2", {}, spec.title, spec.unit && !shortUnit(spec.unit) && el("span", { class: "muted" }, ` ${spec.unit}`)),
      spec.caption && el("p", { class: "caption", title: spec.caption }, spec.caption)),
    reading, canvas, note);
  host.append(frame);

  const lines = () => spec.lines.filter((line) => line.mean.some((value) => value !== null && value !== undefined));

  function data() {
    const tables = lines().map((line) => [
      line.x ?? spec.x, line.mean, line.low ?? line.mean, line.high ?? line.mean,
      spec.smoothing ? smoothed(line.mean, spec.smoothing) : line.mean,
    ]);
    if (!tables.length) {
      const x = spec.x?.length ? spec.x : (spec.points ?? []).map((point) => point.x);
      return [x, x.map(() => null)];
    }
    if (lines().some((line) => line.x)) return uPlot.join(tables);
    return [tables[0][0], ...tables.flatMap((columns) => columns.slice(1))];
  }

  function draw() {
    const now = JSON.stringify([lines().map((line) => [line.name, line.colour]), spec.smoothing > 0, spec.xLabel]);
    if (chart && now === shape) {
      const [xs] = chart.data;
      const { min, max } = chart.scales.x;
      const zoomed = xs.length && (min > xs[0] || max < xs.at(-1));
      chart.setData(data(), !zoomed);
      if (zoomed) chart.setScale("x", { min, max });
    } else {
      chart?.destroy();
      shape = now;
      fill(canvas);
      chart = new uPlot(options(), data(), canvas);
      const pressed = chart.root.querySelector("canvas");
      pressed.setAttribute("role", "img");
      chart.over.addEventListener("click", pick);
    }
    chart.root.querySelector("canvas").setAttribute("aria-label", summary());
    read();
  }

  function options() {
    const series = [{}];
    const bands = [];
    for (const line of lines()) {
      const stroke = () => colour(line.colour);
      const of = { stroke, points: { show: (u) => u.data[0].length < 40, size: 4, fill: stroke }, dash: line.dash };
      const edge = { ...of, stroke: "transparent", width: 0, points: { show: false } };
      bands.push({ series: [series.length + 2, series.length + 1], fill: () => `${colour(line.colour)}22` });
      series.push({ ...of, width: spec.smoothing ? 1 : 1.5, alpha: spec.smoothing ? 0.35 : 1 }, edge, edge,
        { ...of, width: 2, show: spec.smoothing > 0, points: { show: false } });
    }
    if (series.length === 1) series.push({ points: { show: false } }); // without lines points need a scale too
    const axis = { stroke: () => colour("--muted"), font: "11px system-ui, sans-serif", grid: { stroke: () => colour("--line"), width: 1 },
      ticks: { show: false } };
    return {
      width: Math.max(160, canvas.clientWidth), height: spec.height ?? HEIGHT, legend: { show: false }, series, bands,
      padding: [8, 8, 0, 0],
      scales: { x: { time: false, range: xRange }, y: { range: yRange } },
      axes: [{ ...axis, size: 18, label: spec.xLabel, labelSize: 16, labelGap: 0, labelFont: axis.font, gap: 2,
        values: (_, ticks) => ticks.map(quantity) },
      { ...axis, size: 56, gap: 4, values: (_, ticks) => ticks.map((tick) => withUnit(tick, shortUnit(spec.unit))) }],
      cursor: { y: false, sync: spec.group ? { key: spec.group, setSeries: false } : undefined,
        drag: { x: true, y: false, setScale: true }, points: { size: 6 } },
      hooks: { draw: [drawMarks, drawPoints], setCursor: [read] },
    };
  }

  function xRange(_, least, greatest) {
    if (least !== null) shown = spread(least, greatest) === 0 ? [least - 0.5, greatest + 0.5] : [least, greatest];
    return shown;
  }

  function yRange(_, least, greatest) {
    for (const point of spec.points ?? []) {
      if (point.x < shown[0] || point.x > shown[1]) continue;
      least = Math.min(least ?? point.y, point.y - (point.error ?? 0));
      greatest = Math.max(greatest ?? point.y, point.y + (point.error ?? 0));
    }
    if (least === null) return [0, 1];
    const room = (spread(least, greatest) || Math.abs(greatest) || 1) * 0.06;
    // A quantity that is near zero is drawn from zero: its size can be seen.
    return [least >= 0 && least < greatest * 0.5 ? 0 : least - room, greatest + room];
  }

  function drawMarks(u) {
    const { left, top, width, height } = u.bbox;
    const drawn = new Set();
    u.ctx.save();
    for (const mark of spec.marks ?? []) {
      const at = Math.round(u.valToPos(mark.x, "x", true));
      if (!(at >= left && at <= left + width) || drawn.has(at)) continue;
      drawn.add(at);
      u.ctx.strokeStyle = u.ctx.fillStyle = colour(MARK_COLOURS[mark.kind] ?? "--muted");
      u.ctx.globalAlpha = 0.55;
      u.ctx.setLineDash([3, 3]);
      u.ctx.beginPath();
      u.ctx.moveTo(at, top);
      u.ctx.lineTo(at, top + height);
      u.ctx.stroke();
      u.ctx.globalAlpha = 1;
      u.ctx.beginPath();
      u.ctx.moveTo(at - 4 * devicePixelRatio, top);
      u.ctx.lineTo(at + 4 * devicePixelRatio, top);
      u.ctx.lineTo(at, top + 6 * devicePixelRatio);
      u.ctx.fill();
    }
    u.ctx.restore();
  }

  function drawPoints(u) {
    const size = 3 * devicePixelRatio;
    u.ctx.save();
    u.ctx.lineWidth = 1.5 * devicePixelRatio;
    for (const point of spec.points ?? []) {
      const x = u.valToPos(point.x, "x", true);
      if (!(x >= u.bbox.left - 1 && x <= u.bbox.left + u.bbox.width + 1)) continue;
      const [y, low, high] = [0, -1, 1].map((side) => u.valToPos(point.y + side * (point.error ?? 0), "y", true));
      u.ctx.strokeStyle = u.ctx.fillStyle = colour(point.colour ?? "--fg");
      u.ctx.beginPath();
      u.ctx.moveTo(x, low);
      u.ctx.lineTo(x, high);
      u.ctx.stroke();
      u.ctx.beginPath();
      u.ctx.arc(x, y, size, 0, 2 * Math.PI);
      u.ctx.fill();
    }
    u.ctx.restore();
  }

  /** Say the values under the cursor, or the last ones. */
  function read() {
    const u = chart;
    if (!u) return;
    const last = u.data[0].length - 1;
    const at = u.cursor.idx ?? last;
    const back = at === u.cursor.idx ? 50 : last; // of joined lines each has holes, or ends before the others
    const items = lines().map((line, number) => {
      const [raw, smooth] = [1, 4].map((column) => valueAt(u.data[4 * number + column], at, back));
      return el("span", {}, el("i", { class: "swatch", style: { "background-color": `var(${line.colour})` } }),
        spec.lines.length > 1 && ` ${line.name}`, " ", el("b", {}, withUnit(smooth ?? raw, shortUnit(spec.unit))),
        spec.smoothing > 0 && spec.lines.length < 3 && el("span", { class: "muted" }, ` (${withUnit(raw, shortUnit(spec.unit))})`));
    });
    const x = u.data[0][at];
    fill(reading, el("span", { class: "muted" }, `${quantity(x)} ${spec.xLabel ?? ""}`), items, pointItems(x));
    const left = u.cursor.left ?? -1;
    const near = (x) => left >= 0 && Math.abs(u.valToPos(x, "x") - left) <= NEAR_PX;
    const texts = [...(spec.marks ?? []), ...(spec.points ?? [])].filter((of) => near(of.x)).map((of) => of.text);
    note.hidden = !texts.length;
    note.textContent = texts.slice(0, 4).join("\n") + (texts.length > 4 ? `\nand ${texts.length - 4} more` : "");
  }

  /** The last point of each kind up to x. */
  function pointItems(x) {
    const kinds = new Map((spec.points ?? []).filter((of) => of.label && of.colour).map((of) => [of.label + of.colour, of]));
    return [...kinds].map(([kind, last]) => {
      const point = spec.points.filter((of) => of.label + of.colour === kind && of.x <= x).at(-1);
      return el("span", {}, el("i", { class: "swatch round", style: { "background-color": `var(${last.colour})` } }), ` ${last.label} `,
        el("b", {}, withUnit(point?.y, shortUnit(spec.unit))));
    });
  }

  /** The value at an index, or the last one before it, at most `back` of it. */
  function valueAt(column, at, back) {
    for (let i = at; column && i >= 0 && i >= at - back; i--) if (column[i] !== null && column[i] !== undefined) return column[i];
    return null;
  }

  function summary() {
    const parts = lines().map((line) => {
      const values = line.mean.filter((value) => value !== null && value !== undefined);
      const [least, greatest] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
      const [first, last, low, high] = [values[0], values.at(-1), least, greatest].map((value) => withUnit(value, spec.unit));
      return `${line.name}: from ${first} to ${last}, least ${low}, greatest ${high}`;
    });
    const points = spec.points?.length ? [`${spec.points.length} evaluations, the last ${quantity(spec.points.at(-1).y)}`] : [];
    return `${spec.title} over ${spec.xLabel}. ${[...parts, ...points].join("; ") || "No values"}.`;
  }

  function pick() {
    const at = chart.cursor.idx;
    if (at !== null && at !== undefined) spec.onPick?.(chart.data[0][at]);
  }

  function onKey(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) {
      const last = chart.data[0].length - 1;
      const at = Math.min(last, Math.max(0, (chart.cursor.idx ?? last) + by * (event.shiftKey ? 10 : 1)));
      const left = chart.valToPos(chart.data[0][at], "x");
      chart.setCursor({ left, top: 8 });
    } else if (event.key === "Enter") pick();
    else return;
    event.preventDefault();
  }

  const onTheme = () => chart?.redraw(false, true);
  document.addEventListener("themechange", onTheme);
  let width = 0;
  const resized = new ResizeObserver(() => {
    if (canvas.clientWidth === width || !canvas.clientWidth) return;
    width = canvas.clientWidth;
    if (chart) chart.setSize({ width, height: spec.height ?? HEIGHT });
    else draw();
  });
  resized.observe(canvas);

  return {
    set(changes) {
      Object.assign(spec, changes);
      if (width) draw();
    },
    reset() {
      if (chart) chart.setData(chart.data, true);
    },
    destroy() {
      resized.disconnect();
      document.removeEventListener("themechange", onTheme);
      chart?.destroy();
      frame.remove();
    },
  };
}

// "share" is in every number's per cent; "s" and "bytes" are words of `withUnit`; others stand in the title.
const shortUnit = (unit) => (["share", "s", "bytes"].includes(unit) ? unit : "");
