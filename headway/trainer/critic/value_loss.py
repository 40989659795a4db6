"""The loss of values, per token.

Legend: suffix ``_m`` is one value per token that carries loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

VALUE_CLIP = 0.2  # in deviations of the returns, which values are divided by


def clipped_value_loss(values_m: Tensor, start_m: Tensor, targets_m: Tensor, clip: float = VALUE_CLIP) -> Tensor:
    """Half the squared error of values [M], or of those moved at most ``clip`` away from the values ``start_m`` at the
    start of the step, whichever is larger (PPO's code, 2017): a value that has moved so far towards its target has no
    gradient any more."""
    near_m = start_m + (values_m - start_m).clamp(-clip, clip)
    return 0.5 * torch.maximum((values_m - targets_m).square(), (near_m - targets_m).square())
