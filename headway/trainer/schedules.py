"""Learning rate as a pure function of the version, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from headway.config.schema import SftConfig, TrainerConfig


def learning_rate(step: int, settings: TrainerConfig | SftConfig, total_steps: int) -> float:
    """Learning rate of the step that follows ``step`` completed ones.

    Warm-up is linear and reaches its peak at the last of ``warmup_steps``; a linear or cosine decay reaches 0 at
    ``total_steps`` and stays there.
    """
    peak, warmup_steps = settings.learning_rate, settings.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if settings.schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if settings.schedule == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
