// A sequence's tokens: loaded and drawn in windows as one scrolls, coloured by a value, walked by keyboard.

import { count, duration, el, fill, plural, quantity, table } from "../dom.js";
import { token, visible } from "./visible.js";

const WINDOW = 4000; // tokens of a request
const BLOCK = 500; // tokens drawn at once, where a sequence is longer than a window
const KEPT = 16; // windows in memory
const TOP = 110; // px of the page's head that stays
const AT_ONCE = 1500; // tokens drawn before anything is known of the window
const AROUND = 8; // tokens listed to each side of the chosen one

// Bounds of classes: a value belongs to the first bound that it reaches.
const LOGPROBS = [-0.105, -0.357, -0.693, -1.2, -2.3, -3.5, -4.6, -6.9, -9.2];
const ADVANTAGES = [0.05, 0.3, 0.6, 1, 1.5];
const RATIOS = [1.03, 1.1, 1.25, 1.5, 2];

const below = (value, bounds) => (bounds.findIndex((bound) => value >= bound) + bounds.length + 1) % (bounds.length + 1);
const beyond = (value, bounds) => bounds.filter((bound) => value >= bound).length;
const signed = (value) => (value > 0 ? `+${quantity(value)}` : quantity(value));
const nats = (value) => (value === null || value === undefined ? "–" : value.toFixed(3).replace(/^-0\.000$/, "0.000").replace("-", "−"));

const ratio = (value) => (value < 10 ? nats(value) : quantity(value));

/** What tokens can be coloured by: `tone(values, index)` is the class of one, `legend` pairs of class and text. */
export const COLOURS = {
  logprob: {
    label: "log-probability (engine)", unit: "nats, at least",
    tone: (values, i) => (values.logprobs[i] === null ? "none" : `t${below(values.logprobs[i], LOGPROBS)}`),
    legend: () => [...LOGPROBS, null].map((bound, i) => [`t${i}`, bound === null
      ? "less" : quantity(Number(bound.toPrecision(2))), bound === null ? "" : `probability ${quantity(Number(Math.exp(bound).toPrecision(1)))} or more`]),
  },
  version: {
    label: "version", unit: "version that sampled the token",
    tone: (values, i, known) => (values.versions[i] === null ? "none" : versionTone(values.versions[i], known)),
    legend: (known) => versionsShown(known).map((version) => [versionTone(version, known), count(version)]),
  },
  advantage: {
    label: "advantage", unit: "of the token at training",
    tone: (values, i) => diverging(values.advantages?.[i], (value) => beyond(value, ADVANTAGES), (value) => beyond(-value, ADVANTAGES)),
    legend: () => [...ADVANTAGES.toReversed().map((bound, i) => [`n${5 - i}`, `≤ −${bound}`]), ["z", "0"],
      ...ADVANTAGES.map((bound, i) => [`p${i + 1}`, `≥ ${bound}`])],
  },
  ratio: {
    label: "ratio at training", unit: "trainer's probability ÷ engine's",
    tone: (values, i) => diverging(values.ratios?.[i], (value) => beyond(value, RATIOS), (value) => beyond(1 / value, RATIOS)),
    legend: () => [...RATIOS.toReversed().map((bound, i) => [`n${5 - i}`, `≤ ${quantity(1 / bound)}`]), ["z", "1"],
      ...RATIOS.map((bound, i) => [`p${i + 1}`, `≥ ${bound}`])],
  },
  clip: {
    label: "clip", unit: "by the loss",
    tone: (values, i) => (values.clipped?.[i] === null || !values.clipped ? "none" : values.clipped[i] ? "k1" : "z"),
    legend: () => [["k1", "clipped"], ["z", "not clipped"], ["none", "not trained on"]],
  },
  mask: {
    label: "mask", unit: "what the loss is taken of",
    tone: (values, i) => (!values.mask[i] ? "none" : values.trained?.[i] ? "k2" : "k1"),
    legend: () => [["k2", "in the loss"], ["k1", "sampled, not in the loss"], ["none", "not sampled by the policy"]],
  },
};

