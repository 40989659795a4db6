"""A made-up calibration and the run it belongs to, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from headway.control.lengths import LengthDistribution, length_distribution
from headway.control.tuning.forecast import RunShape
from headway.records.check_report import Calibration


def lengths_of(ended: list[int] | None = None, *, limit: int = 40, cut: list[int] | None = None) -> LengthDistribution:
    """By default responses of 20 tokens each."""
    observed = [(tokens, True) for tokens in ([20] * 100 if ended is None else ended)]
    return length_distribution(observed + [(tokens, False) for tokens in cut or []], limit)


def shape_of(**changes: Any) -> RunShape:
    """8 groups of 4 in 32 slots."""
    fields: dict[str, Any] = {
        "groups_per_step": 8,
        "group_size": 4,
        "budget": 2,
        "overdue": "wait",
        "steps_per_publish": 1,
        "slots": 32,
        "replicas": 1,
        "ranks": 1,
        "concurrent_rollouts": 40,
        "kv_tokens": 32 * 60,
        "max_sequence_tokens": 60,
        "max_response_tokens": 40,
        "verifiers": 1,
        "yielded_replicas": 0,
        "steps": 100,
        "time_limit_s": None,
        "evaluated_samples": 0,
    }
    return RunShape(**(fields | changes))


def calibration_of(**changes: Any) -> Calibration:
    """32 requests decode in 10 ms: 3,200 tokens/s, 160 samples/s; a step of 32 samples trains in 0.106 s."""
    fields: dict[str, Any] = {
        "measured_s": 9.0,
        "start_s": 3.0,
        "at_once": True,
        "lengths": lengths_of().summary(0.0),
        "prompt_tokens": 10.0,
        "prefill_tokens_per_s": 50_000.0,
        "decode_running": 32.0,
        "decode_tokens_per_s": 3200.0,
        "decode_beside_tokens_per_s": 3200.0,
        "decode_fixed_s": 0.002,
        "decode_request_s": 0.00025,
        "train_tokens_per_s": 9000.0,
        "train_samples": 32,
        "train_fixed_s": 0.01,
        "train_token_s": 1e-4,
        "publish_s": 0.002,
        "apply_s": 0.01,
        "pause_s": 0.001,
        "verify_response_s": 0.001,
        "groups": 50,
        "accepted_groups": 50,
        "failed_rollouts": 0,
    }
    return Calibration(**(fields | changes))
