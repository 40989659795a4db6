"""Models a task's solve rate as a Beta distribution, and derives probabilities for a group of attempts.

With p ~ Beta(a, b) and n independent attempts, E[p^n] = prod_{i<n} (a + i) / (a + b + i): the beta-binomial
distribution, so every probability below includes the uncertainty about p.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def mixed_probability(alpha: float, beta: float, size: int) -> float:
    """Return the probability that ``size`` attempts have mixed outcomes: 1 - E[p^n] - E[(1-p)^n]."""
    all_solved_chance = all_failed_chance = 1.0
    for i in range(size):
        denominator = alpha + beta + i
        all_solved_chance *= (alpha + i) / denominator
        all_failed_chance *= (beta + i) / denominator
    return max(0.0, 1.0 - all_solved_chance - all_failed_chance)


def group_size(alpha: float, beta: float, smallest: int, largest: int, gain: float) -> int:
    """Choose the number of attempts of a group, from ``smallest`` to ``largest``.

    Attempts are added as long as each raises the probability of mixed outcomes by at least ``gain``. A rate known to be
    near 1/2 needs few more, one near 0 or 1 or still unknown needs many, and one that is surely 0 or 1 none: no number
    of attempts would have mixed outcomes. The gain of another member can't rise with their number, since
    E[p^n (1-p)] + E[(1-p)^n p] falls in n.
    """
    size, mixed_chance = smallest, mixed_probability(alpha, beta, smallest)
    while size < largest:
        larger_chance = mixed_probability(alpha, beta, size + 1)
        if larger_chance - mixed_chance < gain:
            break
        size, mixed_chance = size + 1, larger_chance
    return size


def interval(alpha: float, beta: float, mass: float = 0.9) -> tuple[float, float]:
    """Return the central interval that contains ``mass`` of Beta(alpha, beta)."""
    tail_mass = (1.0 - mass) / 2
    return _quantile(alpha, beta, tail_mass), _quantile(alpha, beta, 1.0 - tail_mass)


def cumulative(alpha: float, beta: float, x: float) -> float:
    """Compute P(p <= x), the regularised incomplete beta function.

    It is evaluated by its continued fraction (Abramowitz and Stegun 26.5.8) with Lentz's recurrence, on the side of the
    mean where it converges fast."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (alpha + 1.0) / (alpha + beta + 2.0):
        return 1.0 - cumulative(beta, alpha, 1.0 - x)
    log_scale = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    prefactor = math.exp(log_scale + alpha * math.log(x) + beta * math.log1p(-x)) / alpha
    return min(1.0, prefactor * _fraction(alpha, beta, x))


def _fraction(alpha: float, beta: float, x: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1.0 - (alpha + beta) * x / (alpha + 1.0)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    fraction = d
    for m in range(1, 300):
        even_term = m * (beta - m) * x / ((alpha + 2 * m - 1) * (alpha + 2 * m))
        odd_term = -(alpha + m) * (alpha + beta + m) * x / ((alpha + 2 * m) * (alpha + 2 * m + 1))
        factor = 1.0
        for term in (even_term, odd_term):
            d = 1.0 + term * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + term / c
            c = c if abs(c) > tiny else tiny
            factor = c * d
            fraction *= factor
        if abs(factor - 1.0) < 1e-12:
            break
    return fraction


def _quantile(alpha: float, beta: float, share: float) -> float:
    return sum(_bisected(lambda x: cumulative(alpha, beta, x) < share, 1.0)) / 2


def known_limits(signal: float, size: int) -> tuple[float, float]:
    """Return the interval of solve rates p with 1 - p^n - (1-p)^n >= ``signal``, n = ``size``.

    Inside it ``size`` attempts at a task of known rate differ with probability ``signal`` or more. (0.5, 0.5) where no
    rate reaches it."""
    if 1.0 - 2 * 0.5**size < signal:
        return 0.5, 0.5
    _, lower_limit = _bisected(lambda p: 1.0 - p**size - (1.0 - p) ** size < signal, 0.5)
    return lower_limit, 1.0 - lower_limit


def _bisected(is_below: Callable[[float], bool], high: float) -> tuple[float, float]:
    """Bisect 0 to ``high`` for the point up to which ``is_below`` holds; return its lower and upper bound."""
    low = 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low, high
