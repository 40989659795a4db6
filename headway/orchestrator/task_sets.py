"""Loads the task sets of an experiment, disjoint by content, and resolves the verifiers that tasks name."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from headway.config.schema import Experiment
from headway.config.sources import TaskSource, VerifierSettings
from headway.models.configuration import read_json
from headway.models.hf.configuration import implementation_of
from headway.records.errors import ConfigurationError
from headway.records.ledger import LedgerLine
from headway.records.task import Task
from headway.rollout.verification.verifiers import VERIFIERS
from headway.runtime.devices import parse_device
from headway.tasks.drawn_demonstrations import Demonstrations
from headway.tasks.source_rows import short
from headway.tasks.sources import load_tasks, require_disjoint, without_prompts_of
from headway.telemetry.ledger import EVENT_RESUME, EVENT_START
from headway.telemetry.summary import last_event
from headway.tokens.template_check import require_rendered
from headway.tokens.tokenizer import Tokenizer

SPLITS = ("train", "validation", "test")


def load_task_sets(experiment: Experiment) -> dict[str, list[Task]]:
    """Load the ``train`` set and, where given, ``validation`` and ``test``; no prompt is in two of them.

    Prompts of held-out sets are left out of *generated* training tasks; files must be disjoint already. Raises
    ConfigurationError for sources that can't be read, overlap, or leave no training task, and for conversations without
    a chat template, and pictures that the model isn't shown.
    """
    task_sets: dict[str, list[Task]] = {}
    for split in SPLITS:
        sources: Sequence[TaskSource] | None = getattr(experiment.tasks, split)
        if sources is not None:
            task_sets[split] = load_tasks(sources, experiment.run.seed)
            require_template(experiment, split, task_sets[split])
            require_pictures(experiment, split, task_sets[split])
    held_out = [task for split, split_tasks in task_sets.items() if split != "train" for task in split_tasks]
    task_sets["train"] = without_held_out(experiment.tasks.train, task_sets["train"], held_out)
    require_disjoint({f"tasks.{split}": split_tasks for split, split_tasks in task_sets.items()})
    return task_sets


def without_held_out(sources: Iterable[TaskSource], train: Sequence[Task], held_out: Sequence[Task]) -> list[Task]:
    """``train`` without those *generated* tasks whose prompts are in a held-out set."""
    generated_sources = {source.display_name for source in sources if source.source == "reasoning-gym"}
    if not generated_sources:
        return list(train)
    kept_ids = {task.task_id for task in without_prompts_of(train, held_out)}
    return [task for task in train if task.source not in generated_sources or task.task_id in kept_ids]


def require_template(experiment: Experiment, split: str, tasks: Sequence[Task]) -> None:
    """Raise ConfigurationError where a task is a conversation and ``model.template`` isn't 'chat'."""
    conversation = next((task for task in tasks if task.messages), None)
    if conversation is not None and experiment.model.template != "chat":
        raise ConfigurationError(
            f"tasks.{split}: the prompts of {conversation.source} are conversations, and model.template = "
            f"{experiment.model.template!r} takes texts: set model.template = 'chat'"
        )


def require_rendered_tasks(tokenizer: Tokenizer, tasks: Sequence[Task]) -> set[str]:
    """Return the parts of conversations that the chat template drops by design. Raises ConfigurationError, naming the
    task, where it drops others. Tasks with pictures aren't checked."""
    dropped = set[str]()
    for task in tasks:
        try:
            if task.messages and not task.pictures:
                dropped |= require_rendered(tokenizer, task.messages, None, (), add_generation_prompt=True)
        except ConfigurationError as error:
            raise ConfigurationError(f"{task.source}, {short(task.prompt)} ({task.task_id}): {error}") from None
    return dropped


