// Rollouts: a search over all that a run has recorded. The address holds the whole query.

import { count, el, empty, fill, percent, plural, problems, quantity } from "../dom.js";
import { said } from "./visible.js";

const PAGE = 50;
export const NO_RUN = "There is no run here yet. Its rollouts appear when its first groups have finished.";
const LEAD = 60; // characters shown before a match, so that a narrow window still shows the match
const ENDINGS = ["trained", "filtered", "pruned", "discarded", "overdue", "failed", "open"];
const ORDERS = { newest: "newest first", oldest: "oldest first", "-reward": "highest reward", reward: "lowest reward",
  "-tokens": "longest", tokens: "shortest" };
const RANGES = { reward: "Reward", tokens: "Tokens", version: "Version", step: "Step" };
const NAMES = ["text", "task", "group", "solved", "ending", "failure", "order",
  ...Object.keys(RANGES).flatMap((name) => [`${name}_from`, `${name}_to`])];

/** The last search, so that one rollout's page knows the next of it, and coming back finds the list as it was. */
export const found = { key: null, rows: [], after: null, total: null, scroll: 0 };

/** The part of `params` that is a query. */
export const queryOf = (params) => Object.fromEntries(NAMES.filter((name) => params[name]).map((name) => [name, params[name]]));
export const keyOf = (run, query) => JSON.stringify([run, NAMES.map((name) => query[name] ?? "")]);

/** The address of a rollout of a search. */
export const rolloutHash = (context, run, row, query) =>
  context.hashOf("rollout", { run, row, q: new URLSearchParams(query).toString() });

/** Load the next page of the last search. Returns its rows, none at its end. */
export async function more(context, run, query, signal) {
  if (found.after === null) return [];
  const page = await context.api.get("rollouts", { run, ...query, limit: PAGE, after: found.after }, { signal });
  found.rows.push(...page.rows);
  found.after = page.after;
  return page.rows;
}

/** "solved", with a colour and a sign that need no colour. */
export const verdictChip = ({ solved, failure, ending, verified }) => {
  const [kind, text] = failure || ending === "failed" ? ["warn", "! failed"] : verified === false ? ["", "… unfinished"]
    : solved ? ["good", "✓ solved"] : ["bad", "✗ not solved"];
  return el("span", { class: `outcome ${kind}` }, text);
};

const versions = ({ first_version: from, last_version: to }) =>
  (!(from >= 0) || from === null ? "no version" : from === to ? `version ${count(from)}` : `versions ${count(from)}–${count(to)}`);

/** How a rollout ended and why, where that says more than its step. */
export const endingOf = ({ ending, ending_reason: why, step }) => (why && why !== `step ${step}` ? `${ending}: ${why}` : ending);

function hit(row, context, run, query) {
  const cause = typeof row.failure === "string" ? row.failure : row.failure?.cause;
  const facts = {
    length: plural(row.tokens, "token") + (row.turns > 1 ? `, ${plural(row.turns, "turn")}` : ""),
    step: row.step === null ? "no step" : `step ${count(row.step)}`, versions: versions(row), place: `group ${count(row.group)}/${row.member}`,
  };
  const { before, match, after } = row.snippet ?? {};
  return el("li", {}, el("a", { class: "hit", "data-item": true, href: rolloutHash(context, run, row.row, query) },
    el("span", { class: "facts" }, verdictChip(row), el("b", { class: "reward" }, `reward ${quantity(row.reward)}`),
      Object.entries(facts).map(([name, text]) => el("span", { class: name }, text)),
      el("span", { class: "ending" }, said(endingOf(row))), said(row.task_id, { class: "task" })),
    cause && el("span", { class: "line bad" }, said(cause)),
    row.snippet ? el("span", { class: "line" }, said(before.length > LEAD ? `…${before.slice(-LEAD)}` : before), el("mark", {}, said(match)), said(after))
      : el("span", { class: "line quiet" }, said(row.prompt))));
}

function form(query, onChange) {
  const choose = (name, label, options) => el("label", {}, label, el("select", { name, value: query[name] ?? "" },
    Object.entries(options).map(([value, text]) => el("option", { value, selected: (query[name] ?? "") === value }, text))));
  const enter = (name, label, more = {}) => el("label", {}, label, el("input", { name, value: query[name] ?? "", ...more }));
  const bound = (name, what) => el("input", { name, type: "number", step: "any", value: query[name] ?? "", "aria-label": what, placeholder: what.split(" ").at(-1) });
  const ranges = Object.entries(RANGES).map(([name, label]) => el("fieldset", {}, el("legend", {}, label),
    bound(`${name}_from`, `${label} from`), bound(`${name}_to`, `${label} to`)));
  return el("form", { class: "search", role: "search", oninput: onChange, onsubmit: (event) => event.preventDefault() },
    el("div", { class: "first" },
      enter("text", "Text", { type: "search", placeholder: "in prompts and responses", autocomplete: "off", spellcheck: "false", maxlength: 400 }),
      choose("order", "Order", Object.fromEntries(Object.entries(ORDERS).map(([name, text]) => [name === "newest" ? "" : name, text])))),
    el("div", { class: "narrow" },
      choose("solved", "Verdict", { "": "any", true: "solved", false: "not solved" }),
      choose("ending", "Ending", { "": "any", ...Object.fromEntries(ENDINGS.map((name) => [name, name])) }),
      ranges, enter("task", "Task", { autocomplete: "off", size: 14 }), enter("group", "Group", { type: "number", min: 0 }),
      el("label", { class: "tick" }, el("input", { name: "failure", type: "checkbox", value: "1", checked: query.failure === "1" }), "Failed only"),
      el("button", { type: "button", class: "clear" }, "Clear")));
}

