"""How stale the groups of a training step were: by trajectory, by token, by environment, by optimiser step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.control.summaries import distribution
from headway.records.ledger import Distribution
from headway.records.rollout import FinishedGroup, Rollout


def staleness_fields(
    trained: Sequence[FinishedGroup], step: int, updates: int, token_budget: int | None = None, skipped: int = 0
) -> dict[str, Any]:
    """The record's fields on the staleness of the groups ``trained`` at ``step``, in ``updates`` optimiser steps of
    which the last ``skipped`` were left out; but for that of tokens."""
    return {
        "trajectory_staleness": trajectory_staleness(trained, step, token_budget),
        "environment_staleness": environment_staleness(trained, step),
        "optimizer_step_staleness": optimizer_step_staleness(trained, step, updates, skipped, token_budget),
    }


def trajectory_staleness(groups: Sequence[FinishedGroup], step: int, token_budget: int | None = None) -> Distribution:
    """Staleness at ``step`` of every trained rollout's first token that carries loss: tokens staler than
    ``token_budget`` are masked."""
    return distribution(
        (max(ages), 1)
        for group in groups
        for rollout in group.valid
        if (ages := [age for age, _ in _ages(rollout, step, token_budget)])
    )


def token_staleness(groups: Sequence[FinishedGroup], step: int, token_budget: int | None = None) -> Distribution:
    """Staleness of every trained token at ``step``, masked ones left out."""
    return distribution(
        age for group in groups for rollout in group.valid for age in _ages(rollout, step, token_budget)
    )


def environment_staleness(groups: Sequence[FinishedGroup], step: int) -> Distribution:
    """Staleness at ``step`` of the environments that trained rollouts were resumed in."""
    versions = (rollout.environment_version for group in groups for rollout in group.valid)
    return distribution((step - version, 1) for version in versions if version >= 0)


def optimizer_step_staleness(
    groups: Sequence[FinishedGroup], step: int, updates: int, skipped: int = 0, token_budget: int | None = None
) -> Distribution:
    """Trajectory staleness at ``step`` in optimiser steps, where each step takes ``updates``: of the rollouts in the
    i-th minibatch (from 0) it is i more than ``updates`` times that in steps. ``skipped``: minibatches left out at the
    end. A step that left some out, or skipped one, counts as whole.

    Example: two updates a step, four groups that are one step old: 2 for the first two groups, 3 for the others.
    """
    minibatches = np.array_split(np.arange(len(groups)), max(1, min(updates, len(groups))))
    return distribution(
        (updates * int(age) + number, count)
        for number, minibatch in enumerate(minibatches[: len(minibatches) - skipped])
        for found in [trajectory_staleness([groups[at] for at in minibatch], step, token_budget)]
        for age, count in found.histogram.items()
    )


def _ages(rollout: Rollout, step: int, token_budget: int | None) -> list[tuple[int, int]]:
    """(staleness, tokens) of each span of versions."""
    ages = [(step - span.version, span.tokens) for sequence in rollout.sequences for span in sequence.versions]
    return ages if token_budget is None else [(age, tokens) for age, tokens in ages if age <= token_budget]