function diverging(value, up, down) {
  if (value === null || value === undefined) return "none";
  const [p, n] = [up(value), down(value)];
  return p ? `p${p}` : n ? `n${n}` : "z";
}

function versionTone(version, known) {
  const place = known.length <= 9 ? known.indexOf(version) / (known.length - 1 || 1)
    : (version - known[0]) / (known.at(-1) - known[0]);
  return `t${1 + Math.round(place * 8)}`;
}

function versionsShown(known) {
  if (known.length <= 9) return known;
  return Array.from({ length: 9 }, (_, i) => Math.round(known[0] + ((known.at(-1) - known[0]) * i) / 8));
}

/** The tokens of one sequence and the values beside them. `load(offset, limit)` answers a window of the sequence. */
export class TokenPane {
  constructor(sequence, { load, turns, step, announce, onProblem }) {
    Object.assign(this, { sequence, load, turns, step, announce, onProblem });
    this.windows = new Map();
    this.nodes = new Map(); // position -> span, of those drawn
    this.colour = "logprob";
    this.at = null;
    this.range = null;
    this.versions = [...new Set(sequence.span_versions ?? [])].sort((a, b) => a - b);
    this.size = sequence.total_tokens > WINDOW ? BLOCK : WINDOW;
    this.legend = el("ul", { class: "legend", "aria-label": "Legend" });
    this.token = el("div", { class: "token-values" });
    this.list = el("div", { class: "token-list" });
    this.body = el("div", { class: "tokens by-logprob", tabindex: 0, role: "group",
      "aria-label": "Tokens; arrow keys walk, Shift with them selects, Escape clears",
      onkeydown: (event) => this.key(event), onclick: (event) => this.click(event),
      onmouseover: (event) => this.hover(event), onmouseleave: () => this.tell(this.at) });
    this.observer = new IntersectionObserver((entries) => this.scrolled(entries), { rootMargin: "350px 0px" });
    this.keep(sequence);
    this.lay();
    this.paint(this.colour);
    this.tell(null);
  }

  /** Stop watching the page's scrolling. */
  end() {
    this.observer.disconnect();
    this.ended = true;
  }

  /** Colour the tokens by another value. */
  paint(colour) {
    this.colour = colour;
    this.body.className = `tokens by-${colour}`;
    for (const [position, node] of this.nodes) node.className = this.classes(position);
    this.explain();
  }

  explain() {
    const { unit, legend } = COLOURS[this.colour];
    this.legend.className = `legend by-${this.colour}`;
    fill(this.legend, el("li", { class: "unit" }, unit), legend(this.versions).map(([tone, text, title]) => el("li", { title }, el("span", { class: `tok ${tone}` }, text))));
  }

  // --- windows -----------------------------------------------------------------------------------------------

  keep(sequence) {
    const start = sequence.offset ?? 0;
    for (let number = Math.floor(start / WINDOW); number * WINDOW < start + sequence.tokens.length; number += 1) {
      const window = { start, ...sequence };
      this.windows.set(number, window);
    }
    if (!this.sequence.span_versions) {
      const seen = new Set([...this.versions, ...sequence.versions.filter((version) => version !== null)]);
      if (seen.size > this.versions.length) {
        this.versions = [...seen].sort((a, b) => a - b);
        if (this.colour === "version") this.paint("version");
      }
    }
    while (this.windows.size > KEPT) this.windows.delete(this.windows.keys().next().value);
  }

  /** The window that holds `position` and the index in it; undefined: it isn't loaded. */
  find(position) {
    const values = this.windows.get(Math.floor(position / WINDOW));
    const i = position - (values?.start ?? 0);
    return values && i >= 0 && i < values.tokens.length ? { values, i } : undefined;
  }

  async fetch(block) {
    if (this.find(block.from) && this.find(block.to - 1)) return true;
    const offset = Math.floor(block.from / WINDOW) * WINDOW;
    this.loading ??= new Map();
    if (!this.loading.has(offset)) {
      this.loading.set(offset, this.load(offset, WINDOW).then((sequence) => this.keep(sequence)).finally(() => this.loading.delete(offset)));
    }
    try {
      await this.loading.get(offset);
    } catch (error) {
      if (error.name !== "AbortError") this.onProblem(`Tokens from ${count(offset)}: ${error.message}`);
    }
    return Boolean(this.find(block.from));
  }

