"""What becomes of a reward: responses near the length limit, a KL penalty inside it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """Soft overlong punishment (DAPO, 2025, Eq. 13): 0 up to ``limit - buffer`` response tokens, then falling
    linearly to -1 at ``limit``.

    Example, limit 100 and buffer 20: 80 tokens cost 0, 90 cost -0.5, 100 cost -1.
    """
    over = tokens - (limit - buffer)
    return -min(1.0, over / buffer) if over > 0 else 0.0


def reward_to_go(penalties_m: NDArray[np.float64], sequence_m: NDArray[np.int64]) -> NDArray[np.float64]:
    """[M] sums over a token and those after it in its sample: what a per-token penalty inside the reward takes from
    each token's advantage (REINFORCE++, 2025). ``sequence_m``: the token's sample, ascending."""
    total_s = np.bincount(sequence_m, weights=penalties_m)
    before_m = np.cumsum(penalties_m) - penalties_m  # of all earlier tokens, earlier samples' included
    before_s = np.cumsum(total_s) - total_s
    return total_s[sequence_m] - (before_m - before_s[sequence_m])
