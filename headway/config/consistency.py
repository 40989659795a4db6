"""Checks of keys against those of other sections, with a function for each concern that raises ValueError."""

from __future__ import annotations

from headway.config.buffer import BufferConfig
from headway.config.engines import require_engine
from headway.config.external_models import SELF
from headway.config.objective.rules import denominators_of, stream_rules
from headway.config.schema import GAE, CriticConfig, Experiment

KL_HORIZON = 10_000.0  # samples; a step's samples divided by it weigh the step's error: Ziegler et al., 2019
MOST_KL_ERROR = 0.2  # limit of a step's error, as a share of algorithm.kl_target: trainer/kl.py
MUON_OF_TRANSFORMERS = (
    "'muon': which matrices a model of transformers has in one tensor isn't known; valid: 'adamw', or a family that "
    "Headway implements"
)
BATCH_ADVANTAGES = ("batch_mean_std", "group_mean_batch_std")  # known only once a batch is formed


def require_consistent(experiment: Experiment) -> None:
    """Raise ValueError for keys that contradict each other, with their values and valid ones."""
    _require_rules(experiment)
    _require_parts(experiment)
    _require_packing(experiment)
    _require_shards(experiment)
    _require_muon(experiment)
    _require_publishing(experiment)
    _require_update_mode(experiment)
    _require_optimizer_step_staleness(experiment)
    _require_determinism(experiment)
    _require_surplus(experiment)
    _require_pruning(experiment)
    _require_environment(experiment)
    _require_reproducible_sampling(experiment)
    _require_group_sizes(experiment)
    _require_variable_name(experiment)
    require_engine(experiment)


def _require_rules(experiment: Experiment) -> None:
    """Check the rule of each source as if all had it, and those that are no rule of training."""
    sections, rules = experiment.tasks, experiment.rules
    for split in ("validation", "test"):
        for source in getattr(sections, split) or ():
            if source.algorithm:
                raise ValueError(
                    f"tasks.{split} {source.display_name!r} has a table 'algorithm', and isn't trained on; valid: in "
                    "tasks.train"
                )
    for rule, algorithm in enumerate(rules.algorithms):
        try:
            _require_rule(experiment.model_copy(update={"algorithm": algorithm}))
        except ValueError as error:
            sources = ", ".join(repr(name) for name, number in rules.rule_by_source.items() if number == rule)
            raise ValueError(f"{error} (tasks.train {sources})" if rule else str(error)) from None
    teachers = {algorithm.teacher for algorithm in rules.algorithms}
    coefficients = {  # of those that have none to weigh
        f"tasks.train {source.display_name!r}: algorithm": source.algorithm["teacher_coefficient"]
        for source in sections.train
        if "teacher_coefficient" in source.algorithm and not rules.of(source.display_name).teacher
    }
    if experiment.algorithm.teacher_coefficient != 1 and not any(teachers):
        coefficients["algorithm"] = experiment.algorithm.teacher_coefficient
    for origin, coefficient in coefficients.items():
        raise ValueError(
            f"{origin}.teacher_coefficient = {coefficient!r} weighs a teacher, and none is named; valid: with teacher"
        )
    for name in experiment.teachers:
        if name not in teachers:
            raise ValueError(f"teachers.{name} teaches nothing: no algorithm.teacher names it")
    if experiment.algorithm.kl_target is not None and len(rules.algorithms) > 1:
        raise ValueError(
            f"algorithm.kl_target = {experiment.algorithm.kl_target:g} adapts one coefficient to all samples, and "
            "sources have rules of their own: leave it or their tables 'algorithm' out"
        )
    _require_average(experiment)
    _require_critic(experiment)
    if all(part.stream != "policy" for part in stream_rules(rules, experiment.demonstrations)):
        for key in ("entropy_coefficient", "entropy_threshold", "early_stop_ratio", "early_stop_kl"):
            if number := getattr(experiment.algorithm, key):
                raise ValueError(
                    f"algorithm.{key} = {number:g} is of the policy's loss, which algorithm.policy_coefficient = 0 "
                    "leaves out: valid: one of them"
                )


def _require_average(experiment: Experiment) -> None:
    decay, is_adapted = experiment.algorithm.reference_decay, experiment.model.adapter is not None
    if decay is None:
        return
    fault = f"algorithm.reference_decay = {decay:g} makes a moving average of the trained weights"
    if not any(rule.kl_coefficient for rule in experiment.rules.algorithms):
        raise ValueError(f"{fault} the reference of a KL penalty; set algorithm.kl_coefficient above 0")
    if experiment.model.reference or is_adapted:
        other_key = "[model.adapter]" if is_adapted else "model.reference"
        raise ValueError(f"{fault}, all of them and from the run's beginning: leave {other_key} out")


