"""Exponential backoff: the delay before a retry."""

from __future__ import annotations

import math

_MOST_DOUBLINGS = 64  # a delay of centuries; beyond, 2.0**n would overflow


def backoff_s(retry: int, first_s: float, longest_s: float = math.inf) -> float:
    """Seconds to wait before the ``retry``-th retry: ``first_s`` before retry 1, doubled for each further one, at most
    ``longest_s``; 0 for ``retry`` < 1. Callers that fail together multiply it with a random factor of their own."""
    if retry < 1:
        return 0.0
    return min(longest_s, first_s * 2.0 ** min(retry - 1, _MOST_DOUBLINGS))
