// One rollout: its conversation token by token, its group, its life from admission to gradient.

import { count, duration, el, empty, fill, plural, problems, quantity, table } from "../dom.js";
import { NO_RUN, endingOf, found, keyOf, more, queryOf, rolloutHash, verdictChip } from "./rollouts.js";
import { COLOURS, TokenPane } from "./tokens.js";
import { said, visible } from "./visible.js";

const WINDOW = 4000; // tokens of a request
const LINES = 1500; // aligned at most, on each side
const PHASES = ["waiting", "first token", "generating", "verifying", "buffered", "training"]; // a colour each

function facts(one) {
  const { first_version: low, last_version: high } = one;
  const versioned = low !== null && low >= 0;
  return [
    ["Reward", quantity(one.reward)],
    typeof one.trained_reward === "number" && one.trained_reward !== one.reward && ["Reward as trained", quantity(one.trained_reward)],
    ["Length", plural(one.tokens, "token")], one.turns?.length > 1 && ["Turns", count(one.turns.length)],
    ["Ending", endingOf(one)], one.finish_reason && ["Finish", one.finish_reason],
    ["Step", one.step === null ? "none" : count(one.step)],
    versioned && ["Version", low === high ? count(low) : `${count(low)}–${count(high)}`],
    versioned && one.step !== null && ["Staleness", count(one.step - low)],
  ].filter(Boolean);
}

function failureCard(failure) {
  const of = typeof failure === "string" ? { cause: failure } : failure;
  return el("section", { class: "card failure" }, el("h2", {}, "Failure ", of.boundary && el("span", { class: "aside" }, `of the ${of.boundary}`)),
    el("p", {}, said(of.cause ?? "")), of.detail && el("details", {}, el("summary", {}, "Detail"), el("pre", {}, visible(of.detail, true))));
}

/** A recorded object, folded up. */
function recorded(title, record) {
  const shown = Object.entries(record ?? {}).filter(([, value]) => value !== null && value !== "");
  if (!shown.length) return null;
  return el("details", {}, el("summary", {}, title), el("dl", { class: "pairs" }, shown.map(([name, value]) =>
    [el("dt", {}, said(name)), el("dd", {}, el("pre", {}, visible(typeof value === "string" ? value : JSON.stringify(value, null, 1), true)))])));
}

/** From admission to gradient as a bar, and its phases as a list. */
function lifeCard({ life, verdict, pruned, ending }) {
  const phases = (life ?? []).filter(({ start_s, end_s }) => start_s !== null && end_s !== null && end_s >= start_s);
  const records = [recorded("Verdict as the verifier gave it", verdict), recorded("Pruned", pruned)];
  if (!phases.length) return el("section", { class: "card" }, el("h2", {}, "Life"), empty("Its times aren't recorded."), records);
  const [from, to] = [Math.min(...phases.map((phase) => phase.start_s)), Math.max(...phases.map((phase) => phase.end_s))];
  const until = phases.at(-1).name === "training" ? "gradient" : ending === "open" ? "here" : "its end";
  const tone = (name, i) => `l${PHASES.includes(name) ? PHASES.indexOf(name) : 6 + (i % 2)}`;
  const share = (value) => `${((value / (to - from || 1)) * 100).toFixed(3)}%`;
  return el("section", { class: "card" }, el("h2", {}, "Life ", el("span", { class: "aside" }, `${duration(to - from)} from admission to ${until}`)),
    el("div", { class: "life", role: "img", "aria-label": phases.map(({ name, start_s, end_s }) => `${name} ${duration(end_s - start_s)}`).join(", ") },
      phases.map(({ name, start_s, end_s }, i) => el("span", { class: tone(name, i), title: `${name}: ${duration(end_s - start_s)}`,
        style: { left: share(start_s - from), width: share(end_s - start_s) } }))),
    el("ol", { class: "phases" }, phases.map(({ name, start_s, end_s }, i) =>
      el("li", {}, el("span", { class: `swatch ${tone(name, i)}` }), ` ${name} `, el("b", {}, duration(end_s - start_s))))), records);
}

