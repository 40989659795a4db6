"""Divergences of the distribution in training from a teacher's, token by token, with exact gradients.

p is the distribution in training, q the teacher's, both over the vocabulary, or over the teacher's k likeliest tokens
and one bin with the rest of the mass:

    forward         KL(q || p) = sum q log(q / p): p covers all that q does
    reverse         KL(p || q) = sum p log(p / q): p concentrates where q is likely
    jensen_shannon  (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2, at most log 2 (Lin, 1991)

Logits are computed in chunks of `CHUNK_LOGITS`, and again in the backward.

Legend: ``_m`` per token, ``_c`` per token of a chunk, ``d`` width, ``v`` vocabulary, ``k`` likeliest tokens, ``b``
bins, v or k + 1; all in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from headway.models.gpu.recomputation import computed_again
from headway.models.packed_model import PackedModel
from headway.trainer.kept_sets import MicroBatchSets

DivergenceKind = Literal["forward", "reverse", "jensen_shannon"]

CHUNK_LOGITS = 1 << 24  # of one model in a chunk; some six copies exist at once
_LEAST_REST = math.log(1e-7)  # of the teacher's mass behind its k likeliest tokens: beyond it float32 sums are noise
EXCLUDED = -1e30  # logit of an id that can't be: its probability is 0, and differences stay finite


class Divergence(NamedTuple):
    """The divergence of the policy from a teacher's distribution, per scored token; 0 without a teacher."""

    values_m: Tensor  # nats, with gradient
    slopes_m: Tensor  # sum over the bins of |d value / d log P|, without


class TopLogprobs(NamedTuple):
    """A teacher's likeliest tokens in each token's place."""

    ids_mk: Tensor  # int64
    logprobs_mk: Tensor
    padded: bool = False  # some ids are only the teacher's: the policy's vocabulary stands for each, at `EXCLUDED`


@dataclass(frozen=True, kw_only=True)
class TeacherHidden:
    """A teacher in the trainer: its hidden states, from which logits are computed chunk by chunk."""

    model: PackedModel
    hidden_md: Tensor
    top_k: int | None = None  # likeliest tokens that are compared; None: the complete distributions


