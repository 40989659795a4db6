"""Static key/value slots: one tensor for all layers, so that copying a prefix or moving a slot is one operation.

Shapes: l layers, s slots, k KV heads, t context tokens, c head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.records.tokens import ExpertRouting


class SlotCache:
    """Keys and values of every slot, ``[l, 2, s, k, t, c]``.

    Allocated as zeros, not uninitialised: masked positions enter the arithmetic with weight 0, and 0 x NaN is NaN.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        context_tokens: int,
        head_dimension: int,
        dtype: torch.dtype,
        device: torch.device,
        routing: ExpertRouting | None = None,
    ) -> None:
        """``routing``: the model's, if the experts of every token are kept beside its KV."""
        self.slots = slots
        self.routing = routing
        is_narrow, expert_columns = routing is None or routing.item_bytes == 1, 0 if routing is None else routing.width
        self.unknown = 255 if is_narrow else -1  # all bits set
        shape, id_dtype = (slots, context_tokens, expert_columns), torch.uint8 if is_narrow else torch.int16
        self.experts = torch.full(shape, self.unknown, dtype=id_dtype, device=device)  # [s, t, sparse layers * experts]
        self.kv_heads = kv_heads
        self.context_tokens = context_tokens
        self.all = torch.zeros((layers, 2, slots, kv_heads, context_tokens, head_dimension), dtype=dtype, device=device)
        self.keys = [self.all[layer, 0] for layer in range(layers)]  # [s, k, t, c] each
        self.values = [self.all[layer, 1] for layer in range(layers)]
        # Flat [s*k*t, c] views: a decode step writes one row per (slot, head) by linear index.
        self.flat_keys = [keys.view(-1, head_dimension) for keys in self.keys]
        self.flat_values = [values.view(-1, head_dimension) for values in self.values]
        row_starts = torch.arange(slots * kv_heads, device=device) * context_tokens
        self._row_starts_sk = row_starts.view(slots, kv_heads)

    def rows(self, position_n: Tensor) -> Tensor:
        """Linear row indices of slots 0..n-1 at ``position_n``, [n * k]."""
        n = position_n.shape[0]
        return (self._row_starts_sk[:n] + position_n[:, None]).view(-1)

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int], tokens: int) -> None:
        """Copy the first ``tokens`` positions of source slots into target slots, pairwise, all layers."""
        if len(sources) == 1:
            self.all[:, :, targets[0], :, :tokens] = self.all[:, :, sources[0], :, :tokens]
            self.experts[targets[0], :tokens] = self.experts[sources[0], :tokens]
        else:
            device = self.all.device
            source_slots = torch.tensor(sources, device=device)
            target_slots = torch.tensor(targets, device=device)
            self.all[:, :, target_slots, :, :tokens] = self.all[:, :, source_slots, :, :tokens]
            self.experts[target_slots, :tokens] = self.experts[source_slots, :tokens]

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Zero a slot whose KV may hold NaN, which would reach its next request."""
        self.all[:, :, slot].zero_()
