"""`headway report --html` writes the page of `headway watch` with its answers to a file that needs no server."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Sequence
from contextlib import closing
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from headway.records.errors import ConfigurationError, HeadwayError
from headway.report.run_view import view_run
from headway.report.several.axes import AXES
from headway.report.several.run_list import list_runs
from headway.report.watch import run_series, view_compare, view_now, view_report
from headway.report.watch.lanes import RunLanes
from headway.report.watch.rollouts.page_selection import select_rollouts, select_shared_tasks
from headway.report.watch.rollouts.watched_rollouts import WatchedRollouts
from headway.report.watch.watched_runs import WatchedRun
from headway.runtime.run_directory import write_atomically
from headway.services.run_tokenizer import token_table
from headway.services.watch.stream import encode

_STATIC = Path(__file__).with_name("static")
_POINTS, _COMPARED_POINTS = 800, 400  # of a series, on the page of a run and on one that compares several
_ROLLOUTS, _COMPARED_TASKS = 300, 3
_TOKENS, _ALL_TOKENS = 4000, 300_000  # of a rollout, and of all together
_STEPS, _PIXELS, _TRACKS = 30, 3000, 64  # of the lanes
_GROUPS = ("devices", "trainer", "generator", "verifiers", "other", "groups", "rollouts")  # by decreasing priority
_VIEWS = ("report", "now", "run", "rollouts", "tasks", "devices")
_POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
_FULL_PAGE_HINT = "`headway watch RUN` shows everything."


def write_run_page(run_dir: str | Path, output: str | Path | None = None, price: float | None = None) -> Path:
    """Write the page of a run to ``output`` (default: RUN/report.html), and return its path. ``price``: dollars of a
    device-hour. Raises ConfigurationError where there is no run, HeadwayError when the page can't be written."""
    run, path = _run(run_dir), Path(output or Path(run_dir) / "report.html")
    answers = _answers(run, price)
    _write(path, f"Headway: {run.id}", {"views": _VIEWS, "runs": _run_listing([run], price), "of": {run.id: answers}})
    return path


def write_compared_page(
    run_dirs: Sequence[str | Path], output: str | Path, price: float | None = None
) -> dict[str, str]:
    """Write a page that compares several runs; returns the errors of the runs that are left out, by path. Raises
    ConfigurationError when no run can be read, HeadwayError when the page can't be written."""
    runs, left_out = list[WatchedRun](), dict[str, str]()
    folder_names = [Path(run).resolve().name for run in run_dirs]
    for run_dir, name in zip(run_dirs, folder_names, strict=True):
        try:
            runs.append(_run(run_dir, name if folder_names.count(name) == 1 else str(run_dir)))
        except (HeadwayError, OSError) as error:
            left_out[str(run_dir)] = str(error)
    if not runs:
        raise ConfigurationError("; ".join(left_out.values()))
    comparison = view_compare.compare(runs, "", "steps", _COMPARED_POINTS, price)
    comparison["problems"] += [f"Left out: {run}: {reason}" for run, reason in left_out.items()]
    answers: dict[str, Any] = {}
    readers = [WatchedRollouts(run.path, token_table(run.path)) for run in runs]
    rows_by_run = select_shared_tasks([reader.table() for reader in readers], _COMPARED_TASKS)
    for run, reader, run_rows in zip(runs, readers, rows_by_run, strict=True):
        with closing(reader):
            answers[run.id] = _series(run, _COMPARED_POINTS, price) | _rollouts(reader, run_rows, len(runs))
            common = {row["task_id"] for row in answers[run.id]["rollouts"]["rows"]}
            tasks = reader.tasks()
            answers[run.id]["tasks"] = tasks | {"tasks": [row for row in tasks["tasks"] if row["task_id"] in common]}
    page = {"views": ("compare", "rollouts"), "runs": _run_listing(runs, price), "of": answers, "compare": comparison}
    _write(Path(output), "Headway: " + ", ".join(answers), page)
    return left_out


