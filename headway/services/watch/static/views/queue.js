// The queue, drawn: groups are marks that move from admission to the trainer, coloured by how stale they are.

import { count, duration, el, percent, plural, quantity, svg } from "../dom.js";

const HEAD = 58; // px: a stage's name and numbers
const LOOP = 40; // the way of the weights, back
const LEAST = 88; // a stage's width
const TRAINER = 128;
const GAP = 32;
const RATED = 92; // a gap with a rate over it
const WHAT = {
  admitted: "opened, waiting for a slot of the generator", generating: "tokens are being sampled",
  parked: "set aside, resumed later", verifying: "answers are being judged",
  teaching: "teachers score their tokens",
  buffered: "finished, waiting for the trainer", batch: "what the trainer computes now, or collects",
};
const SIZES = [24, 20, 16, 14, 12, 10, 8, 7, 6];
const PER_MARK = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000, 100_000];

/** A colour from fresh to as stale as the budget allows; red beyond it. */
function shade(staleness, budget) {
  if (staleness > budget) return "var(--bad)";
  return `color-mix(in oklab, var(--fresh), var(--stale) ${budget ? (100 * Math.max(0, staleness)) / budget : 0}%)`;
}

/** One shade a buffered group, the oldest first. */
function shadesOf(now) {
  const { buffered_by_version: versions = [], budget } = now.queue;
  return [...versions].sort((a, b) => a.version - b.version)
    .flatMap(({ version, groups }) => Array(groups).fill(shade((now.queue.version ?? now.version) - version, budget ?? 0)));
}

