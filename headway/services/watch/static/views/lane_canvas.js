// Draws lanes: their bars pixel by pixel into one image, so that a frame takes milliseconds however many there are; on it
// the lines, the ruler and the labels.

import { duration, moment } from "../dom.js";
import { above } from "./lane_tiles.js";

export const GUTTER = 168; // px at the left, for the names of tracks
const RULER_ROWS = ["", "step", "version", "event"];
const RULER_ROW = 17;
export const RULER = RULER_ROWS.length * RULER_ROW;
const MOST_LABELS = 400;

/** Kinds of activity, by their spans' names; the first that fits gives a span its colour. */
export const KINDS = [
  ["generating", "--c1", /(^|: )(busy|generating|decoding requests)$/],
  ["training", "--c2", /(^|: )(step|training|forward|backward)/],
  ["verifying", "--c3", /(^|: )(score|verifying)$/],
  ["weights", "--c4", /(^|: )(update|apply version|publish)$/],
  ["checkpoint, evaluation", "--c6", /checkpoint|before|during|after|interval|test|validation/],
  ["skipped, failed", "--bad", /skipped|failed|discarded|overdue/],
  ["waits", "--warn", /^(wait)$/],
  ["idle or queued", "--muted", /^(idle|yielded|queued|buffered|waits for its group)$/, 0.5],
  ...["--c8", "--c5", "--c7"].map((colour) => ["other", colour, /^$/]),
];
export function kindOf(name) {
  const kind = KINDS.findIndex(([, , fits]) => fits.test(name));
  return kind >= 0 ? kind : KINDS.length - 1 - ([...name].reduce((sum, letter) => sum + letter.charCodeAt(0), 0) % 3);
}
const BAD = /died|stall|lost|failed|refused|alert|opened/;

/** Seconds since the start, as finely as `step` needs: 1 h 05, 12:30, 12:30.125. */
export function clock(seconds, step) {
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  const two = (value) => String(value).padStart(2, "0");
  if (step >= 60) return `${h}:${two(m)} h`;
  const digits = step >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(step) - 1e-9));
  return `${h ? `${h}:${two(m)}` : m}:${s.toFixed(digits).padStart(digits ? digits + 3 : 2, "0")}`;
}

function tickStep(least) {
  const nice = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  if (least > 0.5) return nice.find((step) => step >= least) ?? 86400 * Math.ceil(least / 86400);
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least * (1 - 1e-9));
}

