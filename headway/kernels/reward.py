"""The raw reward of a kernel's evaluation."""

from __future__ import annotations

from headway.records.kernels import KernelEvaluation

COMPILED = 0.1
CORRECT = 0.3
MOST_GAIN = 2.0  # of the speed-up, above 1


def kernel_reward(evaluation: KernelEvaluation) -> float:
    """TritonForge's reward: 0.1 for a candidate that compiles, 0.3 + clip(speed-up - 1, 0, 2) for a correct one, 0.3
    for a correct one without a speed-up, else 0, which a cheat gets too. Raises ValueError for an infrastructure
    failure, which gives no reward."""
    if evaluation.infrastructure:
        raise ValueError(f"the evaluation failed, so there is no reward: {evaluation.infrastructure}")
    if evaluation.cheat or not evaluation.compiled:
        return 0.0
    if not evaluation.correct:
        return COMPILED
    gain = 0.0 if evaluation.speedup is None else evaluation.speedup - 1.0
    return CORRECT + min(max(gain, 0.0), MOST_GAIN)
