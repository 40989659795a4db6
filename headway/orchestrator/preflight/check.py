"""Problems that can be found before a run starts. Torch-free: only files, sizes and one verifier process.

``preview.py`` continues from here: it starts the run's own workers for some seconds and predicts its rates.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.config.auto import Machine
from headway.config.schema import Experiment
from headway.models.adapter_targets import adapted_targets, stored_metadata
from headway.models.configuration import DecoderConfig
from headway.models.hf.configuration import HfConfig, adapter_size, read_config
from headway.models.sizes import sizes_of
from headway.orchestrator.preflight.capacity import (
    layout_findings,
    link_findings,
    memory_findings,
    memory_places,
    nearest_folder,
)
from headway.orchestrator.preflight.cluster import cluster_findings
from headway.orchestrator.preflight.conversations import conversation_findings
from headway.orchestrator.preflight.devices import device_findings, division_findings
from headway.orchestrator.preflight.engine import engine_findings
from headway.orchestrator.preflight.episode import episode_findings
from headway.orchestrator.preflight.hooks import function_findings, require_kernel_services, require_known_calls
from headway.orchestrator.preflight.memory import memory_uses
from headway.orchestrator.preflight.pictures import picture_findings
from headway.orchestrator.preflight.run_directory import directory_findings
from headway.orchestrator.preflight.sandboxes import sandbox_findings
from headway.orchestrator.preflight.verifier import verifier_findings
from headway.orchestrator.run_device_locks import require_offload
from headway.orchestrator.task_sets import (
    SPLITS,
    require_pictures,
    require_rendered_tasks,
    require_template,
    without_held_out,
)
from headway.orchestrator.teachers.checks import require_teachers
from headway.records.check_report import Finding, Findings
from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.task import Task
from headway.runtime.addresses import is_loopback, listening_socket
from headway.runtime.nodes.gpus import read_machine
from headway.runtime.run_directory import RunDirectory
from headway.tasks.drawn_demonstrations import Demonstrations
from headway.tasks.sources import contradictions, is_conversation_as_text, overlap, read_tasks
from headway.telemetry.exporters.exporters import missing_packages
from headway.tokens.format_probe import output_format
from headway.tokens.tokenizer import Tokenizer


@dataclass
class _Inputs:
    """Inputs that the checks share: read once, None where they couldn't be read."""

    experiment: Experiment
    resume: bool
    ahead: bool
    machine: Machine
    strict: bool = False
    model: DecoderConfig | HfConfig | None = None
    tokenizer: Tokenizer | None = None
    tasks: dict[str, list[Task]] | None = None  # split -> tasks
    demonstrations: Demonstrations | None = None


def check(
    experiment: Experiment,
    *,
    resume: bool = False,
    smoke_test: bool = True,
    ahead: bool = False,
    strict: bool = False,
    machine: Machine | None = None,
) -> list[Finding]:
    """Find everything that would stop or spoil the run, before it starts; errors first.

    Reads the model's configuration, the tokenizer and every task; ``smoke_test`` also starts a verifier process and
    scores some responses. ``ahead``: other steps may come before the run's start, so a model that `headway sft` will
    make and a run that ``--resume`` continues are warnings. ``strict``: even one task that its own answer doesn't solve
    is an error. ``machine``: a described one, instead of this. Writes nothing to the run's folder. Never raises for bad
    input: that is what it reports.
    """
    inputs, findings = _Inputs(experiment, resume, ahead, machine or read_machine(), strict), Findings()
    for run_check in (
        _model,
        _reference,
        _adapter,
        _tokenizer,
        _tasks,
        _demonstrations,
        _prompts,
        _sizes,
        _functions,
        _devices,
        _engine,
        _offload,
        _space,
        _run_directory,
        _cluster,
        _exporters,
        _environment,
        *([_pictures, _episode, _verifier] if smoke_test else []),
    ):
        try:
            run_check(inputs, findings)
        except HeadwayError as error:
            findings.error(run_check.__name__.strip("_"), str(error))
    return findings.by_level()


# The default, 1e-5, is a rate for a whole model; an adapter wants about ten times that (Schulman et al. 2025, "LoRA
# without regret"). A rate below the geometric middle of the two was probably chosen for a whole model.
_LOWEST_ADAPTER_RATE = 3e-5


# --- model and tokenizer ---------------------------------------------------------------------------------


