"""Tasks over time: how often each is solved, what it costs, and what fails."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.control.curriculum.beta import mixed_probability
from headway.report.watch.rollouts.columns import BOUNDARIES, TOOL, RolloutTable

MAX_TASKS = 200  # those that were seen last


def tasks(table: RolloutTable, bins: int) -> dict[str, Any]:
    """The newest tasks of a run, with solve rates in ``bins`` of equally many rollouts in the order of their arrival,
    the shares of rollouts that failed at each boundary, and of each tool's calls those in error.

    ``weight`` of a task: the probability that outcomes of a group of the run's usual size differ, which is what a
    curriculum goes by (control/curriculum), from all attempts and a uniform prior."""
    count, bins = len(table), min(max(bins, 1), 200)
    ends = np.linspace(0, count, bins + 1).astype(int)[1:]
    step = np.maximum.accumulate(table["step"]) if count else table["step"]
    shown, place, last = _newest(table)
    where = np.searchsorted(ends, np.arange(count), side="right")
    failed, present = table["boundary"] != 255, (table["member"] >= 0) & (place < len(shown))
    judged = present & table["verified"] & ~failed
    by_time = _sums(place, where, judged, None, (len(shown), bins))
    solved = _sums(place, where, judged, table["solved"], (len(shown), bins))
    per_task = np.where(present, place, len(shown))
    rollouts, failures, tokens = (
        np.bincount(per_task, weights, len(shown) + 1)[:-1] for weights in (None, failed & present, table["tokens"])
    )
    last_step = np.full(len(shown) + 1, -1)
    np.maximum.at(last_step, per_task, table["step"])
    size = int(np.median(np.bincount(np.unique(table["group"], return_inverse=True)[1]))) if count else 1
    rows = [
        {
            "task_id": table.names[shown[n]],
            "prompt": "",
            "row": int(last[n]) + table.first,
            "rollouts": int(rollouts[n]),
            "solved_rate": _share(solved[n].sum(), by_time[n].sum()),
            "by_time": [_share(s, of) for s, of in zip(solved[n].tolist(), by_time[n].tolist(), strict=True)],
            "tokens_mean": _share(tokens[n], rollouts[n]),
            "failures": int(failures[n]),
            "weight": float(mixed_probability(1 + solved[n].sum(), 1 + by_time[n].sum() - solved[n].sum(), size)),
            "last_step": int(last_step[n]) if last_step[n] >= 0 else None,
        }
        for n in range(len(shown))
    ]
    return {
        "tasks": rows,
        "tasks_total": len(np.unique(table["task"])),
        "x": [int(step[end - 1]) if end and step[end - 1] >= 0 else None for end in ends.tolist()],
        "tools": _failures(table, where, bins),
    }


def _newest(table: RolloutTable) -> tuple[list[int], NDArray[Any], NDArray[Any]]:
    """The tasks that were seen last: (names' places, each rollout's place among them, newest rollout of each)."""
    names, first = np.unique(table["task"][::-1], return_index=True)
    newest = np.argsort(first)[:MAX_TASKS]
    places = np.full(max(len(table.names), 1), len(newest))
    places[names[newest]] = np.arange(len(newest))
    return names[newest].tolist(), places[table["task"]], len(table) - 1 - first[newest]


def _sums(rows: Any, bins: Any, taken: Any, weights: Any, shape: tuple[int, int]) -> NDArray[Any]:
    at = rows[taken] * shape[1] + bins[taken]
    return np.bincount(at, None if weights is None else weights[taken], shape[0] * shape[1]).reshape(shape)


def _failures(table: RolloutTable, where: NDArray[Any], bins: int) -> dict[str, list[float | None]]:
    every = np.bincount(where, minlength=bins)
    found: dict[str, list[float | None]] = {}
    for code, name in enumerate(BOUNDARIES):
        if (of_it := table["boundary"] == code).any():
            counts = np.bincount(where[of_it], minlength=bins)
            found[name] = [_share(n, of) for n, of in zip(counts.tolist(), every.tolist(), strict=True)]
    bin_of = where[table["tool_row"] - table.first]
    for code in np.unique(table["tool"]).tolist():
        own = table["tool"] == code
        calls, errors = (np.bincount(bin_of[own], table[name][own], bins) for name in ("tool_calls", "tool_errors"))
        if errors.any():
            name = table.names[code].removeprefix(TOOL) or "a tool there isn't"
            found[name] = [_share(n, of) for n, of in zip(errors.tolist(), calls.tolist(), strict=True)]
    return found


def _share(part: float, whole: float) -> float | None:
    return round(float(part / whole), 4) if whole else None
