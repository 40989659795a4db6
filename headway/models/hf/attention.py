"""Attention over packed documents inside transformers models, by attention functions that are registered there.

Two names are registered, one for each of transformers' plain implementations. Within `packing` a layer's mask is a
`PackedMask`, and documents of similar length share one padded call of that plain implementation, so that sinks, soft
caps and values of another width keep their meaning. Outside of `packing` both compute what the plain one does.

Shape suffixes: n packed tokens, h heads, e values of a head, b documents of a bucket, l its padded length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from headway.models.attention_plan import AttentionPlan
from headway.models.kernels import PadDocuments, UnpadDocuments
from headway.models.parallel.context import ContextRanks

# Name of a plain implementation -> name of the packed one that calls it.
PACKED = {"sdpa": "headway_packed", "eager": "headway_packed_eager"}

_pack: ContextVar[tuple[AttentionPlan, ContextRanks | None] | None] = ContextVar("packed documents", default=None)


@contextmanager
def packing(plan: AttentionPlan, context: ContextRanks | None = None) -> Iterator[None]:
    """Make the models called in this block treat their row of tokens as the documents of ``plan``, or as this rank's
    slice of them."""
    reset_token = _pack.set((plan, context))
    try:
        yield
    finally:
        _pack.reset(reset_token)


class PackedMask:
    """The mask that a model passes to its layers: the keys that each query sees, for documents of ``plan``.

    ``sees``: transformers' function of batch, head, query and key index; None: plain causality.
    """

    def __init__(self, plan: AttentionPlan, context: ContextRanks | None, sees: Callable[..., Any] | None) -> None:
        self.plan = plan
        self.context = context
        self._sees = sees
        self._made: dict[tuple[int, torch.dtype], Tensor] = {}

    def of(self, length: int, dtype: torch.dtype | None, device: torch.device) -> Tensor | None:
        """The mask [1, 1, l, l] of documents of ``length`` tokens: boolean, or additive in ``dtype``. None: plain
        causality, boolean. Padding follows a document, so that causality hides it."""
        if self._sees is None and dtype is None:
            return None
        cache_key = (length, dtype or torch.bool)
        if cache_key not in self._made:
            indices = torch.arange(length, device=device)
            query_indices, keys = indices[:, None], indices[None, :]
            zero = torch.zeros((), dtype=torch.int64, device=device)
            mask = (keys <= query_indices) if self._sees is None else self._sees(zero, zero, query_indices, keys)
            if dtype is not None:
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
            self._made[cache_key] = mask.expand(length, length)[None, None]
        return self._made[cache_key]


def _make_mask(
    plain: Callable[..., Any], batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any
) -> Any:
    """The mask of a model's layers: a `PackedMask` within `packing`, else that of ``plain``."""
    pack = _pack.get()
    if pack is None:
        return plain(batch_size, q_length, kv_length, *args, **kwargs)
    plan, context = pack
    local_size = kwargs.get("local_size")
    is_causal = kwargs.get("allow_is_causal_skip", True) and (local_size is None or local_size >= plan.longest)
    return PackedMask(plan, context, None if is_causal else kwargs["mask_function"])


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The plain implementation in the Python module of the layer's class."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


def _attend(
    plain: Callable[..., Any],
    additive: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention with the signature of transformers' functions: [1, h, N, e] to [1, N, h, e]. ``additive``: the plain
    implementation adds its mask to the scores."""
    if not isinstance(attention_mask, PackedMask):
        return plain(module, query, key, value, attention_mask, *args, **kwargs)
    plan, context = attention_mask.plan, attention_mask.context
    buckets, scatter_n = plan.buckets, plan.scatter_n
    gathers = [bucket.gather_bl for bucket in buckets]
    parts = [rows[0].transpose(0, 1) for rows in (query, key, value)]
    if context is not None:
        parts = context.gather_tokens(parts, plan.tokens)
    padded: list[list[Tensor]] = []
    for part in parts:
        heads = part.shape[1]
        blocks = PadDocuments.apply(part.flatten(1), scatter_n, *gathers)
        padded.append(
            [
                block.view(bucket.documents, bucket.length, heads, -1).transpose(1, 2)
                for bucket, block in zip(buckets, blocks, strict=True)  # pyright: ignore[reportArgumentType]
            ]
        )
    outputs: list[Tensor] = []
    for bucket, q, k, v in zip(buckets, *padded, strict=True):
        mask = attention_mask.of(bucket.length, query.dtype if additive else None, query.device)
        out = plain(module, q, k, v, mask, *args, **kwargs)[0]
        outputs.append(out.reshape(bucket.documents * bucket.length, -1))
    unpadded: Tensor = UnpadDocuments.apply(scatter_n, *outputs)  # pyright: ignore[reportAssignmentType]
    if context is not None:
        unpadded = context.scatter_tokens(unpadded, plan.tokens)
    return unpadded.view(1, query.shape[2], query.shape[1], -1), None


for _name, _plain, _mask, _additive in (
    (PACKED["sdpa"], sdpa_attention_forward, sdpa_mask, False),
    (PACKED["eager"], _eager, eager_mask, True),
):
    AttentionInterface.register(_name, partial(_attend, _plain, _additive))
    AttentionMaskInterface.register(_name, partial(_make_mask, _mask))
