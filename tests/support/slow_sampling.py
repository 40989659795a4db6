"""Imported by tests' `vllm serve`: it samples on while a test doesn't look, and what a test does between two tokens
would otherwise, on a busy machine, come after the last."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

STEP_S = 0.01  # for up to eight requests at once; many take a test longer to send, so they last longer


class SlowSampling(LogitsProcessor):
    """Changes nothing, and takes ``STEP_S`` a step for every eight requests."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Nothing to set up."""

    def is_argmax_invariant(self) -> bool:
        return False  # else greedy steps would pass it by

    def update_state(self, batch_update: Any) -> None:
        """It has no state."""

    def apply(self, logits: Tensor) -> Tensor:
        time.sleep(STEP_S * (1 + logits.shape[0] // 8))
        return logits
