"""The raw reward, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from headway.kernels.reward import kernel_reward
from headway.records.kernels import KernelEvaluation

RIGHT: dict[str, Any] = {"compiled": True, "passed": 5, "trials": 5}
CASES: list[tuple[dict[str, Any], float]] = [
    ({}, 0.0),
    ({"fault": "syntax_error"}, 0.0),
    ({"compiled": True}, 0.1),
    ({"compiled": True, "passed": 4, "trials": 5}, 0.1),
    ({"compiled": True, "passed": 4, "trials": 5, "speedup": 3.0}, 0.1),
    ({**RIGHT, "fault": "segmentation_fault"}, 0.1),
    (RIGHT, 0.3),
    ({**RIGHT, "speedup": 0.5}, 0.3),
    ({**RIGHT, "speedup": 1.0}, 0.3),
    ({**RIGHT, "speedup": 1.75}, 1.05),
    ({**RIGHT, "speedup": 40.0}, 2.3),
    ({**RIGHT, "speedup": 40.0, "cheat": "returns a cached output"}, 0.0),
]


@pytest.mark.parametrize(("fields", "reward"), CASES)
def test_reward_follows_the_ladder(fields: dict[str, Any], reward: float) -> None:
    assert kernel_reward(KernelEvaluation(**fields)) == pytest.approx(reward, abs=1e-12)


def test_an_infrastructure_failure_has_no_reward() -> None:
    with pytest.raises(ValueError, match="the disk is full"):
        kernel_reward(KernelEvaluation(infrastructure="the disk is full"))
