"""Selects the rollouts that a page in a single file contains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.report.watch.rollouts.columns import RolloutTable


def select_rollouts(table: RolloutTable, limit: int) -> list[int]:
    """Select at most ``limit`` rows, newest first. Each combination of ending and solved contributes in turn the newest
    and the oldest row that isn't selected yet."""
    kind_codes = np.where(table["member"] >= 0, 2 * table["ending"].astype(int) + table["solved"], -1)
    rows_by_kind = [np.flatnonzero(kind_codes == kind)[::-1] for kind in np.unique(kind_codes) if kind >= 0]
    turns = [np.empty(len(rows), rows.dtype) for rows in rows_by_kind]
    for rows, turn_rows in zip(rows_by_kind, turns, strict=True):
        half = (len(rows) + 1) // 2
        turn_rows[0::2], turn_rows[1::2] = rows[:half], rows[half:][::-1]
    chosen = sorted((turn, kind) for kind, rows in enumerate(turns) for turn in range(min(len(rows), limit)))[:limit]
    return sorted((int(turns[kind][turn]) + table.first for turn, kind in chosen), reverse=True)


def select_shared_tasks(tables: Sequence[RolloutTable], max_tasks: int) -> list[list[int]]:
    """Select rows of each run: the newest rollouts of at most ``max_tasks`` tasks that occur in several of the runs,
    tasks of more runs first."""
    task_rows = list[dict[str, int]]()
    for table in tables:
        present_rows = np.flatnonzero(table["member"] >= 0)
        tasks, last_index = np.unique(table["task"][present_rows][::-1], return_index=True)
        rows = present_rows[::-1][last_index]
        task_rows.append({table.names[task]: int(row) for task, row in zip(tasks.tolist(), rows.tolist(), strict=True)})
    run_counts: dict[str, int] = {}
    for row_by_task in task_rows:
        for task in row_by_task:
            run_counts[task] = run_counts.get(task, 0) + bool(task)
    shared_tasks = sorted((-count, task) for task, count in run_counts.items() if count > 1)[:max_tasks]
    return [
        sorted((row_by_task[task] + table.first for _, task in shared_tasks if task in row_by_task), reverse=True)
        for table, row_by_task in zip(tables, task_rows, strict=True)
    ]
