"""The dense decoder of Llama and Qwen3: one class, computed on packed tokens.

Shape suffixes: n packed tokens of all documents, d width, h query heads, g key/value heads, e head dimension,
v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headway.models.attention import AttentionPlan, packed_attention
from headway.models.configuration import DecoderConfig
from headway.models.kernels import gated_silu, norm_rotate, product_dtype, rms_norm

__all__ = ["Decoder", "DecoderConfig", "DecoderLayer"]


class DecoderLayer(nn.Module):
    """One block: x + attention(norm(x)), then x + MLP(norm(x)). Query, key and value share one matrix, so do
    gate and up: fewer and larger products. `loading.py` maps them to Hugging Face's names."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        c = self.config = config
        self.input_norm = nn.Parameter(torch.ones(c.width))
        self.qkv_weight = nn.Parameter(torch.empty((c.heads + 2 * c.kv_heads) * c.head_dim, c.width))
        self.output_weight = nn.Parameter(torch.empty(c.width, c.heads * c.head_dim))
        self.post_norm = nn.Parameter(torch.ones(c.width))
        self.gate_up_weight = nn.Parameter(torch.empty(2 * c.intermediate, c.width))
        self.down_weight = nn.Parameter(torch.empty(c.width, c.intermediate))
        self.q_norm = nn.Parameter(torch.ones(c.head_dim)) if c.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(c.head_dim)) if c.qk_norm else None
        qkv_rows = self.qkv_weight.shape[0]
        self.qkv_bias = nn.Parameter(torch.zeros(qkv_rows)) if c.attention_bias else None
        self.output_bias = nn.Parameter(torch.zeros(c.width)) if c.attention_bias else None
        self.gate_up_bias = nn.Parameter(torch.zeros(2 * c.intermediate)) if c.mlp_bias else None
        self.down_bias = nn.Parameter(torch.zeros(c.width)) if c.mlp_bias else None

    def _project(self, x_nd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Query, key and value side by side, [N, (Hq + 2 Hkv) Dh]."""
        c = self.config
        hidden_nd = rms_norm(x_nd, self.input_norm, c.norm_epsilon)
        qkv = functional.linear(hidden_nd, self.qkv_weight, self.qkv_bias)
        sizes = (c.heads, c.kv_heads, c.head_dim, c.norm_epsilon)
        return norm_rotate(qkv, self.q_norm, self.k_norm, cos, sin, sizes)

    def project_qkv(self, x_nd: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [N, Hq, Dh], key and value [N, Hkv, Dh] of the residual stream x [N, d], norms and rope applied.

        Rotary pairs are neighbours here (Hugging Face's halves are reordered at load): the order of a head's
        elements is internal, attention doesn't depend on it.
        """
        c = self.config
        qkv = self._project(x_nd, cos, sin).unflatten(-1, (-1, c.head_dim))
        q_nhe, k_nge, v_nge = qkv.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        return q_nhe, k_nge, v_nge

    def finish(self, x_nd: Tensor, attention_nhd: Tensor) -> Tensor:
        """The rest of the block after attention [N, Hq*Dh]: output projection, residual, norm, MLP, residual."""
        x_nd = _add_linear(x_nd, attention_nhd, self.output_weight, self.output_bias)
        hidden_nd = rms_norm(x_nd, self.post_norm, self.config.norm_epsilon)
        gate_up = functional.linear(hidden_nd, self.gate_up_weight, self.gate_up_bias)
        return _add_linear(x_nd, gated_silu(gate_up), self.down_weight, self.down_bias)

    def forward(self, x_nd: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan) -> Tensor:
        """The whole block on packed documents: residual stream [N, d] to [N, d]."""
        c = self.config
        qkv = self._project(x_nd, cos, sin)
        return self.finish(x_nd, packed_attention(qkv, c.heads, c.kv_heads, c.head_dim, plan))


def _add_linear(x_nd: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x + inner @ weight.T (+ bias). The residual is added inside the product, except under autocast, which would
    round the residual stream to the product's dtype."""
    if bias is not None or product_dtype(x_nd) != x_nd.dtype:
        return x_nd + functional.linear(inner, weight, bias)
    return torch.addmm(x_nd, inner, weight.t())


class Decoder(nn.Module):
    """A dense causal language model. Parameters are uninitialised until `loading` or `initialise` fills them.

    A tied head has no parameter of its own: it *is* ``embedding_weight``, so no copy, cast or update can part them.
    """

    _frequencies: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoints_layers = False  # gradient checkpointing: a layer is computed again in the backward
        self.embedding_weight = nn.Parameter(torch.empty(config.vocabulary_size, config.width))
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.final_norm = nn.Parameter(torch.ones(config.width))
        self.head_weight = None if config.tied else nn.Parameter(torch.empty(config.vocabulary_size, config.width))
        frequencies = torch.tensor(config.rope_frequencies(), dtype=torch.float32)
        self.register_buffer("_frequencies", frequencies, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        # A cast of the module must not round the rotary frequencies: angles of far positions would be off.
        super()._apply(fn, recurse)
        exact = torch.tensor(self.config.rope_frequencies(), dtype=torch.float32)
        self._frequencies = exact.to(self._frequencies.device)
        return self

    @property
    def device(self) -> torch.device:
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_weight.dtype

    def embed(self, ids_n: Tensor) -> Tensor:
        """Token ids [N] (int64) to the residual stream [N, d]."""
        return functional.embedding(ids_n, self.embedding_weight)

    def rope(self, positions_n: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each float32 [N, 1, Dh / 2], for positions [N]; shared by all layers."""
        angles = positions_n.to(torch.float32)[:, None, None] * self._frequencies
        return angles.cos(), angles.sin()

    def head(self, x_nd: Tensor) -> Tensor:
        """Final norm and output head: residual stream [N, d] to logits [N, V]."""
        weight = self.embedding_weight if self.head_weight is None else self.head_weight
        return functional.linear(rms_norm(x_nd, self.final_norm, self.config.norm_epsilon), weight)

    def forward_packed(self, ids_n: Tensor, lengths: list[int], continues: list[int] | None = None) -> Tensor:
        """Residual stream [N, d] after the last layer (before `head`) of documents laid end to end.

        ``ids_n``: int64 [N] with N = sum(lengths). Each document attends causally to itself alone and its
        positions start at 0; nothing is padded in the linear layers. With ``continues`` documents may share a prefix:
        see `AttentionPlan.build`. Raises ValueError when lengths don't add up.
        """
        plan = AttentionPlan.build(lengths, self.device, continues)
        if plan.tokens != ids_n.shape[0]:
            raise ValueError(f"lengths add up to {plan.tokens} tokens, but {ids_n.shape[0]} ids were given")
        cos, sin = self.rope(plan.positions_n)
        x_nd = self.embed(ids_n)
        for layer in self.layers:
            if self.checkpoints_layers and torch.is_grad_enabled():
                x_nd = checkpoint(layer, x_nd, cos, sin, plan, use_reentrant=False, preserve_rng_state=False)
            else:
                x_nd = layer(x_nd, cos, sin, plan)
        return x_nd

    def forward(self, ids_n: Tensor, lengths: list[int]) -> Tensor:
        """Logits [N, V] of documents laid end to end."""
        return self.head(self.forward_packed(ids_n, lengths))

    def flops(self, lengths: list[int], head_tokens: int | None = None, continues: list[int] | None = None) -> float:
        """Forward model FLOP over pieces of ``lengths``; ``head_tokens``: positions with logits (default all);
        ``continues``: the piece that each continues, as in `forward_packed`."""
        return self.config.flops(lengths, head_tokens, continues)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())
