// Compare: runs over each other, what their configurations differ in, their last numbers, two rollouts of one task.

import { el, empty, fill, problems, table } from "../dom.js";
import { colourOf, plot } from "../plot.js";
import { AXES, axisAndSmoothing, chooser, plotsOf, shortName } from "../series.js";

const POINTS = 400;
const AGAIN_MS = 15_000;
const FIRST = [
  "reward/solve_rate", "reward/mean", "wait/trainer_ratio", "wait/generator_ratio", "rates/effective_production_samples_per_s",
  "length/mean_tokens", "trainer/entropy", "trainer/loss",
];
const SOLVED = "reward/solve_rate";
const MOST_TASKS = 500; // offered while one types

export async function show(root, params, context) {
  const settings = { axis: params.axis ?? "steps", smoothing: Number(params.smoothing ?? 0.6) };
  const known = (await context.api.get("runs").catch(() => ({ runs: [] }))).runs;
  let ids = (params.runs || params.run || "").split(",").filter(Boolean);
  let chosen = new Set();
  let answer = null;
  let handles = [];
  const [warnings, legend, numbers, differences, rollouts] = Array.from({ length: 5 }, () => el("div"));
  const controls = el("div", { class: "controls" });
  const body = el("div", { class: "run-body" });
  const grid = el("div", { class: "plots" });
  legend.className = "legend";
  fill(root, el("h1", {}, "Compare"), runsChoice(), legend, controls, warnings, body, numbers, differences, rollouts);

  const indexOf = (id) => Math.max(0, ids.indexOf(id));
  const nameOf = (id) => known.find((run) => run.id === id)?.name ?? id;

  function runsChoice() {
    return el("details", { class: "card", open: ids.length < 2 }, el("summary", {}, "Runs"),
      known.length ? el("div", { class: "series-list wide" }, known.map((run) => el("label", {}, el("input", {
        type: "checkbox", checked: ids.includes(run.id), onchange: (event) => {
          ids = event.target.checked ? [...ids, run.id] : ids.filter((id) => id !== run.id);
          context.remember({ runs: ids, run: "" });
          begin();
        },
      }), run.name))) : empty("The watched folders contain no run."));
  }

  async function begin() {
    fill(legend, ids.map((id) => el("a", { class: "chip", style: { color: `var(${colourOf(indexOf(id))})` }, href: context.hashOf("run", { run: id }) }, nameOf(id))));
    if (!ids.length) {
      clear();
      fill(body, empty("Choose runs: their curves share the plots."));
      for (const place of [numbers, differences, rollouts, controls]) fill(place);
      delete controls.dataset.axes;
      return;
    }
    await context.api.attempt(warnings, async () => {
      // Every series is a plot of its own: its lines are the runs.
      const found = await context.api.get("names", { run: ids[0] });
      const plots = plotsOf(found.series.map((of) => ({ ...of, title: alone(of, found.series) ? of.title : `${of.title}: ${shortName(of.name)}` })));
      if (!chosen.size) {
        const named = params.series ? params.series.split(",") : FIRST;
        chosen = new Set(plots.filter((of) => named.includes(of.names[0])).map((of) => of.key));
        if (!chosen.size) chosen = new Set(plots.slice(0, 6).map((of) => of.key));
      }
      fill(body, chooser(plots, chosen, () => {
        context.remember({ series: namesOf(plots) });
        load(plots);
      }), grid);
      again = () => load(plots);
      await load(plots);
      drawRollouts();
    });
  }

  const alone = (of, all) => all.filter((other) => other.section === of.section && other.title === of.title).length === 1;
  const namesOf = (plots) => plots.filter((of) => chosen.has(of.key)).map((of) => of.names[0]);

  async function load(plots) {
    await context.api.attempt(warnings, async () => {
      const asked = ids.join(",");
      const found = await context.api.get("compare", { runs: asked, names: namesOf(plots).join(","), axis: settings.axis, points: POINTS });
      if (asked !== ids.join(",")) return; // others were chosen meanwhile
      answer = found;
      fill(warnings, problems(found.problems));
      drawControls(found.axes?.length ? found.axes : Object.keys(AXES), plots);
      draw(plots);
      drawTables();
    });
  }

  function drawControls(axes, plots) {
    if (controls.dataset.axes === axes.join()) return; // a slider that is being moved stays
    controls.dataset.axes = axes.join();
    fill(controls, axisAndSmoothing(settings, (changes) => {
      Object.assign(settings, changes);
      context.remember(changes);
      if (changes.axis) load(plots);
      else draw(plots);
    }, axes));
  }

  function clear() {
    for (const handle of handles) handle.destroy();
    handles = [];
    fill(grid);
  }

  function draw(plots) {
    const specs = plots.filter((of) => chosen.has(of.key)).map((of) => ({
      title: of.title, caption: of.caption, unit: of.unit, x: [], xLabel: (AXES[settings.axis] ?? settings.axis).toLowerCase(),
      smoothing: settings.smoothing, group: "compare", height: 220,
      lines: answer.runs.filter((run) => run.series[of.names[0]]).map((run) => (
        { name: run.name, colour: colourOf(indexOf(run.id)), ...run.series[of.names[0]], low: null, high: null, x: xOf(run) })),
      points: of.names[0] === SOLVED ? answer.runs.flatMap((run) => (run.evaluations ?? []).filter((e) => Number.isFinite(e.solve_rate)).map((e) => ({
        x: e.x, y: e.solve_rate, error: e.standard_error, colour: colourOf(indexOf(run.id)),
        text: `${run.name}, ${e.split} ${e.phase}: ${e.solve_rate.toFixed(3)} ± ${(e.standard_error ?? 0).toFixed(3)}${e.failures_text && `; ${e.failures_text}`}` }))) : [],
    }));
    if (handles.length === specs.length && handles.every((handle, number) => handle.title === specs[number].title)) {
      handles.forEach((handle, number) => handle.set(specs[number]));
      return;
    }
    clear();
    handles = specs.map((spec) => {
      const cell = el("div", { class: "card plot-cell" });
      grid.append(cell);
      return { title: spec.title, ...plot(cell, spec) };
    });
    if (!specs.length) grid.append(empty("Choose series: their curves appear here."));
  }

  // `x` is one list, or one an axis.
  const xOf = (run) => (Array.isArray(run.x) ? run.x : run.x?.[settings.axis] ?? []);

  function drawTables() {
    const heads = answer.runs.map((run) => run.name);
    const labels = [...new Set(answer.runs.flatMap((run) => Object.keys(run.numbers ?? {})))];
    fill(numbers, el("h2", {}, "Last numbers"), labels.length
      ? table(["Number", ...heads], labels.map((label) => [label, ...answer.runs.map((run) => run.numbers?.[label])]), { label: "Last numbers" })
      : empty("Numbers come with the first step."));
    const keys = Object.entries(answer.differences ?? {});
    fill(differences, el("h2", {}, "Differences of their configurations"), answer.runs.length < 2 ? empty("Choose a second run.") :
      keys.length ? table(["Key", ...heads], keys.map(([key, values]) => [el("code", {}, key), ...values.map((value) => el("code", {}, value ?? "–"))]),
        { textColumns: heads.length + 1, label: "Differences" })
        : empty("Nothing: their configurations are equal."));
  }

  // --- two rollouts of one task ---------------------------------------------------------------------------

  function drawRollouts() {
    fill(rollouts);
    if (ids.length < 2) return;
    const select = (at, label) => el("select", { "aria-label": label }, ids.map((id, number) => el("option", { value: id, selected: number === at }, nameOf(id))));
    const [left, right] = [select(0, "First run"), select(1, "Second run")];
    const place = el("div");
    const tasks = el("datalist", { id: "tasks-of-run" });
    const task = el("input", { type: "search", list: "tasks-of-run", placeholder: "Task", "aria-label": "Task", onfocus: offer });
    const form = el("form", { class: "controls", onsubmit: (event) => {
      event.preventDefault();
      context.api.attempt(place, () => showSame(place, [left.value, right.value], task.value));
    } }, left, right, task, tasks, el("button", {}, "Side by side"));
    fill(rollouts, el("h2", {}, "Two rollouts of one task"), form, place);

    async function offer() {
      if (tasks.childElementCount) return;
      const found = await context.api.get("tasks", { run: left.value, bins: 1 }).catch(() => ({ tasks: [] }));
      fill(tasks, found.tasks.slice(0, MOST_TASKS).map((of) => el("option", { value: of.task_id }, (of.prompt ?? "").slice(0, 80))));
    }
  }

  async function showSame(place, runs, task) {
    const { rollouts: found } = await context.api.get("same_task", { runs: runs.join(","), task });
    const [left, right] = runs.map((run) => found.find((of) => of.run === run));
    if (left && right) context.navigate(context.hashOf("rollout", { run: left.run, row: left.row, beside: right.row, beside_run: right.run }));
    else fill(place, empty(`No rollout of this task in ${runs.filter((run) => !found.some((of) => of.run === run)).map(nameOf).join(" and ")}.`));
  }

  let again = () => {};
  await begin();
  const timer = setInterval(() => {
    if (known.some((run) => ids.includes(run.id) && run.state === "running") && !document.hidden) again();
  }, AGAIN_MS);
  return () => {
    clearInterval(timer);
    clear();
  };
}
