"""Measures length bias by cause: whether trained responses are as long as generated ones (design.md, rule 3).

Short rollouts finish first, so the responses trained so far are always biased towards short ones. Only
admission cohorts (``groups_per_step`` consecutive admissions) whose every rollout has ended are compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

from headway.records.ledger import LengthBiasStatistics
from headway.records.rollout import Ending

Cause = Literal["scheduling", "filter", "pruning"]

# The cause that keeps a rollout with this ending out of training; failures aren't caused by the queue.
CAUSE_OF: dict[Ending, Cause] = {
    "overdue": "scheduling",
    "discarded": "scheduling",
    "filtered": "filter",
    "pruned": "pruning",
}


def ks_statistic(a: Mapping[int, int], b: Mapping[int, int]) -> float:
    """Two-sample Kolmogorov-Smirnov statistic, sup |F_a - F_b|, of two histograms (length -> count >= 0).

    O(n log n) in the number of distinct lengths; 0.0 when either is empty (nothing to compare).
    """
    total_a, total_b = sum(a.values()), sum(b.values())
    if not total_a or not total_b:
        return 0.0
    below_a = below_b = 0
    largest_gap = 0
    for length in sorted(a.keys() | b.keys()):
        below_a += a.get(length, 0)
        below_b += b.get(length, 0)
        # integers throughout: the comparison is exact, rounding happens once
        largest_gap = max(largest_gap, abs(below_a * total_b - below_b * total_a))
    return largest_gap / (total_a * total_b)


# (ending, whether the length is complete, or was reached by a rollout cut short) -> lengths
_Histograms = defaultdict[tuple[Ending, bool], Counter[int]]


class _Cohort:
    """An open cohort: admitted groups, open rollouts, lengths so far."""

    def __init__(self) -> None:
        self.groups = 0
        self.rollouts = 0
        self.open = 0
        self.lengths: _Histograms = defaultdict(Counter)


def _cause_of(ending: Ending, complete: bool) -> Cause | None:
    if ending == "trained" and not complete:
        return "pruning"  # nothing else trains a rollout before its own end
    return CAUSE_OF.get(ending)


def _total(histograms: Iterable[Counter[int]]) -> Counter[int]:
    total_histogram: Counter[int] = Counter()
    for histogram in histograms:
        total_histogram.update(histogram)
    return total_histogram


class LengthBias:
    """Length histograms by ending over admission cohorts; memory grows with distinct lengths, not rollouts.

    Lifecycle: ``admit`` every group in the order of its index, ``end`` every rollout once. A cohort holds the
    groups with equal ``index // groups_per_step``; it closes, and is counted, when all of them are admitted
    and all their rollouts have ended.

    ``ks`` compares complete lengths, as the rule defines; a rollout that was cut (an overdue one cancelled while
    it ran, a pruned one) has none. The statistics by cause therefore compare lengths *reached*, complete or
    not, with and without the rollouts that the cause removed: a policy that cancels long rollouts shows there.
    A rollout that was pruned and then trained counts as trained, but its complete length is lost to pruning.

    Invariant: under ``wait``, with no filter, pruning or failure, the trained and the completed multisets
    of closed cohorts are equal and every statistic is 0.

    Example: one group a step; group 0 trains lengths 3 and 9, group 1 ends overdue, cut at 50 and 60:
    ks = 0.0 (both complete lengths were trained), scheduling_ks = 0.5, cut_share = 0.5.
    """

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._open: dict[int, _Cohort] = {}
        self._closed: _Histograms = defaultdict(Counter)
        self._closed_rollouts = 0
        self._admitted = 0

    def admit(self, group: int, size: int) -> None:
        """Enter a group of ``size`` rollouts; indices count up from 0 without gaps."""
        cohort = self._open.setdefault(group // self._groups_per_step, _Cohort())
        cohort.groups += 1
        cohort.rollouts += size
        cohort.open += size
        self._admitted += size

    def end(self, group: int, ending: Ending, length: int, *, complete: bool, count: int = 1) -> None:
        """Enter ``count`` ended rollouts of a group.

        length: response tokens reached. complete: generation ended by a stop token or the length limit.
        Raises KeyError when the group's cohort is closed or unknown.
        """
        cohort_number = group // self._groups_per_step
        cohort = self._open[cohort_number]
        cohort.lengths[ending, complete][length] += count
        cohort.open -= count
        if cohort.open == 0 and cohort.groups == self._groups_per_step:
            del self._open[cohort_number]
            for ending_key, histogram in cohort.lengths.items():
                self._closed[ending_key].update(histogram)
            self._closed_rollouts += cohort.rollouts

    def statistics(self) -> LengthBiasStatistics:
        """Compute all statistics. O(n log n) in distinct lengths."""
        reached = _total(self._closed.values())
        trained_lengths, completed = self._trained_and_completed()
        open_rollouts = self._admitted - self._closed_rollouts

        def ks_without(cause: Cause) -> float:
            removed = _total(lengths for key, lengths in self._closed.items() if _cause_of(*key) == cause)
            return ks_statistic(reached - removed, reached) if removed else 0.0  # none taken: the usual case

        return LengthBiasStatistics(
            ks=ks_statistic(trained_lengths, completed),
            scheduling_ks=ks_without("scheduling"),
            filter_ks=ks_without("filter"),
            pruning_ks=ks_without("pruning"),
            censored_share=open_rollouts / self._admitted if self._admitted else 0.0,
            cut_share=(reached.total() - completed.total()) / self._closed_rollouts if self._closed_rollouts else 0.0,
        )

    def lengths(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the (trained, completed) length histograms of the closed cohorts."""
        trained_lengths, completed_lengths = self._trained_and_completed()
        return dict(trained_lengths), dict(completed_lengths)

    def _trained_and_completed(self) -> tuple[Counter[int], Counter[int]]:
        completed_lengths = _total(lengths for (_, complete), lengths in self._closed.items() if complete)
        return self._closed["trained", True], completed_lengths
