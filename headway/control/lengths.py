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
        share = self.tail_share
        return -math.log(share) / self.last_tokens if 0 < share < 1 and self.last_tokens else 0.0

    @property
    def mean_least_tokens(self) -> float:
        """Restricted mean E[min(L, last)]."""
        edges = [0, *self.tokens, self.last_tokens]
        levels = [1.0, *self.survival]
        return sum((end - start) * level for (start, end), level in zip(pairwise(edges), levels, strict=True))

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
        beyond = math.log(self.tail_share / remaining_share) / hazard if hazard and remaining_share > 0 else math.inf
        return max(1, int(min(self.limit_tokens, self.last_tokens + max(0.0, beyond))))

    def beyond(self, tokens: float) -> float:
        """P(L > tokens)."""
        if tokens >= self.limit_tokens:
            return 0.0
        if tokens >= self.last_tokens:
            return self.tail_share * math.exp(-self._hazard * (tokens - self.last_tokens))
        ended = bisect_right(self.tokens, tokens)
        return self.survival[ended - 1] if ended else 1.0

    def mean_remaining_tokens(self, tokens: int) -> float:
        """Return E[L - tokens | L > tokens], the expected further growth at ``tokens`` tokens.

        It is 0.0 where all
        observed responses had ended by then: nothing is known of longer ones."""
        share = self.beyond(tokens)
        if share <= 0:
            return 0.0
        ends = [end for end in self.tokens if tokens < end < self.last_tokens]
        edges = [tokens, *ends, max(tokens, self.last_tokens)]
        seen = sum((end - start) * self.beyond(start) for start, end in pairwise(edges))
        start, hazard = edges[-1], self._hazard
        tail_tokens = max(0, self.limit_tokens - start)
        unseen = self.beyond(start) * (-math.expm1(-hazard * tail_tokens) / hazard if hazard else tail_tokens)
        return (seen + unseen) / share

    def capped(self, limit_tokens: int) -> LengthDistribution:
        """Return the distribution under a smaller limit: responses beyond it end at it."""
        limit = min(limit_tokens, self.limit_tokens)
        if limit > self.last_tokens:
            return msgspec.structs.replace(self, limit_tokens=limit)
        kept = bisect_left(self.tokens, limit)
        return msgspec.structs.replace(
            self,
            tokens=(*self.tokens[:kept], limit),
            survival=(*self.survival[:kept], 0.0),
            last_tokens=limit,
            limit_tokens=limit,
        )

    def summary(self, group_correlation: float) -> LengthSummary:
        p99 = self.quantile(0.99)
        return LengthSummary(
            finished=self.finished,
            truncated=self.truncated,
            censored=self.censored,
            longest_tokens=self.last_tokens,
            mean_tokens=self.mean_tokens,
            mean_least_tokens=self.mean_least_tokens,
            mean_most_tokens=self.mean_most_tokens,
            p50_tokens=self.quantile(0.5),
            p99_tokens=p99,
            p99_seen=p99 <= self.last_tokens,
            group_correlation=group_correlation,
        )


def length_distribution(observations: Iterable[tuple[int, bool]], limit_tokens: int) -> LengthDistribution:
    """Estimate a distribution from (tokens, ended) pairs; a response that hasn't ended is censored at its tokens.

    Lengths beyond the limit count as ended at it.

    Example: (2, True), (3, False), (5, True): of three one ends at 2, so P(L > 2) = 2/3; the one censored at 3 has no
    information about later tokens; the only one that reached 5 ends there, so P(L > 5) = 0, and the mean is
    2 x 1 + 3 x 2/3 = 4 tokens.
    """
    ended: Counter[int] = Counter()
    cut: Counter[int] = Counter()
    for tokens, is_end in observations:
        if tokens >= limit_tokens:
            ended[limit_tokens] += 1
        else:
            (ended if is_end else cut)[tokens] += 1
    at_risk = ended.total() + cut.total()
    tokens_out: list[int] = []
    survival: list[float] = []
    level = 1.0
    for tokens in sorted(ended.keys() | cut.keys()):
        if ended[tokens]:
            level *= 1.0 - ended[tokens] / at_risk
            tokens_out.append(tokens)
            survival.append(level)
        at_risk -= ended[tokens] + cut[tokens]
    return LengthDistribution(
        tokens=tuple(tokens_out),
        survival=tuple(survival),
        last_tokens=max([0, *ended, *cut]),
        limit_tokens=limit_tokens,
        finished=ended.total(),
        truncated=ended[limit_tokens],
        censored=cut.total(),
    )


def group_correlation(groups: Sequence[Sequence[int]]) -> float:
    """Compute the intraclass correlation of the lengths inside a group, 0 to 1.

    It is that of a one-way analysis of variance on normal scores of the lengths' ranks, so that a single very long
    response doesn't dominate it.

    ``groups``: lengths of the members, groups of at least two. 0.0 where there are fewer than two groups.
    """
    usable = [group for group in groups if len(group) > 1]
    count = sum(map(len, usable))
    if len(usable) < 2:
        return 0.0
    score = _normal_scores([length for group in usable for length in group])
    squares = mean_squares([[score[length] for length in group] for group in usable])
    size = (count - sum(len(group) ** 2 for group in usable) / count) / (len(usable) - 1)
    return intraclass_correlation(*squares, size)


def mean_squares(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return mean squares between groups and within them, of a one-way analysis of variance.

    Groups of one are left out; (0, 0) for fewer than two others."""
    usable = [group for group in groups if len(group) > 1]
    count = sum(map(len, usable))
    if len(usable) < 2:
        return 0.0, 0.0
    mean = sum(map(sum, usable)) / count
    means = [sum(group) / len(group) for group in usable]
    between = sum(len(g) * (m - mean) ** 2 for g, m in zip(usable, means, strict=True)) / (len(usable) - 1)
    within = sum((x - m) ** 2 for g, m in zip(usable, means, strict=True) for x in g) / (count - len(usable))
    return between, within


def intraclass_correlation(between: float, within: float, size: float) -> float:
    """Return the intraclass correlation, 0 to 1, of groups of ``size`` with these mean squares."""
    spread = between + (size - 1) * within
    return min(1.0, max(0.0, (between - within) / spread)) if spread > 0 else 0.0


def _normal_scores(lengths: Sequence[int]) -> dict[int, float]:
    """Return the standard normal quantile of each length's mid-rank, by length."""
    counts = Counter(lengths)
    normal, below = NormalDist(), 0
    scores: dict[int, float] = {}
    for length in sorted(counts):
        scores[length] = normal.inv_cdf((below + counts[length] / 2) / len(lengths))
        below += counts[length]
    return scores