def _model(inputs: _Inputs, findings: Findings) -> None:
    folder = Path(inputs.experiment.model.path)
    if inputs.ahead and is_made_by_sft(inputs.experiment):
        findings.warning(
            "model.path",
            f"{folder} doesn't exist yet: headway sft (in a project: make run) writes it; what depends on the "
            "model isn't checked",
        )
        return
    with findings.refused("model.path"):
        inputs.model = read_config(inputs.experiment.model)
    if inputs.model is None:
        return
    if not any(folder.glob("*.safetensors")) and not inputs.machine.described:
        findings.error("model.path", f"{folder} holds no *.safetensors file")
    longest_tokens = inputs.experiment.max_sequence_tokens
    if longest_tokens > inputs.model.max_positions:
        findings.error(
            "rollout.max_response_tokens",
            f"max_prompt_tokens + max_response_tokens = {longest_tokens} is beyond the model's context of "
            f"{inputs.model.max_positions} tokens",
        )


def is_made_by_sft(experiment: Experiment) -> bool:
    """Whether `headway sft` will write the run's model, and hasn't yet."""
    folder = Path(experiment.model.path)
    is_output = bool(experiment.sft.output) and Path(experiment.sft.output).resolve() == folder.resolve()
    return is_output and not folder.exists()


def _reference(inputs: _Inputs, findings: Findings) -> None:
    folder, algorithms = inputs.experiment.model.reference, inputs.experiment.rules.algorithms
    if not folder:
        return  # the model itself
    if not any(algorithm.kl_coefficient for algorithm in algorithms):
        findings.warning("model.reference", "has no effect without algorithm.kl_coefficient")
        return
    with findings.refused("model.reference"):
        vocabulary = read_config(inputs.experiment.model, folder).vocabulary_size
        if inputs.model is not None and vocabulary != inputs.model.vocabulary_size:
            known = f"the model one of {inputs.model.vocabulary_size}"
            findings.error("model.reference", f"{folder} has a vocabulary of {vocabulary}, {known}: they must be equal")


def _adapter(inputs: _Inputs, findings: Findings) -> None:
    adapter, learning_rate = inputs.experiment.model.adapter, inputs.experiment.trainer.learning_rate
    if adapter is None or inputs.model is None:
        return
    with findings.refused("model.adapter"):
        if isinstance(inputs.model, DecoderConfig):
            adapted_targets(inputs.model, adapter)
        else:
            adapter_size(inputs.experiment.model.path, adapter)
        if adapter.path:
            stored_metadata(Path(adapter.path), inputs.experiment.model.path)
    if adapter.dropout:
        findings.error(
            "model.adapter.dropout",
            f"{adapter.dropout:g}: valid: 0, but for headway sft: the policy that is trained would differ from the one "
            "that sampled, and no ratio would be 1",
        )
    if 0 < learning_rate < _LOWEST_ADAPTER_RATE:
        findings.warning(
            "trainer.learning_rate",
            f"{learning_rate:g} is a rate for training a whole model; adapters learn as fast at about ten times that",
        )


def _tokenizer(inputs: _Inputs, findings: Findings) -> None:
    folder = Path(inputs.experiment.model.path)
    if not folder.is_dir():
        return  # reported already
    with findings.refused("model.path"):
        inputs.tokenizer = Tokenizer.of(inputs.experiment, RunDirectory(inputs.experiment.run.directory).started())
    if (tokenizer := inputs.tokenizer) is None:
        return
    if tokenizer.added_stops:
        findings.info("model.path", tokenizer.added_text)
    if inputs.model is not None and tokenizer.vocabulary_size > inputs.model.vocabulary_size:
        findings.error(
            "model.path",
            f"the tokenizer has {tokenizer.vocabulary_size} ids, the model only {inputs.model.vocabulary_size}: "
            "they don't belong together",
        )
    if inputs.experiment.model.template == "chat" and tokenizer.chat_template is None:
        findings.error("model.template", f"'chat' needs a chat template, and {folder} has none; use 'raw'")
    special_tokens = [token for i in sorted(tokenizer.special_ids) if (token := tokenizer.token(i))]
    for stop in inputs.experiment.rollout.stop:
        special_token = next((token for token in special_tokens if token in stop), None)
        if special_token is not None:
            findings.error(
                "rollout.stop",
                f"{stop!r} holds the special token {special_token}, which isn't part of the searched text, so it would "
                "never match. Special tokens end a response by their ids (eos_token_id in generation_config.json)",
            )


# --- tasks -----------------------------------------------------------------------------------------------


