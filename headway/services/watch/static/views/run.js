// Run: any series over steps or time as small multiples, marks of events, and what the logs said at a moment.

import { bytes, el, empty, fill, moment, plural, problems, quantity, score } from "../dom.js";
import { colourOf, plot } from "../plot.js";
import { AXES, axisAndSmoothing, chooser, firstOf, plotsOf, shortName } from "../series.js";

const POINTS = 800;
const AGAIN_MS = 2000; // between two readings of the series
const MOST_UPDATES = 60; // marked: more would hide the curves
const HINT = "Drag: zoom. Click: the logs of that moment.";
const SOLVED = "reward/solve_rate"; // whose plot has the evaluations
const SPLITS = { validation: "--c4", test: "--c5" };

export async function show(root, params, context) {
  const settings = { axis: params.axis ?? "steps", smoothing: Number(params.smoothing ?? 0.6) };
  const drawn = new Map(); // key of a plot -> its handle
  let plots = [];
  let chosen = new Set();
  let events = [];
  let answer = null;
  let seen = -1;
  let ended = false;
  let loading = Promise.resolve();
  let waiting = null;
  const hint = el("span", { class: "muted" }, HINT);
  const warnings = el("div");
  const grid = el("div", { class: "plots" });
  const side = el("aside", { class: "moment card", hidden: true, "aria-label": "A moment" });
  const body = el("div", { class: "run-body" });
  const configuration = el("details", { class: "card configuration", ontoggle: showConfiguration }, el("summary", {}, "Configuration"));
  fill(root, el("h1", {}, `Run ${context.run}`), el("div", { class: "controls" }, axisAndSmoothing(settings, change),
    el("button", { type: "button", title: "0, or a double click", onclick: reset }, "Whole range"),
    hint), warnings);

  await context.api.attempt(warnings, async () => {
    const found = await context.api.get("names", { run: context.run });
    plots = plotsOf(found.series);
    const named = new Set((params.series ?? "").split(",").filter(Boolean));
    chosen = new Set(plots.filter((of) => named.has(of.names[0])).map((of) => of.key));
    if (!chosen.size) chosen = firstOf(plots);
    fill(body, chooser(plots, chosen, choose), grid, side);
    await load();
    root.append(body, configuration); // at their full size
  });

  function change(changes) {
    Object.assign(settings, changes);
    context.remember(changes);
    if (changes.axis) load();
    else drawAll();
  }

  function choose() {
    context.remember({ series: plots.filter((of) => chosen.has(of.key)).map((of) => of.names[0]) });
    load();
  }

  /** Read all series that are drawn; while one reading runs, the next waits for it. */
  function load() {
    waiting ??= loading.then(async () => {
      waiting = null;
      if (!ended) await context.api.attempt(warnings, read);
    });
    loading = waiting ?? loading;
    return loading;
  }

  async function read() {
    const names = plots.filter((of) => chosen.has(of.key)).flatMap((of) => of.names);
    const of = { run: context.run };
    const [series, found] = await Promise.all([
      context.api.get("series", { ...of, names: names.join(","), axis: settings.axis, points: POINTS }),
      context.api.get("events", of),
    ]);
    answer = series;
    events = found.events;
    if (series.x.some((x) => x === null)) { // dollars without a price
      for (const of of Object.values(series.series)) of.mean = [];
      series.x = [];
      series.problems.push(`This run has no place on the axis ${AXES[settings.axis].toLowerCase()}.`);
    }
    hint.textContent = HINT + (series.per_point > 1 ? ` A point stands for ${plural(series.per_point, "step")}; the band is their range.` : "");
    fill(warnings, problems(series.problems));
    drawAll();
  }

  function drawAll() {
    if (!answer || ended) return;
    const many = events.filter((event) => event.kind === "update").length > MOST_UPDATES;
    const marks = events.filter((event) => !["other", "evaluation", many && "update"].includes(event.kind)).map((event) => ({
      kind: event.kind, x: event.x?.[settings.axis], text: `${event.event.replaceAll("_", " ")} at step ${event.step}${event.detail ? `: ${event.detail}` : ""}`,
    })).filter((mark) => Number.isFinite(mark.x));
    for (const [key, handle] of drawn) {
      if (chosen.has(key)) continue;
      handle.destroy();
      drawn.delete(key);
    }
    const shown = plots.filter((of) => chosen.has(of.key));
    for (const of of shown) {
      const lines = of.names.filter((name) => answer.series[name]).map((name, number) => (
        { name: shortName(name), colour: colourOf(number), ...answer.series[name] }));
      const spec = {
        title: of.title, caption: of.caption, unit: of.unit, x: answer.x, xLabel: AXES[settings.axis]?.toLowerCase(), lines, marks,
        smoothing: settings.smoothing, group: "run", onPick: showMoment, points: of.names.includes(SOLVED) ? evaluations() : [],
      };
      if (drawn.has(of.key)) drawn.get(of.key).set(spec);
      else {
        const cell = el("div", { class: "card plot-cell", "data-key": of.key });
        const next = shown.slice(shown.indexOf(of) + 1).map((later) => grid.querySelector(`[data-key="${CSS.escape(later.key)}"]`)).find(Boolean);
        grid.insertBefore(cell, next ?? null);
        const handle = plot(cell, spec);
        drawn.set(of.key, { ...handle, destroy: () => {
          handle.destroy();
          cell.remove();
        } });
      }
    }
    grid.querySelector(":scope > .empty")?.remove();
    if (!answer.x.length && !answer.evaluations?.length) grid.prepend(empty("No step is recorded yet: curves begin with the first one."));
    else if (!shown.length) grid.prepend(empty("Choose series: their curves appear here."));
  }

  function evaluations() {
    return (answer.evaluations ?? []).filter((of) => Number.isFinite(of.solve_rate)).map((of) => ({
      x: of.x, y: of.solve_rate, error: of.standard_error, label: of.split, colour: SPLITS[of.split] ?? "--c6",
      text: `${of.split} ${of.phase}: ${score(of.solve_rate, of.standard_error)} (${plural(of.tasks, "task")})${of.failures_text && `; ${of.failures_text}`}`,
    }));
  }

  function reset() {
    for (const handle of drawn.values()) handle.reset();
  }

  // --- a moment -------------------------------------------------------------------------------------------

  async function showMoment(x) {
    const at = answer.x.reduce((best, value, index) => (Math.abs(value - x) < Math.abs(answer.x[best] - x) ? index : best), 0);
    const unix_s = answer.unix_s?.[at] ?? null;
    const log = el("div");
    const near = events.filter((event) => Math.abs((event.x?.[settings.axis] ?? NaN) - x) <= (answer.x.at(-1) - answer.x[0]) / 50);
    side.hidden = false;
    body.classList.add("with-moment");
    fill(side, el("div", { class: "moment-head" },
      el("h2", { tabindex: -1 }, `${AXES[settings.axis]} ${quantity(x)}`, unix_s && el("span", { class: "muted" }, ` ${moment(unix_s)}`)),
      el("button", { type: "button", "aria-label": "Close the moment", onclick: hideMoment }, "×")),
    near.length > 0 && el("ul", {}, near.slice(0, 20).map((event) => el("li", {}, el("strong", {}, event.event.replaceAll("_", " ")),
      event.worker && `, ${event.worker}`, event.detail && `: ${event.detail}`))), log);
    await context.api.attempt(log, async () => {
      const { logs } = await context.api.get("logs", { run: context.run });
      if (!logs.length) return void fill(log, empty("The run has no logs: its workers write RUN/logs when they start."));
      const written = logs.find((of) => of.size_bytes > 0) ?? logs[0];
      const text = el("div");
      const select = el("select", { onchange: () => showLog(text, select.value, { unix_s }) },
        logs.map((of) => el("option", { value: of.name, selected: of === written }, `${of.name}, ${bytes(of.size_bytes)}`)));
      fill(log, el("label", { class: "log-choice" }, "Log of ", select), text);
      await showLog(text, written.name, { unix_s });
      return undefined;
    });
  }

  function hideMoment() {
    side.hidden = true;
    body.classList.remove("with-moment");
  }

  function showLog(place, name, where) {
    return context.api.attempt(place, async () => {
      const part = await context.api.get("log", { run: context.run, name, ...where });
      const said = problems(part.problems);
      const lines = el("pre", { class: "log", tabindex: 0, role: "region", "aria-label": `Log ${name}` }, part.text || "(empty)");
      const go = (end, words, possible) => el("button", { type: "button", disabled: !possible, onclick: () => showLog(place, name, { end }) }, words);
      const length = Math.max(1, part.end - part.start);
      fill(place, said, lines, el("p", { class: "log-way" }, go(part.start, "Earlier", part.start > 0),
        go(Math.min(part.size_bytes, part.end + length), "Later", part.end < part.size_bytes),
        go(part.size_bytes, "End", part.end < part.size_bytes),
        el("span", { class: "muted" }, `${bytes(part.start)} to ${bytes(part.end)} of ${bytes(part.size_bytes)}`)));
      if (!("unix_s" in where)) lines.scrollTop = lines.scrollHeight;
    });
  }

  async function showConfiguration() {
    if (!configuration.open || configuration.childElementCount > 1) return;
    const place = el("div");
    configuration.append(place);
    await context.api.attempt(place, async () => {
      const found = await context.api.get("config", { run: context.run });
      fill(place, problems(found.problems), el("pre", { tabindex: 0 }, JSON.stringify(found.configuration, null, 2)));
    });
  }

  const onKey = (event) => {
    if (event.key === "0" && !event.target.closest("input, select, textarea")) reset();
    if (event.key === "Escape") hideMoment();
  };
  document.addEventListener("keydown", onKey);
  let timer = null;
  const close = context.api.stream({ run: context.run }, { now: (now) => {
    if (now.step === seen) return;
    if (seen >= 0) timer ??= setTimeout(() => {
      timer = null;
      load();
    }, AGAIN_MS);
    seen = now.step;
  } });
  return () => {
    ended = true;
    close();
    clearTimeout(timer);
    document.removeEventListener("keydown", onKey);
    for (const handle of drawn.values()) handle.destroy();
  };
}
