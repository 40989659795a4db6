"""Makes a scenario from a run: hardware and workload estimated from its ledger, the rest from its experiment.

Rates are those of a window of steps. Parameters that a ledger doesn't identify get the defaults of
``control/tuning/ledger_model.py`` and are named in ``RunScenario.unidentified``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from headway.config.hooks import HOOKS
from headway.config.load import apply_overrides, validate
from headway.config.schema import Experiment
from headway.control.lengths import length_distribution
from headway.control.summaries import bucket_middle, bucket_width, pooled, weighted_mean
from headway.control.tuning.forecast import RunShape
from headway.control.tuning.ledger_model import LedgerModel, estimate, shape_of
from headway.control.tuning.run_figures import RunFigures, figures, steady, usable
from headway.planner.interference import InterferenceCosts, costs, separated_costs
from headway.planner.quantities import Quantity
from headway.planner.scenario import Scenario
from headway.planner.simulate import SCENARIO_FILE, is_simulated
from headway.planner.solve_rates import solve_rates
from headway.records.errors import ConfigurationError
from headway.records.ledger import EvaluationRecord, EventRecord, LedgerLine, StepRecord
from headway.runtime.devices import sharing
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.ledger import EVENT_RESUME, read_ledger
from headway.telemetry.summary import undisturbed

LEAST_STEPS = 4  # fewest informative steps to estimate rates from
TASKS = 10_000  # distinct tasks: enough that the choice of those drawn makes no difference
_RAMP = 1e-6  # between two values of a quantity, as a share
_ACCEPTANCE_DIFFERS = 0.02
_ROLLOUTS, _LEAST_STEPS_SIMULATED = 16_000, 30  # simulated by default, about

# Sections that are kept as they are, and keys in them that describe a live run alone.
_KEPT: dict[str, tuple[str, ...]] = {
    "rollout": (),
    "generator": ("devices", "engine", "dtype", "prefill_tokens_per_step"),
    "queue": (),
    "algorithm": ("preset", "loss"),
    "weights": ("exchange",),
    "control": (),
}


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run's experiment and ledger, as read from its folder."""

    path: Path
    experiment: Experiment
    lines: list[LedgerLine]
    shape: RunShape

    @property
    def steps(self) -> list[StepRecord]:
        """The steps that are informative about rates."""
        return usable(undisturbed(self.lines))

    @property
    def last_session(self) -> list[StepRecord]:
        """The steps since the last resume (all, if there was none) that measure rates: trained, not rebuilt after a
        kill, undisturbed by incidents. Settings may differ before it."""
        numbered_events = ((index, line) for index, line in enumerate(self.lines) if isinstance(line, EventRecord))
        resume_index = max((index for index, event in numbered_events if event.event == EVENT_RESUME), default=-1)
        return usable(undisturbed(self.lines[resume_index + 1 :]))


class RunScenario(msgspec.Struct, frozen=True, kw_only=True):
    """The scenario that a run's ledger describes."""

    scenario: Scenario
    raw: dict[str, Any]  # the scenario as in a file, without keys at their defaults
    run: str
    first_step: int  # first step that it was estimated from
    last_step: int
    live: RunFigures  # the live run's figures over those steps
    unidentified: dict[str, str]  # parameter -> why, and what is assumed instead


def read_run(path: str | Path) -> RecordedRun:
    """Read a run's folder. Raises ConfigurationError where there is no run, its experiment or ledger can't be read, or
    its rollouts have several turns, about which a ledger says too little."""
    folder = Path(path)
    directory = RunDirectory(folder)
    experiment = directory.read_experiment()
    lines = read_ledger(folder)
    for key, maker in (("hooks.rollout", experiment.hooks.rollout), ("environment.name", experiment.environment.name)):
        if maker != "single_turn":
            raise ConfigurationError(
                f"{folder}: its rollouts are made by {key} = {maker!r}, and a ledger doesn't record what their turns "
                "took: describe them in a scenario file ([workload] turns, turn_tokens, tool_s)"
            )
    devices, ranks = experiment.generator.devices, experiment.trainer.devices
    shape = shape_of(experiment, len(sharing(devices, ranks)))
    if is_simulated(folder):
        scenario = _read_scenario(folder / SCENARIO_FILE)
        if scenario.workload.multi_turn:
            raise ConfigurationError(
                f"{folder} simulates rollouts of several turns: a ledger doesn't record what they took"
            )
        hardware = scenario.hardware
        yielded_replicas = len(devices) if hardware.generator.shares_devices else 0
        shape = msgspec.structs.replace(
            shape, verifiers=hardware.verifiers, ranks=hardware.trainer.devices, yielded_replicas=yielded_replicas
        )
    return RecordedRun(path=folder, experiment=experiment, lines=lines, shape=shape)