def _tasks(inputs: _Inputs, findings: Findings) -> None:
    sections = inputs.experiment.tasks
    tasks: dict[str, list[Task]] = {}
    for split in SPLITS:
        sources = getattr(sections, split)
        if sources is None:
            continue
        key = f"tasks.{split}"
        with findings.refused(key):
            read_set = read_tasks(sources, inputs.experiment.run.seed)
            require_template(inputs.experiment, split, read_set.tasks)
            require_pictures(inputs.experiment, split, read_set.tasks)
            tasks[split] = list(read_set.tasks)
            if read_set.duplicates:
                findings.info(key, f"{read_set.duplicates:,} tasks were repeats of earlier ones and are left out")
            if read_set.left_out:
                findings.info(key, f"{read_set.left_out:,} rows were left out by 'convert'")
            _check_rows(key, read_set.tasks, findings)
    inputs.tasks = tasks
    if "train" in tasks:  # as the run does: generated sets are made disjoint
        held_out = [task for split in tasks if split != "train" for task in tasks[split]]
        kept_tasks = without_held_out(sections.train, tasks["train"], held_out)
        if left_out_count := len(tasks["train"]) - len(kept_tasks):
            reason = f"{left_out_count:,} tasks are left out because their prompts are in a held-out set"
            if kept_tasks:
                findings.info("tasks.train", reason)
            else:
                findings.error("tasks.train", reason + "; none remains")
            for source_name in (source.display_name for source in sections.train) if kept_tasks else ():
                if source_name not in {task.source for task in kept_tasks}:
                    findings.error("tasks.train", f"{source_name}: all its tasks are in a held-out set; none remains")
        tasks["train"] = kept_tasks
    tasks_by_key = {f"tasks.{split}": split_tasks for split, split_tasks in tasks.items()}
    for likeness, add, consequence in (
        ("", findings.error, "a score on tasks that were trained on means nothing"),
        (" but for white space", findings.warning, "they count as different tasks"),
    ):
        for overlapping in overlap(tasks_by_key, white_space=not likeness):
            shared = "1 prompt" if overlapping.prompts == 1 else f"{overlapping.prompts:,} prompts"
            example = f"for example {_shortened(overlapping.example)!r}"
            add(overlapping.second, f"shares {shared} with {overlapping.first}{likeness}, {example}: {consequence}")
    _evaluation(inputs, findings)


def _demonstrations(inputs: _Inputs, findings: Findings) -> None:
    if inputs.tokenizer is not None:
        with findings.refused("demonstrations"):
            inputs.demonstrations = Demonstrations.read(inputs.experiment, inputs.tokenizer)


def _check_rows(key: str, tasks: Sequence[Task], findings: Findings) -> None:
    """Warn about rows that can be read but are probably mistakes."""
    if text_count := sum(map(is_conversation_as_text, tasks)):
        subject = (
            "1 prompt is the JSON text of a conversation"
            if text_count == 1
            else f"{text_count:,} prompts are JSON texts of conversations"
        )
        findings.warning(key, f"{subject}, which the model reads as plain text: 'convert' can parse it (json.loads)")
    if answers_by_prompt := contradictions(tasks):
        prompt, answers = next(iter(answers_by_prompt.items()))
        subject = "1 prompt has" if len(answers_by_prompt) == 1 else f"{len(answers_by_prompt):,} prompts have"
        answers_text = " and ".join(repr(_shortened(answer)) for answer in answers[:2])
        example_text = f"for example {_shortened(prompt)!r}: {answers_text}"
        findings.warning(key, f"{subject} answers that contradict each other, {example_text}")


def _evaluation(inputs: _Inputs, findings: Findings) -> None:
    sections, evaluation = inputs.experiment.tasks, inputs.experiment.evaluation
    if sections.validation is None and (evaluation.every_steps or evaluation.every_s is not None):
        findings.warning("tasks.validation", "evaluation during the run is on, but there are no validation tasks")
    if sections.validation is None and evaluation.stop_at_solve_rate is not None:
        findings.warning("evaluation.stop_at_solve_rate", "has no effect without tasks.validation")
    elif evaluation.stop_at_solve_rate is not None and not (evaluation.every_steps or evaluation.every_s):
        findings.warning("evaluation.stop_at_solve_rate", "has no effect without evaluation.every_steps or every_s")
    if sections.test is None and (evaluation.before or evaluation.after):
        findings.info("tasks.test", "no test tasks: there will be no score before and after training")


