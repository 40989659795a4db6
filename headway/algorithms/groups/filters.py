"""Applies filters and group hooks once when a group has finished: they remove members, or the group."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headway.algorithms.groups.batches import advantages_of_turns, length_cost, trains_without_reward
from headway.algorithms.groups.hooks import GroupHooks, resolve_hooks
from headway.algorithms.groups.outcome import GroupOutcome, advantage_outcome, failed_outcome, group_outcome
from headway.algorithms.groups.rewards import credits_of
from headway.config.schema import GAE, Experiment
from headway.records.errors import HookFailed
from headway.records.rollout import FinishedGroup, Group, Rollout


class FilteredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A finished group after its filters, as it is committed, so that every replay builds the same batch."""

    finished: FinishedGroup  # its members with ``removal``, ``trained_reward`` and ``copies``
    outcome: GroupOutcome
    meta: dict[str, float] = {}  # the statistics that hooks.group_meta returned
    problems: tuple[HookFailed, ...] = ()  # hooks that broke their contract; any but group_meta's fails the group


class GroupFilters:
    """The filters and hooks of an experiment.

    They are applied in this order: overlong members, and trees under a critic, are filtered; rewards are shaped;
    statistics are taken; the group fails when too few members are sound, or is refused; members are filtered; the group
    is filtered when too few are kept or their rewards don't differ; rewards are normalised; the group is filtered when
    its advantages are too small; copies pad it. A filtered group ends at once and returns its credit, so that another
    is generated in its place.
    Groups that more than their rewards trains aren't filtered for these.
    """

    def __init__(self, experiment: Experiment, text: Callable[[Rollout], str]) -> None:
        """``text`` decodes a response. Raises ConfigurationError for a hook that can't be imported or called."""
        self._experiment, self._rules = experiment, experiment.rules
        self._hooks: GroupHooks = resolve_hooks(experiment.hooks)
        self._text = text

    def apply(self, finished: FinishedGroup) -> FilteredGroup:
        """Filter a group whose members are verified: mark the members that leave, and decide the group's outcome.

        Pure but for the hooks. The group fails if a hook breaks its contract, except group_meta, whose fault is only
        reported in ``problems``."""
        group, problems = finished.group, list[HookFailed]()
        meta: dict[str, float] = {}
        try:
            members = self._shaped(group, self._without_untrainable(finished.rollouts))
        except HookFailed as problem:
            return self._failed(finished, meta, [problem])
        try:
            meta = self._hooks.meta_of(group, members)
        except HookFailed as problem:
            problems.append(problem)
        try:
            members, outcome = self._with_outcome(group, members)
        except HookFailed as problem:
            return self._failed(finished, meta, [*problems, problem])
        filtered = FinishedGroup(group=group, rollouts=members)
        return FilteredGroup(finished=filtered, outcome=outcome, meta=meta, problems=tuple(problems))

    def _failed(self, finished: FinishedGroup, meta: dict[str, float], problems: list[HookFailed]) -> FilteredGroup:
        """Fail the group: training on members that a broken hook didn't filter would be worse than losing it."""
        outcome = GroupOutcome(ending="failed", reason=f"hook:{problems[-1].short}", valid=len(finished.valid))
        return FilteredGroup(finished=finished, outcome=outcome, meta=meta, problems=tuple(problems))

    def _without_untrainable(self, members: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        algorithm = self._experiment.algorithm
        if algorithm.overlong == "filter":
            members = tuple(_filtered(r, "overlong") if r.valid and r.truncated else r for r in members)
        if algorithm.advantage == GAE:  # the tokens of a tree have no order in which values follow each other
            members = tuple(_filtered(r, "branches") if r.valid and r.branches else r for r in members)
        return members

    def _shaped(self, group: Group, members: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        hooks = self._hooks
        if hooks.default("reward"):
            return members
        return tuple(
            msgspec.structs.replace(r, trained_reward=hooks.reward_of(group, r, self._text(r))) if r.valid else r
            for r in members
        )

    def _with_outcome(self, group: Group, members: tuple[Rollout, ...]) -> tuple[tuple[Rollout, ...], GroupOutcome]:
        hooks, experiment = self._hooks, self._experiment
        early_outcome = failed_outcome(members, size=group.size, limits=experiment.queue)
        if early_outcome is not None:
            return members, early_outcome
        if refusal_reason := hooks.group_refusal(group, members):
            valid_count = sum(r.valid for r in members)
            return members, GroupOutcome(ending="filtered", reason=refusal_reason, valid=valid_count)
        if not hooks.default("filter_item"):
            members = tuple(self._filtered_by_hook(group, r) if r.valid else r for r in members)
        discount = experiment.algorithm.turn_discount
        member_credits = [credit for r in members if r.valid for credit in credits_of(r, _reward(r), discount)]
        rule, valid_members = self._rules.of(group.task.source), [r for r in members if r.valid]
        limits = experiment.queue
        if trains_without_reward(valid_members, rule):  # equal rewards and small advantages don't matter
            limits = limits.model_copy(update={"filter_zero_variance": False, "min_advantage": 0.0})
        outcome = group_outcome(members, size=group.size, limits=limits, signal=member_credits)
        if outcome.ending is not None:
            return members, outcome
        members = self._normalized(group, members)
        if limits.min_advantage:
            turns_by_member = advantages_of_turns([r for r in members if r.valid], experiment, rule)
            advantages = [advantage for turns in turns_by_member for advantage in turns]
            outcome = advantage_outcome(outcome, advantages, limits.min_advantage)
        return (members if outcome.ending is not None else self._padded(group, members)), outcome

    def _filtered_by_hook(self, group: Group, rollout: Rollout) -> Rollout:
        refusal_reason = self._hooks.item_refusal(group, rollout)
        return _filtered(rollout, refusal_reason) if refusal_reason else rollout

    def _normalized(self, group: Group, members: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        """Store the rewards that advantages are computed from: shaped by hooks, plus `length_cost`, normalised."""
        hooks, experiment = self._hooks, self._experiment
        if hooks.default("reward") and hooks.default("normalize_group"):
            return members  # `build_batch` applies the length cost itself
        valid_members = [r for r in members if r.valid]
        rewards = [_reward(r) + length_cost(r, experiment) for r in valid_members]
        if not hooks.default("normalize_group"):
            rewards = hooks.normalized(group, valid_members, rewards)
        by_member = dict(zip((r.member for r in valid_members), rewards, strict=True))
        return tuple(msgspec.structs.replace(r, trained_reward=by_member[r.member]) if r.valid else r for r in members)

    def _padded(self, group: Group, members: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        hooks = self._hooks
        if hooks.default("pad_group"):
            return members
        copies_by_member = hooks.copies(group, [r for r in members if r.valid])
        return tuple(msgspec.structs.replace(r, copies=copies_by_member[r.member]) if r.valid else r for r in members)


def _filtered(rollout: Rollout, reason: str) -> Rollout:
    return msgspec.structs.replace(rollout, removal="filtered", removal_reason=reason)


def _reward(rollout: Rollout) -> float:
    return rollout.reward if rollout.trained_reward is None else rollout.trained_reward
