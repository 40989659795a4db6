"""Keys and values in blocks that rows share: one tensor for all layers, so that a block is copied by one operation.

Shapes: l layers, b blocks, k KV heads, t tokens of a block, c head dimension, p tokens to store.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.generator.engines.torch.block_pool import BLOCK_TOKENS, BlockPool, blocks_for
from headway.records.tokens import ExpertRouting


class PagedCache:
    """Keys and values ``[l, 2, b, k, t, c]``, with the experts of every token beside them if they are kept.

    ``pool`` decides which row has which blocks; ``table`` is its memory as a tensor on the host.
    """

    def __init__(
        self,
        rows: int,
        context_tokens: int,
        capacity_tokens: int,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        routing: ExpertRouting | None = None,
    ) -> None:
        """``sizes``: layers, KV heads, head dimension. ``routing``: the model's, if the experts of every token are
        kept."""
        self.pool = BlockPool(rows, context_tokens, blocks_for(capacity_tokens))
        self.table = torch.from_numpy(self.pool.tables)
        self.routing = routing
        is_narrow, expert_columns = routing is None or routing.item_bytes == 1, 0 if routing is None else routing.width
        self.unknown = 255 if is_narrow else -1  # all bits set
        layers, kv_heads, head_dimension = sizes
        blocks, id_dtype = len(self.pool.references), torch.uint8 if is_narrow else torch.int16
        shape = (blocks, BLOCK_TOKENS, expert_columns)
        self.experts = torch.full(shape, self.unknown, dtype=id_dtype, device=device)  # [b, t, sparse layers * experts]
        shape = (layers, 2, blocks, kv_heads, BLOCK_TOKENS, head_dimension)
        self.all = torch.zeros(shape, dtype=dtype, device=device)
        self.keys = [self.all[layer, 0] for layer in range(layers)]  # [b, k, t, c] each
        self.values = [self.all[layer, 1] for layer in range(layers)]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, as (source, target), in all layers."""
        if not pairs:
            return
        host_pairs = torch.tensor(pairs, pin_memory=self.all.is_cuda)
        with torch.inference_mode():
            sources, targets = host_pairs.to(self.all.device, non_blocking=True).unbind(1)
            self.all[:, :, targets] = self.all[:, :, sources]
            if self.routing is not None:
                self.experts[targets] = self.experts[sources]
