"""Estimates over groups of attempts at tasks: unbiased pass@k, and standard errors clustered by task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from headway.records.ledger import PassAt


def pass_share(solved: int, valid: int, k: int) -> float:
    """Return ``1 - C(n - c, k) / C(n, k)`` for c solved among n >= k valid attempts at one task.

    It is the share of the subsets of k that contain a solved one. Example: of (1, 4), with k = 2, 1 - 3 / 6 = 0.5."""
    return 1.0 - math.comb(valid - solved, k) / math.comb(valid, k)


def pass_at(groups: Iterable[tuple[int, int]], ks: Sequence[int] = ()) -> dict[str, PassAt]:
    """Estimate pass@k by k, from (solved, valid) attempts of each group (Chen et al., 2021, arXiv:2107.03374, Eq. 1).

    The estimate is the mean over groups of `pass_share`. It is unbiased for each group of k attempts or more; smaller
    groups are left out, and a k without any group.

    ``ks``: default 1, 2, 4, ... up to the largest group. Example: of (1, 4), pass@2 is 1 - 3 / 6 = 0.5."""
    group_counts = list(groups)
    most_valid = max((attempts for _, attempts in group_counts), default=0)
    estimates: dict[str, PassAt] = {}
    for k in ks or [1 << power for power in range(most_valid.bit_length())]:
        rates = [pass_share(c, n, k) for c, n in group_counts if n >= k]
        if rates:
            standard_error = statistics.stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else 0.0
            estimates[str(k)] = PassAt(groups=len(rates), value=statistics.fmean(rates), standard_error=standard_error)
    return estimates


def clustered_standard_error(observations: Sequence[tuple[int, float]]) -> float:
    """Return the cluster-robust standard error of the mean of (task, value) pairs (Liang & Zeger, 1986).

    Attempts at one task are correlated, so tasks count, not attempts. 0 for fewer than two tasks."""
    if not observations:
        return 0.0
    mean = sum(observation for _, observation in observations) / len(observations)
    sums: dict[int, float] = {}
    for task, observation in observations:
        sums[task] = sums.get(task, 0.0) + observation - mean
    tasks = len(sums)
    if tasks < 2:
        return 0.0
    return math.sqrt(tasks / (tasks - 1) * sum(deviation**2 for deviation in sums.values())) / len(observations)
