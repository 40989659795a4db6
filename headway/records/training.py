"""Records that cross the boundary between the orchestrator and a trainer: batches, reports, checkpoints."""

from __future__ import annotations

import msgspec

from headway.records.rollout import Sample
from headway.records.tokens import TokenIds, TokenLogprobs, TokenMask

MAX_CONSECUTIVE_SKIPS = 20  # steps; beyond it, weights that don't change won't recover by themselves
SKIPPED_MINIBATCHES = "skipped_minibatches"  # metric of a step: those that algorithm.early_stop_ratio or _kl left out

SKIPPED_VALUE_UPDATES = "skipped_value_updates"  # metric of a step: the critic's whose gradient wasn't finite


class DrawnDemonstration(msgspec.Struct, frozen=True, kw_only=True):
    """A row of ``demonstrations.data`` in a batch: no rollout, no group, no advantage."""

    row: int  # its number among those that can be drawn
    ids: TokenIds
    learned: TokenMask  # tokens with cross-entropy; the first has none


class TrainBatch(msgspec.Struct, frozen=True, kw_only=True):
    """All samples of one step, in admission order, and its demonstrations."""

    step: int  # trainer version before the step
    samples: tuple[Sample, ...]
    demonstrations: tuple[DrawnDemonstration, ...] = ()


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one part's forward and backward pass."""

    samples: int
    tokens: int  # of the samples, prompts included
    loss: float  # sum of its weighted token losses
    loss_tokens: int
    compute_s: float
    # [N] of every token in turn (samples in batch order, a sample's trunk, then its branches); 0 where none has loss
    logprobs: TokenLogprobs = TokenLogprobs()
    metrics: dict[str, float] = {}  # as those of a step, of this part alone


class OptimiserSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one AdamW step."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # gradients are scaled down to it


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one training step."""

    step: int  # version before the step
    version: int  # version after it (== step when skipped)
    skipped: bool = False  # non-finite loss or gradient: no version was made
    reason: str = ""
    samples: int = 0
    tokens: int = 0  # tokens of the samples, prompts included
    computed_tokens: int = 0  # those the model computed: a prompt shared by samples of a micro-batch counts once
    loss_tokens: int = 0  # tokens that carry loss weight (the denominator of token-mean)
    micro_batches: int = 0
    compute_s: float = 0.0
    rank_compute_s: tuple[float, ...] = ()  # of every rank; compute_s is the first one's
    flops: float = 0.0  # model FLOP of forward and backward over the computed tokens: what MFU counts
    unrecorded: str = ""  # why the record of trained tokens ended in this step
    # of each sample, in batch order, with a critic: the mean over its loss tokens; of one rank those of its samples
    sample_advantages: tuple[float, ...] = ()
    halved: str = ""  # which micro-batches were halved in this process, and why
    # loss, entropy, grad_norm, clip_fraction, ratio_*, learning_rate, mismatch_k3, mismatch_max, ...
    metrics: dict[str, float] = {}


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A durable checkpoint."""

    path: str
    version: int
