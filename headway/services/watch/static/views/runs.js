// Runs: every run that is found, live; several can be chosen to be compared.

import { ago, bar, bytes, count, dollars, duration, el, empty, fill, moment, problems, quantity, score, table } from "../dom.js";

export const STATE_CLASS = { running: "good", ended: "muted", interrupted: "warn", died: "bad", unknown: "muted" };

export async function show(root, params, context) {
  const chosen = new Set();
  let found = { runs: [], roots: [], problems: [] };
  const search = el("input", { type: "search", placeholder: "Name or state", "aria-label": "Search runs", oninput: draw });
  const compare = el("button", { type: "button", onclick: () => context.navigate(context.hashOf("compare", { runs: [...chosen] })) });
  const place = el("div", { class: "runs" });
  const lost = el("div");
  fill(root, el("h1", {}, "Runs"), el("div", { class: "controls" }, search, compare), lost, place);

  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = found.runs.filter((run) => words.every((word) => `${run.name} ${run.id} ${run.state}`.toLowerCase().includes(word)));
    const focused = document.activeElement?.dataset?.id;
    const list = shown.length
      ? table(["Run", "State", "Step", "Solve rate", "Reward", "Device time", "Cost", "Disk", "Started", "Heard"],
        shown.map(row), { textColumns: 2, label: "Runs" })
      : empty(found.runs.length ? "No run matches these words." :
        `No run is in ${found.roots.join(", ") || "the folders that are watched"}. \`headway train FILE\` starts one; it then appears here.`);
    fill(place, problems(found.problems), list);
    if (focused) place.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
    drawCompare();
  }

  function row(run) {
    const box = el("input", {
      type: "checkbox", checked: chosen.has(run.id), "aria-label": `Choose ${run.name}`, tabindex: -1, onchange: () => choose(run.id),
    });
    const name = el("a", {
      href: context.hashOf("now", { run: run.id }), "data-item": "", "data-id": run.id, title: run.id,
      onkeydown: (event) => event.key === "x" && choose(run.id),
    }, run.name);
    const step = el("span", { class: "step" }, `${count(run.step)} of ${count(run.steps)}`,
      bar(run.steps ? run.step / run.steps : 0, `${count(run.step)} of ${count(run.steps)} steps`));
    const state = el("span", { class: `chip ${STATE_CLASS[run.state] ?? ""}`, title: run.holder ? `process ${run.holder}` : null }, run.state);
    return [[el("span", { class: "pick" }, box, name), problems(run.problems)], state, step,
      el("span", { title: run.solve_rate_of ?? null }, score(run.solve_rate, run.standard_error)), quantity(run.reward),
      Number.isFinite(run.device_hours) ? duration(run.device_hours * 3600) : "–", dollars(run.usd), bytes(run.disk_bytes),
      moment(run.started_unix_s, "minute"), ago(run.last_unix_s)];
  }

  function choose(id) {
    if (!chosen.delete(id)) chosen.add(id);
    context.announce(`${chosen.size} chosen`);
    draw();
  }

  function drawCompare() {
    compare.disabled = chosen.size < 2;
    compare.textContent = compare.disabled ? "Choose two or more to compare them" : `Compare ${chosen.size} runs`;
  }

  await context.api.attempt(place, async () => {
    found = await context.api.get("runs");
    draw();
  });
  const close = context.api.stream({}, { runs: (data) => {
    found = data;
    draw();
  } }, (connected, error) => fill(lost, problems(error ? [error] : connected ? [] : ["The connection to `headway watch` is lost; it is tried again."])));
  const timer = setInterval(draw, 10_000); // "12 s ago" grows
  return () => {
    close();
    clearInterval(timer);
  };
}
