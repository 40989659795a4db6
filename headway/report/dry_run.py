"""`headway train --dry-run` describes the run without starting it."""

from __future__ import annotations

from collections.abc import Sequence

from headway.config.objective.critic import GAE, TRUNK
from headway.config.schema import AlgorithmConfig, Experiment
from headway.config.sources import TaskSource
from headway.report.formats import duration
from headway.report.tables import Rows


def dry_run_rows(experiment: Experiment, environment_scores: bool = False) -> Rows:
    """Describe the run as rows, in the order of its phases. ``environment_scores``: whether the environment's class
    defines `score`."""
    run, rollout, queue = experiment.run, experiment.rollout, experiment.queue
    samples = queue.groups_per_step * rollout.group_size
    slot_count = experiment.generator.slots * len(experiment.generator.devices)
    mode = "synchronous, on-policy" if queue.budget == 0 else f"asynchronous, budget {queue.budget} ({queue.overdue})"
    end_text = f"{run.steps:,} steps" + (f" or {duration(run.time_limit_s)}" if run.time_limit_s else "")
    if experiment.evaluation.stop_at_solve_rate is not None:
        end_text += f", or a validation solve rate of {experiment.evaluation.stop_at_solve_rate:g}"
    return {
        "run": f"{run.directory}, seed {run.seed}, until {end_text}",
        "model": f"{experiment.model.path} ({experiment.model.template} prompts)",
        "train on": _sources(experiment.tasks.train, shares=True),
        "evaluate on": _evaluation(experiment),
        "batch": (
            f"{queue.groups_per_step} groups × {rollout.group_size} rollouts = {samples} samples a step, at most "
            f"{rollout.max_prompt_tokens} + {rollout.max_response_tokens} tokens each"
        ),
        "queue": f"{mode}; at most {queue.groups_per_step * (queue.budget + 1)} groups open before the first step",
        "generator": (
            f"{', '.join(experiment.generator.devices)} ({experiment.generator.dtype}), {slot_count} slots, "
            f"{experiment.concurrent_rollouts} rollouts at once, updates: {experiment.generator.update_mode}"
        ),
        "trainer": (
            f"{', '.join(experiment.trainer.devices)} ({experiment.trainer.dtype}), learning rate "
            f"{experiment.trainer.learning_rate:g} ({experiment.trainer.schedule}), "
            f"{_count_text(experiment.trainer.updates_per_batch, 'optimiser step')} a batch"
        ),
        **_objectives(experiment),
        "weights": f"published every {_every(experiment.weights.steps_per_publish)}",
        "checkpoints": (
            f"every {_every(experiment.checkpoint.every_steps)}, the last {experiment.checkpoint.keep_last} kept"
        ),
        **_scoring_row(experiment, environment_scores),
    }


def _scoring_row(experiment: Experiment, environment_scores: bool) -> Rows:
    """Return the row with the source of the rewards that the run trains on."""
    environment, verifier = experiment.environment, experiment.verifier
    if environment_scores:
        return {"scored by": f"{environment.name}, {environment.timeout_s:g} s limit"}
    if environment.name == "verifiers":
        return {"scored by": "its environment of the package verifiers"}
    never_rewards = environment.name == "single_turn" or (environment.command and not environment.posts_reward)
    condition_text = "" if never_rewards else f", where {environment.name} gives no reward"
    return {"verifier": f"{verifier.name}, {verifier.timeout_s:g} s limit{condition_text}"}


def _sources(sources: Sequence[TaskSource], *, shares: bool = False) -> str:
    """Describe all task sources; ``shares``: with the share of the tasks that each source provides."""
    if len(sources) == 1:
        return _source(sources[0])
    total_weight = sum(source.weight for source in sources)
    return "; ".join(
        (f"{source.weight / total_weight:.0%} " if shares else "")
        + (f"{source.label}: " if source.label else "")
        + _source(source)
        for source in sources
    )


def _source(source: TaskSource) -> str:
    details_text = f", the first {source.limit:,}" if source.limit is not None else ""
    if source.verifier:
        details_text += f", verifier {source.verifier}"
    if source.source == "jsonl":
        return source.path + details_text
    if source.source == "datasets":
        origin_text = "" if source.path else " from the Hugging Face hub"
        part_text = "".join(f" {name}" for name in (source.subset, source.split) if name)
        return f"{source.path or source.name}{part_text}{origin_text}{details_text}"
    if source.source == "function":
        arguments_text = ", ".join(f"{name}={value!r}" for name, value in source.parameters.items())
        return f"{source.name}({arguments_text}){details_text}"
    size, seed = (source.generator_parameters[key] for key in ("size", "seed"))
    return f"reasoning-gym {source.name}, {size:,} tasks, seed {seed}{details_text}"


