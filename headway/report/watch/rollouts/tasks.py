"""Summarises tasks over time: solve rates, tokens and failures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.control.curriculum.beta import mixed_probability
from headway.report.watch.rollouts.columns import BOUNDARIES, TOOL, RolloutTable

MAX_TASKS = 200  # the tasks with the newest rollouts


def tasks(table: RolloutTable, bins: int) -> dict[str, Any]:
    """Summarise the newest tasks of a run: solve rates in ``bins`` of equally many rollouts in the order of their
    arrival, shares of rollouts that failed at each boundary, and shares of each tool's calls that failed.

    ``weight`` of a task: the probability that outcomes of a group of the run's usual size differ, from all attempts and
    a uniform prior; a curriculum selects by it (control/curriculum)."""
    count, bins = len(table), min(max(bins, 1), 200)
    ends = np.linspace(0, count, bins + 1).astype(int)[1:]
    steps_so_far = np.maximum.accumulate(table["step"]) if count else table["step"]
    newest, task_index, last_rows = _newest(table)
    bin_index = np.searchsorted(ends, np.arange(count), side="right")
    failed, present = table["boundary"] != 255, (table["member"] >= 0) & (task_index < len(newest))
    is_judged = present & table["verified"] & ~failed
    by_time = _sum_by_bin(task_index, bin_index, is_judged, None, (len(newest), bins))
    solved = _sum_by_bin(task_index, bin_index, is_judged, table["solved"], (len(newest), bins))
    task_of_row = np.where(present, task_index, len(newest))
    rollout_counts, failure_counts, token_sums = (
        np.bincount(task_of_row, weights, len(newest) + 1)[:-1] for weights in (None, failed & present, table["tokens"])
    )
    last_step = np.full(len(newest) + 1, -1)
    np.maximum.at(last_step, task_of_row, table["step"])
    group_size = int(np.median(np.bincount(np.unique(table["group"], return_inverse=True)[1]))) if count else 1
    rows = [
        {
            "task_id": table.names[newest[n]],
            "prompt": "",
            "row": int(last_rows[n]) + table.first,
            "rollouts": int(rollout_counts[n]),
            "solved_rate": _share(solved[n].sum(), by_time[n].sum()),
            "by_time": [_share(s, of) for s, of in zip(solved[n].tolist(), by_time[n].tolist(), strict=True)],
            "tokens_mean": _share(token_sums[n], rollout_counts[n]),
            "failures": int(failure_counts[n]),
            "weight": float(mixed_probability(1 + solved[n].sum(), 1 + by_time[n].sum() - solved[n].sum(), group_size)),
            "last_step": int(last_step[n]) if last_step[n] >= 0 else None,
        }
        for n in range(len(newest))
    ]
    return {
        "tasks": rows,
        "tasks_total": len(np.unique(table["task"])),
        "x": [int(steps_so_far[end - 1]) if end and steps_so_far[end - 1] >= 0 else None for end in ends.tolist()],
        "tools": _failures(table, bin_index, bins),
    }


def _newest(table: RolloutTable) -> tuple[list[int], NDArray[Any], NDArray[Any]]:
    """Return the tasks with the newest rollouts: (indices of their names, each rollout's index among these tasks,
    index of each task's newest rollout)."""
    name_indices, first_index = np.unique(table["task"][::-1], return_index=True)
    newest = np.argsort(first_index)[:MAX_TASKS]
    task_positions = np.full(max(len(table.names), 1), len(newest))
    task_positions[name_indices[newest]] = np.arange(len(newest))
    return name_indices[newest].tolist(), task_positions[table["task"]], len(table) - 1 - first_index[newest]


def _sum_by_bin(rows: Any, bins: Any, counted: Any, weights: Any, shape: tuple[int, int]) -> NDArray[Any]:
    cells = rows[counted] * shape[1] + bins[counted]
    return np.bincount(cells, None if weights is None else weights[counted], shape[0] * shape[1]).reshape(shape)


def _failures(table: RolloutTable, bin_index: NDArray[Any], bins: int) -> dict[str, list[float | None]]:
    total = np.bincount(bin_index, minlength=bins)
    shares_by_name: dict[str, list[float | None]] = {}
    for code, name in enumerate(BOUNDARIES):
        if (is_boundary := table["boundary"] == code).any():
            counts = np.bincount(bin_index[is_boundary], minlength=bins)
            shares_by_name[name] = [_share(n, of) for n, of in zip(counts.tolist(), total.tolist(), strict=True)]
    bin_of = bin_index[table["tool_row"] - table.first]
    for code in np.unique(table["tool"]).tolist():
        mask = table["tool"] == code
        calls, errors = (np.bincount(bin_of[mask], table[name][mask], bins) for name in ("tool_calls", "tool_errors"))
        if errors.any():
            name = table.names[code].removeprefix(TOOL) or "a tool there isn't"
            shares_by_name[name] = [_share(n, of) for n, of in zip(errors.tolist(), calls.tolist(), strict=True)]
    return shares_by_name


def _share(part: float, total: float) -> float | None:
    return round(float(part / total), 4) if total else None