function groupCard(one, { run, context, query, beside, choose }) {
  const rows = [one, ...one.siblings.filter(({ row }) => row !== one.row)].sort((a, b) => a.member - b.member).map((other) => {
    const own = other.row === one.row;
    return { "aria-current": own ? "true" : null, cells: [
      own ? el("b", {}, `member ${other.member}`) : el("a", { href: rolloutHash(context, run, other.row, query) }, `member ${other.member}`),
      verdictChip(other), quantity(other.reward), count(other.tokens), other.ending,
      own ? "shown" : el("button", { type: "button", class: "small", "aria-pressed": String(other.row) === beside ? "true" : "false",
        "aria-label": `Member ${other.member} beside this one`, onclick: () => choose(String(other.row)) }, "beside"),
    ] };
  });
  return el("section", { class: "card group" }, el("h2", {}, "Group ", el("span", { class: "aside" }, `${plural(rows.length, "rollout")} of one task`)),
    table(["Member", { text: "Verdict", class: "text" }, "Reward", "Tokens", "Ending", "Compare"], rows, { textColumns: 2, label: "Rollouts of the group" }));
}

// --- two side by side --------------------------------------------------------------------------------------

/** A rollout's response as lines of [text, kind of part], and whether there is more of it. */
function linesOf(one) {
  const { parts = [], tokens = [], ids = [], offset = 0, total_tokens: total } = one.sequences[0] ?? {};
  const lines = [];
  for (const { kind, from, to } of parts) {
    if (kind === "prompt") continue;
    const text = tokens.slice(Math.max(0, from - offset), Math.max(0, to - offset)).map((token, i) => token ?? `⟨${ids[from - offset + i]}⟩`).join("");
    lines.push(...text.replace(/\n$/, "").split("\n").map((line) => [line, kind]));
  }
  return { lines: lines.slice(0, LINES), cut: lines.length > LINES || offset + tokens.length < total };
}

/** Pairs of indices of both lists: equal lines side by side, what lies between them in order. */
function aligned(a, b) {
  const width = b.length + 1;
  const best = new Uint16Array((a.length + 1) * width); // longest common run of lines from (i, j) on
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      best[i * width + j] = a[i][0] === b[j][0] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
    }
  }
  const pairs = [];
  let [i, j, left, right] = [0, 0, [], []];
  const flush = () => {
    for (let k = 0; k < Math.max(left.length, right.length); k += 1) pairs.push([left[k] ?? null, right[k] ?? null]);
    [left, right] = [[], []];
  };
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i][0] === b[j][0]) {
      flush();
      pairs.push([i++, j++]);
    } else if (j >= b.length || (i < a.length && best[(i + 1) * width + j] >= best[i * width + j + 1])) left.push(i++);
    else right.push(j++);
  }
  flush();
  return pairs;
}

function besideCard(one, other, { titles, onClose }) {
  const [left, right] = [linesOf(one), linesOf(other)];
  const [a, b] = [left.lines, right.lines];
  const start = a.findIndex(([line], i) => line !== b[i]?.[0]);
  const head = (of, title) => el("div", { class: "head" }, el("h3", {}, title), el("p", { class: "aside" }, verdictChip(of),
    ` reward ${quantity(of.reward)} · ${plural(of.tokens, "token")} · ${of.ending}`));
  const cell = ([line, kind], alike) => el("div", { class: `cell ${kind} ${alike === line.length ? "same" : ""}` },
    el("span", { class: "same" }, said(line.slice(0, alike))), said(line.slice(alike) || (line ? "" : " ")));
  const pair = ([i, j]) => {
    if (i === null || j === null) return [[a, i], [b, j]].map(([lines, n]) => (n === null ? el("div", { class: "cell gap" }) : cell(lines[n], 0)));
    let alike = 0;
    while (alike < a[i][0].length && a[i][0][alike] === b[j][0][alike]) alike += 1;
    if (a[i][0] !== b[j][0]) alike = a[i][0].slice(0, alike).search(/[\p{L}\p{N}_]*$/u); // whole words
    return [cell(a[i], alike), cell(b[j], alike)];
  };
  const alike = start > 0 ? `the first ${plural(start, "line")} are the same` : start === 0 ? "they differ from the first line"
    : a.length === b.length ? "the same, word for word" : "one continues where the other ends";
  return el("section", { class: "card beside" },
    el("div", { class: "heading" }, el("h2", {}, "Side by side ", el("span", { class: "aside" }, alike)),
      el("button", { type: "button", onclick: onClose }, "Close")),
    el("div", { class: "pairing", tabindex: 0, role: "region", "aria-label": "Two responses, equal lines side by side" }, head(one, titles[0]), head(other, titles[1]),
      aligned(a, b).map(pair)),
    (left.cut || right.cut) && el("p", { class: "aside" }, `The first ${count(WINDOW)} tokens are compared.`));
}