def _evaluation(experiment: Experiment) -> str:
    tasks, evaluation = experiment.tasks, experiment.evaluation
    part_texts: list[str] = []
    if tasks.validation is not None and (evaluation.every_steps or evaluation.every_s is not None):
        times = [f"every {_every(evaluation.every_steps)}"] if evaluation.every_steps else []
        times += [f"every {duration(evaluation.every_s)}"] if evaluation.every_s is not None else []
        part_texts.append(f"validation ({_sources(tasks.validation)}) {' and '.join(times)}")
    if tasks.test is not None and (evaluation.before or evaluation.after):
        times = [word for word, enabled in (("before", evaluation.before), ("after", evaluation.after)) if enabled]
        part_texts.append(f"test ({_sources(tasks.test)}) {' and '.join(times)}")
    return "; ".join(part_texts) or "nothing"


def _objectives(experiment: Experiment) -> Rows:
    """Describe the rules by which samples are trained, a row for each source where they differ, and demonstrations."""
    rules, demonstrations, rows = experiment.rules, experiment.demonstrations, Rows()
    if len(rules.used) == 1:
        rows["objective"] = _objective(experiment, rules.algorithms[rules.used[0]])
    else:
        rows |= {f"objective of {name}": _objective(experiment, rules.of(name)) for name in rules.rule_by_source}
    if demonstrations.data is not None:
        rows["demonstrations"] = (
            f"{demonstrations.data.display_name}, {_count_text(demonstrations.per_step, 'row')} a step, cross-entropy "
            f"x {demonstrations.coefficient:g}"
        )
    return rows


def _objective(experiment: Experiment, algorithm: AlgorithmConfig) -> str:
    """Describe the settings of a rule that take effect, with the values that a preset filled in."""
    stream_texts = [f"teacher {algorithm.teacher} x {algorithm.teacher_coefficient:g}"] if algorithm.teacher else []
    if algorithm.environment_coefficient:
        stream_texts.append(f"cross-entropy on answers of tools x {algorithm.environment_coefficient:g}")
    if not algorithm.policy_coefficient:
        return ", ".join([*stream_texts, algorithm.aggregation])
    if algorithm.policy_coefficient != 1:
        stream_texts.insert(0, f"reward x {algorithm.policy_coefficient:g}")
    part_texts = [f"preset {algorithm.preset}"] if algorithm.preset else []
    critic, advantage_text = experiment.critic, f"advantage {algorithm.advantage}"
    if algorithm.advantage == GAE:
        advantage_text += f" {critic.gae[0]:g} {critic.gae[1]} by the critic {critic.path}"
        if critic.path != TRUNK or critic.learning_rate is not None:
            advantage_text += f" at {critic.network_rate:g}"
        alone_steps = experiment.trainer.warmup[0]
        advantage_text += f", alone for {_count_text(alone_steps, 'step')}" if alone_steps else ""
    part_texts += [algorithm.loss, advantage_text, *_bounds(algorithm), algorithm.aggregation]
    if algorithm.kl_coefficient:
        target_text = "" if algorithm.kl_target is None else f" at first, for {algorithm.kl_target:g} nats per token"
        part_texts.append(
            f"KL {algorithm.kl_coefficient:g}{target_text} ({algorithm.kl_estimator}, in the {algorithm.kl_in}) to "
            f"{experiment.model.reference or experiment.model.path}"
        )
    if algorithm.token_mask:
        part_texts.append(f"token weights within {_range(algorithm.token_mask)}")
    if algorithm.sequence_mask:
        part_texts.append(f"response weights ({algorithm.sequence_mask_by}) within {_range(algorithm.sequence_mask)}")
    if algorithm.second_moment_limit is not None:
        part_texts.append(f"second moment at most {algorithm.second_moment_limit:g}")
    if algorithm.overlong != "score":
        part_texts.append(f"overlong responses: {algorithm.overlong}")
    if experiment.queue.filter_zero_variance and not algorithm.trains_equal_rewards:
        part_texts.append("groups of equal rewards filtered")
    return ", ".join([*part_texts, *stream_texts])


def _bounds(algorithm: AlgorithmConfig) -> list[str]:
    """Describe the limits that the loss reads (all of them for a user-defined loss)."""
    loss, parameters = algorithm.loss, algorithm.parameters
    bounds: list[str] = []
    if loss == "cispo":
        return [f"weights at most {1 + algorithm.clip_high:g}"]
    if loss == "dro":
        return [f"squared log ratio by {parameters.beta:g}"]
    if loss == "gmpo":
        return [f"log ratios clipped to {-algorithm.clip_low:g} to {algorithm.clip_high:g}"]
    if loss == "sapo":
        return [f"gate {parameters.temperature_positive:g} and {parameters.temperature_negative:g}"]
    if loss not in ("reinforce", "dppo"):
        bounds.append(f"clip {1 - algorithm.clip_low:g} to {1 + algorithm.clip_high:g}")
        if parameters.dual_clip is not None:
            bounds.append(f"dual clip {parameters.dual_clip:g}")
    if loss == "dppo":
        bounds.append(f"{parameters.divergence} divergence at most {parameters.divergence_limit:g}")
    if loss != "gspo":
        bounds.append(f"weights at most {algorithm.behaviour_weight_cap:g}")
    return bounds


def _range(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]:g} to {bounds[1]:g}"


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _every(steps: int) -> str:
    return "step" if steps == 1 else f"{steps} steps"
