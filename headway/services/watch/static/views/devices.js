// Devices: who did what when, from hours to a decode step. Lanes for each device, worker, group and rollout.

import { count, duration, el, empty, fill, moment, percent, plural, problems, table } from "../dom.js";
import { GUTTER, KINDS, LaneCanvas, RULER, clock, kindOf } from "./lane_canvas.js";
import { LaneTiles } from "./lane_tiles.js";

const GROUPS = { devices: "Devices", trainer: "Trainer", generator: "Generator", verifiers: "Verifiers", other: "Other", groups: "Groups", rollouts: "Rollouts" };
const HEAD = 24;
const HEIGHT = { groups: 15, rollouts: 15 };
const REST_MS = 80; // without a change of the view, before a sharper window is asked for
const POLL_MS = 5000;
const LEAST_S = 1e-4;
const closed = new Set(); // groups of tracks, for as long as the page is open
let measured = { frames: 0, frames_per_s: null, draw_ms: null };

/** Frames a second while the view moved, over the last two seconds of motion: {frames, frames_per_s, draw_ms}. */
export const frames = () => measured;

function labelOf({ name, group }) {
  const [lane, member] = name.split(".").map(Number);
  return group === "groups" ? `lane ${lane}` : group === "rollouts" ? `lane ${lane}, member ${member}` : name;
}

/** Rows of the lanes, heads of groups among them, with their places from the top. */
function layout(tracks) {
  const rows = [];
  let y = 0;
  for (const [group, title] of Object.entries(GROUPS)) {
    const of = tracks.filter((track) => track.group === group);
    if (!of.length) continue;
    of.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
    rows.push({ y, height: HEAD, group, title, tracks: of.length });
    y += HEAD;
    for (const track of closed.has(group) ? [] : of) {
      const height = HEIGHT[group] ?? 22;
      rows.push({ y, height, group, track: track.id, label: labelOf(track) });
      y += height;
    }
  }
  return { rows, height: y };
}

export async function show(root, params, context) {
  const { run } = params;
  const controller = new AbortController();
  const ask = (path, more) => context.api.get(path, { run, ...more }, { signal: controller.signal });
  const place = el("div");
  fill(root, el("h1", {}, "Devices"), place);
  const overview = await context.api.attempt(place, () => ask("lanes"));
  const end = () => controller.abort();
  if (!overview) return end;
  if (overview.from_s === null || !overview.tracks.length) {
    fill(place, problems(overview.problems), empty("Lanes come from the run's trace.jsonl, which is written while it runs: who worked when, on which device, and when each version of the weights was published and applied."));
    return end;
  }
  const view = new DevicesView(place, overview, ask, context, params);
  return () => {
    end();
    view.end();
  };
}

class DevicesView {
  constructor(place, overview, ask, context, params) {
    Object.assign(this, { overview, ask, context, run: params.run, ended: false, hover: null, intervals: [] });
    this.whole = () => ({ from: 0, to: Math.max(1e-3, (this.overview.to_s - this.overview.from_s) * 1.01) });
    this.tiles = new LaneTiles((from, to, pixels, tracks) =>
      ask("lanes/window", { from_s: from + overview.from_s, to_s: to + overview.from_s, pixels, tracks: tracks.join(",") }), (error) => {
      if (error) fill(this.trouble, problems([error.message]));
      this.redraw();
    });
    this.build(place);
    const [from, to] = [Number(params.from), Number(params.to)];
    this.view = params.to && to > from ? { from, to } : this.whole();
    this.target = { ...this.view };
    this.layOut();
    this.listen();
    this.rest();
    this.poll();
  }

