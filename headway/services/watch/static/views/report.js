// Report: the run judged in words, and what no curve shows. The words are those of `headway report`.

import { el, fill, percent, problems, svg, table } from "../dom.js";
import { colourOf } from "../plot.js";
import { said } from "./visible.js";

const AGAIN_MS = 10_000; // between two readings of a run that goes on
const [WIDTH, TALL, BAR] = [560, 132, 22];

/** Histograms side by side, a group of columns for each label. */
function bars({ title, caption, labels, series }) {
  const most = Math.max(...series.flatMap(({ shares }) => shares));
  const wide = Math.min(3 * BAR, WIDTH / labels.length);
  const each = (wide * 0.8) / series.length;
  const every = Math.ceil(44 / wide);
  const columns = series.flatMap(({ name, shares }, number) => shares.map((share, place) => svg("rect", {
    x: place * wide + number * each, y: TALL - (share / most) * (TALL - 8), width: Math.max(1, each - 1), height: (share / most) * (TALL - 8),
    style: { fill: `var(${colourOf(number)})` },
  }, svg("title", {}, `${name}, ${labels[place]}: ${percent(share)}`))));
  const texts = labels.map((label, place) => place % every === 0 &&
    svg("text", { x: place * wide + wide * 0.4, y: TALL + 16, "text-anchor": "middle", class: "small" }, label));
  const words = series.map(({ name, shares }) => `${name}: ${labels.map((label, place) => `${label} ${percent(shares[place])}`).join(", ")}`);
  const height = TALL + 22;
  return el("figure", { class: "bars" }, title && el("h3", {}, title), el("p", { class: "caption muted" }, caption),
    el("p", { class: "legend" }, series.map(({ name }, number) => el("span", {},
      el("i", { class: "swatch", style: { "background-color": `var(${colourOf(number)})` } }), ` ${name}`))),
    svg("svg", { class: "queue", width: WIDTH, height, viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": words.join(". ") }, columns, texts));
}

function section({ title, sentences = [], heads, rows = [], text_columns: textColumns, bars: drawn = [], picture }) {
  const shown = rows.map((cells) => cells.map((text) => said(text)));
  return el("section", { class: "card" }, el("h2", {}, title), sentences.map((text) => el("p", {}, said(text))), drawn.map(bars),
    picture && el("img", { src: picture, alt: sentences[0] ?? title }), rows.length > 0 && table(heads, shown, { textColumns, label: title }));
}

export async function show(root, params, context) {
  const place = el("div", { class: "report" });
  const trouble = el("div");
  fill(root, el("h1", {}, context.run), trouble, place);

  function draw(found) {
    fill(trouble, problems(found.problems));
    fill(place, el("p", { class: "muted" }, said(`${found.path} · ${found.state} · ${found.summary}`)),
      el("section", { class: "card verdict", "aria-label": "Verdict" }, el("dl", {}, found.verdict.map(({ question, answer, bad }) => [
        el("dt", {}, question), el("dd", { class: bad ? "bad" : null }, said(answer))])),
      found.pages.length > 0 && el("p", { class: "muted" }, `What to do: ${found.pages.join(", ")}`)),
      el("div", { class: "tiles" }, Object.entries(found.figures).map(([label, value]) => el("div", {}, el("span", {}, label), el("b", {}, value)))),
      found.sections.map(section));
  }

  const read = () => context.api.attempt(trouble, async () => draw(await context.api.get("report", { run: context.run })));
  await read();
  let [seen, timer] = [-1, null];
  const close = context.api.stream({ run: context.run }, { now: ({ step }) => {
    if (step !== seen && seen >= 0) timer ??= setTimeout(() => {
      timer = null;
      read();
    }, AGAIN_MS);
    seen = step;
  } });
  return () => {
    close();
    clearTimeout(timer);
  };
}