def _prompts(inputs: _Inputs, findings: Findings) -> None:
    """Tokenize every prompt: those that are too long fail their group at run time, so they are refused here."""
    if inputs.tokenizer is None or not inputs.tasks:
        return
    with findings.refused("teachers"):
        require_teachers(inputs.experiment, inputs.tokenizer, inputs.tasks.get("train", ()))
    limit = inputs.experiment.rollout.max_prompt_tokens
    if inputs.experiment.environment.name != "single_turn":
        return  # the environment makes the prompts
    for split, split_tasks in inputs.tasks.items():
        tasks = [task for task in split_tasks if not task.pictures]  # theirs are tried by `picture_findings`
        if not tasks:
            continue
        if dropped_parts := require_rendered_tasks(inputs.tokenizer, tasks):
            findings.info(f"tasks.{split}", f"the chat template leaves out: {', '.join(sorted(dropped_parts))}")
        lengths = [len(inputs.tokenizer.render(task.content, inputs.experiment.model.template)) for task in tasks]
        overlong = sum(length > limit for length in lengths)
        if overlong:
            worst = max(range(len(tasks)), key=lambda i: lengths[i])
            findings.error(
                "rollout.max_prompt_tokens",
                f"{overlong:,} of {len(tasks):,} prompts of tasks.{split} are longer than {limit} tokens; the longest "
                f"has {lengths[worst]:,} (task {tasks[worst].task_id}, {_shortened(tasks[worst].prompt)!r})",
            )
        if not min(lengths):
            findings.error(f"tasks.{split}", f"{lengths.count(0):,} prompts have no token at all")


def _pictures(inputs: _Inputs, findings: Findings) -> None:
    findings.extend(picture_findings(inputs.experiment, inputs.tasks or {}))


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


# --- queue, batch, functions -----------------------------------------------------------------------------


def _sizes(inputs: _Inputs, findings: Findings) -> None:
    experiment = inputs.experiment
    rollout, generator, queue, trainer = experiment.rollout, experiment.generator, experiment.queue, experiment.trainer
    _deadlocks(experiment, findings)
    slot_count = generator.slots * len(generator.devices)
    admitted_rollouts = queue.groups_per_step * (queue.budget + 1) * experiment.largest_group
    at_once = min(experiment.concurrent_rollouts, admitted_rollouts)
    if queue.budget and at_once < slot_count:
        findings.warning(
            "generator.slots",
            f"at most {at_once} rollouts can run at once (concurrency {experiment.concurrent_rollouts}, admission "
            f"{admitted_rollouts}): {slot_count - at_once} of {slot_count} slots will stay empty",
        )
    rank_count, parts = len(trainer.devices), trainer.optimizer_steps_per_batch
    if parts > queue.groups_per_step:
        findings.error("trainer.optimizer_steps_per_batch", f"{parts} steps can't share {queue.groups_per_step} groups")
    elif queue.groups_per_step % parts:
        findings.warning(
            "trainer.optimizer_steps_per_batch",
            f"{queue.groups_per_step} groups don't divide into {parts} equal parts: their gradients weigh differently",
        )
    if rank_count > queue.groups_per_step * rollout.group_size:
        findings.error("trainer.devices", f"{rank_count} ranks, but a batch has fewer samples")
    if trainer.packing != "fixed" and trainer.micro_batch_tokens < experiment.max_sequence_tokens:
        findings.warning(
            "trainer.micro_batch_tokens",
            f"{trainer.micro_batch_tokens} is less than the longest sample ({experiment.max_sequence_tokens} tokens), "
            "which will be a micro-batch of its own",
        )
    if experiment.algorithm.proximal == "current" and trainer.updates_per_batch > 1:
        findings.warning("algorithm.proximal", "'current' with several optimiser steps per batch clips nothing")
    if trainer.warmup[1] >= experiment.run.steps:
        findings.warning("trainer.warmup_steps", "the run ends before the learning rate has warmed up")
    train = (inputs.tasks or {}).get("train")
    if train is not None and len(train) < queue.groups_per_step:
        findings.warning("tasks.train", f"{len(train)} tasks: some will be in a batch of {queue.groups_per_step} twice")
    trained = experiment.run.steps * queue.groups_per_step
    if train is not None and experiment.curriculum.mode == "adaptive" and len(train) > trained:
        findings.warning(
            "curriculum.mode",
            f"'adaptive' chooses among tasks it has seen, and {trained} groups are trained of {len(train)} tasks: most "
            "will be drawn once, in turn, if at all",
        )


