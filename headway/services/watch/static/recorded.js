// A page that is one file: what a server would answer lies in it, as it was when the file was written.

const parts = {};

/** Whether this page is such a file. */
export const inside = document.querySelector("#kept-answers") !== null;

async function part(name) {
  parts[name] ??= (async () => {
    const bytes = Uint8Array.from(atob(document.querySelector(`#kept-${name}`).textContent), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  })();
  return parts[name];
}

/** Names of the views that the file holds. */
export const views = async () => (await part("answers")).views;

const missing = (what) => ({ error: `${what} isn't in this file. \`headway watch\` on the run's folder has everything.` });

/** What the server would answer to a request; {error} where the file hasn't got it. */
export async function answer(path, params) {
  const page = await part("answers");
  if (path === "runs") return page.runs;
  if (path === "compare") return compare(page, params);
  if (path === "same_task") return sameTask(page, params);
  const of = page.of[params.run];
  if (!of) return missing(`The run ${params.run}`);
  if (path === "series") return series(of.series, params);
  if (path === "rollouts") return search(of.rollouts, params);
  if (path === "rollout") return (await part("rollouts"))[params.run]?.[params.row] ? rollout(params) : missing(`Rollout ${params.row}`);
  if (path === "lanes/window") return spans(of, params);
  return of[path] ?? missing("This view");
}

const chosen = (all, names) => Object.fromEntries((names ?? "").split(",").filter((name) => all[name]).map((name) => [name, all[name]]));

function series(of, { names, axis }) {
  const { axes, series: all, ...rest } = of;
  const { x, evaluations, problems = [] } = axes[axis] ?? axes.steps;
  return { ...rest, axis, x, evaluations, series: chosen(all, names), problems: [...rest.problems, ...problems] };
}

function compare({ compare: found, of }, { runs, names, axis }) {
  if (!found) return missing("The comparison");
  const ids = runs.split(",");
  const rows = found.runs.filter((run) => ids.includes(run.id)).map((run) => ({ ...run, ...series(of[run.id].series, { names, axis }) }));
  const known = Object.keys(of[ids[0]]?.series.axes ?? {}).filter((name) => found.runs.some((run) => of[run.id].series.axes[name].x.length));
  return { ...found, runs: rows, axis, axes: known };
}

function sameTask({ of }, { runs, task }) {
  const newest = (run) => of[run]?.rollouts?.rows.filter((row) => row.task_id === task).sort((a, b) => b.row - a.row)[0];
  return { rollouts: runs.split(",").flatMap((run) => (newest(run) ? [{ run, row: newest(run).row }] : [])) };
}

// --- rollouts ----------------------------------------------------------------------------------------------

async function search({ rows, ...rest }, params) {
  const within = (value, name) => (params[`${name}_from`] === undefined || value >= params[`${name}_from`]) && (params[`${name}_to`] === undefined || value <= params[`${name}_to`]);
  const text = (params.text ?? "").toLowerCase();
  const texts = text ? (await part("rollouts"))[params.run] : {};
  const holds = ({ row }) => texts[row].sequences.some(({ tokens }) => tokens.join("").toLowerCase().includes(text));
  const found = rows.filter((row) => within(row.reward, "reward") && within(row.tokens, "tokens") && within(row.step ?? -1, "step")
    && (within(row.last_version, "version") || within(row.first_version, "version"))
    && (!params.task || row.task_id.startsWith(params.task)) && (!params.ending || row.ending === params.ending)
    && (!params.solved || String(row.solved) === params.solved) && (!params.failure || row.failure)
    && (!params.group || row.group === Number(params.group)) && (!text || holds(row)));
  const order = params.order || "newest";
  const key = { newest: (row) => -row.row, oldest: (row) => row.row }[order]
    ?? ((row) => row[order.replace("-", "")] * (order.startsWith("-") ? -1 : 1));
  found.sort((a, b) => key(a) - key(b) || b.row - a.row);
  const start = params.after ? found.findIndex((row) => String(row.row) === params.after) + 1 : 0;
  const shown = found.slice(start, start + (params.limit ?? 50));
  return { ...rest, rows: shown, total: found.length, after: start + shown.length < found.length ? String(shown.at(-1).row) : null };
}

async function rollout({ run, row, sequence, offset }) {
  const kept = (await part("rollouts"))[run][row];
  const { ids, total_tokens: total } = kept.sequences[sequence ?? 0] ?? kept.sequences[0];
  if ((offset ?? 0) >= ids.length && (offset ?? 0) < total) return missing(`The text after token ${ids.length}`);
  return kept;
}

// --- lanes -------------------------------------------------------------------------------------------------

function spans({ lanes, spans: kept }, { from_s, to_s, tracks }) {
  const by = lanes.from_s - from_s;
  const tracksOf = tracks.split(",").filter((track) => kept?.[track]).map((track) => {
    const { start, end, ...rest } = kept[track];
    const inside = start.map((at, place) => at + by < to_s - from_s && end[place] + by > 0);
    const taken = (values) => values.filter((_, place) => inside[place]);
    const others = Object.entries(rest).map(([name, values]) => [name, taken(values)]);
    return [track, { start: taken(start).map((at) => at + by), end: taken(end).map((at) => at + by), ...Object.fromEntries(others) }];
  });
  return { tracks: Object.fromEntries(tracksOf) };
}
