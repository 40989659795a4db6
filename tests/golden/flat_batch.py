"""Batches of bare loss masks: what the aggregations look at."""

from __future__ import annotations

import numpy as np

from headway.algorithms.samples import SampleArrays


def arrays_of(*masks: list[bool]) -> SampleArrays:
    """A batch whose samples have the loss masks ``masks``, token by token."""
    mask_n = np.array([value for mask in masks for value in mask], np.bool_)
    return SampleArrays(
        token_ids_n=np.zeros(len(mask_n), np.int64),
        loss_mask_n=mask_n,
        behaviour_logprobs_n=np.zeros(len(mask_n), np.float32),
        advantages_n=np.zeros(len(mask_n), np.float32),
        versions_n=np.zeros(len(mask_n), np.int64),
        lengths_s=np.array([len(mask) for mask in masks], np.int64),
        groups_s=np.arange(len(masks)),
    )


def all_loss(*tokens: int) -> SampleArrays:
    """Samples of so many loss tokens each."""
    return arrays_of(*([True] * count for count in tokens))