  // --- drawing -----------------------------------------------------------------------------------------------

  lay() {
    this.blocks = [];
    let turn = 0;
    const ends = { prompt: "Prompt", observation: "Environment's reply" };
    for (const { kind, from, to } of this.sequence.parts) {
      const of = kind === "sampled" ? this.turns?.[turn++] : null;
      const title = ends[kind] ?? (turn > 1 || this.turns?.length > 1 ? `Model, turn ${turn}` : "Model");
      const section = el("section", { class: `part ${kind}` }, el("h3", {}, title, el("span", { class: "aside" },
        plural(to - from, "token"), typeof of?.reward === "number" && ` · reward ${quantity(of.reward)}`,
        of?.end_s !== undefined && of?.end_s !== null && of.start_s !== null && ` · ${duration(of.end_s - of.start_s)}`)));
      for (let start = from; start < to;) {
        const stop = Math.min(to, start + this.size, (Math.floor(start / WINDOW) + 1) * WINDOW);
        const node = el("div", { class: "block", "data-from": this.size === BLOCK && count(start) });
        this.blocks.push({ from: start, to: stop, node, drawn: false, begins: start === from, end: to });
        node.block = this.blocks.at(-1);
        section.append(node);
        start = stop;
      }
      this.body.append(section);
    }
    for (const block of this.blocks.filter(({ from }) => from < AT_ONCE)) this.draw(block, true);
    requestAnimationFrame(() => {
      const line = Math.max(20, (this.body.clientWidth || 800) / 8); // characters
      for (const block of this.blocks) {
        if (!block.drawn) block.node.style.minHeight = `${Math.ceil(((block.to - block.from) * 4) / line) * 21}px`;
        this.observer.observe(block.node);
      }
    });
  }

  scrolled(entries) {
    for (const { target, isIntersecting } of entries) {
      target.block.near = isIntersecting;
      if (isIntersecting) this.draw(target.block);
      else if (target.block.drawn && this.size === BLOCK) this.clear(target.block);
    }
  }

  /** Draw a block that is near; `wanted`: also one that isn't yet. What is read stays where it is on the screen. */
  async draw(block, wanted = false) {
    if (block.drawn || !(await this.fetch(block)) || block.drawn || this.ended || !(block.near || wanted)) return;
    const spans = [];
    block.first = block.begins ? block.from : this.lineFrom(block.from, block.end);
    block.last = block.to === block.end ? block.to : this.lineFrom(block.to, block.end);
    for (let position = block.first; position < block.last; position += 1) {
      const found = this.find(position);
      if (!found) break;
      const text = found.values.tokens[found.i];
      const node = el("span", { class: this.classes(position) }, text === null ? `⟨${found.values.ids[found.i]}⟩` : visible(text, true));
      node.position = position;
      this.nodes.set(position, node);
      spans.push(node);
    }
    if (this.size === BLOCK) block.node.dataset.from = count(block.first);
    block.drawn = true;
    const { top, height } = block.node.getBoundingClientRect();
    block.node.style.minHeight = "";
    fill(block.node, spans);
    if (top < TOP && height) scrollBy(0, block.node.getBoundingClientRect().height - height);
  }

  /** The place soon after `position` where a line begins, so that a block needn't end within one; else `position`. */
  lineFrom(position, end) {
    const most = Math.min(end, position + BLOCK / 2, (Math.floor(position / WINDOW) + 1) * WINDOW);
    if (position % WINDOW === 0) return position;
    for (let place = position; place < most; place += 1) {
      const found = this.find(place - 1);
      if (found?.values.tokens[found.i]?.includes("\n")) return place;
    }
    return position;
  }

  clear(block) {
    block.node.style.minHeight = `${block.node.offsetHeight}px`;
    fill(block.node);
    for (let position = block.first; position < block.last; position += 1) this.nodes.delete(position);
    block.drawn = false;
  }