def _require_critic(experiment: Experiment) -> None:
    algorithm, queue, hooks = experiment.algorithm, experiment.queue, experiment.hooks
    advantages = {rule.advantage for rule in experiment.rules.algorithms}
    if GAE not in advantages:
        changed_keys = ["algorithm.overlong"] if algorithm.overlong == "bootstrap" else []
        changed_keys += [] if experiment.critic == CriticConfig() else ["[critic]"]
        changed_keys += ["trainer.warmup_steps = [first, last]"] if experiment.trainer.warmup[0] else []
        if changed_keys:
            raise ValueError(f"{changed_keys[0]} is for a critic, and no algorithm.advantage is 'gae'")
        return
    if len(advantages) > 1:
        others = ", ".join(sorted(advantages - {GAE}))
        raise ValueError(f"algorithm.advantage = 'gae' of some sources with {others} of others: valid: 'gae' for all")
    fault = "algorithm.advantage = 'gae' is known only in the trainer, from its critic's values"
    for key, is_set in (
        (f"queue.min_advantage = {queue.min_advantage:g} filters groups by it", queue.min_advantage > 0),
        (f"queue.groups_per_part = {queue.groups_per_part} begins before it", queue.groups_per_part is not None),
        (f"hooks.normalize_group = {hooks.normalize_group!r} compares a group", hooks.normalize_group != "identity"),
        (f"hooks.pad_group = {hooks.pad_group!r} repeats its values", hooks.pad_group != "none"),
    ):
        if is_set:
            raise ValueError(f"{fault}; {key} as it finishes: leave one of them out")
    if algorithm.turn_discount is not None:
        raise ValueError(
            f"algorithm.turn_discount = {algorithm.turn_discount:g} makes returns of rewards by turn, of which "
            "algorithm.advantage = 'gae' takes each where it stands: leave it out, critic.gae has the discount"
        )
    if experiment.environment.calls:
        raise ValueError(
            f"environment.name = {experiment.environment.name!r} with algorithm.advantage = 'gae': a program's calls "
            "may branch, and tokens of a tree have no order; valid: an environment that Headway plays"
        )
    if experiment.critic.path == "adapter" and experiment.model.adapter is None:
        raise ValueError(
            "critic.path = 'adapter' has the rank, alpha and targets of [model.adapter], which is missing; valid: "
            "'trunk', the folder of a model, or with [model.adapter]"
        )
    if not any(rule.policy_coefficient for rule in experiment.rules.algorithms):
        raise ValueError("algorithm.policy_coefficient = 0 with algorithm.advantage = 'gae', which nothing then uses")
    if (steps := experiment.trainer.warmup)[0] >= experiment.run.steps:
        raise ValueError(
            f"trainer.warmup_steps = {list(steps)} leaves the policy no step of run.steps = {experiment.run.steps}"
        )


def _require_rule(experiment: Experiment) -> None:
    """Check ``experiment.algorithm``."""
    _require_objective(experiment)
    _require_known_advantages(experiment)
    algorithm = experiment.algorithm
    if algorithm.teacher:
        _require_teacher(experiment, algorithm.teacher)
    if not (algorithm.policy_coefficient or algorithm.teacher or algorithm.environment_coefficient):
        raise ValueError(
            "algorithm.policy_coefficient = 0 trains nothing: valid: above 0, or with algorithm.teacher or "
            "algorithm.environment_coefficient"
        )
    if algorithm.environment_coefficient and experiment.environment.name == "single_turn":
        raise ValueError(
            f"algorithm.environment_coefficient = {algorithm.environment_coefficient:g} trains on what tools answered, "
            "and environment.name = 'single_turn' has none; valid: 0, or an environment with tools"
        )
    if algorithm.kl_coefficient and not algorithm.policy_coefficient:
        raise ValueError(
            f"algorithm.kl_coefficient = {algorithm.kl_coefficient:g} is a penalty of the policy's loss, which "
            "algorithm.policy_coefficient = 0 leaves out: valid: one of them"
        )


