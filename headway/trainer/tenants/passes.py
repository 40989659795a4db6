"""Passes over tenants' data: rows with free targets, in micro-batches of one or several tenants.

Legend: ``_n`` one value per token, k targets of a token, d width, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.algorithms.packing import pack
from headway.models.cpu import native
from headway.models.decoder import Decoder
from headway.models.gpu.recomputation import computed_again
from headway.models.lora import Lora, segmented, use
from headway.models.sizes import logit_rows
from headway.records.tenants.protocols import PassOutcome, TrainingDatum, TrainingPass
from headway.trainer.streams.token_logprobs import token_logprobs
from headway.trainer.tenants.losses import loss_sum, require_loss


@dataclass
class PassInProgress:
    """A tenant's pass while it is computed."""

    lora: Lora
    training_pass: TrainingPass
    logprobs: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])  # datum -> log-probabilities
    loss: float = 0.0

    def __post_init__(self) -> None:
        require_loss(self.training_pass.loss)

    def outcome(self) -> PassOutcome:
        """The outcome, once all rows are computed."""
        logprobs = tuple(self.logprobs[index] for index in range(len(self.training_pass.data)))
        return PassOutcome(logprobs=logprobs, metrics={"loss:sum": self.loss})


class _MicroBatch(NamedTuple):
    """Rows of a tenant that are computed at once."""

    job: PassInProgress
    indices: list[int]  # of its data

    @property
    def data(self) -> list[TrainingDatum]:
        return [self.job.training_pass.data[index] for index in self.indices]

    @property
    def lengths(self) -> list[int]:
        return [len(datum.token_ids_n) for datum in self.data]


def compute(model: Decoder, jobs: Sequence[PassInProgress], most_tokens: int, kernels: Any) -> None:
    """Compute passes that all have a backward or all have none, at most ``most_tokens`` tokens at once, a longer datum
    alone; gradients are added to the adapters'. A tenant's micro-batches depend on its data alone; several tenants'
    micro-batches share a forward pass, which changes their numbers by rounding."""
    is_forward_only = any(job.training_pass.forward_only for job in jobs)
    for micro_batches in _together(jobs, most_tokens):
        with native.using(kernels), torch.no_grad() if is_forward_only else nullcontext():
            loss = _forward(model, micro_batches)
            if not is_forward_only:
                loss.backward()
    use(model, None)


def _together(jobs: Sequence[PassInProgress], most_tokens: int) -> Iterator[list[_MicroBatch]]:
    """Yield the micro-batches that are computed together; one job's never are."""
    plans = [pack([len(d.token_ids_n) for d in job.training_pass.data], most_tokens)[0] for job in jobs]
    for number in range(max(map(len, plans), default=0)):
        together, tokens = list[_MicroBatch](), 0
        for job, plan in zip(jobs, plans, strict=True):
            if number >= len(plan) or not plan[number]:
                continue
            micro_batch = _MicroBatch(job, plan[number])
            if together and tokens + sum(micro_batch.lengths) > most_tokens:
                yield together
                together, tokens = [], 0
            together.append(micro_batch)
            tokens += sum(micro_batch.lengths)
        if together:
            yield together


def _forward(model: Decoder, micro_batches: Sequence[_MicroBatch]) -> Tensor:
    """Compute the sum of the losses of several tenants' rows, and note log-probabilities and losses."""
    data = [datum for micro_batch in micro_batches for datum in micro_batch.data]
    lengths = [len(datum.token_ids_n) for datum in data]
    ids_n = torch.from_numpy(np.concatenate([datum.token_ids_n for datum in data]).astype(np.int64)).to(model.device)
    if len(micro_batches) == 1:
        use(model, micro_batches[0].job.lora.layers)
    else:
        use(model, segmented([(batch.job.lora, sum(batch.lengths)) for batch in micro_batches]))
    hidden_nd = model.forward_packed(ids_n, lengths)
    targets = [_tensor(datum.inputs["target_tokens"], model.device) for datum in data]
    logprobs = iter(target_logprobs_of(model, hidden_nd.split(lengths), targets))
    losses: list[Tensor] = []
    for job, indices in micro_batches:
        own_logprobs = [next(logprobs) for _ in indices]
        loss = _loss(job.training_pass, indices, own_logprobs)
        losses.append(loss)
        job.loss += float(loss.detach())
        for index, datum_logprobs in zip(indices, own_logprobs, strict=True):
            job.logprobs[index] = datum_logprobs.detach().float().cpu().numpy()
    return torch.stack(losses).sum()


def _loss(training_pass: TrainingPass, indices: Sequence[int], logprobs: Sequence[Tensor]) -> Tensor:
    data, device = [training_pass.data[index] for index in indices], logprobs[0].device
    names = set[str]().union(*(datum.inputs for datum in data)) - {"target_tokens"}

    def joined(name: str) -> Tensor:  # a datum without sequence_ratio_mask beside others has its advantages for it
        parts = [datum.inputs[name if name in datum.inputs else "advantages"] for datum in data]
        return torch.cat([_tensor(part, device).flatten() for part in parts])

    sizes = torch.tensor([part.numel() for part in logprobs], device=device)
    sequence_m = torch.repeat_interleave(torch.arange(len(data), device=device), sizes)
    logprobs_m = torch.cat([part.flatten() for part in logprobs])
    inputs = {name: joined(name) for name in names}
    return loss_sum(training_pass.loss, logprobs_m, inputs, sequence_m, training_pass.settings)


def target_logprobs_of(model: Decoder, hidden: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    """Log-probabilities of each datum's targets, int64 [N] or [N, K], in their shape, from its hidden states [N, d]."""
    logprobs: list[Tensor] = [hidden[0]] * len(targets)
    for trailing_shape in dict.fromkeys(target.shape[1:] for target in targets):
        chosen = [index for index, target in enumerate(targets) if target.shape[1:] == trailing_shape]
        hidden_nd = torch.cat([hidden[index] for index in chosen])
        targets_n = torch.cat([targets[index] for index in chosen])
        if trailing_shape:
            joined = several_logprobs(model, hidden_nd, targets_n)
        else:
            joined, _ = token_logprobs(model, hidden_nd, targets_n, 1.0)
        for index, part in zip(chosen, joined.split([len(targets[index]) for index in chosen]), strict=True):
            logprobs[index] = part
    return logprobs


def several_logprobs(model: Decoder, hidden_nd: Tensor, targets_nk: Tensor, chunk_rows: int | None = None) -> Tensor:
    """log-softmax(z) at several targets of each token [N, K], in chunks of rows whose logits the backward computes
    again."""

    def head(hidden_cd: Tensor, targets_ck: Tensor) -> Tensor:
        logits_cv = model.head(hidden_cd)
        logits_cv = logits_cv.to(torch.promote_types(logits_cv.dtype, torch.float32))
        return logits_cv.gather(1, targets_ck) - logits_cv.logsumexp(1, keepdim=True)

    rows = chunk_rows or logit_rows(model.config.vocabulary_size, on_gpu=hidden_nd.device.type != "cpu")
    chunks = list(zip(hidden_nd.split(rows), targets_nk.split(rows), strict=True))
    if len(chunks) == 1:
        return head(*chunks[0])
    return torch.cat([computed_again(head, *chunk) for chunk in chunks])


def _tensor(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values)).to(device)