  classes(position) {
    const found = this.find(position);
    const tone = found ? COLOURS[this.colour].tone(found.values, found.i, this.versions) : "none";
    const chosen = this.range && position >= this.range[0] && position <= this.range[1];
    return `tok ${tone}${position === this.at ? " at" : ""}${chosen ? " in" : ""}`;
  }

  /** The tokens of the first place where `text` stands, selected, as arguments of `go`; null: nowhere in what is loaded. */
  findText(text) {
    const { tokens, start } = this.windows.get(0) ?? { tokens: [], start: 0 };
    const ends = [];
    let all = "";
    for (const piece of tokens) ends.push((all += piece ?? "").length);
    const at = all.toLowerCase().indexOf(text.toLowerCase());
    if (at < 0) return null;
    const [from, to] = [at, at + text.length - 1].map((place) => start + ends.findIndex((end) => end > place));
    this.select([from, to]);
    return [from, { keep: true, aloud: false }];
  }

  // --- walking -----------------------------------------------------------------------------------------------

  /** Make the token at `position` the chosen one, bring it into view and show its values. */
  async go(position, { extend = false, keep = false, aloud = true } = {}) {
    const target = Math.max(0, Math.min(this.sequence.total_tokens - 1, position));
    const number = this.blocks.findIndex(({ to }) => target < to);
    if (number < 0) return;
    if (!this.blocks[number].drawn) {
      this.blocks[number].node.scrollIntoView({ block: "center" });
      await Promise.all(this.blocks.slice(Math.max(0, number - 1), number + 2).map((block) => this.draw(block, true)));
      this.nodes.get(target)?.scrollIntoView({ block: "center" });
    }
    this.anchor = extend ? (this.anchor ?? this.at ?? target) : target;
    this.at = target;
    this.select(keep ? this.range : extend ? [Math.min(this.anchor, target), Math.max(this.anchor, target)] : null);
    this.nodes.get(target)?.scrollIntoView({ block: "nearest" });
    const found = this.find(target);
    if (aloud && found) this.announce(`${found.values.tokens[found.i] ?? found.values.ids[found.i]}, log-probability ${nats(found.values.logprobs[found.i])}`);
  }

  select(range) {
    const before = this.range ?? [Infinity, -Infinity];
    this.range = range;
    this.body.toggleAttribute("data-at", this.at !== null);
    for (const [position, node] of this.nodes) {
      const was = position >= before[0] && position <= before[1];
      if (was || (range && position >= range[0] && position <= range[1]) || position === this.at || node.classList.contains("at")) {
        node.className = this.classes(position);
      }
    }
    this.tell(this.at);
    this.compare();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = this.at ?? -1;
    const first = this.sequence.parts.find(({ kind }) => kind === "sampled")?.from ?? 0;
    const to = {
      ArrowRight: () => (this.at === null ? first : at + 1), ArrowLeft: () => at - 1, ArrowDown: () => this.beneath(1), ArrowUp: () => this.beneath(-1),
      Home: () => 0, End: () => this.sequence.total_tokens - 1,
    }[event.key]?.();
    if (to !== undefined) {
      event.preventDefault();
      document.getSelection()?.removeAllRanges();
      this.go(to, { extend: event.shiftKey });
    } else if (event.key === "Escape") this.select(null);
  }

  /** The token of the next line in `direction` that is nearest to the chosen one. */
  beneath(direction) {
    const own = this.nodes.get(this.at)?.getClientRects()[0];
    if (!own) return (this.at ?? -1) + direction;
    let [line, best, distance] = [null, this.at + direction, Infinity];
    for (let position = this.at + direction; this.nodes.has(position); position += direction) {
      const rectangle = this.nodes.get(position).getClientRects()[0];
      if (!rectangle || Math.abs(rectangle.top - own.top) < 4) continue;
      line ??= rectangle.top;
      if (Math.abs(rectangle.top - line) >= 4) break;
      const away = Math.abs(rectangle.left - own.left);
      if (away < distance) [best, distance] = [position, away];
    }
    return best;
  }

  click(event) {
    const picked = document.getSelection();
    const ends = picked?.isCollapsed === false && [picked.anchorNode, picked.focusNode].map((node) => positionOf(node));
    if (ends && ends.every((position) => position !== undefined)) {
      this.at = ends[1];
      this.select([Math.min(...ends), Math.max(...ends)]);
    } else if (positionOf(event.target) !== undefined) this.go(positionOf(event.target), { extend: event.shiftKey, aloud: false });
  }

