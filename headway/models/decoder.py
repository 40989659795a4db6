"""The dense decoder of Llama and Qwen3: one class, computed on packed tokens.

Shape suffixes: n packed tokens of all documents, d width, h query heads, g key/value heads, e head dimension,
f intermediate width, v vocabulary, b documents of a bucket, l padded length of a bucket.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.models.attention import AttentionPlan, packed_attention
from headway.models.configuration import DecoderConfig

__all__ = ["Decoder", "DecoderConfig", "DecoderLayer"]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last axis, computed in float32 (Zhang & Sennrich 2019, Eq. 4)."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * (wide * scale).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [N, heads, e]; cos and the signed sin are [N, 1, e] (see `Decoder.rope`)."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


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

    def project_qkv(self, x_nd: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [N, Hq, Dh], key and value [N, Hkv, Dh] of the residual stream x [N, d], norms and rope applied."""
        c = self.config
        hidden_nd = rms_norm(x_nd, self.input_norm, c.norm_epsilon)
        qkv = functional.linear(hidden_nd, self.qkv_weight, self.qkv_bias).unflatten(-1, (-1, c.head_dim))
        q_nhe, k_nge, v_nge = qkv.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_nhe = rms_norm(q_nhe, self.q_norm, c.norm_epsilon)
            k_nge = rms_norm(k_nge, self.k_norm, c.norm_epsilon)
        return rotate(q_nhe, cos, sin), rotate(k_nge, cos, sin), v_nge

    def finish(self, x_nd: Tensor, attention_nhd: Tensor) -> Tensor:
        """The rest of the block after attention [N, Hq*Dh]: output projection, residual, norm, MLP, residual."""
        x_nd = x_nd + functional.linear(attention_nhd, self.output_weight, self.output_bias)
        hidden_nd = rms_norm(x_nd, self.post_norm, self.config.norm_epsilon)
        gate_up = functional.linear(hidden_nd, self.gate_up_weight, self.gate_up_bias)
        gate_nf, up_nf = gate_up.chunk(2, dim=-1)
        return x_nd + functional.linear(functional.silu(gate_nf) * up_nf, self.down_weight, self.down_bias)


class Decoder(nn.Module):
    """A dense causal language model. Parameters are uninitialised until `loading` or `initialise` fills them.

    A tied head has no parameter of its own: it *is* ``embedding_weight``, so no copy, cast or update can part them.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding_weight = nn.Parameter(torch.empty(config.vocabulary_size, config.width))
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.final_norm = nn.Parameter(torch.ones(config.width))
        self.head_weight = None if config.tied else nn.Parameter(torch.empty(config.vocabulary_size, config.width))
        frequencies = torch.tensor(config.rope_frequencies(), dtype=torch.float32)
        self.register_buffer("_frequencies", frequencies, persistent=False)

    def _apply(self, fn, recurse: bool = True):
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
        """cos and signed sin, each [N, 1, Dh] in the model's dtype, for positions [N]; shared by all layers.

        The first half of sin is negated, so that a rotation is x*cos + swapped_halves(x)*sin.
        """
        angles = positions_n.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).to(self.dtype), torch.cat((-sin, sin), dim=-1).to(self.dtype)

    def head(self, x_nd: Tensor) -> Tensor:
        """Final norm and output head: residual stream [N, d] to logits [N, V]."""
        weight = self.embedding_weight if self.head_weight is None else self.head_weight
        return functional.linear(rms_norm(x_nd, self.final_norm, self.config.norm_epsilon), weight)

    def forward_packed(self, ids_n: Tensor, lengths: list[int]) -> Tensor:
        """Residual stream [N, d] after the last layer (before `head`) of documents laid end to end.

        ``ids_n``: int64 [N] with N = sum(lengths). Each document attends causally to itself alone and its
        positions start at 0; nothing is padded in the linear layers. Raises ValueError when lengths don't add up.
        """
        plan = AttentionPlan.build(lengths, self.device)
        if plan.tokens != ids_n.shape[0]:
            raise ValueError(f"lengths add up to {plan.tokens} tokens, but {ids_n.shape[0]} ids were given")
        cos, sin = self.rope(plan.positions_n)
        x_nd = self.embed(ids_n)
        for layer in self.layers:
            q_nhe, k_nge, v_nge = layer.project_qkv(x_nd, cos, sin)
            x_nd = layer.finish(x_nd, packed_attention(q_nhe, k_nge, v_nge, plan))
        return x_nd

    def forward(self, ids_n: Tensor, lengths: list[int]) -> Tensor:
        """Logits [N, V] of documents laid end to end."""
        return self.head(self.forward_packed(ids_n, lengths))

    def flops(self, lengths: list[int], head_tokens: int | None = None) -> float:
        """Forward model FLOP over documents of ``lengths``; ``head_tokens``: positions with logits (default all)."""
        return self.config.flops(lengths, head_tokens)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())