// --- the view ----------------------------------------------------------------------------------------------

async function rowOf(params, context, signal) {
  if (params.row !== undefined && params.row !== "") return params.row;
  const { run, group, member = "0" } = params;
  if (!group) return null;
  let after = null;
  do { // a group has few pages
    const page = await context.api.get("rollouts", { run, group, limit: 200, after }, { signal });
    const own = page.rows.find((row) => String(row.member) === member);
    if (own) return own.row;
    after = page.after;
  } while (after !== null);
  return null;
}

/** Next and previous of the search that led here, else of the record. */
function neighbours(run, { row, rollouts, first_row: first = 0 }, query) {
  const at = found.key === keyOf(run, query) ? found.rows.findIndex((of) => of.row === row) : -1;
  if (at >= 0) {
    const [previous = null, next = null] = [found.rows[at - 1]?.row, found.rows[at + 1]?.row];
    return { where: "of the search", previous, next, ahead: next === null && found.after !== null };
  }
  return { where: "of the record", previous: row > first ? row - 1 : null, next: row + 1 < first + rollouts ? row + 1 : null };
}

export async function show(root, params, context) {
  const { run } = params;
  if (!run) return void fill(root, el("h1", {}, "Rollout"), empty(NO_RUN));
  const ending = new AbortController();
  const { signal } = ending;
  const query = queryOf(Object.fromEntries(new URLSearchParams(params.q ?? "")));
  const back = el("a", { href: context.hashOf("rollouts", { run, ...query }) }, "Rollouts");
  fill(root, el("h1", {}, "Rollout"), el("p", { class: "muted" }, "Loading …"));
  const at = await rowOf(params, context, signal);
  if (at === null) {
    fill(root, el("h1", {}, "Rollout"), empty(params.group
      ? `No rollout of group ${params.group}, member ${params.member ?? 0} is recorded yet: it has a row when its group has finished.` : "No rollout is chosen. Open one of:"), back);
    return () => {};
  }
  const one = await context.api.get("rollout", { run, row: at, sequence: 0, offset: 0, limit: WINDOW }, { signal });
  const near = neighbours(run, one, query);
  const trouble = el("div", {}, problems(one.problems));
  let pane = null;
  let colour = COLOURS[params.colour] ? params.colour : "logprob";
  let beside = params.beside ?? null;

  async function step(by) {
    let row = by > 0 ? near.next : near.previous;
    if (row === null && by > 0 && near.ahead) row = (await more(context, run, query, signal))[0]?.row ?? null;
    if (row === null) context.announce(by > 0 ? "That was the last one." : "That was the first one.");
    else context.navigate(rolloutHash(context, run, row, query) + (colour === "logprob" ? "" : `&colour=${colour}`));
  }
  const onKey = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
    if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
  };
  const turn = (by, text, key) => el("button", { type: "button", title: `${text} ${near.where} (${key})`, onclick: () => step(by),
    disabled: by > 0 ? near.next === null && !near.ahead : near.previous === null }, text);

  // side by side
  const sides = el("div", {});
  const card = el("div", {});
  async function choose(row, otherRun = run) {
    beside = row === beside && sides.childNodes.length ? null : row;
    context.remember({ beside, beside_run: otherRun === run ? null : otherRun });
    drawGroup();
    if (beside === null) return void fill(sides);
    try {
      const other = await context.api.get("rollout", { run: otherRun, row: beside, sequence: 0, offset: 0, limit: WINDOW }, { signal });
      const title = (of, name) => `${otherRun === run ? "" : `${name}: `}group ${of.group}, member ${of.member}`;
      fill(sides, besideCard(one, other, { titles: [title(one, run), title(other, otherRun)], onClose: () => choose(beside) }));
    } catch (error) {
      if (error.name !== "AbortError") fill(sides, problems([error.message]));
    }
  }
  const drawGroup = () => fill(card, groupCard(one, { run, context, query, beside, choose }));

  // tokens
  const place = el("div", { class: "reading" });
  const paint = el("select", { onchange: () => {
    colour = paint.value;
    context.remember({ colour });
    pane?.paint(colour);
  } }, Object.entries(COLOURS).map(([name, { label }]) => el("option", { value: name, selected: name === colour }, label)));
  const jump = el("input", { type: "number", min: 0, onchange: () => {
    pane?.go(Number(jump.value), { aloud: false });
    pane?.body.focus({ preventScroll: true });
  } });
  const legend = el("div", {});
  const match = el("span", {});
  const tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "Sequences" });
  const load = (sequence) => async (offset, limit) =>
    (await context.api.get("rollout", { run, row: one.row, sequence, offset, limit }, { signal })).sequences[sequence];

  async function open(number) {
    pane?.end();
    [...tabs.children].forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === number));
      tab.tabIndex = i === number ? 0 : -1;
    });
    let sequence = one.sequences[number];
    if (!sequence.tokens.length && sequence.total_tokens) {
      try {
        sequence = await load(number)(0, WINDOW);
      } catch (error) {
        if (error.name !== "AbortError") fill(place, problems([error.message]));
        return;
      }
    }
    pane = new TokenPane(sequence, { load: load(number), turns: number === 0 ? one.turns : null, step: one.step, announce: context.announce,
      onProblem: (text) => trouble.append(problems([text])) });
    pane.paint(colour);
    const where = query.text && pane.findText(query.text);
    fill(match, where && el("button", { type: "button", onclick: () => pane.go(...where) }, "Go to ", el("mark", {}, said(query.text.slice(0, 24)))));
    jump.max = sequence.total_tokens - 1;
    fill(legend, pane.legend);
    const panel = one.sequences.length > 1 ? { role: "tabpanel", "aria-labelledby": `sequence-${number}` } : {};
    fill(place, el("div", { class: "conversation", id: "sequence", ...panel }, pane.body),
      el("section", { class: "values", "aria-label": "Values of a token" }, el("div", { class: "card" }, pane.token, pane.list)));
  }

  if (one.sequences.length > 1) {
    fill(tabs, one.sequences.map((sequence, number) => el("button", { type: "button", role: "tab", id: `sequence-${number}`, "aria-controls": "sequence",
      onclick: () => open(number), onkeydown: (event) => {
        const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!by) return;
        const other = (number + by + one.sequences.length) % one.sequences.length;
        tabs.children[other].focus();
        open(other);
      } }, sequence.name, " ", el("span", { class: "aside" }, plural(sequence.total_tokens, "token")))));
  }

  fill(root,
    el("div", { class: "heading" }, el("p", { class: "crumbs" }, back, " / "), el("h1", {}, `Group ${count(one.group)}, member ${count(one.member)}`),
      el("span", { class: "turning" }, turn(-1, "Previous", "k"), turn(1, "Next", "j"))),
    el("div", { class: "summary" }, verdictChip(one), said(one.task_id, { class: "task" }), facts(one).map(([name, value]) => el("span", {}, `${name} `, el("b", {}, said(value))))),
    trouble, one.failure && failureCard(one.failure),
    el("div", { class: "split" }, lifeCard(one), one.siblings?.length > 0 && card), sides);
  if (one.siblings?.length > 0) drawGroup();
  if (one.sequences.some(({ total_tokens: total }) => total > 0)) {
    root.append(el("div", { class: "colouring" }, one.sequences.length > 1 && tabs, el("label", {}, "Colour by ", paint), legend, match,
      el("label", { class: "jump" }, "Go to token ", jump)), place);
    await open(0);
  } else root.append(empty("It has no tokens in the record: its group ended before it had finished."));
  if (beside !== null) {
    const wanted = beside;
    beside = null;
    choose(wanted, params.beside_run ?? run);
  }
  document.addEventListener("keydown", onKey);
  return () => {
    ending.abort();
    pane?.end();
    document.removeEventListener("keydown", onKey);
  };
}