def token_divergences(
    model: PackedModel,
    hidden_md: Tensor,
    teacher: TeacherHidden | TopLogprobs,
    kind: DivergenceKind,
    temperature: float,
    kept: MicroBatchSets | None = None,
) -> Divergence:
    """Divergence of softmax(logits / temperature) from the teacher's distribution, with gradient with respect to
    the hidden states [M, d] and the head. ``kept``: sets over which both are renormalised. Rows that only one of two
    models has are padding: both are compared over the others."""
    vocabulary = model.config.vocabulary_size
    rows = max(1, CHUNK_LOGITS // vocabulary)
    if isinstance(teacher, TeacherHidden):
        vocabulary = min(vocabulary, teacher.model.config.vocabulary_size)

    def compute(hidden_cd: Tensor, first: int) -> tuple[Tensor, Tensor]:
        chunk = slice(first, first + len(hidden_cd))
        outside_cv = None if kept is None else kept.outside(chunk.start, chunk.stop)[:, :vocabulary]
        if isinstance(teacher, TopLogprobs):
            target = _stored_target(teacher.ids_mk[chunk], teacher.logprobs_mk[chunk], vocabulary)
        else:
            with torch.no_grad():
                logits_cv = teacher.model.head(teacher.hidden_md[chunk])[:, :vocabulary]
                target = _computed_target(_masked(logits_cv, outside_cv), teacher.top_k, temperature)
            del logits_cv
        logits_cv = model.head(hidden_cd)
        if logits_cv.shape[1] > vocabulary:
            logits_cv = logits_cv[:, :vocabulary]
        if isinstance(teacher, TopLogprobs) and teacher.padded:
            logits_cv = torch.nn.functional.pad(logits_cv, (0, 1), value=EXCLUDED)
        outputs: Any = _Divergence.apply(_masked(logits_cv, outside_cv), target, kind, temperature)
        return outputs

    if not len(hidden_md):
        zeros_m = model.head(hidden_md).float().sum(1)
        return Divergence(zeros_m, zeros_m.detach())
    chunks = [computed_again(compute, part_cd, part * rows) for part, part_cd in enumerate(hidden_md.split(rows))]
    values, slopes = zip(*chunks, strict=True)
    return Divergence(torch.cat(values), torch.cat(slopes))


class _Target(NamedTuple):
    ids_ck: Tensor | None  # of the bins but that of the rest; None: each id is a bin
    logprobs_cb: Tensor


def _masked(logits_cv: Tensor, outside_cv: Tensor | None) -> Tensor:
    return logits_cv if outside_cv is None else logits_cv.masked_fill(outside_cv, EXCLUDED)


def _logprobs(logits_cv: Tensor, temperature: float) -> Tensor:
    """log-softmax(logits / temperature) [C, V], in at least float32."""
    wide_cv = logits_cv.to(torch.promote_types(logits_cv.dtype, torch.float32)) / temperature
    return wide_cv.sub_(torch.logsumexp(wide_cv, dim=1, keepdim=True))


def _bins(logprobs_cv: Tensor, ids_ck: Tensor | None) -> Tensor:
    """Log of the bins' mass [C, B]; if all tokens are named there is no rest."""
    if ids_ck is None:
        return logprobs_cv
    named_ck = logprobs_cv.gather(1, ids_ck)
    if ids_ck.shape[1] == logprobs_cv.shape[1]:
        return named_ck
    rest_c1 = torch.logsumexp(logprobs_cv.scatter(1, ids_ck, EXCLUDED), dim=1, keepdim=True)
    return torch.cat([named_ck, rest_c1], dim=1)


def _stored_target(ids_ck: Tensor, logprobs_ck: Tensor, vocabulary: int) -> _Target:
    """The bins of likeliest tokens; the rest is the mass that they leave."""
    if ids_ck.shape[1] == vocabulary:
        return _Target(ids_ck, logprobs_ck)
    sum_c1 = torch.logsumexp(logprobs_ck.double(), dim=1, keepdim=True).clamp(max=-1e-15)
    rest_c1 = torch.log(-torch.expm1(sum_c1)).clamp(min=_LEAST_REST)
    return _Target(ids_ck, torch.cat([logprobs_ck, rest_c1.to(logprobs_ck)], dim=1))


def _computed_target(logits_cv: Tensor, top_k: int | None, temperature: float) -> _Target:
    logprobs_cv = _logprobs(logits_cv, temperature)
    if top_k is None:
        return _Target(None, logprobs_cv)
    ids_ck = logprobs_cv.topk(min(top_k, logprobs_cv.shape[1]), dim=1).indices
    return _Target(ids_ck, _bins(logprobs_cv, ids_ck))


class _Divergence(torch.autograd.Function):
    """The divergence and its slopes, [C] each; its gradient with respect to the logits is computed beside
    them: with P the bins' mass and w = P dD/dP, it is (p / P w of the id's bin - p sum w) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits_cv: Tensor, target: _Target, kind: DivergenceKind, temperature: float) -> Any:
        logprobs_cv, ids_ck = _logprobs(logits_cv, temperature), target.ids_ck
        bins_cb = _bins(logprobs_cv, ids_ck)
        values_c, weights_cb = _KINDS[kind](bins_cb, target.logprobs_cb.to(bins_cb))
        total_c1, slopes_c = weights_cb.sum(1, keepdim=True), weights_cb.abs().sum(1)
        if ids_ck is None:
            gradient_cv = weights_cb.addcmul_(logprobs_cv.exp_(), total_c1, value=-1)
        else:
            k = ids_ck.shape[1]
            named_ck = weights_cb[:, :k] - bins_cb[:, :k].exp() * total_c1
            gradient_cv = logprobs_cv.exp() * -total_c1
            if bins_cb.shape[1] > k:
                gradient_cv += logprobs_cv.sub_(bins_cb[:, k:]).clamp_(max=0.0).exp_() * weights_cb[:, k:]
            gradient_cv.scatter_(1, ids_ck, named_ck)
        ctx.save_for_backward(gradient_cv.div_(temperature))
        ctx.dtype = logits_cv.dtype
        ctx.mark_non_differentiable(slopes_c)
        return values_c, slopes_c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_cv,) = ctx.saved_tensors
        return (gradient_cv * grads[0].unsqueeze(1)).to(ctx.dtype), None, None, None


# From log P and log Q of the bins: the divergence [C], and w = P dD/dP [C, B], up to a multiple of P.


def _forward(log_p_cb: Tensor, log_q_cb: Tensor) -> tuple[Tensor, Tensor]:
    q_cb = log_q_cb.exp()
    return (q_cb * (log_q_cb - log_p_cb)).sum(1), q_cb.neg_()


def _reverse(log_p_cb: Tensor, log_q_cb: Tensor) -> tuple[Tensor, Tensor]:
    weights_cb = (log_p_cb - log_q_cb).mul_(log_p_cb.exp())
    return weights_cb.sum(1), weights_cb


def _jensen_shannon(log_p_cb: Tensor, log_q_cb: Tensor) -> tuple[Tensor, Tensor]:
    log_m_cb = torch.logaddexp(log_p_cb, log_q_cb).sub_(math.log(2))
    teacher_c = ((log_q_cb - log_m_cb).mul_(log_q_cb.exp())).sum(1)
    weights_cb = log_m_cb.neg_().add_(log_p_cb).mul_(log_p_cb.exp()).mul_(0.5)
    return 0.5 * teacher_c + weights_cb.sum(1), weights_cb


_KINDS: dict[DivergenceKind, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "forward": _forward,
    "reverse": _reverse,
    "jensen_shannon": _jensen_shannon,
}
