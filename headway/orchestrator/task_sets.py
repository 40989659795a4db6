"""The task sets of an experiment, kept apart by content."""

from __future__ import annotations

from headway.config.schema import Experiment
from headway.records.task import Task
from headway.tasks.sources import load_tasks, require_disjoint, without_prompts_of


def load_task_sets(experiment: Experiment) -> dict[str, list[Task]]:
    """``train`` and, where given, ``validation`` and ``test``; no prompt is in two of them.

    Prompts of held-out sets are left out of *generated* training tasks; files must be disjoint already.
    Raises ConfigurationError for sources that can't be read, overlap, or leave no training task.
    """
    tasks, seed = experiment.tasks, experiment.run.seed
    sets = {
        name: load_tasks(source, seed)
        for name, source in (("train", tasks.train), ("validation", tasks.validation), ("test", tasks.test))
        if source is not None
    }
    held_out = [task for name, members in sets.items() if name != "train" for task in members]
    if tasks.train.source != "jsonl":
        sets["train"] = without_prompts_of(sets["train"], held_out)
    require_disjoint({f"tasks.{name}": members for name, members in sets.items()})
    return sets
