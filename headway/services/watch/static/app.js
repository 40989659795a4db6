// The shell: which view is shown, which run, theme, keyboard. A view is a module with `show(root, params, context)`.

import * as api from "./api.js";
import { el, empty, fill, problems } from "./dom.js";
import * as recorded from "./recorded.js";

const VIEWS = {
  runs: { title: "Runs", key: "l", module: "./views/runs.js" },
  now: { title: "Now", key: "n", module: "./views/now.js" },
  report: { title: "Report", key: "p", module: "./views/report.js" },
  run: { title: "Run", key: "r", module: "./views/run.js" },
  rollouts: { title: "Rollouts", key: "o", module: "./views/rollouts.js" },
  tasks: { title: "Tasks", key: "t", module: "./views/tasks.js" },
  devices: { title: "Devices", key: "d", module: "./views/devices.js" },
  compare: { title: "Compare", key: "c", module: "./views/compare.js" },
  rollout: { title: "Rollout", module: "./views/rollout.js", under: "rollouts" },
};
const FRESH_MS = 10_000; // the list of runs in the top
const THEMES = ["auto", "light", "dark"];

const choice = document.querySelector("#run-choice");
const nav = document.querySelector("#views");
const help = document.querySelector("#help");
const announcer = document.querySelector("#announcer");
let current = { name: "", run: "", end: null, number: 0 };
let runs = [];
let loaded_ms = 0;
let loading = null;

/** Say `text` to who can't see the page. */
function announce(text) {
  announcer.textContent = text;
}

/** The hash of a view: `hashOf("now", { run: "a" })`. Lists become commas; what is empty is left out. */
export function hashOf(view, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== "" && value?.length !== 0) query.set(name, value);
  }
  const text = query.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

function routeOf(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  return { name: VIEWS[path] ? path : "", params: Object.fromEntries(new URLSearchParams(query)) };
}

async function loadRuns() {
  loaded_ms = Date.now();
  const found = await api.get("runs").catch(() => ({ runs }));
  runs = found.runs;
  drawChoice();
}

function drawChoice() {
  const options = runs.map((run) => el("option", { value: run.id }, `${run.name} · ${run.state}`));
  if (!runs.some((run) => run.id === current.run)) {
    options.unshift(el("option", { value: current.run }, current.run || "no run"));
  }
  fill(choice, options);
  choice.value = current.run;
}

/** The run that is meant where the address names none: one that runs, else the newest. */
function likelyRun() {
  const newest = [...runs].sort((a, b) => (b.last_unix_s ?? 0) - (a.last_unix_s ?? 0));
  return (newest.find((run) => run.state === "running") ?? newest[0])?.id ?? "";
}

function drawNavigation() {
  const shown = VIEWS[current.name]?.under ?? current.name;
  fill(nav, Object.entries(VIEWS).filter(([, view]) => !view.under).map(([name, view]) =>
    el("a", {
      href: hashOf(name, name === "runs" ? {} : name === "compare" ? { runs: current.run } : { run: current.run }),
      "aria-current": name === shown ? "page" : null, title: `g ${view.key}`,
    }, view.title)));
}

async function open() {
  const asked = location.hash;
  const { name, params } = routeOf(asked);
  if (Date.now() - loaded_ms > FRESH_MS) loading = loadRuns();
  if (!name || !(params.run || params.runs || current.run)) await loading; // it says which run is meant
  if (location.hash !== asked) return;
  if (!name) {
    const all = runs.map((run) => run.id);
    location.replace(VIEWS.now && all.length === 1 ? hashOf(recorded.inside ? "report" : "now", { run: all[0] }) : VIEWS.runs ? hashOf("runs") : hashOf("compare", { runs: all }));
    return;
  }
  current.end?.();
  const number = current.number + 1;
  const first = current.number === 0;
  current = { name, number, end: null, run: params.run || params.runs?.split(",")[0] || current.run || likelyRun() };
  drawNavigation();
  drawChoice();
  // A new element for each view: what an older one still writes goes nowhere.
  const root = el("main", { id: "main", tabindex: "-1", class: `view-${name}` });
  document.querySelector("#main").replaceWith(root);
  const title = VIEWS[name].title;
  document.title = `${title} · ${current.run || "Headway"}`;
  scrollTo(0, 0);
  if (!first) {
    root.focus({ preventScroll: true });
    announce(title);
  }
  const run = current.run;
  if (!run && name !== "runs" && name !== "compare") {
    fill(root, el("h1", {}, title), empty("There is no run yet. `headway train FILE` starts one; this page finds it."));
    return;
  }
  const context = { navigate, announce, remember, hashOf, api, run, theme: theme(), runs: () => runs };
  try {
    const view = await import(VIEWS[name].module);
    const end = await view.show(root, { ...params, run }, context);
    if (current.number === number) current.end = end ?? null;
    else end?.();
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof api.ApiError)) console.error(error);
    fill(root, el("h1", {}, title), problems([error.message]), el("button", { type: "button", onclick: open }, "Try again"));
  }
}