export async function show(root, params, context) {
  const { run } = params;
  if (!run) return void fill(root, el("h1", {}, "Rollouts"), empty(NO_RUN));
  let query = queryOf(params);
  let [asked, timer, busy, page, held] = [null, null, false, null, null];

  const state = el("p", { class: "state", role: "status" });
  const trouble = el("div", {});
  const list = el("ol", { class: "hits", "aria-label": "Rollouts found" });
  const button = el("button", { type: "button", hidden: true, onclick: () => next() }, "Load more");
  const fresh = el("button", { type: "button", class: "fresh", hidden: true, onclick: () => search() });
  const fields = form(query, (event) => changed(event.target.type === "checkbox" || event.target.tagName === "SELECT" ? 0 : 200));
  fields.querySelector(".clear").addEventListener("click", () => {
    for (const field of fields.elements) field.type === "checkbox" ? (field.checked = false) : (field.value = "");
    changed(0);
  });
  fill(root, el("h1", {}, "Rollouts"), fields, el("div", { class: "found" }, state, fresh), trouble, list, button);

  function changed(delay) {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const data = Object.fromEntries(new FormData(fields));
      query = queryOf(data);
      context.remember(Object.fromEntries(NAMES.map((name) => [name, query[name] ?? null])));
      search();
    }, delay);
  }

  function say() {
    const { total, rows, after } = found;
    const seen = total !== null && total !== undefined ? count(total) : after === null ? count(rows.length) : `at least ${count(rows.length)}`;
    const indexed = page.indexed_share < 1 && query.text
      ? ` · text index ${percent(page.indexed_share)} built: the rest isn't searched yet` : "";
    fill(state, el("b", {}, indexed && after === null ? `${seen} so far` : seen), ` of ${plural(page.rollouts, "rollout")}${indexed}`);
    button.hidden = after === null;
    if (indexed) state.append(" ", el("progress", { max: "1", value: page.indexed_share, "aria-label": "Share indexed" }));
  }

  async function search({ quietly = false } = {}) {
    asked?.abort();
    asked = new AbortController();
    const { signal } = asked;
    const begun = performance.now();
    list.setAttribute("aria-busy", "true");
    if (!quietly && !found.rows.length) fill(state, "Searching …");
    try {
      const answer = await context.api.get("rollouts", { run, ...query, limit: PAGE }, { signal });
      page = answer;
      Object.assign(found, { key: keyOf(run, query), rows: answer.rows, after: answer.after, total: answer.total, page, scroll: 0 });
      draw();
      if (!quietly && performance.now() - begun > 300) state.append(` · ${quantity((performance.now() - begun) / 1000)} s`);
    } catch (error) {
      if (error.name === "AbortError") return;
      fill(trouble, problems([error.message]));
      fill(state, "");
      fill(list);
      button.hidden = true;
    }
    list.removeAttribute("aria-busy");
  }

  function draw() {
    fill(trouble, problems(page.problems));
    fresh.hidden = true;
    fill(list, found.rows.map((row) => hit(row, context, run, query)));
    say();
    if (!found.rows.length) {
      fill(list, el("li", { class: "empty" }, page.rollouts === 0
        ? "No rollout is recorded. One appears when its group has finished; `ledger.rollouts = \"none\"` records none."
        : page.indexed_share < 1 && query.text ? "No match in the texts indexed so far." : "No rollout matches. Widen a range, or Clear."));
    }
  }

  async function next() {
    if (busy || found.after === null) return;
    busy = true;
    try {
      const rows = await more(context, run, query, asked?.signal);
      list.append(...rows.map((row) => hit(row, context, run, query)));
      say();
    } catch (error) {
      if (error.name !== "AbortError") fill(trouble, problems([error.message]));
    }
    busy = false;
  }

  // What is recorded or indexed meanwhile: a short list fills by itself, a long one offers it.
  async function look() {
    if (document.hidden || !page || busy) return;
    const now = await context.api.get("rollouts", { run, limit: 1 }).catch(() => null);
    if (!now || (now.rollouts === page.rollouts && now.indexed_share === page.indexed_share)) return;
    const untouched = found.after === null && !list.contains(document.activeElement);
    if (untouched || (query.text && now.indexed_share !== page.indexed_share && scrollY < 200 && found.rows.length <= PAGE)) {
      await search({ quietly: true });
    } else if (now.rollouts > page.rollouts) {
      fresh.textContent = `${plural(now.rollouts - page.rollouts, "newer rollout")}: search again`;
      fresh.hidden = false;
    }
  }

  const sentinel = new IntersectionObserver(([entry]) => entry.isIntersecting && next(), { rootMargin: "600px" });
  const focused = () => list.lastElementChild?.contains(document.activeElement) && next();
  list.addEventListener("focusin", focused);
  list.addEventListener("click", (event) => {
    held = event.target.closest("a")?.getAttribute("href") ?? null;
    Object.assign(found, { scroll: scrollY, held });
  });

  if (found.key === keyOf(run, query) && found.rows.length) {
    page = found.page;
    draw();
    requestAnimationFrame(() => {
      scrollTo(0, found.scroll);
      [...list.querySelectorAll("a")].find((link) => link.getAttribute("href") === found.held)?.focus({ preventScroll: true });
    });
  } else {
    Object.assign(found, { key: null, rows: [], after: null, total: null });
    await search();
  }
  sentinel.observe(button);
  const watch = setInterval(look, 5000);
  return () => {
    asked?.abort();
    clearTimeout(timer);
    clearInterval(watch);
    sentinel.disconnect();
  };
}