export class LaneCanvas {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false, willReadFrequently: true }); // whole images are put on it
    this.readColours();
  }

  /** Take up the page's colours, which a change of theme changes. */
  readColours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["--bg", "--card", "--raised", "--fg", "--muted", "--line", "--accent", "--bad", "--warn", "--c4", "--c6"];
    this.colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(name).trim()]));
    const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const packed = (name, alpha = 1) => {
      for (const [of, share] of [["--card", 1], [name, alpha]]) {
        pixel.globalAlpha = share;
        pixel.fillStyle = style.getPropertyValue(of).trim();
        pixel.fillRect(0, 0, 1, 1);
      }
      return new Uint32Array(pixel.getImageData(0, 0, 1, 1).data.buffer)[0];
    };
    this.kinds = Uint32Array.from(KINDS, ([, colour, , alpha]) => packed(colour, alpha));
    [this.paper, this.band, this.rule] = ["--card", "--raised", "--line"].map((name) => packed(name));
  }

  resize(width, height) {
    const ratio = Math.min(2, devicePixelRatio || 1);
    if (this.width === width && this.height === height && this.ratio === ratio) return;
    Object.assign(this, { width, height, ratio });
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    for (const [name, value] of Object.entries({ width, height })) this.canvas.style.setProperty(name, `${value}px`);
    this.image = this.context.createImageData(this.canvas.width, Math.max(1, this.canvas.height - Math.round(RULER * ratio)));
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  /** scene: view {from, to}, rows {y, height, track?, label}, scroll, tiles, kinds (of names), names, overview, hover. */
  draw(scene) {
    const { context, ratio, colours } = this;
    this.scale = (this.width - GUTTER) / (scene.view.to - scene.view.from);
    this.from = scene.view.from;
    const rows = scene.rows.filter((row) => row.y + row.height > scene.scroll && row.y < scene.scroll + this.height - RULER);
    this.labels = [];
    this.pixels.fill(this.paper);
    for (const row of rows) this.paintRow(row, scene);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.putImageData(this.image, 0, Math.round(RULER * ratio));
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawLabels(colours["--card"]);
    context.fillStyle = colours["--card"];
    context.fillRect(0, 0, this.width, RULER);
    this.drawRuler(scene);
    this.drawNames(rows, scene);
    if (scene.hover) this.drawLine(scene.hover.moment, colours["--fg"], [2, 3], RULER);
  }

  x(moment) {
    return GUTTER + (moment - this.from) * this.scale;
  }

  paintRow(row, scene) {
    const { ratio } = this;
    const width = this.canvas.width;
    const top = Math.round((row.y - scene.scroll) * ratio);
    const bottom = Math.min(this.image.height, Math.round((row.y + row.height - scene.scroll) * ratio));
    if (row.track === undefined) {
      this.pixels.fill(this.band, Math.max(0, top) * width, bottom * width);
      return;
    }
    const base = bottom - 1;
    if (base >= 0 && base < this.image.height) this.pixels.fill(this.rule, base * width, base * width + width);
    const gap = Math.round(ratio);
    const room = Math.round(row.height * ratio) - 2 * gap - 1;
    const [least, wide] = [Math.max(2, Math.round(room * 0.2)), 5 * ratio];
    const scale = this.scale * ratio;
    scene.tiles.parts(row.track, scene.view, (spans, offset, from, to) => {
      const { start, end, name, share } = spans;
      const zero = GUTTER * ratio + (offset - scene.view.from) * scale;
      const [left, right] = [from, to].map((at) => Math.round(GUTTER * ratio + (at - scene.view.from) * scale));
      for (let place = above(end, from - offset); place < start.length && start[place] < to - offset; place += 1) {
        const begin = Math.max(left, Math.round(zero + start[place] * scale));
        let until = Math.min(right, Math.max(begin + 1, Math.round(zero + end[place] * scale)));
        if (until - begin > wide) {
          if (end[place] <= to - offset) until -= gap;
          if (start[place] >= from - offset || from === scene.view.from) this.label(spans, place, begin, until, row, top, scene);
        }
        const colour = this.kinds[scene.kinds[name[place]]];
        const height = Math.max(least, Math.round(room * share[place] * Math.min(1, (end[place] - start[place]) * scale)));
        const last = Math.min(this.image.height - 1, base - gap);
        for (let y = Math.max(0, base - gap - height + 1); y <= last; y += 1) {
          if (until - begin > 12) this.pixels.fill(colour, y * width + begin, y * width + until);
          else for (let x = y * width + begin; x < y * width + until; x += 1) this.pixels[x] = colour;
        }
      }
    });
  }

  label(spans, place, begin, until, row, top, scene) {
    const number = spans.number?.[place] ?? -1;
    const of = row.group === "groups" || row.group === "rollouts";
    if (!spans.share[place] || spans.share[place] < 0.98 || row.height < 14 || this.labels.length >= MOST_LABELS) return;
    const text = scene.names[spans.name[place]] + (number >= 0 ? (of ? ` · ${number}` : ` ${number}`) : "");
    const room = Math.floor(((until - begin) / this.ratio - 8) / 6.2);
    if (room >= Math.min(text.length, 9)) this.labels.push([text.length > room ? `${text.slice(0, room - 1)}…` : text, begin / this.ratio + 4, RULER + top / this.ratio + row.height / 2]);
  }

  drawLabels(colour) {
    const { context } = this;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillStyle = colour;
    for (const [text, x, y] of this.labels) context.fillText(text, x, y + 0.5);
  }

  drawLine(moment, colour, dash, top) {
    const x = Math.round(this.x(moment)) + 0.5;
    if (x < GUTTER || x > this.width) return;
    const { context } = this;
    context.strokeStyle = colour;
    context.globalAlpha = 0.7;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(x, top);
    context.lineTo(x, this.height);
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  drawRuler({ view, overview }) {
    const { context, colours } = this;
    const step = tickStep((view.to - view.from) / Math.max(2, (this.width - GUTTER) / 96));
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (let tick = Math.ceil(view.from / step) * step; tick < view.to; tick += step) {
      if (tick < 0) continue;
      const x = Math.round(this.x(tick)) + 0.5;
      context.fillStyle = colours["--line"];
      context.fillRect(x - 0.5, 0, 1, RULER);
      context.fillStyle = colours["--muted"];
      context.fillText(clock(tick, step), x + 4, RULER_ROW / 2 + 0.5);
    }
    this.drawSteps(overview);
    this.drawVersions(overview, view);
    this.drawMarks(overview);
    context.fillStyle = colours["--line"];
    context.fillRect(0, RULER - 1, this.width, 1);
  }

  drawSteps({ steps, from_s }) {
    const { context, colours } = this;
    let reached = GUTTER; // steps narrower than a pixel are one
    for (const [place, { step, start_s, end_s, skipped }] of steps.entries()) {
      const [left, right] = [Math.max(reached, this.x(start_s - from_s)), Math.min(this.width, this.x(end_s - from_s))];
      if (right - left < 1) continue;
      reached = right;
      context.fillStyle = skipped ? colours["--bad"] : place % 2 ? colours["--line"] : colours["--raised"];
      context.fillRect(left, RULER_ROW + 2, right - left, RULER_ROW - 4);
      const text = String(step);
      if (right - left > 10 + 7 * text.length) {
        context.fillStyle = skipped ? colours["--card"] : colours["--fg"];
        context.fillText(text, left + 4, 1.5 * RULER_ROW + 0.5);
      }
    }
  }

  drawVersions({ versions, from_s }, view) {
    const { context, colours } = this;
    const [from, to] = [view.from + from_s, view.to + from_s];
    const shown = versions.filter((one) => (one.applied_s ?? one.published_s) >= from && one.published_s <= to);
    const places = shown.map((one) => this.x((one.applied_s ?? one.published_s) - from_s));
    const top = 2 * RULER_ROW;
    let [last, free] = [0, GUTTER];
    for (const [place, { version, published_s, applied_s }] of shown.entries()) {
      const x = places[place];
      if (x < GUTTER || x - last < 2) continue;
      context.fillStyle = colours["--c4"];
      context.fillRect(Math.round(x), top + RULER_ROW - 5, 1, 5);
      if (x - last > 12 && !(places[place + 1] - x < 12)) { // alone: a line each over all lanes
        this.drawLine(published_s - from_s, colours["--c6"], [], top + RULER_ROW);
        if (applied_s !== null) this.drawLine(applied_s - from_s, colours["--c4"], [4, 3], top + RULER_ROW);
      }
      last = x;
      const text = `v${version}`;
      if (x >= free && x < this.width - 8) {
        context.fillText(text, x + 4, top + RULER_ROW / 2 - 0.5);
        free = x + 16 + 7 * text.length;
      }
    }
  }

  drawMarks({ marks, from_s }) {
    const { context, colours } = this;
    const y = 3.5 * RULER_ROW;
    let [last, free] = [0, GUTTER];
    for (const [place, { time_s, event }] of marks.entries()) {
      const x = this.x(time_s - from_s);
      if (x < GUTTER || x > this.width || x - last < 2) continue;
      last = x;
      context.fillStyle = BAD.test(event) ? colours["--bad"] : colours["--accent"];
      context.beginPath();
      for (const [dx, dy] of [[0, -5], [4, 0], [0, 5], [-4, 0]]) context.lineTo(x + dx, y + dy);
      context.fill();
      if (BAD.test(event)) this.drawLine(time_s - from_s, colours["--bad"], [1, 3], RULER);
      const text = event.replaceAll("_", " ");
      const room = 14 + 6.2 * text.length;
      const next = marks[place + 1];
      if (x >= free && !(next && this.x(next.time_s - from_s) < x + room)) {
        context.fillText(text, x + 7, y + 0.5);
        free = x + room;
      }
    }
  }

  drawNames(rows, { view, overview, scroll }) {
    const { context, colours } = this;
    context.save();
    context.beginPath();
    context.rect(0, RULER, GUTTER - 8, this.height);
    context.clip();
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = colours["--fg"];
    for (const row of rows) {
      if (row.track !== undefined && row.label) context.fillText(row.label, 24, RULER + row.y - scroll + row.height / 2);
    }
    context.restore();
    context.fillStyle = colours["--muted"];
    context.fillText(moment(overview.from_s + Math.max(0, view.from)).slice(0, 19), 12, RULER_ROW / 2 + 0.5);
    context.textAlign = "right";
    for (const [row, text] of RULER_ROWS.entries()) context.fillText(text, GUTTER - 12, (row + 0.5) * RULER_ROW + 0.5);
    context.fillStyle = colours["--fg"];
    context.textAlign = "left";
    context.fillText(`${duration(view.to - view.from)} shown`, 12, 1.5 * RULER_ROW + 0.5);
    context.fillStyle = colours["--line"];
    context.fillRect(GUTTER - 1, 0, 1, this.height);
  }
}