function navigate(hash) {
  if (location.hash === hash) open();
  else location.hash = hash;
}

/** Keep a view's choices in the address without showing the view again. */
function remember(params) {
  const { name, params: before } = routeOf(location.hash);
  history.replaceState(null, "", hashOf(name, { ...before, ...params }));
}

// --- theme -------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    return THEMES.includes(localStorage.theme) ? localStorage.theme : "auto";
  } catch {
    return "auto"; // no storage for this page
  }
}

const theme = () => document.documentElement.dataset.theme ?? "light";

function applyTheme() {
  document.documentElement.dataset.theme = chosen() === "auto" ? (dark.matches ? "dark" : "light") : chosen();
  const button = document.querySelector("#theme");
  button.textContent = { auto: "◐", light: "☀", dark: "☾" }[chosen()];
  button.title = `Colours: ${chosen()}`;
  button.setAttribute("aria-label", `Colours: ${chosen()}. Change.`);
  document.dispatchEvent(new Event("themechange"));
}

// --- keyboard ----------------------------------------------------------------------------------------------

const KEYS = [
  ["/", "Search in this view"], ["j, k", "Next, previous of a list"], ["Enter", "Open it"],
  ["x", "Choose it (Runs)"], ["double click, 0", "Whole range again (plots)"], ["?", "This help"],
];
let pending = 0; // when g was pressed

function onKey(event) {
  const typing = event.target.closest("input, textarea, select, [contenteditable]");
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const after = event.timeStamp - pending < 1500;
  pending = 0;
  const view = Object.entries(VIEWS).find(([, of]) => of.key === event.key);
  if (after && view) navigate(nav.querySelectorAll("a")[Object.keys(VIEWS).indexOf(view[0])].getAttribute("href"));
  else if (event.key === "g") pending = event.timeStamp;
  else if (event.key === "?") showHelp();
  else if (event.key === "/") document.querySelector("#main input[type=search]")?.focus();
  else if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
  else return;
  event.preventDefault();
}

/** Focus the next item of a list: whatever has the attribute data-item. */
function step(by) {
  const items = [...document.querySelectorAll("#main [data-item]")];
  const at = items.findIndex((item) => item.contains(document.activeElement));
  const next = items[at < 0 ? (by > 0 ? 0 : items.length - 1) : Math.min(items.length - 1, Math.max(0, at + by))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function showHelp() {
  const views = Object.values(VIEWS).filter((view) => view.key).map((view) => [`g ${view.key}`, view.title]);
  fill(help, el("h2", { id: "help-title" }, "Keyboard"),
    el("dl", { class: "keys" }, [...views, ...KEYS].map(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])),
    el("button", { type: "button", onclick: () => help.close() }, "Close"));
  help.showModal();
}

document.querySelector("#theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(chosen()) + 1) % THEMES.length];
  try {
    localStorage.theme = next;
  } catch {
    announce("Colours can't be kept: this page has no storage.");
  }
  applyTheme();
  announce(`Colours: ${next}`);
});
document.querySelector("#keys").addEventListener("click", showHelp);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash is the address of the view
  document.querySelector("#main").focus();
});
choice.addEventListener("change", () => {
  const name = ["runs", "compare", "rollout", ""].includes(current.name) ? "now" : current.name;
  navigate(hashOf(name, { run: choice.value }));
});
dark.addEventListener("change", applyTheme);
document.addEventListener("keydown", onKey);
addEventListener("hashchange", open);
applyTheme();
if (recorded.inside) {
  const kept = await recorded.views();
  for (const [name, { under = name }] of Object.entries(VIEWS)) if (!kept.includes(under)) delete VIEWS[name];
}
open();
