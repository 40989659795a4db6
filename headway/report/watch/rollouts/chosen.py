"""The rollouts that a page which is one file has inside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.report.watch.rollouts.columns import RolloutTable


def chosen_rollouts(table: RolloutTable, most: int) -> list[int]:
    """At most ``most`` rows, the newest first: of each ending, and of solved and unsolved ones, in turn the newest and
    the oldest that isn't chosen yet."""
    kinds = np.where(table["member"] >= 0, 2 * table["ending"].astype(int) + table["solved"], -1)
    places = [np.flatnonzero(kinds == kind)[::-1] for kind in np.unique(kinds) if kind >= 0]
    turns = [np.empty(len(of), of.dtype) for of in places]
    for of, turn in zip(places, turns, strict=True):
        half = (len(of) + 1) // 2
        turn[0::2], turn[1::2] = of[:half], of[half:][::-1]
    chosen = sorted((turn, number) for number, of in enumerate(turns) for turn in range(min(len(of), most)))[:most]
    return sorted((int(turns[number][turn]) + table.first for turn, number in chosen), reverse=True)


def rollouts_of_tasks(tables: Sequence[RolloutTable], most: int) -> list[list[int]]:
    """Rows of each run: the newest rollouts of at most ``most`` tasks that several of the runs have rollouts of, tasks
    of more runs first."""
    newest = list[dict[str, int]]()
    for table in tables:
        present = np.flatnonzero(table["member"] >= 0)
        tasks, last = np.unique(table["task"][present][::-1], return_index=True)
        rows = present[::-1][last]
        newest.append({table.names[task]: int(row) for task, row in zip(tasks.tolist(), rows.tolist(), strict=True)})
    counts: dict[str, int] = {}
    for of in newest:
        for task in of:
            counts[task] = counts.get(task, 0) + bool(task)
    shared = sorted((-count, task) for task, count in counts.items() if count > 1)[:most]
    return [
        sorted((of[task] + table.first for _, task in shared if task in of), reverse=True)
        for table, of in zip(tables, newest, strict=True)
    ]
