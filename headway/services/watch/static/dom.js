// Elements and numbers. Text is only ever set as text: nothing that a model or a log wrote becomes HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. `attributes`: `class`, `style` (an object), `onclick` and its like (functions), properties of
 * form fields (`value`, `checked`, `disabled`), else attributes; null and false leave one out. Children: nodes, or
 * what becomes text; arrays are flattened; null and false are left out. */
export function el(tag, attributes = {}, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}

/** Make an SVG element, as `el` does. */
export function svg(tag, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, tag), attributes, children);
}

function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, of] of Object.entries(value)) node.style.setProperty(key, of);
    else if (["value", "checked", "disabled", "selected", "open"].includes(name)) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Replace what is inside `node`. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

/** What can't be read, each in a sentence; null without any. */
export function problems(found) {
  if (!found?.length) return null;
  return el("div", { class: "problems" }, found.map((text) => el("p", { class: "problem" }, text)));
}

/** What would fill an empty place. */
export const empty = (text) => el("p", { class: "empty" }, text);

/** A table. `heads`: texts, or {text, class, title}; a row: cells, which are texts or nodes, or {cells, ...attributes of tr}.
 * The first `textColumns` columns are aligned as text; the first cell of a row is its head. */
export function table(heads, rows, { caption, textColumns = 1, label } = {}) {
  const side = (column) => (column < textColumns ? "text" : null);
  const head = heads.map((of, column) => {
    const { text, ...rest } = typeof of === "object" ? of : { text: of };
    return el("th", { scope: "col", class: side(column), ...rest }, text);
  });
  const body = rows.map((row) => {
    const { cells, ...rest } = Array.isArray(row) ? { cells: row } : row;
    return el("tr", rest, cells.map((cell, column) =>
      el(column ? "td" : "th", { class: side(column), scope: column ? null : "row" }, cell ?? "–")));
  });
  return el("div", { class: "table", tabindex: 0, role: "region", "aria-label": label ?? caption ?? "Table" },
    el("table", {}, caption && el("caption", {}, caption), el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

/** A horizontal bar of a share from 0 to 1; read aloud as `label`. */
export function bar(share, label, colour = "--accent") {
  const width = `${Math.min(1, Math.max(0, share ?? 0)) * 100}%`;
  return el("span", { class: "bar", role: "img", "aria-label": label },
    el("span", { style: { width, "background-color": `var(${colour})` } }));
}

// --- numbers -----------------------------------------------------------------------------------------------

const THIN = "\u202f"; // narrow, no break
const known = (value) => typeof value === "number" && Number.isFinite(value);
const separated = (text) => text.replace(/\B(?=(\d{3})+(?!\d))/g, THIN);

/** A whole number: 12 345. */
export const count = (value) => (known(value) ? separated(String(Math.round(value))).replace("-", "−") : "–");

/** A count with its noun: `plural(1, "group")`. */
export const plural = (value, noun) => `${count(value)}${THIN}${noun}${value === 1 ? "" : "s"}`;

/** A number to three significant figures, or four where it is a large one. */
export function quantity(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${quantity(value / 1e6)}${THIN}M`;
  if (size >= 1e4) return `${quantity(value / 1e3)}${THIN}k`;
  if (size >= 1000) return count(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace("-", "−");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

export const percent = (share) => (known(share) ? `${Number((share * 100).toFixed(share < 0.0995 ? 1 : 0))}${THIN}%` : "–");
export const score = (rate, error) => (known(rate) ? rate.toFixed(3) + (known(error) ? ` ± ${error.toFixed(3)}` : "") : "–");
export const dollars = (value) => (known(value) ? `$${separated(value.toFixed(2)).replace(/\.\d+$/, (d) => d.replaceAll(THIN, ""))}` : "–");

/** Seconds as "3 m 20 s": two units at most. */
export function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds === 0) return `0${THIN}s`;
  if (seconds < 0.9995) return `${count(seconds * 1000)}${THIN}ms`;
  if (seconds < 9.95) return `${Number.isInteger(seconds) ? seconds : seconds.toFixed(1)}${THIN}s`;
  const s = Math.round(seconds);
  if (s < 60) return `${s}${THIN}s`;
  if (s < 3600) return `${Math.floor(s / 60)}${THIN}m ${s % 60}${THIN}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}${THIN}h ${Math.floor((s % 3600) / 60)}${THIN}m`;
  return `${Math.floor(s / 86400)}${THIN}d ${Math.floor((s % 86400) / 3600)}${THIN}h`;
}

export function bytes(value) {
  if (!known(value)) return "–";
  const step = value < 1 ? 0 : Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${quantity(value / 1000 ** step)}${THIN}${["B", "kB", "MB", "GB", "TB"][step]}`;
}

/** Unix seconds as local date and time; `parts`: "time" alone, or to the "minute". */
export function moment(unix_s, parts = "date time") {
  if (!known(unix_s)) return "–";
  const at = new Date(unix_s * 1000);
  const two = (value) => String(value).padStart(2, "0");
  const date = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const minute = `${two(at.getHours())}:${two(at.getMinutes())}`;
  const time = parts === "minute" ? minute : `${minute}:${two(at.getSeconds())}`;
  return parts === "time" ? time : `${date} ${time}`;
}

/** How long ago a moment was. */
export function ago(unix_s) {
  if (!known(unix_s)) return "–";
  const seconds = Math.floor(Date.now() / 1000 - unix_s);
  return seconds < 2 ? "just now" : `${duration(seconds)} ago`;
}

/** A number with its unit: shares as per cent, seconds as a duration, bytes as bytes. */
export function withUnit(value, unit) {
  if (!known(value)) return "–";
  if (unit === "share" || unit === "%") return percent(value);
  if (unit === "s" || unit === "seconds") return duration(value);
  if (unit === "bytes") return bytes(value);
  return unit ? `${quantity(value)}${THIN}${unit}` : quantity(value);
}
