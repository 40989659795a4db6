// What Run and Compare share: which series are drawn, over what, how smooth.

import { el, empty, fill } from "./dom.js";

export const AXES = { steps: "Steps", hours: "Hours", samples: "Samples", tokens: "Tokens", dollars: "Dollars" };
const FIRST_SECTIONS = ["Learning", "Balance", "Staleness"];
const FIRST = 12; // plots, unless others are chosen

/** Plots from /api/names: series of one section and title are drawn together. */
export function plotsOf(names) {
  const plots = new Map();
  const all = new Map();
  const keyOf = (series) => `${series.section}/${series.title}`;
  for (const series of names) all.set(keyOf(series), (all.get(keyOf(series)) ?? 0) + 1);
  for (const series of names) {
    const key = keyOf(series);
    const plot = plots.get(key) ?? { key, section: series.section, title: series.title, caption: "", unit: series.unit, names: [] };
    plot.names.push(series.name);
    const said = all.get(key) > 1 ? `${shortName(series.name)}: ${series.caption}` : series.caption;
    if (series.caption) plot.caption = plot.caption ? `${plot.caption}; ${said}` : said;
    plots.set(key, plot);
  }
  return [...plots.values()];
}

/** What is drawn at first. */
export function firstOf(plots) {
  const told = plots.filter((plot) => FIRST_SECTIONS.includes(plot.section));
  return new Set((told.length ? told : plots).slice(0, FIRST).map((plot) => plot.key));
}

/** The short name of a series of a plot: what its name has that the others don't. */
export function shortName(name) {
  return name.replace(/^[^/]*\//, "").replace(/_(samples_per_s|tokens_per_s|tokens|s|steps|ratio|groups|share)$/, "").replaceAll("_", " ");
}

/** The list from which plots are chosen: by section, with a search. `onChange` is told after `chosen` has changed. */
export function chooser(plots, chosen, onChange) {
  const search = el("input", { type: "search", placeholder: "Search series", "aria-label": "Search series", oninput: draw });
  const list = el("div", { class: "series-list" });
  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = plots.filter((plot) => words.every((word) => `${plot.section} ${plot.title} ${plot.names.join(" ")} ${plot.caption}`.toLowerCase().includes(word)));
    const sections = [...new Set(shown.map((plot) => plot.section))];
    fill(list, sections.length ? sections.map((section) => {
      const of = shown.filter((plot) => plot.section === section);
      const all = of.every((plot) => chosen.has(plot.key));
      return el("fieldset", {}, el("legend", {}, section, " ", el("button", {
        type: "button", class: "link", "aria-label": `${all ? "None" : "All"} of ${section}`, onclick: () => set(of, !all),
      }, all ? "none" : "all")), of.map((plot) => el("label", { title: plot.names.join(", ") },
        el("input", { type: "checkbox", checked: chosen.has(plot.key), onchange: (event) => set([plot], event.target.checked) }), plot.title)));
    }) : empty("No series matches these words."));
  }
  function set(of, on) {
    for (const plot of of) on ? chosen.add(plot.key) : chosen.delete(plot.key);
    if (of.length > 1) draw();
    onChange();
  }
  draw();
  return el("details", { class: "series-choice card", open: matchMedia("(min-width: 1100px)").matches },
    el("summary", {}, "Series"), search, list);
}

/** Choices of axis and smoothing. `onChange({axis, smoothing})`. */
export function axisAndSmoothing(settings, onChange, axes = Object.keys(AXES)) {
  const shown = el("output", {}, settings.smoothing.toFixed(2));
  return [
    el("label", {}, "Over", el("select", { onchange: (event) => onChange({ axis: event.target.value }) },
      axes.map((axis) => el("option", { value: axis, selected: axis === settings.axis }, AXES[axis] ?? axis)))),
    el("label", {}, "Smoothing", el("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: settings.smoothing, oninput: (event) => {
        shown.value = Number(event.target.value).toFixed(2);
        onChange({ smoothing: Number(event.target.value) });
      },
    }), shown),
  ];
}
