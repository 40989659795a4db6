// Now: one sentence, the queue drawn as a queue, both rates, who waits, what is wrong, what happened last.

import { ago, bar, count, dollars, duration, el, empty, fill, moment, percent, plural, problems, quantity, table } from "../dom.js";
import { plot } from "../plot.js";
import { drawQueue, drawStaleness } from "./queue.js";
import { STATE_CLASS } from "./runs.js";

const SILENT_S = 60; // a run that runs says something at least this often
const ENDS = {
  ended: "The run has ended", interrupted: "The run was interrupted and can be resumed", died: "The run died and can be resumed",
  unknown: "The run's state can't be read",
};
const SAY_EVERY_MS = 20_000; // to who can't see the page

export async function show(root, params, context) {
  let now = null;
  let connected = true;
  let said = { text: "", at: 0 };
  const place = Object.fromEntries(
    ["sentence", "heard", "problems", "tiles", "queue", "stale", "rates", "waits", "wrong", "workers", "latest"].map((name) => [name, el("div")]));
  const card = (title, name, wide = "") => el("section", { class: `card ${wide} now-${name}` }, el("h2", {}, title), place[name]);
  const heading = el("h2", {}, "The queue");
  const waited = el("h2", {}, "Who waits");
  const rates = el("div", { class: "now-plot" });
  place.title = el("h1", {}, context.run);
  fill(root, place.title, place.problems); // the rest comes with the first answer, at its full size
  place.sentence.className = "sentence";
  place.tiles.className = "tiles";
  place.stale.className = "stale";

  const chart = plot(rates, {
    title: "Production and consumption", unit: "samples/s", xLabel: "minutes from now", x: [], height: 160,
    lines: [{ name: "production", colour: "--c2", mean: [] }, { name: "consumption", colour: "--c1", mean: [] }], smoothing: 0,
  });

  function draw() {
    if (!now) return;
    const steps = now.steps ? `step ${count(now.step)} of ${count(now.steps)}` : `step ${count(now.step)}`;
    fill(place.title, now.name, " ", el("span", { class: `chip ${STATE_CLASS[now.state] ?? ""}` }, now.state), " ",
      el("span", { class: "steps" }, steps, now.left_s > 0 && now.state === "running" && ` · about ${duration(now.left_s)} left`));
    fill(place.sentence, el("p", {}, now.sentence || "Nothing is recorded yet: workers start, and the first step comes when its batch is full."));
    fill(place.problems, problems(now.problems));
    fill(place.tiles, tiles());
    drawPictures();
    drawRates();
    waited.textContent = now.state === "running" ? `Who waits, in the newest ${plural(now.waits_of, "step")}` : "Who waits, in all steps";
    fill(place.waits, waits());
    fill(place.wrong, wrong());
    fill(place.workers, workers());
    fill(place.latest, latest());
    drawHeard();
    say();
  }

  function drawPictures() {
    const width = place.queue.clientWidth;
    if (!now?.queue || !width) return;
    fill(place.queue, drawQueue(now, width));
    heading.textContent = now.state === "running" ? "The queue" : "The queue, as it was when last recorded";
    const budget = now.queue.budget;
    if (!now.queue.buffered_by_version?.length) {
      fill(place.stale, el("p", { class: "muted" }, now.state === "running" ? "Nothing is buffered." : "The versions of what is buffered are known while a run is active.",
        ` The budget is ${budget ?? "unknown"}.`));
      return;
    }
    fill(place.stale, drawStaleness(now, Math.min(width, 640)),
      el("p", { class: "caption muted" }, "Versions between the first token and the gradient. ",
        budget === 0 ? "The budget is 0: synchronous, on-policy." : `The budget, the red line, is ${budget ?? "unknown"}: older trajectories aren't trained on.`,
        now.queue.oldest_age_s ? ` The oldest buffered group has waited for ${duration(now.queue.oldest_age_s)}.` : ""));
  }

  function tiles() {
    const of = {
      "Is it learning?": now.learning, Balance: now.balance,
      "Cost so far": now.cost && dollars(now.cost.usd),
      "of it, of waits": now.cost && dollars(now.cost.trainer_waits_usd + now.cost.generator_waits_usd),
    };
    return Object.entries(of).filter(([, value]) => value).map(([label, value]) => el("div", {}, el("span", {}, label), el("b", {}, String(value))));
  }

  function drawRates() {
    const { production, effective_production: effective, consumption, trained, unit = "samples/s", recent = [] } = now.rates;
    const item = (label, value, variable, title) => el("div", { title },
      el("span", {}, variable && el("i", { class: "swatch", style: { "background-color": `var(${variable})` } }), ` ${label}`),
      el("b", {}, quantity(value), el("small", { class: "muted" }, ` ${unit}`)));
    fill(place.rates, el("div", { class: "tiles flat" },
      item("production", production, "--c2", "Rollouts finished"),
      item("of these accepted", effective, null, "Production times the share that is accepted"),
      item("consumption", consumption, "--c1", "The trainer's rate if it never waited"),
      item("trained", trained, null, "The trainer's actual rate")));
    const end = recent.at(-1)?.[0] ?? 0;
    const [xLabel, unit_s] = end - (recent[0]?.[0] ?? 0) < 180 ? ["seconds from now", 1] : ["minutes from now", 60];
    chart.set({
      xLabel, x: recent.map(([at]) => (at - end) / unit_s),
      lines: [{ name: "production", colour: "--c2", mean: recent.map((row) => row[1]) },
        { name: "consumption", colour: "--c1", mean: recent.map((row) => row[2]) }],
    });
  }

  function waits() {
    const words = { trainer: "The trainer waits for samples", generator: "The generator has nothing to do", yielded: "The trainer computes on the generator's devices" };
    return el("dl", { class: "waits" }, Object.entries(words).filter(([name]) => name !== "yielded" || now.waits?.yielded).map(([name, text]) => [
      el("dt", {}, text), el("dd", {}, bar(now.waits?.[name], `${text}: ${percent(now.waits?.[name])} of the time`,
        name === "trainer" ? "--c1" : name === "generator" ? "--c2" : "--c8"), el("span", {}, percent(now.waits?.[name])))]));
  }

  function wrong() {
    const stalls = (now.stalls ?? []).map((stall) => el("p", { class: "problem" }, el("strong", {}, `${stall.worker} stalls`),
      stall.since_unix_s ? ` since ${moment(stall.since_unix_s, "time")}` : "", `: ${stall.detail}`));
    const alerts = (now.alerts ?? []).map((alert) => el("p", { class: "problem" }, el("strong", {}, `Alert ${alert.rule.replaceAll("_", " ")}`),
      ` at step ${count(alert.step)}: ${alert.detail}`));
    return stalls.length + alerts.length ? [stalls, alerts] : el("p", { class: "muted" }, "No stall, no alert.");
  }

  function workers() {
    if (!now.workers?.length) return empty("No worker is known: a run without a trace names none.");
    return table(["Worker", "Device", "Does", "Restarts"], now.workers.map((worker) => [worker.name, worker.device || "–",
      el("span", { class: worker.up ? "" : "bad" }, worker.up ? worker.doing || "up" : "down"), count(worker.restarts)]), { textColumns: 3, label: "Workers" });
  }

  function latest() {
    if (!now.latest?.length) return empty("No event yet.");
    return el("ol", { class: "events" }, now.latest.map((event) => el("li", {},
      el("time", { class: "muted" }, event.unix_s ? moment(event.unix_s, "time") : duration(event.time_s)),
      el("span", {}, el("strong", { class: `kind-${event.kind}` }, event.event.replaceAll("_", " ")), ` at step ${count(event.step)}`,
        event.worker && `, ${event.worker}`, event.detail && `: ${event.detail}`, event.cause && ` (${event.cause})`))));
  }

  function drawHeard() {
    if (!now) return;
    const silent_s = Date.now() / 1000 - (now.updated_unix_s ?? NaN);
    const heard = now.updated_unix_s ? `${ago(now.updated_unix_s)}, ${moment(now.updated_unix_s)}` : "never";
    let text = `Last update: ${heard}.`;
    if (ENDS[now.state]) text = `${ENDS[now.state]}; last update: ${heard}.`;
    else if (silent_s > SILENT_S) text = `No update for ${duration(silent_s)}. The page shows the state of that time.`;
    const bad = !connected || (now.state === "running" && silent_s > SILENT_S);
    fill(place.heard, el("p", { class: bad ? "problem" : "muted" }, connected ? text : `The connection to \`headway watch\` is lost; it is tried again. ${text}`));
  }

  function say() {
    const text = [now.sentence, now.stalls?.length && plural(now.stalls.length, "stall"), now.alerts?.length && plural(now.alerts.length, "alert")]
      .filter(Boolean).join(" ");
    if (text === said.text || Date.now() - said.at < SAY_EVERY_MS) return;
    said = { text, at: Date.now() };
    context.announce(text);
  }

  function build() {
    fill(root, place.title, place.sentence, place.heard, place.problems,
      el("section", { class: "card hero", "aria-label": "The queue" }, heading, place.queue,
        el("h2", {}, "How stale they would be, if they were trained now"), place.stale),
      place.tiles,
      el("div", { class: "split" },
        el("section", { class: "card" }, el("h2", {}, "Two rates"), place.rates, rates),
        el("section", { class: "card" }, waited, place.waits, el("h2", {}, "Problems"), place.wrong)),
      el("div", { class: "split" }, card("Workers", "workers"), card("Newest events", "latest")));
    resized.observe(place.queue);
  }

  const take = (data) => {
    if (!now) build();
    now = data;
    draw();
  };
  const resized = new ResizeObserver(drawPictures);
  await context.api.attempt(place.problems, async () => take(await context.api.get("now", { run: context.run })));
  const close = context.api.stream({ run: context.run }, { now: take }, (state, error) => {
    connected = state;
    if (error) fill(place.problems, problems([error]));
    drawHeard();
  });
  const timer = setInterval(drawHeard, 1000);
  return () => {
    close();
    clearInterval(timer);
    resized.disconnect();
    chart.destroy();
  };
}