def _require_teacher(experiment: Experiment, name: str) -> None:
    """Check the teacher that ``experiment.algorithm`` names."""
    teacher, rollout, settings = experiment.teachers.get(name), experiment.rollout, experiment.trainer
    if teacher is None:
        valid = ", ".join(experiment.teachers) or "none"
        raise ValueError(f"algorithm.teacher = {name!r}: there is no [teachers.{name}]; valid: {valid}")
    for key in ("optimizer_steps_per_batch", "passes"):
        if teacher.path == SELF and (number := getattr(settings, key)) > 1:
            raise ValueError(
                f"teachers.{name}.path = 'self' is the weights at the start of a step, which change within it: "
                f"trainer.{key} = {number}; valid: 1"
            )
    if teacher.context and (experiment.environment.name, experiment.hooks.rollout) != ("single_turn",) * 2:
        raise ValueError(
            f"teachers.{name}.context takes the place of a single turn's prompt, and environment.name = "
            f"{experiment.environment.name!r}, hooks.rollout = {experiment.hooks.rollout!r}; valid: 'single_turn'"
        )
    if not teacher.scores:
        return
    reason = "" if rollout.temperature == 1 else f"rollout.temperature = {rollout.temperature:g}"
    if rollout.truncates or experiment.kept_sets:
        reason = f"rollout.top_p = {rollout.top_p:g}, top_k = {rollout.top_k}"
        reason = reason if rollout.truncates else "algorithm.allow_truncated_sampling = true"
    if reason:
        keys = "address" if teacher.address else f"devices, of generator.engine = {experiment.generator.engine!r},"
        raise ValueError(
            f"teachers.{name} with {keys} answers for the whole vocabulary at temperature 1, not for "
            f"{reason}; valid: a teacher without devices and address"
        )
    if teacher.address and experiment.run.deterministic:
        raise ValueError(f"teachers.{name}.address: run.deterministic = true excludes a server, whose bits may vary")


def _require_objective(experiment: Experiment) -> None:
    algorithm = experiment.algorithm
    if algorithm.kl_target is not None and not algorithm.kl_coefficient:
        raise ValueError(
            f"algorithm.kl_target = {algorithm.kl_target:g} multiplies the coefficient step by step, and "
            "algorithm.kl_coefficient = 0 stays 0: set kl_coefficient above 0, or leave kl_target out"
        )
    max_cut = MOST_KL_ERROR * experiment.queue.groups_per_step * experiment.largest_group
    if algorithm.kl_target is not None and max_cut >= KL_HORIZON:
        raise ValueError(
            f"algorithm.kl_target = {algorithm.kl_target:g}: a step of {max_cut / MOST_KL_ERROR:g} samples could take "
            f"all of the coefficient away, which then stays at 0: fewer than {KL_HORIZON / MOST_KL_ERROR:g}"
        )
    for key in ("early_stop_ratio", "early_stop_kl"):
        if (limit := getattr(algorithm, key)) is not None and experiment.trainer.updates_per_batch == 1:
            raise ValueError(
                f"algorithm.{key} = {limit:g} skips the later updates of a batch, and with trainer.passes = 1 "
                "trainer.optimizer_steps_per_batch = 1 has none; valid: 2 or more of one of them, or leave it out"
            )
    if algorithm.sequence_mask_by != "mean" and algorithm.sequence_mask is None:
        raise ValueError(
            f"algorithm.sequence_mask_by = {algorithm.sequence_mask_by!r} masks nothing: set algorithm.sequence_mask = "
            "[lowest, highest], or leave it out"
        )
    if algorithm.kl_coefficient > 0 and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        raise ValueError(
            "algorithm.kl_estimator = 'k1' has no gradient in expectation when algorithm.kl_in = 'loss': valid: "
            "k2, k3, k1_unbiased, k3_unbiased, or kl_in = 'reward'"
        )
    if algorithm.kl_in == "reward" and algorithm.kl_estimator != "k1" and algorithm.kl_coefficient > 0:
        raise ValueError(
            f"algorithm.kl_in = 'reward' takes kl_estimator = 'k1', the log-ratio of each token, not "
            f"{algorithm.kl_estimator!r}"
        )