def _run(run_dir: str | Path, name: str = "") -> WatchedRun:
    view = view_run(run_dir)  # raises unless the ledger can be read
    return WatchedRun(name or view.path.resolve().name, view.path)


def _run_listing(runs: Sequence[WatchedRun], price: float | None) -> dict[str, Any]:
    rows = [{"id": run.id, "name": run.id, **msgspec.to_builtins(list_runs([run.path], price)[0])} for run in runs]
    return {"runs": rows, "roots": [], "problems": []}


def _answers(run: WatchedRun, price: float | None) -> dict[str, Any]:
    with closing(WatchedRollouts(run.path, token_table(run.path))) as reader:
        rows = select_rollouts(reader.table(), _ROLLOUTS)
        return {
            "report": view_report.report(run, price),
            "now": view_now.now(run, price),
            **_series(run, _POINTS, price),
            "events": run_series.events(run),
            "config": run_series.configuration(run),
            "logs": {"logs": [], "problems": [f"Logs aren't in this file: they are in {run.path / 'logs'}."]},
            **_rollouts(reader, rows, 1),
            "tasks": reader.tasks(),
            **_lanes(run),
        }


def _series(run: WatchedRun, points: int, price: float | None) -> dict[str, Any]:
    """Return all series of a run, and its positions on each of its axes."""
    names_answer, axis_answers = run_series.names(run), dict[str, Any]()
    all_names = ",".join(description["name"] for description in names_answer["series"])
    all_series = run_series.series(run, all_names, "steps", points)
    for axis in AXES:
        try:
            axis_series = run_series.series(run, "", axis, points, price=price)
            axis_answers[axis] = {"x": _rounded(axis_series["x"]), "evaluations": axis_series["evaluations"]}
        except ConfigurationError as error:
            axis_answers[axis] = {"x": [], "evaluations": [], "problems": [str(error)]}
    curves = {
        name: {curve_kind: values and _rounded(values) for curve_kind, values in curve.items()}
        for name, curve in all_series["series"].items()
    }
    return {"names": names_answer, "series": {**all_series, "series": curves, "axes": axis_answers}}


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _rollouts(reader: WatchedRollouts, rows: Sequence[int], shares: int) -> dict[str, Any]:
    """Return the rollouts of these rows, each with as many tokens as the page's limits allow."""
    details, remaining_tokens, cut_count = dict[int, dict[str, Any]](), _ALL_TOKENS // shares, 0
    for row_index, row in enumerate(rows):
        max_tokens = min(_TOKENS, remaining_tokens // (len(rows) - row_index))
        try:
            rollout = details[row] = reader.rollout(row, limit=max_tokens)
        except ConfigurationError:  # its part of the record can't be read, which is in `problems`
            continue
        if sum(len(sequence["ids"]) for sequence in rollout["sequences"]) > max_tokens:
            rollout = details[row] = reader.rollout(row, sequence=0, limit=max_tokens)
        remaining_tokens -= sum(len(sequence["ids"]) for sequence in rollout["sequences"])
        cut_count += any(len(sequence["ids"]) < sequence["total_tokens"] for sequence in rollout["sequences"])
    table = reader.summaries(list(details))
    note_texts = []
    if len(details) < table["rollouts"]:
        note_texts.append(
            f"In this file are {len(details):,} of {table['rollouts']:,} rollouts: the newest and the oldest of each "
            f"ending. {_FULL_PAGE_HINT}"
        )
    if cut_count:
        note_texts.append(f"This file has only the first tokens of {cut_count:,} long ones.")
    return {"rollouts": {**table, "problems": [*note_texts, *table["problems"]]}, "details": details}


def _lanes(run: WatchedRun) -> dict[str, Any]:
    """Return the lanes of the newest steps, at a single resolution."""
    with run.reader(RunLanes) as reader:
        lanes = reader.lanes()
        while lanes["indexed_share"] < 1 and not lanes["problems"]:
            lanes = reader.lanes()
        if lanes["from_s"] is None:
            return {"lanes": lanes, "spans": None}
        steps = lanes["steps"][-_STEPS:]
        from_s = max(lanes["from_s"], steps[0]["start_s"]) if len(steps) == _STEPS else lanes["from_s"]
        ranks = {group: rank for rank, group in enumerate(_GROUPS)}
        tracks = [track["id"] for track in sorted(lanes["tracks"], key=lambda track: ranks[track["group"]])][:_TRACKS]
        spans = reader.window(from_s, lanes["to_s"], _PIXELS, tracks)["tracks"]
    notes = [f"These are the newest {_STEPS} steps, at one zoom. {_FULL_PAGE_HINT}"] if from_s > lanes["from_s"] else []
    if len(lanes["tracks"]) > _TRACKS:
        notes.append(f"In this file are {_TRACKS} of {len(lanes['tracks'])} lanes.")
    kept = {
        "tracks": [track for track in lanes["tracks"] if track["id"] in set(tracks)],
        **{
            kind: [moment for moment in lanes[kind] if moment[time_field] >= from_s]
            for kind, time_field in (("versions", "published_s"), ("marks", "time_s"), ("steps", "end_s"))
        },
    }
    return {"lanes": {**lanes, **kept, "from_s": from_s, "problems": [*lanes["problems"], *notes]}, "spans": spans}


# --- the file --------------------------------------------------------------------------------------------


def _write(path: Path, title: str, page: dict[str, Any]) -> None:
    details_by_run = {run: answers.pop("details", {}) for run, answers in page["of"].items()}
    content_by_name = {"answers": page, "rollouts": details_by_run}
    scripts_html = "".join(
        f'<script type="text/plain" id="kept-{name}">{_base64(gzip.compress(encode(content), 6, mtime=0))}</script>\n'
        for name, content in content_by_name.items()
    )
    write_atomically(path, _document(title).replace("<!-- kept -->", scripts_html).encode("utf-8", "replace"))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _document(title: str) -> str:
    """Return the page with its styles and modules inlined. Modules are imported by an import map, since modules of a
    file can't import others by path."""
    text_by_module = {
        path.relative_to(_STATIC).as_posix(): path.read_text(encoding="utf-8") for path in sorted(_STATIC.rglob("*.js"))
    }
    url_by_module = {
        f"headway/{name}": "data:text/javascript;base64," + _base64(_with_mapped_imports(name, module_text).encode())
        for name, module_text in text_by_module.items()
    }
    html = (_STATIC / "index.html").read_text(encoding="utf-8")
    html = re.sub(
        r'<link rel="stylesheet" href="([^"]+)">', lambda of: f"<style>{(_STATIC / of[1]).read_text()}</style>", html
    )
    icon_url = "data:image/svg+xml;base64," + _base64((_STATIC / "icon.svg").read_bytes())
    html = re.sub(r' *<link rel="modulepreload"[^>]*>\n', "", html).replace('href="icon.svg"', f'href="{icon_url}"')
    script_html = f'<script type="importmap">{msgspec.json.encode({"imports": url_by_module}).decode()}</script>'
    script_html += '<script type="module">import "headway/app.js";</script>'
    html = html.replace('<script type="module" src="app.js"></script>', "<!-- kept -->" + script_html)
    policy_html = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    return html.replace("<title>Headway</title>", f"{policy_html}\n    <title>{escape(title)}</title>")


def _with_mapped_imports(name: str, text: str) -> str:
    """Rewrite the imports of a module to the names in the import map."""
    folder = Path(name).parent

    def replacement(match: re.Match[str]) -> str:
        path_parts = [part for part in (folder / match[2]).parts]
        while ".." in path_parts:
            index = path_parts.index("..")
            del path_parts[index - 1 : index + 1]
        return f'{match[1]}"headway/{"/".join(path_parts)}"'

    return re.sub(r'(\bfrom |\bmodule: )"(\.\.?/[^"]+\.js)"', replacement, text)