  build(place) {
    const button = (text, label, work) => el("button", { type: "button", "aria-label": label, title: label, onclick: work }, text);
    this.canvas = el("canvas", { role: "img", class: "lanes-canvas" });
    this.space = el("div", { class: "lanes-space" });
    this.scroller = el("div", { class: "lanes-scroll", tabindex: 0, role: "group", "aria-label": "Lanes. Plus and minus zoom, arrows move, 0 shows all." }, this.space);
    this.tip = el("div", { class: "lanes-tip", hidden: true });
    this.frame = el("div", { class: "lanes-frame" }, this.canvas, this.scroller, this.tip);
    this.trouble = el("div");
    this.legend = el("span", { class: "lanes-legend" });
    this.facts = el("span", { class: "muted" });
    this.shares = el("details", { class: "lanes-shares", ontoggle: () => this.drawShares() }, el("summary", {}, "Busy shares of the visible window, as a table"), el("div"));
    fill(place, this.trouble,
      el("div", { class: "controls" },
        button("−", "Zoom out", () => this.zoom(2)), button("+", "Zoom in", () => this.zoom(0.5)),
        button("Whole run", "Show the whole run", () => this.go(this.whole())), this.legend, this.facts),
      this.frame, this.shares);
    this.painter = new LaneCanvas(this.canvas);
  }

  /** Rows, buttons and texts after the trace has grown, or groups were opened or closed. */
  layOut() {
    const { overview } = this;
    const { rows, height } = layout(overview.tracks);
    this.rows = rows;
    this.kinds = overview.names.map(kindOf);
    this.space.style.setProperty("height", `${height}px`);
    fill(this.space, rows.filter((row) => row.track === undefined).map(({ y, group, title, tracks }) => {
      const toggle = () => {
        if (!closed.delete(group)) closed.add(group);
        this.layOut();
        this.space.querySelector(`[data-group=${group}]`).focus();
      };
      const head = el("button", { type: "button", class: "lanes-head", "data-group": group, "aria-expanded": String(!closed.has(group)), onclick: toggle },
        title, el("span", { class: "muted" }, count(tracks)));
      head.style.setProperty("top", `${y}px`);
      return head;
    }));
    const used = new Set(this.kinds);
    fill(this.legend, KINDS.map(([name, colour, , opacity = 1], kind) => used.has(kind) && name !== "other" &&
      el("span", {}, el("span", { class: "swatch", style: { background: `var(${colour})`, opacity } }), ` ${name}`)),
      overview.versions.length > 0 && [el("span", { class: "published" }, "version published"), el("span", { class: "applied" }, "applied")]);
    fill(this.facts, `${plural(overview.events, "event")} over ${duration(overview.to_s - overview.from_s)}`,
      overview.indexed_share < 1 && ` · ${percent(overview.indexed_share)} read`);
    fill(this.trouble, problems(overview.problems));
    this.redraw();
  }

  listen() {
    const { frame, scroller } = this;
    const stop = { signal: (this.listening = new AbortController()).signal };
    frame.addEventListener("wheel", (event) => this.onWheel(event), { ...stop, passive: false });
    frame.addEventListener("pointerdown", (event) => this.onDown(event), stop);
    frame.addEventListener("pointermove", (event) => this.onMove(event), stop);
    frame.addEventListener("pointerup", (event) => this.onUp(event), stop);
    frame.addEventListener("pointerleave", () => this.setHover(null), stop);
    frame.addEventListener("dblclick", (event) => event.target.closest("button") || this.go(this.whole()), stop);
    scroller.addEventListener("scroll", () => this.redraw(), stop);
    document.addEventListener("keydown", (event) => this.onKey(event), stop);
    document.addEventListener("themechange", () => {
      this.painter.readColours();
      this.redraw();
    }, stop);
    this.watcher = new ResizeObserver(() => this.redraw());
    this.watcher.observe(frame);
  }

  end() {
    this.ended = true;
    this.listening.abort();
    this.watcher.disconnect();
    clearTimeout(this.resting);
    clearTimeout(this.polling);
  }

  // --- motion ------------------------------------------------------------------------------------------------