def _read_scenario(path: Path) -> Scenario:
    """The scenario of a simulated run, from its folder. Raises ConfigurationError."""
    try:
        raw_scenario = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} can't be read: {error}") from None
    known_sections = ("hardware", "workload")
    return validate({name: raw_scenario[name] for name in known_sections if name in raw_scenario}, str(path), Scenario)


def window(run: RecordedRun, asked: tuple[int | None, int | None] | None = None) -> list[StepRecord]:
    """The steps to estimate from: ``asked[0]`` to ``asked[1]`` (exclusive), or the last half of the steady ones. Raises
    ConfigurationError where they are too few."""
    budget, steps = run.experiment.queue.budget, run.steps
    if asked is not None:
        first, end_step = asked[0] or 0, math.inf if asked[1] is None else asked[1]
        chosen = [step for step in steps if first <= step.step < end_step]
        subset = f"of its steps from {first} to before {'the end' if asked[1] is None else asked[1]}"
    else:
        steps = run.last_session
        first = steps[0].step if steps else 0
        settled_steps = [step for step in steady(steps, budget, run.experiment.run.steps) if step.step > first + budget]
        if len(settled_steps) < LEAST_STEPS:  # a run that is as short as its queue
            settled_steps = [step for step in steps if step.step > first + budget]
        chosen = settled_steps[-max(LEAST_STEPS, len(settled_steps) // 2) :]
        subset = f"of its steps after the first {budget + 1}{' since the resume' * (first > 0)}, which fill the queue,"
    if len(chosen) < LEAST_STEPS:
        raise ConfigurationError(
            f"{run.path}: {len(chosen)} {subset} show its rates, and {LEAST_STEPS} are needed (skipped steps and those "
            "rebuilt after a kill don't count)"
        )
    return chosen


def scenario_from(
    run: RecordedRun,
    steps: Sequence[StepRecord],
    overrides: Sequence[str] = (),
    *,
    beside: tuple[RecordedRun, Sequence[StepRecord]] | None = None,
) -> RunScenario:
    """Estimate the scenario of ``run`` from its ``steps`` (``window``), with ``overrides``. ``beside``: another run of
    the same load on the same machine, from which interference is estimated. Raises ConfigurationError."""
    shape = run.shape
    model, live = estimate(steps, shape), figures(steps)
    if model is None or live is None:
        raise ConfigurationError(f"{run.path}: no response finished in steps {steps[0].step} to {steps[-1].step}")
    unidentified = dict(model.unidentified) | _not_simulated(run, steps, model)
    if beside is None:
        phase_costs = costs(steps, shape.replicas, shape.even_requests)
    else:
        other, other_steps = beside
        if other.shape.replicas != shape.replicas:
            raise ConfigurationError(
                f"{other.path} has {other.shape.replicas} replicas and {run.path} {shape.replicas}: interference "
                "can only be estimated from runs on the same machine"
            )
        phase_costs = separated_costs(steps, other_steps, shape.replicas, shape.even_requests)
        del unidentified["interference"]
        if phase_costs.unknown:
            unidentified["interference"] = (
                f"{' and '.join(phase_costs.unknown)} meets the other side about equally in both runs: its rate "
                "includes that cost"
            )
    seed, directory = run.experiment.run.seed, _default_directory(run.path)
    raw_scenario = {
        "run": {"seed": seed, "directory": directory, "steps": steps_to_simulate(run.experiment)},
        **kept_sections(run.experiment, unidentified),
        "hardware": _hardware(run, steps, model, phase_costs),
        "workload": _workload(run, steps, model, unidentified),
    }
    apply_overrides(raw_scenario, overrides, Scenario)
    scenario = validate(raw_scenario, f"the scenario of {run.path}", Scenario)
    if Path(scenario.run.directory).resolve() == run.path.resolve():
        raise ConfigurationError(f"run.directory = {scenario.run.directory!r} is the run itself: choose another one")
    return RunScenario(
        scenario=scenario,
        raw=raw_scenario,
        run=str(run.path),
        first_step=steps[0].step,
        last_step=steps[-1].step,
        live=live,
        unidentified=unidentified,
    )


def _default_directory(path: Path) -> str:
    """The simulation's default folder: runs/simulated/NAME, or another name beside it where that is ``path`` itself."""
    directory = Path("runs/simulated") / path.resolve().name
    return str(directory if directory.resolve() != path.resolve() else directory.with_name(f"{directory.name}-again"))


def steps_to_simulate(experiment: Experiment) -> int:
    filling_steps = 2 * (experiment.queue.budget + 1)
    samples_per_step = experiment.queue.groups_per_step * experiment.rollout.group_size
    return filling_steps + max(_LEAST_STEPS_SIMULATED, math.ceil(_ROLLOUTS / samples_per_step))


# --- from the experiment ---------------------------------------------------------------------------------


def kept_sections(experiment: Experiment, unidentified: dict[str, str]) -> dict[str, Any]:
    """The experiment's sections that a scenario has as well; the user's own functions are left out and named."""
    configured = experiment.model_dump(mode="json", exclude_defaults=True)
    sections: dict[str, Any] = {}
    for section, dropped_keys in _KEPT.items():
        kept_keys = {key: value for key, value in configured.get(section, {}).items() if key not in dropped_keys}
        if kept_keys:
            sections[section] = kept_keys
    sections["checkpoint"] = {"every_steps": experiment.checkpoint.every_steps}  # a scenario has another default
    settings = configured.get("trainer", {})
    if updates := {key: settings[key] for key in ("optimizer_steps_per_batch", "passes") if key in settings}:
        sections["trainer"] = updates  # which early stops are of, and staleness in optimiser steps
    if teacher := experiment.algorithm.teacher:  # a source's own has no place, as a scenario has no sources
        sections["teachers"] = {teacher: configured["teachers"][teacher]}
    names: list[str] = []
    if ":" in experiment.algorithm.advantage:
        sections["algorithm"].pop("advantage")
        names.append("algorithm.advantage")
    hooks = configured.get("hooks", {})
    names += [f"hooks.{key}" for key, value in hooks.items() if value not in HOOKS[key]]
    kept_hooks = {key: value for key, value in hooks.items() if value in HOOKS[key]}
    if kept_hooks:
        sections["hooks"] = kept_hooks
    if names:
        unidentified["functions"] = f"{', '.join(names)}: the run's hooks are not called; acceptance includes them"
    return sections


def _not_simulated(run: RecordedRun, steps: Sequence[StepRecord], model: LedgerModel) -> dict[str, str]:
    """Features of the run in these steps that its simulation leaves out: parameter -> why."""
    experiment, omissions = run.experiment, dict[str, str]()
    truncated = _truncated_share(steps)
    if truncated > 0.001:
        omissions["long responses"] = (
            f"{truncated:.1%} were cut at rollout.max_response_tokens = {experiment.rollout.max_response_tokens}: "
            "with a larger limit they are assumed to end there"
        )
    if experiment.pruning.kinds:
        omissions["pruning"] = "lengths are those with the run's [pruning], which isn't simulated"
    if experiment.curriculum.mode == "adaptive":
        omissions["curriculum"] = "solve rates are those of the tasks that it drew; it isn't simulated"
    if experiment.surplus_groups:
        omissions["lengths"] = (
            "discarded responses have only a mean length so far: they are assumed to continue from it"
        )
    if 0 < run.shape.yielded_share < 1:
        omissions["shared devices"] = (
            f"{run.shape.yielded_replicas} of {run.shape.replicas} replicas were idle during training steps: "
            f"{'all' if run.shape.yielded_share >= 0.5 else 'none'} of the simulated ones do"
        )
    first_index, last_index = run.lines.index(steps[0]), run.lines.index(steps[-1])
    evaluations = [line for line in run.lines[first_index:last_index] if isinstance(line, EvaluationRecord)]
    if evaluations:
        omissions["evaluations"] = f"{len(evaluations)} ran beside these steps; they are not simulated"
    if model.preemptions_per_response > 0.01:
        omissions["preemptions"] = "what they cost is in the time of a decode step"
    return omissions


# --- from the ledger -------------------------------------------------------------------------------------


def _hardware(
    run: RecordedRun, steps: Sequence[StepRecord], model: LedgerModel, interference: InterferenceCosts
) -> dict[str, Any]:
    queue_model, decode, train = model.model, interference.decode, interference.train
    generator: dict[str, Any] = {
        "replicas": run.shape.replicas,
        "decode_fixed_s": _rounded(decode.fixed),
        "decode_request_s": _rounded(decode.slope),
        "update_s": _rounded(queue_model.pause_s),
        "shares_devices": run.shape.yielded_share >= 0.5,
    }
    if interference.generator_beside > 1:
        generator["beside"] = _rounded(interference.generator_beside)
    trainer: dict[str, Any] = {
        "devices": run.shape.ranks,
        "step_fixed_s": _rounded(train.fixed),
        "token_s": _rounded(train.slope),
        "publish_s": _rounded(queue_model.publish_s),
        "checkpoint_s": _rounded(_mean_of_positive([step.checkpoint_s for step in steps])),
    }
    if interference.trainer_beside > 1:
        trainer["beside"] = _rounded(interference.trainer_beside)
    trained_tokens = sum(step.flow.trained_tokens for step in steps)
    flops = sum(step.flops_per_s * step.step_s for step in steps)
    if flops and trained_tokens and steps[-1].peak_flops_per_s:
        trainer["flops_per_token"] = _rounded(flops / trained_tokens)
        trainer["peak_flops_per_s"] = _rounded(steps[-1].peak_flops_per_s)
    hardware: dict[str, Any] = {"verifiers": run.shape.verifiers, "generator": generator, "trainer": trainer}
    if queue_model.teach_response_s:
        teach_s = _rounded(queue_model.teach_response_s)
        hardware["teachers"] = {"at_once": queue_model.teachers, "rollout_s": teach_s}
    return hardware


def _workload(
    run: RecordedRun, steps: Sequence[StepRecord], model: LedgerModel, unidentified: dict[str, str]
) -> dict[str, Any]:
    experiment, group_size = run.experiment, run.experiment.rollout.group_size
    histogram = [sum(bins) for bins in zip(*(r.rewards.solve_rate_histogram for r in steps if r.rewards), strict=True)]
    is_filtered = experiment.queue.filter_zero_variance and not experiment.algorithm.trains_equal_rewards
    acceptance = model.model.acceptance
    rates = solve_rates(histogram, group_size, acceptance if is_filtered else None)
    simulated = rates.mixed_groups if is_filtered else 1.0
    if abs(simulated - acceptance) > _ACCEPTANCE_DIFFERS:
        unidentified["acceptance"] = (
            f"{acceptance:.0%} of the groups were accepted, {simulated:.0%} of the simulated ones are: groups that "
            "failed or that hooks left out, and rewards beside solved and unsolved, are not simulated"
        )
    return {
        "tasks": TASKS,
        "prompt_tokens": _rounded(max(1.0, model.model.prompt_tokens)),
        "response_tokens": _as_toml(response_tokens(steps, experiment.rollout.max_response_tokens)),
        "group_correlation": _rounded(model.model.group_correlation),
        "solve_rate": _as_toml(rates.solve_rate),
        "trivial_share": rates.trivial_share,
        "impossible_share": rates.impossible_share,
        "verify_s": _rounded(model.model.verify_response_s),
    }


def response_tokens(steps: Sequence[StepRecord], limit_tokens: int) -> Quantity:
    """Distribution of the lengths of finished responses: linear within the histogram's buckets, scaled to the exact
    mean; truncated ones count as a token longer than the limit. Discarded ones are taken to have been cut off at their
    mean length (control/lengths.py)."""
    length_summaries = [step.lengths for step in steps if step.lengths]
    counts = pooled(summary.histogram for summary in length_summaries)
    total_tokens = sum(summary.mean * summary.responses for summary in length_summaries)
    cut_count = round(_truncated_share(steps) * counts.total())
    total_tokens -= cut_count * limit_tokens
    cuts_left = cut_count
    for bucket_end in sorted(counts, reverse=True):  # the longest are those that were cut
        taken_count = min(cuts_left, counts[bucket_end])
        counts[bucket_end] -= taken_count
        cuts_left -= taken_count
    bucket_ends = [bucket_end for bucket_end in sorted(counts) if counts[bucket_end] > 0]
    rough_tokens = sum(bucket_middle(bucket_end) * counts[bucket_end] for bucket_end in bucket_ends)
    scale = total_tokens / rough_tokens if rough_tokens else 1.0
    share_by_end = _shares(steps, counts, cut_count)
    points: list[tuple[float, float]] = []
    share_below = 0.0
    for bucket_end in bucket_ends:
        low, high = (bucket_end - bucket_width(bucket_end) + 0.5) * scale, (bucket_end + 0.5) * scale
        if not points or low > points[-1][1]:
            points.append((round(share_below, 6) + (_RAMP if points else 0.0), low))
        share_below += share_by_end[bucket_end]
        points.append((round(share_below, 6), max(high, points[-1][1])))
    if cut_count:
        points += [(round(share_below, 6) + (_RAMP if points else 0.0), limit_tokens + 1.0), (1.0, limit_tokens + 1.0)]
    longest_tokens = limit_tokens + 1.0 if cut_count else float(limit_tokens)
    return Quantity(kind="quantiles", at=_with_rising_shares(points, longest_tokens))


def _with_rising_shares(points: Sequence[tuple[float, float]], longest: float) -> tuple[tuple[float, float], ...]:
    """Points with strictly rising shares up to 1: a bucket too light for six digits joins the one before it."""
    rising_points: list[tuple[float, float]] = []
    for share, raw_length in points:
        rounded_share, length = round(min(1.0, share), 6), round(min(raw_length, longest), 2)
        if rising_points and rounded_share <= rising_points[-1][0]:
            rising_points[-1] = (rising_points[-1][0], max(length, rising_points[-1][1]))
        else:
            rising_points.append((rounded_share, length))
    return (*rising_points[:-1], (1.0, rising_points[-1][1]))


def _shares(steps: Sequence[StepRecord], counts: Counter[int], cut: int) -> dict[int, float]:
    """Return last length of a bucket -> share of all responses, discarded ones counted."""
    engines = steps[-1].engines
    begun = max(1, engines.slots if engines else 0)  # at most so many of a step's discarded rollouts had tokens
    discarded = sum(min(begun, r.endings.get("discarded", 0)) for r in steps)
    so_far = sum(r.tokens.ended.get("discarded", 0) for r in steps if r.tokens) / discarded if discarded else 0.0
    ended_lengths = [(end, True) for end, count in counts.items() for _ in range(count)]
    beyond = max(counts) + 1  # stands for the length of those that were cut
    distribution = length_distribution(
        [*ended_lengths, *[(beyond, True)] * cut, *[(min(max(counts) - 1, round(so_far)), False)] * discarded], beyond
    )
    survival_by_end = dict(zip(distribution.tokens, distribution.survival, strict=True))
    ends = sorted(end for end, count in counts.items() if count > 0)
    survival_levels = [1.0, *(survival_by_end[end] for end in ends)]
    return {end: above - below for end, (above, below) in zip(ends, pairwise(survival_levels), strict=True)}


def _truncated_share(steps: Sequence[StepRecord]) -> float:
    length_summaries = [step.lengths for step in steps if step.lengths]
    return weighted_mean(length_summaries, lambda summary: summary.truncated_share, lambda summary: summary.responses)


def _as_toml(quantity: Quantity) -> Any:
    """The quantity in a scenario file's form: a number where it is constant, else a table."""
    if quantity.kind == "constant":
        return quantity.value
    return quantity.model_dump(mode="json", exclude_defaults=True)


def _mean_of_positive(values: Sequence[float]) -> float:
    positive_values = [value for value in values if value > 0]
    return sum(positive_values) / len(positive_values) if positive_values else 0.0


def _rounded(value: float) -> float:
    """``value`` rounded to six digits, to keep the file short."""
    return float(f"{value:.6g}")