def require_pictures(experiment: Experiment, split: str, tasks: Sequence[Task]) -> None:
    """Raise ConfigurationError where the tasks have pictures that this experiment's model is never shown."""
    task = next((task for task in tasks if task.pictures), None)
    if task is None:
        return
    model, generator, rollout_source = experiment.model, experiment.generator, experiment.environment.name
    rollout_source = experiment.hooks.rollout if rollout_source == "single_turn" else rollout_source
    folder, devices = Path(model.path), (*generator.devices, *experiment.trainer.devices)
    reason = ""
    if implementation_of(folder, model.implementation) != "transformers" or generator.engine != "torch":
        reason = "valid: a model with model.implementation = 'transformers' and generator.engine = 'torch'"
    elif not read_json(folder / "config.json").get("vision_config"):
        reason = f"{folder} reads text alone: its config.json has no vision_config"
    elif not any(folder.glob("*processor_config.json")):
        reason = f"images without a processor: {folder} has no preprocessor_config.json or processor_config.json"
    elif rollout_source != "single_turn":
        reason = f"{rollout_source} doesn't support them; valid: environment.name = 'single_turn'"
    elif remote_devices := [device for device in devices if parse_device(device).node]:
        reason = f"their pixel arrays are on this machine; valid: its devices, not {remote_devices[0]}"
    if reason:
        raise ConfigurationError(f"tasks.{split}: the prompts of {task.source} have pictures: {reason}")


def training_data(tasks: Sequence[Task], demonstrations: Demonstrations | None) -> dict[str, int | str]:
    """Count and digest of training tasks, in their order, and of demonstrations, if there are any, as a run's ledger
    keeps them where it starts."""
    counts: dict[str, int | str] = {"tasks": len(tasks)}
    if tasks:
        ids = "".join(task.task_id for task in tasks)
        counts["tasks_digest"] = hashlib.blake2b(ids.encode(), digest_size=8).hexdigest()
    if demonstrations is not None:
        counts |= {"demonstrations": len(demonstrations), "demonstrations_digest": demonstrations.digest}
    return counts


def changed_data(now: Mapping[str, int | str], lines: Sequence[LedgerLine]) -> dict[str, str]:
    """Describe how the training tasks and demonstrations differ from those of the run's last start in ``lines``, and
    what to do, by key. ``now``: their `training_data`. Without those that are the same, or aren't known."""
    start, texts = last_event(lines, EVENT_START, EVENT_RESUME), dict[str, str]()
    for name, key in (("tasks", "tasks.train"), ("demonstrations", "demonstrations.data")):
        digests = {data.get(f"{name}_digest") for data in (now, {} if start is None else start.data)}
        if len(digests - {None}) == 2:
            assert start is not None
            texts[key] = (
                f"{key} has changed since this run began ({now[name]} {name}, were {start.data[name]}): make clean in "
                "a project, or another --run.directory, starts a new run"
            )
    return texts


def training_weights(experiment: Experiment) -> dict[str, float]:
    """Label -> weight of the training sources."""
    return {source.display_name: source.weight for source in experiment.tasks.train}


def rollouts_may_reward(experiment: Experiment) -> bool:
    """Whether the environment or rollout function may give the rewards itself: then tasks need no answer."""
    return experiment.environment.name != "single_turn" or experiment.hooks.rollout != "single_turn"


def named_verifiers(experiment: Experiment, sets: Mapping[str, Iterable[Task]]) -> dict[str, VerifierSettings]:
    """Map each verifier name that tasks and pruners use to its settings; the default's name "" is left out.

    A name is one of ``[verifiers.NAME]``, or else of a built-in verifier or a module:function with its defaults. Raises
    ConfigurationError, naming the source, for one that is neither.
    """
    users = {judge.verifier: f"pruning.pruners: {judge.kind}" for judge in experiment.pruning.verifier_pruners.values()}
    users |= {task.verifier: task.source for tasks in sets.values() for task in tasks if task.verifier}
    return {key: _settings_of(key, experiment, source) for key, source in users.items()}


def _settings_of(key: str, experiment: Experiment, source: str) -> VerifierSettings:
    if key in experiment.verifiers:
        return experiment.verifiers[key]
    if key not in VERIFIERS and ":" not in key:
        near_names = difflib.get_close_matches(key, [*experiment.verifiers, *VERIFIERS], n=1, cutoff=0.5)
        hint = f"did you mean {near_names[0]!r}? " if near_names else ""
        names_text = ", ".join(experiment.verifiers) or "none"
        raise ConfigurationError(
            f"{source}: verifier = {key!r} is unknown; {hint}valid: a NAME of [verifiers.NAME] ({names_text}), "
            f"{', '.join(sorted(VERIFIERS))} or module:function"
        )
    return VerifierSettings(name=key)