  hover(event) {
    const position = positionOf(event.target);
    if (position !== undefined) this.tell(position);
  }

  // --- values ------------------------------------------------------------------------------------------------

  tell(position) {
    const found = position === null ? undefined : this.find(position);
    if (!found) {
      fill(this.token, el("p", { class: "empty" }, "Point at a token, or move with the arrow keys, to see its values here."));
      return;
    }
    const { values, i } = found;
    const version = values.versions[i];
    const behind = version !== null && typeof this.step === "number" ? ` (staleness ${this.step - version})` : "";
    const trainer = values.trainer_logprobs?.[i] ?? null;
    const rows = [
      ["Token", values.tokens[i] === null ? "no tokenizer" : el("code", {}, token(values.tokens[i]))],
      ["Id", values.ids[i] < 0 ? "–" : String(values.ids[i])],
      ["Position", `${count(position)} of ${count(this.sequence.total_tokens)}`],
      ["Version", version === null ? "–" : `${count(version)}${behind}`],
      ["Engine", `${nats(values.logprobs[i])} nats`],
      ...(values.trainer_logprobs ? [
        ["Trainer", trainer === null ? "–" : `${nats(trainer)} nats`],
        ["Ratio", ratio(values.ratios?.[i] ?? null)],
        ["Clipped", yes(values.clipped?.[i])],
        ["In the loss", values.mask[i] ? yes(values.trained?.[i]) : "no: not sampled"],
        ["Advantage", signed(values.advantages?.[i] ?? null)],
        ...(values.values ? [["Value", signed(values.values[i])]] : []),
      ] : [["Trainer", "not trained on"]]),
    ];
    fill(this.token, el("dl", {}, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
  }

  compare() {
    if (this.at === null && !this.range) return fill(this.list);
    const [from, to] = this.range ?? [Math.max(0, this.at - AROUND), Math.min(this.sequence.total_tokens - 1, this.at + AROUND)];
    const rows = [];
    const kept = { engine: [], trainer: [], away: [], clipped: 0 };
    for (let position = from; position <= to; position += 1) {
      const found = this.find(position);
      if (!found) continue;
      const { values, i } = found;
      const [engine, trainer] = [values.logprobs[i], values.trainer_logprobs?.[i] ?? null];
      if (engine !== null) kept.engine.push(engine);
      if (trainer !== null) kept.trainer.push(trainer), kept.away.push(Math.abs(trainer - engine));
      if (values.clipped?.[i]) kept.clipped += 1;
      if (rows.length < 200) {
        rows.push({ class: position === this.at ? "at" : null, cells: [token(values.tokens[i] || `⟨${values.ids[i]}⟩`), nats(engine), nats(trainer),
          ratio(values.ratios?.[i] ?? null) + (values.clipped?.[i] ? " ✂" : ""), signed(values.advantages?.[i] ?? null)] });
      }
    }
    const mean = (numbers) => nats(numbers.length ? numbers.reduce((sum, value) => sum + value, 0) / numbers.length : null);
    const seen = this.range && `${plural(to - from + 1, "token")}: mean engine ${mean(kept.engine)}, trainer ${mean(kept.trainer)}; ` +
      `greatest difference ${nats(kept.away.length ? kept.away.reduce((a, b) => Math.max(a, b)) : null)} nats; ${count(kept.clipped)} clipped` +
      (rows.length < to - from + 1 ? `; the first ${rows.length} are listed` : "");
    fill(this.list, el("h3", {}, this.range ? "Selected tokens" : "Tokens around it"), seen && el("p", { class: "aside" }, seen),
      table(["Token", "Engine", "Trainer", "Ratio", "Advantage"], rows, { label: "The trainer's view beside the engine's" }));
  }
}

const yes = (value) => (value === null || value === undefined ? "–" : value ? "yes" : "no");
const positionOf = (node) => (node?.nodeType === Node.TEXT_NODE ? node.parentElement : node)?.closest?.(".tok")?.position;
