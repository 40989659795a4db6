"""Rules of early pruning: which rollouts end early, which are audited, and what pruning saved and cost.

A rollout that a pruner hits is *scored* (verified as it stands: it trains and stays in its group's baseline) or
*dropped* (it leaves its group). A fixed share is *audited*: hit all the same, but run to its own end.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from headway.control.lengths import LengthDistribution
from headway.records.ledger import PrunerFigures
from headway.records.rollout import FinishedGroup, Pruned, Rollout

AGREE = 1e-9  # rewards that differ by no more are the same


def is_audited(seed: int, group: int, member: int | None, share: float) -> bool:
    """Return whether a rollout runs to its own end if a pruner hits it.

    The draw is a function of (run seed, admission index, member) alone, so it neither depends on the order of events
    nor changes in a resume. member None: the draw for the whole group, which decides for all members that a group's
    pruner would stop. With separate draws the group would still wait for some, and the audit would see only part of the
    decision.
    """
    audit_key = f"{seed}:{group}:{'group' if member is None else member}:audit"
    random_bits = int.from_bytes(hashlib.blake2b(audit_key.encode(), digest_size=8).digest(), "little")
    return random_bits < share * 2.0**64


def relative_cap_tokens(
    finished_tokens: Sequence[int], *, times_median: float, least_finished: int, least_tokens: int
) -> int | None:
    """Return the tokens at which a member is too long for its group; None: no cap yet.

    finished_tokens: lengths of the members that came to their own end.
    """
    if len(finished_tokens) < max(1, least_finished):
        return None
    return max(least_tokens, math.ceil(times_median * median(finished_tokens)))


def due_in_s(
    *, first_version: int, budget: int, version: int, since_step_s: float, step_s: float, slack_steps: float
) -> float:
    """Return the seconds until a group whose oldest token has ``first_version`` is due; negative: it is late.

    The last step that may train it is step first_version + budget (rule 2). ``version`` steps are completed, the last
    one ``since_step_s`` ago, and one takes ``step_s``; the group is due ``slack_steps`` after that step's turn comes.

    Example: first version 3, budget 2, version 4, step 4 began 1 s ago, 10 s a step, slack 1: step 5 begins in 9 s, and
    the group is due in 19 s.
    """
    steps_left = max(0, first_version + budget - version) + slack_steps
    return steps_left * step_s - since_step_s


def chance_to_end(lengths: LengthDistribution, tokens: int, more_tokens: float) -> float:
    """Return P(L <= tokens + more | L > tokens) of a response that has ``tokens`` and time for ``more_tokens``.

    It is 1.0 where no response was observed to grow beyond ``tokens``, as there is no evidence, and 0.0 when there is
    no time.
    """
    if more_tokens <= 0:
        return 0.0
    survival_share = lengths.beyond(tokens)
    return 1.0 - lengths.beyond(tokens + more_tokens) / survival_share if survival_share > 0 else 1.0


def expected_saving_tokens(lengths: LengthDistribution, tokens: int, audited_tokens: Sequence[int]) -> float:
    """Estimate the response tokens that a rollout hit at ``tokens`` would still have generated.

    audited_tokens: tokens that audited rollouts of the same pruner generated after the hit. They are a random sample of
    all its hits, so their mean is unbiased for any criterion; lengths alone would treat a loop like any other
    response. The estimate from lengths (E[L - tokens | L > tokens]) counts as one more observation.
    """
    return (lengths.mean_remaining_tokens(tokens) + sum(audited_tokens)) / (1 + len(audited_tokens))


def solve_probability(solved: int, finished: int, prior: float) -> float:
    """Return the mean of the Beta posterior of a group's solve rate, (prior + solved) / (2 prior + finished)."""
    return (prior + solved) / (2 * prior + finished)


def agreement(agreeing: int, rest: int, prior: float) -> float:
    """Return the probability that ``rest`` further members all get the reward of all ``agreeing`` finished ones.

    With p the chance that a member does, p ~ Beta(prior, prior) before and Beta(prior + agreeing, prior) after, so
    E[p^rest] = product over i < rest of (prior + agreeing + i) / (2 prior + agreeing + i): the bound is exact under the
    prior. Solved and unsolved members are treated the same.

    Example: prior 0.5, 6 of 8 agree: 6.5/7 x 7.5/8 = 0.871.
    """
    return math.prod((prior + agreeing + i) / (2 * prior + agreeing + i) for i in range(rest))


def rewards_agree(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are the same, up to rounding."""
    return not rewards or max(rewards) - min(rewards) <= AGREE


def pruner_figures(groups: Iterable[FinishedGroup]) -> dict[str, PrunerFigures]:
    """Summarise the effect of each pruner on finished groups: pruner -> figures.

    An audited rollout is *wrong* when pruning would have changed what its group learns: where the reward of the pruned
    response is known (``cut_reward``), when its own differs; where it would have left its group, when it solved the
    task. Its *bias* is its reward less its substitute under pruning: ``cut_reward``, or the mean reward of
    the group's other valid members. A rollout that failed, or would have left a group without others, is no audit.
    """
    figures_by_pruner: defaultdict[str, list[PrunerFigures]] = defaultdict(list)
    for group in groups:
        for rollout in group.rollouts:
            if rollout.pruned is not None and (figures := _figures(rollout, rollout.pruned, group)) is not None:
                figures_by_pruner[rollout.pruned.pruner].append(figures)
    return {pruner: PrunerFigures.total(figures) for pruner, figures in sorted(figures_by_pruner.items())}


def _figures(rollout: Rollout, pruned: Pruned, group: FinishedGroup) -> PrunerFigures | None:
    """Return the figures of one rollout that was hit; None: an audit without evidence."""
    if not pruned.audited:
        dropped_count = int(rollout.removal == "pruned")
        return PrunerFigures(rollouts=1, dropped=dropped_count, saved_tokens=pruned.saved_tokens)
    other_rewards = [other.reward for other in group.valid if other.member != rollout.member]
    if not rollout.valid or (pruned.cut_reward is None and not other_rewards):
        return None
    replacement_reward = sum(other_rewards) / len(other_rewards) if pruned.cut_reward is None else pruned.cut_reward
    reward_bias = rollout.reward - replacement_reward
    is_wrong = rollout.solved if pruned.cut_reward is None else abs(reward_bias) > AGREE
    audited_tokens = len(rollout.response_ids) - pruned.at_tokens
    return PrunerFigures(audits=1, audited_tokens=audited_tokens, wrong=int(is_wrong), reward_bias=reward_bias)
