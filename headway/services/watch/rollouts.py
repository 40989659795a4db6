"""Defines the views of rollouts and devices, by the names of their routes; each queries the run's reader."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import fields

from headway.records.errors import ConfigurationError
from headway.report.watch.lanes import RunLanes
from headway.report.watch.rollouts.search import RolloutQuery
from headway.report.watch.rollouts.watched_rollouts import WatchedRollouts
from headway.report.watch.watched_runs import WatchedRun, checked
from headway.services.run_tokenizer import token_table

_WINDOW_TOKENS = 20_000


def _rollouts(path: Path) -> WatchedRollouts:
    return WatchedRollouts(path, token_table(path))


def _search(run: WatchedRun, **query: Any) -> Any:
    with run.reader(_rollouts) as reader:
        return reader.search(**query)


_KIND = inspect.Parameter.KEYWORD_ONLY
_search.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
    [
        inspect.Parameter("run", _KIND),
        *(inspect.Parameter(of.name, _KIND, default=of.default, annotation=of.type) for of in fields(RolloutQuery)),
    ]
)


def _rollout(run: WatchedRun, row: int, sequence: int | None = None, offset: int = 0, limit: int = 4000) -> Any:
    checked("offset", offset, 0, 1 << 40)
    with run.reader(_rollouts) as reader:
        return reader.rollout(row, sequence=sequence, offset=offset, limit=checked("limit", limit, 1, _WINDOW_TOKENS))


def _tasks(run: WatchedRun, bins: int = 24) -> Any:
    with run.reader(_rollouts) as reader:
        return reader.tasks(checked("bins", bins, 1, 500))


def _same_task(runs: Sequence[WatchedRun], task: str) -> Any:
    newest_rows = list[dict[str, Any]]()
    for run in runs:
        with run.reader(_rollouts) as reader:
            row = reader.newest_of_task(task)
        newest_rows += [] if row is None else [{"run": run.id, "row": row}]
    return {"rollouts": newest_rows}


def _lanes(run: WatchedRun, since: float | None = None) -> Any:
    with run.reader(RunLanes) as reader:
        return reader.lanes(since)


def _window(run: WatchedRun, from_s: float, to_s: float, pixels: int = 1600, tracks: str = "") -> Any:
    track_ids = [track for track in tracks.split(",") if track]
    if not all(track.isdecimal() and len(track) < 10 for track in track_ids):
        raise ConfigurationError(f"tracks = {tracks[:100]!r}: valid: ids of tracks, separated by commas")
    with run.reader(RunLanes) as reader:
        return reader.window(from_s, to_s, checked("pixels", pixels, 1, 8000), list(map(int, track_ids)))


VIEWS = {
    **{"rollouts": _search, "rollout": _rollout, "tasks": _tasks, "same_task": _same_task},
    **{"lanes": _lanes, "lanes/window": _window},
}