/** The whole picture in `width` px: one row where there is room, else from top to bottom. */
export function drawQueue(now, width) {
  const stages = now.queue.stages.filter((stage) => stage.name !== "parked" || stage.groups).map((stage) => {
    const capacity = stage.name === "buffered" ? now.queue.capacity : 0;
    return { ...stage, groups: stage.groups ?? 0, capacity, places: Math.max(stage.groups ?? 0, capacity || 0) };
  });
  const label = `The queue: ${stages.map((stage) => `${stage.name} ${plural(stage.groups, "group")}`).join(", ")}. ` +
    `Version ${now.version} is trained, version ${now.applied_version ?? "–"} generates.`;
  const least = stages.reduce((sum, stage) => sum + LEAST + gapAfter(stage), TRAINER);
  const draw = width < least ? drawDown : drawAcross;
  const { height, parts, perMark } = draw(now, stages, width);
  const picture = svg("svg", { class: "queue", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, parts);
  const key = perMark > 1 ? `Each mark is ${count(perMark)} groups.` : "Each mark is a group: the rollouts of one task.";
  return [picture, el("p", { class: "muted caption" }, key)];
}

function drawAcross(now, stages, width) {
  const gaps = stages.map(gapAfter);
  const tall = Math.round(Math.min(168, Math.max(96, width / 14)) / 8) * 8; // the marks of a stage
  const room = width - gaps.reduce((sum, gap) => sum + gap, 0) - TRAINER;
  const { size, perMark, widths } = fit(stages, room, tall);
  const spare = Math.max(0, room - widths.reduce((sum, w) => sum + w, 0)) / stages.length;
  const parts = [];
  let x = 0;
  let generating = 0;
  stages.forEach((stage, number) => {
    const wide = widths[number];
    parts.push(...head(stage, x, 14), ...frame(stage, x, HEAD, wide, tall));
    parts.push(...marks(now, stage, perMark, (index) => {
      const rows = Math.floor((tall - 4) / size);
      return [x + wide - (Math.floor(index / rows) + 1) * size - 3, HEAD + (index % rows) * size + 3, size - 2];
    }));
    if (stage.name === "generating") generating = x + wide / 2;
    parts.push(...arrow(now, stage.name, x + wide + 6, HEAD + tall / 2, gaps[number] + spare - 12));
    x += wide + gaps[number] + spare;
  });
  const bottom = HEAD + tall;
  parts.push(...trainer(now, width - TRAINER, HEAD, TRAINER, tall));
  const way = `M ${width - TRAINER / 2} ${bottom + 2} v 14 q 0 8 -8 8 H ${generating + 8} q -8 0 -8 -8 v -8`;
  parts.push(svg("path", { class: "way", d: way }),
    svg("path", { class: "tip", d: `M ${generating - 5} ${bottom + 12} l 5 -9 l 5 9 z` }),
    svg("text", { x: (generating + width - TRAINER / 2) / 2, y: bottom + 40, "text-anchor": "middle", class: "small" }, weights(now)));
  return { height: bottom + LOOP + 8, parts, perMark };
}

function drawDown(now, stages, width) {
  const size = 12;
  const columns = Math.floor((width - 8) / size);
  const most = Math.max(1, ...stages.map((stage) => stage.places));
  const perMark = PER_MARK.find((per) => most / per <= columns * 6) ?? PER_MARK.at(-1);
  const parts = [];
  let y = 0;
  for (const stage of stages) {
    const tall = Math.max(1, Math.ceil(stage.places / perMark / columns)) * size + 6;
    const top = y + 22;
    parts.push(...head(stage, 0, y + 14, true), ...frame(stage, 0, top, width, tall));
    parts.push(...marks(now, stage, perMark, (index) => [3 + (index % columns) * size, top + 4 + Math.floor(index / columns) * size, size - 2]));
    const rate = rateOf(now, stage.name);
    parts.push(svg("path", { class: "tip", d: `M 8 ${top + tall + 6} h 12 l -6 10 z` }));
    if (rate) parts.push(svg("text", { x: 28, y: top + tall + 16, class: "small" }, `${quantity(rate.value)} ${rate.unit} ${rate.what}`));
    y = top + tall + 24;
  }
  parts.push(...trainer(now, 0, y, width, 64), svg("text", { x: 0, y: y + 84, class: "small" }, weights(now)));
  return { height: y + 96, parts, perMark };
}

/** The largest marks, and the fewest groups a mark, with which all stages fit. */
function fit(stages, room, tall) {
  for (const perMark of PER_MARK) {
    for (const size of SIZES) {
      const rows = Math.floor((tall - 4) / size);
      const widths = stages.map((stage) => Math.max(LEAST, Math.ceil(stage.places / perMark / rows) * size + 6));
      if (widths.reduce((sum, width) => sum + width, 0) <= room) return { size, perMark, widths };
    }
  }
  return { size: SIZES.at(-1), perMark: PER_MARK.at(-1), widths: stages.map(() => LEAST) };
}

function head(stage, x, y, inLine) {
  const groups = stage.capacity ? `${count(stage.groups)} of ${plural(stage.capacity, "group")}` : plural(stage.groups, "group");
  const rollouts = stage.rollouts === null || stage.rollouts === undefined ? null : plural(stage.rollouts, "rollout");
  return [
    svg("text", { x, y, class: "name" }, stage.name, svg("title", {}, WHAT[stage.name] ?? stage.name)),
    inLine ? svg("text", { x: x + 96, y, class: "small" }, [groups, rollouts].filter(Boolean).join(" · "))
      : [groups, rollouts].map((text, line) => text && svg("text", { x, y: y + 18 + 16 * line, class: "small" }, text)),
  ];
}

const frame = (stage, x, y, width, height) => [svg("rect", {
  x: x + 0.5, y: y + 0.5, width: width - 1, height: height - 1, rx: 4, class: stage.capacity ? "frame held" : "frame",
}, svg("title", {}, WHAT[stage.name] ?? stage.name))];

function marks(now, stage, perMark, place) {
  const shades = stage.name === "buffered" ? shadesOf(now) : [];
  return Array.from({ length: Math.ceil(stage.groups / perMark) }, (_, index) => {
    const [x, y, side] = place(index);
    const known = shades[index * perMark];
    return svg("rect", { x, y, width: side, height: side, rx: 1.5, class: `mark ${stage.name}`, style: known ? { fill: known } : {} });
  });
}

const gapAfter = (stage) => (rateOf({ rates: {} }, stage.name) ? RATED : GAP);

/** The rate over the arrow that leaves a stage. */
function rateOf(now, stage) {
  const unit = now.rates.unit ?? "samples/s";
  if (stage === "verifying") return { value: now.rates.production, unit, what: "produced" };
  if (stage === "batch") return { value: now.rates.trained ?? now.rates.consumption, unit, what: "trained" };
  return null;
}

function arrow(now, stage, x, y, length) {
  const rate = rateOf(now, stage);
  const most = Math.max(now.rates.production ?? 0, now.rates.trained ?? 0, 1e-9);
  const of = stage === "batch" || stage === "buffered" ? now.rates.trained : now.rates.production;
  const thick = 2 + (12 * (of ?? 0)) / most;
  const tip = Math.max(8, thick);
  const parts = [
    svg("rect", { class: "flow", x, y: y - thick / 2, width: Math.max(1, length - tip), height: thick }),
    svg("path", { class: "tip", d: `M ${x + length - tip} ${y - tip / 1.4} l ${tip} ${tip / 1.4} l ${-tip} ${tip / 1.4} z` }),
  ];
  if (rate) {
    const middle = x + length / 2;
    parts.push(svg("text", { x: middle, y: y - 18, "text-anchor": "middle", class: "rate" }, quantity(rate.value)),
      svg("text", { x: middle, y: y + 26, "text-anchor": "middle", class: "small" }, rate.unit),
      svg("text", { x: middle, y: y + 40, "text-anchor": "middle", class: "small" }, rate.what));
  }
  return parts;
}

function trainer(now, x, y, width, height) {
  const middle = x + width / 2;
  const texts = [["name", "trainer"], ["small", `version ${count(now.version)}`], ["small", `waits ${percent(now.waits?.trainer)}`]];
  return [svg("rect", { x: x + 0.5, y: y + 0.5, width: width - 1, height: height - 1, rx: 8, class: "trainer" }),
    texts.map(([kind, text], line) =>
      svg("text", { x: middle, y: y + height / 2 - 14 + line * 18, "text-anchor": "middle", class: kind }, text))];
}

function weights(now) {
  if (now.applied_version === null || now.applied_version === undefined) return "weights of a version go back to the generator";
  const behind = now.version - now.applied_version;
  return `weights: generator at version ${count(now.applied_version)}` + (behind > 0 ? `, ${behind} behind` : "");
}

/** How stale buffered groups would be if they were trained now: a column a version, the budget as a line. */
export function drawStaleness(now, width) {
  const { buffered_by_version: versions = [], budget } = now.queue;
  const by = new Map(versions.map((of) => [(now.queue.version ?? now.version) - of.version, of]));
  const last = Math.max(budget ?? 0, ...by.keys(), 0);
  const most = Math.max(1, ...versions.map((of) => of.groups));
  const wide = Math.min(72, (width - 80) / (last + 1));
  const drawn = (last + 1) * wide + 80;
  const every = Math.ceil(36 / wide);
  const [top, floor] = [36, 100];
  const columns = Array.from({ length: last + 1 }, (_, staleness) => {
    const of = by.get(staleness);
    const tall = of ? Math.max(2, ((floor - top) * of.groups) / most) : 1;
    const middle = (staleness + 0.5) * wide;
    return [
      svg("rect", { x: staleness * wide + 1, y: floor - tall, width: Math.max(1, wide - 2), height: tall, class: of ? "mark" : "none",
        style: of ? { fill: shade(staleness, budget ?? last) } : {} },
      of && svg("title", {}, `version ${of.version}: ${plural(of.groups, "group")}, ${duration(of.age_s)} old`)),
      of && wide > 24 && svg("text", { x: middle, y: floor - tall - 4, "text-anchor": "middle", class: "small" }, count(of.groups)),
      staleness % every === 0 && svg("text", { x: middle, y: floor + 16, "text-anchor": "middle", class: "small" }, staleness),
    ];
  });
  const line = budget === null || budget === undefined ? [] : [
    svg("path", { class: "budget", d: `M ${(budget + 1) * wide + 1} 2 V ${floor + 4}` }),
    svg("text", { x: (budget + 1) * wide + 8, y: 12, class: "small" }, `budget ${budget}`),
  ];
  const label = `Staleness of buffered groups: ${versions.map((of) => `${plural(of.groups, "group")} of version ${of.version}`).join(", ") || "none"}; budget ${budget ?? "none"}.`;
  return svg("svg", { class: "queue", width: drawn, height: 120, viewBox: `0 0 ${drawn} 120`, role: "img", "aria-label": label }, columns, line);
}