  /** Move to a window, in a few frames. */
  go({ from, to }) {
    const whole = this.whole().to;
    const span = Math.min(Math.max(to - from, LEAST_S), 1.2 * whole);
    const middle = Math.min(Math.max((from + to) / 2, 0.2 * span), Math.max(whole - 0.2 * span, 0.2 * span));
    this.target = to - from === span && middle === (from + to) / 2 ? { from, to } : { from: middle - span / 2, to: middle + span / 2 };
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) this.view = { ...this.target };
    this.redraw();
  }

  zoom(factor, about = (this.target.from + this.target.to) / 2) {
    const { from, to } = this.target;
    const span = Math.max(LEAST_S, (to - from) * factor);
    const left = (about - from) / (to - from);
    this.go({ from: about - left * span, to: about + (1 - left) * span });
  }

  pan(share) {
    const by = share * (this.target.to - this.target.from);
    this.go({ from: this.target.from + by, to: this.target.to + by });
  }

  redraw() {
    if (this.requested || this.ended) return;
    this.requested = true;
    requestAnimationFrame((now) => this.onFrame(now));
  }

  onFrame(now) {
    this.requested = false;
    if (this.ended || !this.frame.isConnected) return;
    const { view, target } = this;
    const span = view.to - view.from;
    const near = Math.abs(target.from - view.from) + Math.abs(target.to - view.to) < 2e-4 * Math.min(span, target.to - target.from);
    this.view = near ? { ...target } : { from: view.from + 0.4 * (target.from - view.from), to: view.to + 0.4 * (target.to - view.to) };
    const began = performance.now();
    this.painter.resize(this.scroller.clientWidth, this.frame.clientHeight);
    this.painter.draw({ view: this.view, rows: this.rows, scroll: this.scroller.scrollTop, tiles: this.tiles, kinds: this.kinds,
      names: this.overview.names, overview: this.overview, hover: this.hover });
    this.measure(now, performance.now() - began, !near);
    if (!near) this.redraw();
    clearTimeout(this.resting);
    this.resting = setTimeout(() => this.rest(), REST_MS);
  }

  measure(now, draw_ms, moving) {
    if (this.moved && now - this.moved < 1000) this.intervals.push([now - this.moved, draw_ms]);
    this.moved = moving ? now : null;
    while (this.intervals.length > 1 && this.intervals.reduce((sum, [ms]) => sum + ms, 0) > 2000) this.intervals.shift();
    const total = this.intervals.reduce((sum, [ms]) => sum + ms, 0);
    const count = this.intervals.length;
    measured = { frames: count, frames_per_s: total ? (1000 * count) / total : null, draw_ms: this.intervals.reduce((sum, [, ms]) => sum + ms, 0) / count };
    this.frame.dataset.framesPerS = measured.frames_per_s?.toFixed(1) ?? "";
  }

  /** The view rests: ask for what is sharper, say what is seen, and keep the place in the address. */
  rest() {
    const [top, bottom] = [this.scroller.scrollTop - 100, this.scroller.scrollTop + this.frame.clientHeight];
    const tracks = this.rows.filter((row) => row.track !== undefined && row.y + row.height > top && row.y < bottom).map((row) => row.track);
    this.tiles.want(this.view, tracks, this.whole().to);
    const { from, to } = this.view;
    this.canvas.setAttribute("aria-label", `Lanes of ${plural(tracks.length, "track")}, from ${duration(Math.max(0, from))} after the start, over ${duration(to - from)}. The table below has their busy shares.`);
    const all = this.isWhole(this.view);
    const digits = Math.max(0, Math.ceil(4 - Math.log10(to - from)));
    this.context.remember({ from: all ? null : from.toFixed(digits), to: all ? null : to.toFixed(digits) });
    this.shown = tracks;
    this.drawShares();
  }

  isWhole({ from, to }) {
    const whole = this.whole();
    return from <= 0.001 * whole.to && to >= 0.999 * whole.to;
  }

  drawShares() {
    if (!this.shares.open || !this.shown) return;
    const names = new Map(this.rows.map((row) => [row.track, row]));
    const to = Math.min(this.view.to, this.overview.to_s - this.overview.from_s);
    const span = Math.max(1e-9, to - Math.max(0, this.view.from));
    fill(this.shares.lastChild, table(["Track", { text: "Part", class: "text" }, "Busy", { text: "Mostly", class: "text" }], this.shown.map((track) => {
      const { work, names: took } = this.tiles.busyIn(track, this.view);
      const most = [...took].sort((a, b) => b[1] - a[1]).slice(0, 3);
      return [names.get(track).label, GROUPS[names.get(track).group], percent(work / span),
        most.map(([name, s]) => `${this.overview.names[name]} ${percent(s / span)}`).join(", ")];
    }), { caption: `${clock(Math.max(0, this.view.from), span / 100)} to ${clock(to, span / 100)} after the start`, textColumns: 1 }));
  }

  /** A run that goes on: what is new, every few seconds; quickly while an old trace is being indexed. */
  async poll() {
    this.polling = setTimeout(() => this.poll(), this.overview.indexed_share < 1 ? 100 : POLL_MS);
    if (document.hidden || this.asking) return;
    this.asking = true;
    const before = this.overview;
    const since = before.to_s - 600; // versions are applied after they were published
    const found = await this.ask("lanes", { since }).catch(() => null);
    this.asking = false;
    if (!found || this.ended || (found.events === before.events && found.indexed_share === before.indexed_share)) return;
    if (found.from_s !== before.from_s) { // another trace
      this.context.navigate(location.hash);
      return;
    }
    for (const [kind, at] of [["steps", "end_s"], ["marks", "time_s"], ["versions", "published_s"]]) {
      found[kind] = [...before[kind].filter((one) => one[at] <= since), ...found[kind]];
    }
    const [all, atEnd] = [this.isWhole(this.target), this.target.to >= before.to_s - before.from_s];
    this.overview = found;
    this.tiles.age += 1;
    if (all) this.go(this.whole());
    else if (atEnd) this.go({ from: this.target.from + found.to_s - before.to_s, to: this.target.to + found.to_s - before.to_s });
    this.layOut();
  }

  // --- input -------------------------------------------------------------------------------------------------

  /** Where a pointer is: {x, y, moment, row}; `row` is undefined on the ruler. */
  where(event) {
    const box = this.frame.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const { from, to } = this.view;
    const at = y - RULER + this.scroller.scrollTop;
    const row = y < RULER ? undefined : this.rows.find((one) => at >= one.y && at < one.y + one.height);
    return { x, y, row, moment: from + ((x - GUTTER) / (this.painter.width - GUTTER)) * (to - from) };
  }

  onWheel(event) {
    const at = this.where(event);
    if (event.shiftKey || at.x < GUTTER) return; // scrolls the rows
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / this.painter.width);
    else this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * (event.deltaMode ? 0.05 : event.ctrlKey ? 0.01 : 0.002)))), at.moment);
  }

  onDown(event) {
    const { x, y } = this.where(event);
    if (event.button !== 0 || event.target.closest("button") || x > this.painter.width) return;
    this.drag = { x, y, startX: x, startY: y, moved: false, target: { ...this.target } };
    this.frame.setPointerCapture(event.pointerId);
  }

  onMove(event) {
    const at = this.where(event);
    const { drag } = this;
    if (!drag) return this.setHover(event.target.closest("button") ? null : at);
    drag.moved ||= Math.hypot(at.x - drag.startX, at.y - drag.startY) > 4;
    if (!drag.moved) return undefined;
    this.scroller.scrollTop -= at.y - drag.y;
    const by = ((drag.x - at.x) / (this.painter.width - GUTTER)) * (this.view.to - this.view.from);
    this.go({ from: this.target.from + by, to: this.target.to + by });
    this.view = { ...this.target }; // what is dragged stays under the pointer
    [drag.x, drag.y] = [at.x, at.y];
    this.frame.classList.add("dragged");
    return this.setHover(null);
  }

  onUp(event) {
    const { drag } = this;
    this.drag = null;
    this.frame.classList.remove("dragged");
    if (!drag || drag.moved) return;
    const span = this.spanAt(this.where(event));
    if (span?.row.group === "rollouts" && span.number >= 0) {
      this.context.navigate(this.context.hashOf("rollout", { run: this.run, group: span.number, member: span.member }));
    }
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog")) return;
    const keys = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.go(this.whole()),
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2),
      ArrowUp: () => this.scroller.scrollBy(0, -66), ArrowDown: () => this.scroller.scrollBy(0, 66) };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  spanAt({ x, row, moment }) {
    if (row?.track === undefined || x < GUTTER) return undefined;
    const span = this.tiles.at(row.track, moment, this.view);
    return span && { ...span, row };
  }

  setHover(at) {
    const inside = at && at.x >= GUTTER && at.x <= this.painter.width;
    this.hover = inside ? { moment: at.moment } : null;
    const lines = inside ? (at.row ? this.aboutSpan(at) : this.aboutRuler(at)) : null;
    this.tip.hidden = !lines;
    this.frame.classList.toggle("opens", Boolean(lines?.opens));
    if (lines) {
      fill(this.tip, lines.map((line, place) => el(place ? "div" : "b", {}, line)));
      const { width, height } = this.tip.getBoundingClientRect();
      this.tip.style.setProperty("left", `${Math.max(0, at.x + 16 + width < this.painter.width ? at.x + 16 : at.x - width - 12)}px`);
      this.tip.style.setProperty("top", `${Math.max(0, Math.min(at.y + 16, this.frame.clientHeight - height - 4))}px`);
    }
    this.redraw();
  }

  aboutSpan(at) {
    const span = this.spanAt(at);
    if (!span) return at.row.track === undefined ? null : [at.row.label, "nothing here", this.when(at.moment)];
    const name = this.overview.names[span.name];
    const of = ["groups", "rollouts"].includes(at.row.group);
    const joined = span.share > 0 && span.share < 1;
    const lines = [`${name}${span.number >= 0 && !of ? ` ${span.number}` : ""}`];
    if (joined) lines[0] = `mostly ${name}: several spans, ${percent(span.share)} busy`;
    if (of && span.number >= 0) lines.push(`group ${span.number}${span.member >= 0 ? `, member ${span.member}` : ""}`);
    lines.push(`${joined ? "together " : ""}${duration(span.end - span.start)}, ${this.when(span.start)}`, `${GROUPS[at.row.group]}: ${at.row.label}`);
    if (at.row.group === "rollouts") lines.push(span.number >= 0 ? "Click: the rollout" : "Zoom in to open one");
    lines.opens = at.row.group === "rollouts" && span.number >= 0;
    return lines;
  }

  aboutRuler(at) {
    const { overview } = this;
    const near = (4 * (this.view.to - this.view.from)) / this.painter.width;
    const time = at.moment + overview.from_s;
    const close = (value) => value !== null && Math.abs(value - time) < near;
    const lines = [this.when(at.moment)];
    const step = overview.steps.find((one) => one.start_s <= time && time < one.end_s);
    if (step) lines.push(`step ${step.step}${step.skipped ? ", skipped" : ""}: ${duration(step.end_s - step.start_s)}`);
    for (const { version, published_s, applied_s } of overview.versions.filter((one) => close(one.published_s) || close(one.applied_s)).slice(0, 3)) {
      lines.push(`version ${version}: ${applied_s === null ? "published, not applied yet" : `applied ${duration(applied_s - published_s)} after it was published`}`);
    }
    for (const mark of overview.marks.filter((one) => close(one.time_s)).slice(0, 4)) lines.push(`${mark.event.replaceAll("_", " ")}: ${mark.detail}`);
    return lines;
  }

  when(seconds) {
    return `${clock(Math.max(0, seconds), (this.view.to - this.view.from) / 1000)} after the start · ${moment(seconds + this.overview.from_s, "time")}`;
  }
}