def _require_shards(experiment: Experiment) -> None:
    """Check that the ranks can divide copies of the model, tokens and experts."""
    settings, quantization = experiment.trainer, experiment.model.quantization
    ranks, shards, context = len(settings.devices), settings.shards, settings.context_parallel
    devices_text = f"the {ranks} ranks of trainer.devices"
    _require_divisor("context_parallel", context, ranks, devices_text)
    if shards != "all":
        by_context = f"{ranks} / {context}, the ranks of trainer.devices by trainer.context_parallel"
        shards_text = devices_text if context == 1 else by_context
        _require_divisor("shards", shards, ranks // context, shards_text, ", all, auto")
    copy_ranks, copy_text = ranks, devices_text
    if shards not in (1, "all"):  # auto is 1 here: a copy then has as many ranks as its experts need
        copy_ranks, copy_text = shards * context, f"the {shards * context} ranks of a copy (trainer.shards = {shards})"
    _require_divisor("expert_parallel", settings.expert_parallel, copy_ranks, copy_text)
    keys = zip(("shards", "context_parallel", "expert_parallel"), settings.layout_of(ranks), strict=True)
    dividing_keys = [key for key, number in keys if number > 1][::-1]
    if quantization is not None and (dividing_keys or settings.host_memory == "all"):
        valid = f"{dividing_keys[0]} = 1" if dividing_keys else "host_memory = 'none' or 'optimiser'"
        raise ValueError(
            f"model.quantization = {quantization!r}: matrices of codes can't be gathered from ranks or from the host's "
            f"memory; valid: trainer.{valid}, or no quantization"
        )


def _require_muon(experiment: Experiment) -> None:
    settings, fault = experiment.trainer, "trainer.optimizer = 'muon' orthogonalises complete matrices of the model"
    if settings.optimizer != "muon":
        return
    if experiment.model.adapter is not None:
        raise ValueError(f"{fault}, and [model.adapter] trains others; valid: 'adamw'")
    for key in ("shards", "context_parallel", "expert_parallel"):
        if (number := getattr(settings, key)) != 1:
            raise ValueError(f"{fault}, and trainer.{key} = {number!r} divides them; valid: {key} = 1, or 'adamw'")
    if settings.host_memory == "all":
        raise ValueError(f"{fault}; valid with it: trainer.host_memory = 'none' or 'optimiser'")


def _require_divisor(key: str, number: int, total: int, total_text: str, more: str = "") -> None:
    if total % number:
        valid = ", ".join(str(divisor) for divisor in range(1, total + 1) if not total % divisor)
        raise ValueError(f"trainer.{key} = {number} doesn't divide {total_text}; valid: {valid}{more}")


def _require_parts(experiment: Experiment) -> None:
    """Check that no key needs the whole batch where it is trained in parts."""
    algorithm, group_count, config = experiment.algorithm, experiment.queue.groups_per_part, experiment.trainer
    if group_count is None:
        return
    fault = f"queue.groups_per_part = {group_count} trains on a batch before it is complete"
    for rule in experiment.rules.algorithms:
        if rule.advantage in BATCH_ADVANTAGES:
            raise ValueError(
                f"{fault}; algorithm.advantage = {rule.advantage!r} needs all of it: leave one of them out"
            )
    denominators = denominators_of(stream_rules(experiment.rules, experiment.demonstrations))
    if len(denominators) > 1:
        raise ValueError(
            f"{fault}, and divides its gradients once: the loss has several denominators, {', '.join(denominators)}; "
            "leave it out, or train one stream with one algorithm.aggregation"
        )
    if experiment.demonstrations.data is not None:
        raise ValueError(f"{fault}, whose demonstrations are of all of it: leave demonstrations.data or it out")
    if algorithm.second_moment_limit is not None:
        raise ValueError(f"{fault}; algorithm.second_moment_limit bounds a mean over all of it: leave one of them out")
    for key, verb in (("optimizer_steps_per_batch", "divides"), ("passes", "repeats")):
        if (number := getattr(config, key)) > 1:
            raise ValueError(f"{fault}; trainer.{key} = {number} {verb} all of it: leave one of them out")
    if experiment.run.deterministic and experiment.queue.budget:
        raise ValueError(
            f"{fault}, in the order of finishing, which run.deterministic = true excludes unless queue.budget = 0"
        )


def _require_packing(experiment: Experiment) -> None:
    trainer = experiment.trainer
    if (trainer.packing == "fixed") != (trainer.micro_batch_samples is not None):
        verb = "needs" if trainer.packing == "fixed" else "doesn't use"
        raise ValueError(
            f"trainer.packing = {trainer.packing!r} {verb} trainer.micro_batch_samples, the samples of a forward "
            "pass under 'fixed'"
        )


def _require_publishing(experiment: Experiment) -> None:
    queue, weights = experiment.queue, experiment.weights
    if queue.budget < weights.steps_per_publish - 1:
        raise ValueError(
            f"queue.budget = {queue.budget} deadlocks with weights.steps_per_publish = "
            f"{weights.steps_per_publish}: the budget must be at least steps_per_publish - 1"
        )


def _require_update_mode(experiment: Experiment) -> None:
    if experiment.generator.update_mode == "finish" and experiment.model.adapter is None:
        raise ValueError(
            "generator.update_mode = 'finish' lets requests end on the weights they began with, which an engine keeps "
            "beside newer ones only where they are an adapter's: set [model.adapter], or one of keep, recompute, abort"
        )


def _require_optimizer_step_staleness(experiment: Experiment) -> None:
    """Check that a batch's last optimiser step, on samples as old as the budget allows, keeps to the limit."""
    queue, settings, updates = experiment.queue, experiment.trainer, experiment.trainer.updates_per_batch
    limit, masked_after = queue.max_optimizer_step_staleness, experiment.token_budget
    oldest = queue.budget if masked_after is None else min(queue.budget, masked_after)
    worst = (oldest + 1) * updates - 1
    if limit is not None and worst > limit:
        max_budget = (limit + 1) // updates - 1
        valid_text = f"queue.budget = {max_budget}" if max_budget >= 0 else f"at least {updates - 1}"
        raise ValueError(
            f"queue.max_optimizer_step_staleness = {limit}: trainer.optimizer_steps_per_batch = "
            f"{settings.optimizer_steps_per_batch} in trainer.passes = {settings.passes} turns a staleness of {oldest} "
            f"steps into up to {worst}; valid: {valid_text}, or fewer optimiser steps"
        )


def _require_known_advantages(experiment: Experiment) -> None:
    """Check that keys which use advantages or rewards get them at the right time and in the right form."""
    algorithm, queue, hooks = experiment.algorithm, experiment.queue, experiment.hooks
    if queue.min_advantage > 0 and algorithm.advantage in BATCH_ADVANTAGES:
        raise ValueError(
            f"queue.min_advantage = {queue.min_advantage:g} is applied to each group as it finishes, but "
            f"algorithm.advantage = {algorithm.advantage!r} is known only once the batch is formed"
        )
    if algorithm.advantage in ("length_weighted", "pass_at_k") and algorithm.turn_discount is not None:
        raise ValueError(
            f"algorithm.advantage = {algorithm.advantage!r} compares whole attempts, and algorithm.turn_discount "
            "learns from one return for each turn: leave one of them out"
        )
    if algorithm.advantage == "pass_at_k" and algorithm.parameters.k >= experiment.smallest_group:
        raise ValueError(
            f"algorithm.parameters.k = {algorithm.parameters.k} for groups of {experiment.smallest_group}: a whole "
            f"group has one best, so every advantage would be 0; valid: 1 to {experiment.smallest_group - 1}"
        )
    if algorithm.second_moment_limit is not None and hooks.pad_group != "none":
        raise ValueError(
            f"hooks.pad_group = {hooks.pad_group!r} would count copies in the batch's mean that "
            "algorithm.second_moment_limit bounds: leave one of them out"
        )
    if algorithm.turn_discount is not None and hooks.normalize_group != "identity":
        raise ValueError(
            f"hooks.normalize_group = {hooks.normalize_group!r} is given one reward for each rollout, and "
            "algorithm.turn_discount learns from one for each turn: leave one of them out"
        )


def _require_determinism(experiment: Experiment) -> None:
    if not experiment.run.deterministic:
        return
    generator = experiment.generator
    kv_tokens, needed_tokens = generator.kv_capacity_tokens, generator.slots * experiment.max_sequence_tokens
    if kv_tokens is not None and kv_tokens < needed_tokens:
        raise ValueError(
            f"generator.kv_capacity_tokens = {kv_tokens} makes requests wait for each other, so results would depend "
            "on when they arrive, which run.deterministic = true excludes: at least generator.slots x "
            f"(rollout.max_prompt_tokens + rollout.max_response_tokens) = {needed_tokens}, or leave it out"
        )
    if experiment.control.mode == "act":
        raise ValueError(
            "control.mode = 'act' sets the run's knobs by the times it measures, which run.deterministic = true "
            "excludes: valid: 'off' or 'advise'"
        )


def _require_surplus(experiment: Experiment) -> None:
    queue = experiment.queue
    if queue.surplus != "continue" and queue.oversampling is None:
        raise ValueError(f"queue.surplus = {queue.surplus!r} needs queue.oversampling: groups open for each in a batch")
    if queue.surplus != "discard" and queue.oversampling is not None and queue.oversampling > queue.budget + 1:
        raise ValueError(
            f"queue.oversampling = {queue.oversampling:g} with queue.budget = {queue.budget}: surplus that is kept "
            f"is trained later, so at most budget + 1 = {queue.budget + 1} times a batch can be open; or queue."
            "surplus = 'discard'"
        )


def _require_pruning(experiment: Experiment) -> None:
    experiment.pruning.require_possible(
        longest_tokens=experiment.rollout.max_response_tokens,
        group_size=experiment.largest_group,
        deterministic=experiment.run.deterministic,
    )
    if experiment.pruning.kinds and experiment.hooks.rollout != "single_turn":
        raise ValueError(
            f"hooks.rollout = {experiment.hooks.rollout!r} with [pruning]: pruners read responses of a single turn; "
            "valid: hooks.rollout = 'single_turn', or no pruner"
        )


def _require_environment(experiment: Experiment) -> None:
    """Check for keys that don't work with rollouts of several turns."""
    name, hook = experiment.environment.name, experiment.hooks.rollout
    if name != "remote" and experiment.buffer != BufferConfig():
        raise ValueError(
            f"[buffer.service] has no effect with environment.name = {name!r}: valid: environment.name = 'remote'"
        )
    if name == "single_turn":
        return
    if hook != "single_turn":
        raise ValueError(f"hooks.rollout = {hook!r} with environment.name = {name!r}: leave one of them out")
    if experiment.pruning.kinds:
        raise ValueError(
            f"environment.name = {name!r} with [pruning]: pruners read responses of a single turn; valid: "
            "environment.name = 'single_turn', or no pruner"
        )
    if experiment.rollout.stop:
        raise ValueError(
            f"rollout.stop = {list(experiment.rollout.stop)!r} with environment.name = {name!r}: agents "
            "and environments decide what ends an answer; leave it out"
        )
    if experiment.algorithm.overlong == "penalty":
        raise ValueError(
            f"algorithm.overlong = 'penalty' with environment.name = {name!r}: answers of several turns have no common "
            "limit that a penalty could rise to; valid: 'score', 'mask', 'filter'"
        )
    if experiment.algorithm.turn_discount is not None and experiment.environment.calls:
        raise ValueError(
            f"algorithm.turn_discount with environment.name = {name!r}: an agent's calls have one reward, and needn't "
            "be one after the other; leave it out"
        )


def _require_reproducible_sampling(experiment: Experiment) -> None:
    rollout = experiment.rollout
    if rollout.truncates and not experiment.algorithm.allow_truncated_sampling:
        raise ValueError(
            f"rollout.top_p = {rollout.top_p:g} with rollout.top_k = {rollout.top_k} gives "
            "samples of a part of the vocabulary: set top_p = 1 and top_k = 0, or "
            "algorithm.allow_truncated_sampling = true, with which the trainer replays that part"
        )


def _require_group_sizes(experiment: Experiment) -> None:
    smallest, size, largest = experiment.smallest_group, experiment.rollout.group_size, experiment.largest_group
    if not smallest <= size <= largest:
        raise ValueError(
            f"curriculum.min_group_size = {smallest} and max_group_size = {largest} must enclose "
            f"rollout.group_size = {size}"
        )
    if experiment.curriculum.mode == "adaptive" and smallest < 2:
        raise ValueError(
            f"curriculum.mode = 'adaptive' selects tasks whose attempts differ: groups need 2 or more, not {smallest}"
        )
    limit = max(largest, experiment.evaluation.samples_per_task)
    for k in experiment.ledger.pass_at:
        if k > limit:
            raise ValueError(f"ledger.pass_at has {k}, which no group of {limit} attempts reaches: valid: 1 to {limit}")
    if experiment.queue.groups_per_step * size < 2:
        raise ValueError(
            f"queue.groups_per_step = {experiment.queue.groups_per_step} times rollout.group_size = {size} "
            "must be at least 2"
        )


def _require_variable_name(experiment: Experiment) -> None:
    name = experiment.alerts.webhook_env
    if name and not name.isidentifier():  # not shown: it may be the URL itself
        raise ValueError("alerts.webhook_env isn't a name; valid: the name of an environment variable with the URL")
