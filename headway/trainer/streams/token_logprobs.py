"""Log-probabilities of tokens from hidden states, in chunks of logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from headway.models.gpu.recomputation import computed_again
from headway.models.kernels import target_logprobs
from headway.models.packed_model import PackedModel
from headway.models.sizes import logit_rows
from headway.trainer.kept_sets import MicroBatchSets


def token_logprobs(
    model: PackedModel,
    hidden_md: Tensor,
    targets_m: Tensor,
    temperature: float,
    chunk_logits: int | None = None,
    kept: MicroBatchSets | None = None,
) -> tuple[Tensor, Tensor]:
    """log-softmax(z/T) at the targets [M] and entropy of the complete distribution [M], from hidden states [M, d]. With
    ``kept`` both are over each target's set, whose log-probability is written to ``kept.masses_m``.

    Above ``chunk_logits`` values (default: `logit_rows`) the [M, V] logits and masks are computed in chunks and never
    exist at once.
    """

    def head(hidden_cd: Tensor, targets_c: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        stop, logits_cv = first + len(targets_c), model.head(hidden_cd)
        if kept is None:
            return target_logprobs(logits_cv, targets_c, temperature)
        outside_cv = kept.outside(first, stop)
        if further := logits_cv.shape[1] - outside_cv.shape[1]:  # a teacher's padding; negative: it has less
            outside_cv = functional.pad(outside_cv, (0, further), value=True)
        return target_logprobs(logits_cv, targets_c, temperature, outside_cv, kept.masses_m[first:stop])

    vocabulary = model.config.vocabulary_size
    on_gpu = hidden_md.device.type != "cpu" and kept is None
    rows = logit_rows(vocabulary, on_gpu=on_gpu) if chunk_logits is None else max(1, chunk_logits // vocabulary)
    if hidden_md.shape[0] <= rows:
        return head(hidden_md, targets_m)
    chunk_scores = [
        computed_again(head, hidden_cd, targets_c, chunk * rows)
        for chunk, (hidden_cd, targets_c) in enumerate(zip(hidden_md.split(rows), targets_m.split(rows), strict=True))
    ]
    return torch.cat([scores[0] for scores in chunk_scores]), torch.cat([scores[1] for scores in chunk_scores])
