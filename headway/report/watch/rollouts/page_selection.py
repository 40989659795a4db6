"""Selects the rollouts that a page in a single file contains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.report.watch.rollouts.columns import RolloutTable


def select_rollouts(table: RolloutTable, limit: int) -> list[int]:
    """Select at most ``limit`` rows, newest first. Each combination of ending and solved contributes in turn the newest
    and the oldest row that isn't selected yet."""
    kinds = np.where(table["member"] >= 0, 2 * table["ending"].astype(int) + table["solved"], -1)
    rows_by_kind = [np.flatnonzero(kinds == kind)[::-1] for kind in np.unique(kinds) if kind >= 0]
    turns = [np.empty(len(rows), rows.dtype) for rows in rows_by_kind]
    for rows, turn in zip(rows_by_kind, turns, strict=True):
        half = (len(rows) + 1) // 2
        turn[0::2], turn[1::2] = rows[:half], rows[half:][::-1]
    chosen = sorted((turn, kind) for kind, rows in enumerate(turns) for turn in range(min(len(rows), limit)))[:limit]
    return sorted((int(turns[kind][turn]) + table.first for turn, kind in chosen), reverse=True)


def select_shared_tasks(tables: Sequence[RolloutTable], max_tasks: int) -> list[list[int]]:
    """Select rows of each run: the newest rollouts of at most ``max_tasks`` tasks that occur in several of the runs,
    tasks of more runs first."""
    newest = list[dict[str, int]]()
    for table in tables:
        present = np.flatnonzero(table["member"] >= 0)
        tasks, last = np.unique(table["task"][present][::-1], return_index=True)
        rows = present[::-1][last]
        newest.append({table.names[task]: int(row) for task, row in zip(tasks.tolist(), rows.tolist(), strict=True)})
    counts: dict[str, int] = {}
    for row_by_task in newest:
        for task in row_by_task:
            counts[task] = counts.get(task, 0) + bool(task)
    shared = sorted((-count, task) for task, count in counts.items() if count > 1)[:max_tasks]
    return [
        sorted((row_by_task[task] + table.first for _, task in shared if task in row_by_task), reverse=True)
        for table, row_by_task in zip(tables, newest, strict=True)
    ]
