"""Estimates response lengths from a censored sample: a response still growing counts as longer than its length.

The product-limit estimator of Kaplan and Meier (1958): with d(t) responses that ended at t tokens and n(t) that had
reached t, P(L > t) = product over s <= t of (1 - d(s) / n(s)).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import NormalDist

import msgspec

from headway.records.check_report import LengthSummary


class LengthDistribution(msgspec.Struct, frozen=True, kw_only=True):
    """P(L > t) as a step function up to the longest response seen, and an exponential tail from there to the limit.

    The tail has the mean hazard of the seen part, -ln P(L > last) / last. Where no response ended the hazard is
    unknown: every response is taken to reach the limit.
    """

    tokens: tuple[int, ...]  # lengths at which responses ended, ascending
    survival: tuple[float, ...]  # P(L > tokens[i]), falling
    last_tokens: int  # longest observation, ended or not
    limit_tokens: int  # max_response_tokens: no response is longer
    finished: int
    truncated: int  # ended at the limit
    censored: int

    @property
    def tail_share(self) -> float:
        """P(L > last), the share of responses beyond the longest observation."""
        return 0.0 if self.last_tokens >= self.limit_tokens else (self.survival[-1] if self.survival else 1.0)

    @property
    def _hazard(self) -> float:
        tail_share = self.tail_share
        return -math.log(tail_share) / self.last_tokens if 0 < tail_share < 1 and self.last_tokens else 0.0

    @property
    def mean_least_tokens(self) -> float:
        """Restricted mean E[min(L, last)]."""
        edges = [0, *self.tokens, self.last_tokens]
        survival_levels = [1.0, *self.survival]
        return sum((end - start) * level for (start, end), level in zip(pairwise(edges), survival_levels, strict=True))

    @property
    def mean_most_tokens(self) -> float:
        return self.mean_least_tokens + self.tail_share * (self.limit_tokens - self.last_tokens)

    @property
    def mean_tokens(self) -> float:
        """Mean E[L], with the tail."""
        hazard, tail_tokens = self._hazard, self.limit_tokens - self.last_tokens
        if not hazard:
            return self.mean_most_tokens
        return self.mean_least_tokens + self.tail_share * -math.expm1(-hazard * tail_tokens) / hazard

    def quantile(self, q: float) -> int:
        """The q-quantile, 0 <= q < 1: the smallest t with P(L <= t) >= q; at least 1 token."""
        remaining_share = 1.0 - q + 1e-12  # rounding must not push an exact share to the next length
        # The first level <= remaining_share.
        index = bisect_left(self.survival, -remaining_share, key=lambda level: -level)
        if index < len(self.survival):
            return max(1, self.tokens[index])
        if self.last_tokens >= self.limit_tokens:
            return max(1, self.limit_tokens)
        hazard = self._hazard
        tail = math.log(self.tail_share / remaining_share) / hazard if hazard and remaining_share > 0 else math.inf
        return max(1, int(min(self.limit_tokens, self.last_tokens + max(0.0, tail))))

    def beyond(self, tokens: float) -> float:
        """P(L > tokens)."""
        if tokens >= self.limit_tokens:
            return 0.0
        if tokens >= self.last_tokens:
            return self.tail_share * math.exp(-self._hazard * (tokens - self.last_tokens))
        ended_count = bisect_right(self.tokens, tokens)
        return self.survival[ended_count - 1] if ended_count else 1.0

    def mean_remaining_tokens(self, tokens: int) -> float:
        """Return E[L - tokens | L > tokens], the expected further growth at ``tokens`` tokens.

        It is 0.0 where all
        observed responses had ended by then: nothing is known of longer ones."""
        survival_share = self.beyond(tokens)
        if survival_share <= 0:
            return 0.0
        step_ends = [end for end in self.tokens if tokens < end < self.last_tokens]
        edges = [tokens, *step_ends, max(tokens, self.last_tokens)]
        seen_tokens = sum((end - start) * self.beyond(start) for start, end in pairwise(edges))
        start, hazard = edges[-1], self._hazard
        tail_tokens = max(0, self.limit_tokens - start)
        unseen_tokens = self.beyond(start) * (-math.expm1(-hazard * tail_tokens) / hazard if hazard else tail_tokens)
        return (seen_tokens + unseen_tokens) / survival_share

    def capped(self, limit_tokens: int) -> LengthDistribution:
        """Return the distribution under a smaller limit: responses beyond it end at it."""
        smaller_limit = min(limit_tokens, self.limit_tokens)
        if smaller_limit > self.last_tokens:
            return msgspec.structs.replace(self, limit_tokens=smaller_limit)
        kept_count = bisect_left(self.tokens, smaller_limit)
        return msgspec.structs.replace(
            self,
            tokens=(*self.tokens[:kept_count], smaller_limit),
            survival=(*self.survival[:kept_count], 0.0),
            last_tokens=smaller_limit,
            limit_tokens=smaller_limit,
        )

    def summary(self, group_correlation: float) -> LengthSummary:
        p99_tokens = self.quantile(0.99)
        return LengthSummary(
            finished=self.finished,
            truncated=self.truncated,
            censored=self.censored,
            longest_tokens=self.last_tokens,
            mean_tokens=self.mean_tokens,
            mean_least_tokens=self.mean_least_tokens,
            mean_most_tokens=self.mean_most_tokens,
            p50_tokens=self.quantile(0.5),
            p99_tokens=p99_tokens,
            p99_seen=p99_tokens <= self.last_tokens,
            group_correlation=group_correlation,
        )


def length_distribution(observations: Iterable[tuple[int, bool]], limit_tokens: int) -> LengthDistribution:
    """Estimate a distribution from (tokens, ended) pairs; a response that hasn't ended is censored at its tokens.

    Lengths beyond the limit count as ended at it.

    Example: (2, True), (3, False), (5, True): of three one ends at 2, so P(L > 2) = 2/3; the one censored at 3 has no
    information about later tokens; the only one that reached 5 ends there, so P(L > 5) = 0, and the mean is
    2 x 1 + 3 x 2/3 = 4 tokens.
    """
    ended_counts: Counter[int] = Counter()
    cut_counts: Counter[int] = Counter()
    for tokens, is_end in observations:
        if tokens >= limit_tokens:
            ended_counts[limit_tokens] += 1
        else:
            (ended_counts if is_end else cut_counts)[tokens] += 1
    at_risk = ended_counts.total() + cut_counts.total()
    step_tokens: list[int] = []
    survival: list[float] = []
    survival_level = 1.0
    for tokens in sorted(ended_counts.keys() | cut_counts.keys()):
        if ended_counts[tokens]:
            survival_level *= 1.0 - ended_counts[tokens] / at_risk
            step_tokens.append(tokens)
            survival.append(survival_level)
        at_risk -= ended_counts[tokens] + cut_counts[tokens]
    return LengthDistribution(
        tokens=tuple(step_tokens),
        survival=tuple(survival),
        last_tokens=max([0, *ended_counts, *cut_counts]),
        limit_tokens=limit_tokens,
        finished=ended_counts.total(),
        truncated=ended_counts[limit_tokens],
        censored=cut_counts.total(),
    )


def group_correlation(groups: Sequence[Sequence[int]]) -> float:
    """Compute the intraclass correlation of the lengths inside a group, 0 to 1.

    It is that of a one-way analysis of variance on normal scores of the lengths' ranks, so that a single very long
    response doesn't dominate it.

    ``groups``: lengths of the members, groups of at least two. 0.0 where there are fewer than two groups.
    """
    usable_groups = [group for group in groups if len(group) > 1]
    length_count = sum(map(len, usable_groups))
    if len(usable_groups) < 2:
        return 0.0
    score_by_length = _normal_scores([length for group in usable_groups for length in group])
    square_pair = mean_squares([[score_by_length[length] for length in group] for group in usable_groups])
    size = (length_count - sum(len(group) ** 2 for group in usable_groups) / length_count) / (len(usable_groups) - 1)
    return intraclass_correlation(*square_pair, size)


def mean_squares(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return mean squares between groups and within them, of a one-way analysis of variance.

    Groups of one are left out; (0, 0) for fewer than two others."""
    used = [group for group in groups if len(group) > 1]
    value_count = sum(map(len, used))
    if len(used) < 2:
        return 0.0, 0.0
    overall_mean = sum(map(sum, used)) / value_count
    group_means = [sum(group) / len(group) for group in used]
    between = sum(len(g) * (m - overall_mean) ** 2 for g, m in zip(used, group_means, strict=True)) / (len(used) - 1)
    within = sum((x - m) ** 2 for g, m in zip(used, group_means, strict=True) for x in g) / (value_count - len(used))
    return between, within


def intraclass_correlation(between: float, within: float, size: float) -> float:
    """Return the intraclass correlation, 0 to 1, of groups of ``size`` with these mean squares."""
    total_variance = between + (size - 1) * within
    return min(1.0, max(0.0, (between - within) / total_variance)) if total_variance > 0 else 0.0


def _normal_scores(lengths: Sequence[int]) -> dict[int, float]:
    """Return the standard normal quantile of each length's mid-rank, by length."""
    length_counts = Counter(lengths)
    normal_distribution, below_count = NormalDist(), 0
    score_by_length: dict[int, float] = {}
    for length in sorted(length_counts):
        score_by_length[length] = normal_distribution.inv_cdf((below_count + length_counts[length] / 2) / len(lengths))
        below_count += length_counts[length]
    return score_by_length
