// Tasks: which are solved, since when, and which tools fail.

import { bar, count, el, empty, fill, percent, plural, problems, quantity, score, svg } from "../dom.js";
import { NO_RUN } from "./rollouts.js";
import { said } from "./visible.js";

const SHOWN = 200; // rows drawn at once
const COLUMNS = {
  task_id: "Task", solved_rate: "Solve rate", change: "Over time", rollouts: "Rollouts", tokens_mean: "Mean length, tokens",
  failures: "Failures", weight: "Weight", last_step: "Last step",
};
const HINTS = { change: "Sorted by the last known rate minus the first", weight: "Probability that the outcomes of a group differ, by which a curriculum draws tasks" };

/** A share over time as a small line, faint across what isn't known. */
function line(values, label, { width = 132, height = 22, most = 1 } = {}) {
  const x = (i) => 2 + (i * (width - 4)) / Math.max(1, values.length - 1);
  const y = (value) => height - 3 - (Math.min(most, value) / most) * (height - 6);
  let [path, across, pen] = ["", "", false];
  const alone = [];
  values.forEach((value, i) => {
    if (value === null) return void (pen = false);
    const place = `${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    path += (pen ? "L" : "M") + place;
    across += (across ? "L" : "M") + place;
    if (!pen && (values[i + 1] ?? null) === null) alone.push(svg("circle", { cx: x(i), cy: y(value), r: 1.5 }));
    pen = true;
  });
  return svg("svg", { class: "line-plot", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    svg("path", { class: "ground", d: `M0 ${height - 2.5}H${width}` }), svg("path", { class: "across", d: across }), svg("path", { d: path }), alone);
}

const ends = (values) => {
  const known = values.filter((value) => value !== null);
  return known.length ? [known[0], known.at(-1)] : null;
};
const course = (values, what) => {
  const of = ends(values);
  return of ? `${what} from ${percent(of[0])} to ${percent(of[1])}` : `${what} unknown`;
};

function drift(tools, x) {
  const names = Object.keys(tools ?? {}).sort();
  if (!names.length) return null;
  const span = typeof x?.at(-1) === "number" ? `to step ${count(x.at(-1))}` : "over the run";
  return el("section", { class: "card tools-drift" }, el("h2", {}, "Failures ", el("span", { class: "aside" }, `share that failed, by boundary or tool, ${span}`)),
    el("ul", {}, names.map((name) => {
      const most = Math.max(0.01, ...tools[name].filter((value) => value !== null));
      return el("li", {}, said(name, { class: "task" }), line(tools[name], course(tools[name], `errors of ${name}`), { most }),
        el("span", { class: "aside" }, `${percent(ends(tools[name])?.[1])} now, ${percent(Math.max(0, ...tools[name].filter((value) => value !== null)))} at most`));
    })));
}

export async function show(root, params, context) {
  const { run } = params;
  if (!run) return void fill(root, el("h1", {}, "Tasks"), empty(NO_RUN));
  let [sort, filter, shown] = [params.sort || "-rollouts", params.filter ?? "", SHOWN];
  const answer = await context.api.get("tasks", { run, bins: 24 });
  const tasks = answer.tasks.map((task) => {
    const of = ends(task.by_time);
    return { ...task, change: of ? of[1] - of[0] : null, searched: `${task.task_id}\n${task.prompt ?? ""}`.toLowerCase() };
  });
  const search = el("input", { type: "search", value: filter, placeholder: "id or prompt", oninput: () => {
    filter = search.value;
    shown = SHOWN;
    context.remember({ filter });
    draw();
  } });
  const state = el("p", { class: "state", role: "status" });
  const body = el("tbody", {});
  const more = el("button", { type: "button", onclick: () => draw((shown += SHOWN)) }, "Show more");
  const heads = Object.entries(COLUMNS).map(([name, title]) => el("th", { scope: "col", "data-name": name, class: name === "task_id" ? "text" : null },
    el("button", { type: "button", class: "sort", title: HINTS[name] ?? null, onclick: () => {
      sort = sort === `-${name}` || (name === "task_id" && sort !== name) ? name : `-${name}`;
      context.remember({ sort });
      draw();
    } }, title)));

  function draw() {
    const [name, down] = sort.startsWith("-") ? [sort.slice(1), true] : [sort, false];
    const wanted = filter.trim().toLowerCase();
    const rows = tasks.filter((task) => task.searched.includes(wanted));
    const known = (task) => task[name] !== null && task[name] !== undefined;
    const order = (a, b) => (typeof a[name] === "string" ? a[name].localeCompare(b[name], "en", { numeric: true }) : a[name] - b[name]);
    rows.sort((a, b) => (known(b) - known(a)) || (known(a) ? (down ? order(b, a) : order(a, b)) : 0));
    fill(body, rows.slice(0, shown).map((task) => row(task)));
    if (!rows.length) {
      fill(body, el("tr", {}, el("td", { class: "text", colspan: heads.length }, "No task here matches. ",
        el("a", { href: context.hashOf("rollouts", { run, task: filter.trim() }) }, "Search all rollouts for this task"))));
    }
    for (const head of heads) head.setAttribute("aria-sort", head.dataset.name !== name ? "none" : down ? "descending" : "ascending");
    const all = answer.tasks_total ?? tasks.length;
    fill(state, el("b", {}, count(rows.length)), ` of ${plural(all, "task")}`, all > tasks.length && `; here are the ${count(tasks.length)} seen last`);
    more.hidden = rows.length <= shown;
  }

  const row = (task) => el("tr", {},
    el("th", { scope: "row", class: "text" }, el("a", { "data-item": true, href: context.hashOf("rollouts", { run, task: task.task_id }), title: "Its rollouts" },
      said(task.task_id, { class: "task" })), el("span", { class: "line quiet" }, said(task.prompt))),
    el("td", { class: "rate" }, el("span", {}, score(task.solved_rate)), bar(task.solved_rate, `solved ${percent(task.solved_rate)}`)),
    el("td", {}, line(task.by_time, course(task.by_time, "solve rate"))),
    el("td", {}, count(task.rollouts)), el("td", {}, quantity(task.tokens_mean)),
    el("td", { class: task.failures ? "bad" : null }, count(task.failures)),
    el("td", {}, quantity(task.weight)), el("td", {}, count(task.last_step)));

  const place = tasks.length ? [
    el("div", { class: "controls" }, el("label", {}, "Filter", search), state),
    el("div", { class: "table tasks", tabindex: 0, role: "region", "aria-label": "Tasks" },
      el("table", {}, el("thead", {}, el("tr", {}, heads)), body)), more]
    : empty("No task has a recorded rollout yet. A task appears here with its solve rate when its first group has finished.");
  fill(root, el("h1", {}, "Tasks"), problems(answer.problems), drift(answer.tools, answer.x), place);
  if (tasks.length) draw();
  return () => {};
}