def _deadlocks(experiment: Experiment, findings: Findings) -> None:
    """Find settings under which the run could never make its first, or some later, step."""
    kv_tokens = experiment.generator.kv_capacity_tokens
    if kv_tokens is not None and kv_tokens < experiment.max_sequence_tokens:
        findings.error(
            "generator.kv_capacity_tokens",
            f"{kv_tokens} can't hold one rollout of {experiment.max_sequence_tokens} tokens: it would wait forever",
        )
    rules = [experiment.rules.algorithms[rule] for rule in experiment.rules.used]
    without_group = ("batch_mean_std", "gae")
    compares = [r.advantage not in without_group and r.policy_coefficient > 0 and not r.teacher for r in rules]
    if experiment.rollout.group_size < 2 and any(compares):
        findings.error(
            "rollout.group_size",
            "1: advantages compare the members of a group, so all would be 0; valid: 2 or more, "
            "algorithm.advantage = 'batch_mean_std' or 'gae', or a teacher",
        )


def _functions(inputs: _Inputs, findings: Findings) -> None:
    """Check the user's own functions."""
    train_tasks = (inputs.tasks or {}).get("train")
    findings += function_findings(inputs.experiment, train_tasks[0] if train_tasks else None)
    if inputs.tokenizer is not None:
        with findings.refused("endpoint.tools"):
            require_known_calls(
                inputs.experiment.environment, output_format(inputs.tokenizer, inputs.experiment.endpoint.tools)
            )


# --- devices and space -----------------------------------------------------------------------------------


def _devices(inputs: _Inputs, findings: Findings) -> None:
    findings += device_findings(inputs.experiment, inputs.machine)
    if inputs.model is not None:
        findings += division_findings(inputs.experiment.trainer, inputs.model)


def _engine(inputs: _Inputs, findings: Findings) -> None:
    """Check that the generator's engine is installed, and computes this model on these devices."""
    findings += engine_findings(inputs.experiment, inputs.model, inputs.machine)


def _offload(inputs: _Inputs, findings: Findings) -> None:
    with findings.refused("run.offload"):
        require_offload(inputs.experiment)


def _space(inputs: _Inputs, findings: Findings) -> None:
    if inputs.model is None:
        return
    try:
        sizes = sizes_of(inputs.experiment.model.path)
        uses = memory_uses(inputs.experiment, sizes)
        findings += memory_findings(uses, memory_places(uses, machine=inputs.machine))
        findings += layout_findings(inputs.experiment, sizes, inputs.machine)
        findings += link_findings(inputs.experiment, sizes)
    except ConfigurationError:
        pass  # a device or a reference model that isn't there: reported already
    folder = nearest_folder(Path(inputs.experiment.run.directory))
    if not os.access(folder, os.W_OK):
        findings.error("run.directory", f"{folder} can't be written to")


# --- run directory and verifier --------------------------------------------------------------------------


def _run_directory(inputs: _Inputs, findings: Findings) -> None:
    train = (inputs.tasks or {}).get("train", ())
    findings += directory_findings(inputs.experiment, inputs.resume, train, inputs.demonstrations, ahead=inputs.ahead)


def _cluster(inputs: _Inputs, findings: Findings) -> None:
    findings += cluster_findings(inputs.experiment)


def _exporters(inputs: _Inputs, findings: Findings) -> None:
    """Check the packages of the trackers and the address of `/metrics`; the trackers' own servers are not asked."""
    address = inputs.experiment.ledger.prometheus
    for problem in missing_packages(inputs.experiment):
        key, _, problem_text = problem.partition(": ")
        findings.error(key, problem_text)
    if address:
        with findings.refused("ledger.prometheus"):
            listening_socket(address).close()
        if not is_loopback(address):
            findings.warning("ledger.prometheus", f"{address}: any host that reaches it can read the run's metrics")


def _environment(inputs: _Inputs, findings: Findings) -> None:
    """Check the needs of multi-turn rollouts. Sandboxes are tried: a later failure would waste the samples."""
    has_template = inputs.tokenizer is None or inputs.tokenizer.chat_template is not None
    findings += conversation_findings(inputs.experiment, has_template)
    findings += sandbox_findings(inputs.experiment)
    with findings.refused("environment.parameters"):
        all_tasks = [task for split_tasks in (inputs.tasks or {}).values() for task in split_tasks]
        asyncio.run(require_kernel_services(inputs.experiment, all_tasks))


def _episode(inputs: _Inputs, findings: Findings) -> None:
    findings += episode_findings(inputs.experiment, inputs.tasks or {}, findings)


def _verifier(inputs: _Inputs, findings: Findings) -> None:
    findings += verifier_findings(inputs.experiment, inputs.tasks or {}, strict=inputs.strict)
