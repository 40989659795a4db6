"""Measures the staleness of a training step's groups by trajectory, token, environment and optimiser step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.algorithms.step_plan import pass_order
from headway.config.schema import Experiment, TrainerConfig
from headway.control.summaries import distribution
from headway.records.ledger import Distribution
from headway.records.rollout import FinishedGroup, Rollout


def staleness_fields(
    trained: Sequence[FinishedGroup], step: int, experiment: Experiment, skipped: int = 0
) -> dict[str, Any]:
    """The record's fields on staleness, except that of tokens, of the groups ``trained`` at ``step``, of whose
    optimiser steps the last ``skipped`` were left out."""
    token_budget, seed = experiment.token_budget, experiment.run.seed
    by_updates = optimizer_step_staleness(
        trained, step, experiment.trainer, seed=seed, skipped=skipped, token_budget=token_budget
    )
    return {
        "trajectory_staleness": trajectory_staleness(trained, step, token_budget),
        "environment_staleness": environment_staleness(trained, step),
        "optimizer_step_staleness": by_updates,
    }


def trajectory_staleness(groups: Sequence[FinishedGroup], step: int, token_budget: int | None = None) -> Distribution:
    """Staleness at ``step`` of the first token with loss of every trained rollout. Tokens staler than ``token_budget``
    are masked."""
    return distribution(
        (max(span_ages), 1)
        for group in groups
        for rollout in group.valid
        if (span_ages := [age for age, _ in _ages(rollout, step, token_budget)])
    )


def token_staleness(groups: Sequence[FinishedGroup], step: int, token_budget: int | None = None) -> Distribution:
    """Staleness of every trained token at ``step``, masked ones left out."""
    return distribution(
        aged_tokens for group in groups for rollout in group.valid for aged_tokens in _ages(rollout, step, token_budget)
    )


def environment_staleness(groups: Sequence[FinishedGroup], step: int) -> Distribution:
    """Staleness at ``step`` of the environments that trained rollouts were resumed in."""
    versions = (rollout.environment_version for group in groups for rollout in group.valid)
    return distribution((step - version, 1) for version in versions if version >= 0)


def optimizer_step_staleness(
    groups: Sequence[FinishedGroup],
    step: int,
    settings: TrainerConfig,
    *,
    seed: int = 0,
    skipped: int = 0,
    token_budget: int | None = None,
) -> Distribution:
    """Trajectory staleness at ``step`` in optimiser steps. Where each step takes K, in all its passes, the rollouts in
    the i-th minibatch (from 0) have K times their staleness in steps, and i more. ``seed``: the run's. ``skipped``:
    minibatches left out at the end. A step that left some out, or skipped one, counts as a full step.

    Example: two updates a step, four groups that are one step old: 2 for the first two groups, 3 for the others.
    """
    updates, parts = settings.updates_per_batch, max(1, min(settings.optimizer_steps_per_batch, len(groups)))
    minibatches = [
        minibatch
        for number in range(settings.passes)
        for minibatch in np.array_split(pass_order(len(groups), number=number, seed=seed, step=step), parts)
    ]
    return distribution(
        (updates * int(age) + number, count)
        for number, minibatch in enumerate(minibatches[: len(minibatches) - skipped])
        for staleness in [trajectory_staleness([groups[index] for index in minibatch], step, token_budget)]
        for age, count in staleness.histogram.items()
    )


def _ages(rollout: Rollout, step: int, token_budget: int | None) -> list[tuple[int, int]]:
    """(staleness, tokens) of each span of versions."""
    ages = [(step - span.version, span.tokens) for sequence in rollout.sequences for span in sequence.versions]
    return ages if token_budget is None else [(age, tokens) for age, tokens in ages if age <= token_budget]
