"""The decoder for all families in `families.py`: one class, computed on packed tokens.

Shape suffixes: n packed tokens of all documents, d width, h query heads, g key/value heads, e head dimension,
v vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.config.schema import Checkpointing
from headway.models.attention import packed_attention
from headway.models.attention_plan import AttentionPlan
from headway.models.configuration import DecoderConfig
from headway.models.experts import ExpertReplay, LayerAdapter, mix, mix_in_fixed_shapes, route
from headway.models.gpu.operators import with_offset
from headway.models.gpu.recomputation import computed_again, recomputing
from headway.models.kernels import GATED, linear, norm_rotate, normed_stream, rms_norm
from headway.models.packed_model import PackedModel
from headway.models.parallel.division import Division
from headway.models.parallel.divisors import require_divisible

__all__ = ["Decoder", "DecoderConfig", "DecoderLayer"]


class DecoderLayer(nn.Module):
    """A transformer block: x + attention(norm(x)), then x + MLP(norm(x)); some families norm each summand as well.
    Query, key and value share one matrix, as do gate and up, and all experts of a mixture, which makes products fewer
    and larger. `layout.py` maps them to Hugging Face's names."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        c = self.config = config
        self.family = config.family
        self.kind = config.layer(index)
        self.adapter: LayerAdapter | None = None  # adds to the products: see `lora.use`
        self.fixed_shapes = False  # a mixture's products have the same shapes for any routing
        self.routed: list[Tensor] | None = None  # if it is a list, each call appends the experts of its tokens
        self.division = Division()
        self.input_norm = nn.Parameter(torch.ones(c.width))
        self.qkv_weight = nn.Parameter(torch.empty((c.heads + 2 * c.kv_heads) * c.head_dim, c.width))
        self.output_weight = nn.Parameter(torch.empty(c.width, c.heads * c.head_dim))
        self.post_norm = nn.Parameter(torch.ones(c.width))
        if c.mixture is not None and self.kind.sparse:
            experts, inner_width = c.mixture.experts, c.mixture.intermediate
            self.router_weight = nn.Parameter(torch.empty(experts, c.width))
            self.gate_up_weight = nn.Parameter(torch.empty(experts, 2 * inner_width, c.width))
            self.down_weight = nn.Parameter(torch.empty(experts, c.width, inner_width))
        else:
            self.gate_up_weight = nn.Parameter(torch.empty(2 * c.intermediate, c.width))
            self.down_weight = nn.Parameter(torch.empty(c.width, c.intermediate))
        self.q_norm = nn.Parameter(torch.ones(c.head_dim)) if c.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(c.head_dim)) if c.qk_norm else None
        qkv_rows = self.qkv_weight.shape[0]
        self.qkv_bias = nn.Parameter(torch.zeros(qkv_rows)) if c.attention_bias else None
        self.output_bias = nn.Parameter(torch.zeros(c.width)) if c.output_bias else None
        self.gate_up_bias = nn.Parameter(torch.zeros(2 * c.intermediate)) if c.mlp_bias else None
        self.down_bias = nn.Parameter(torch.zeros(c.width)) if c.mlp_bias else None
        self.attention_output_norm = nn.Parameter(torch.ones(c.width)) if self.family.output_norms else None
        self.mlp_output_norm = nn.Parameter(torch.ones(c.width)) if self.family.output_norms else None

    def _project(self, x_nd: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Query, key and value side by side, [N, (Hq + 2 Hkv) Dh], and the residual stream for what follows."""
        c, offset, rope = self.config, self.family.norm_offset, self.kind.rope
        hidden_nd, x_nd = normed_stream(x_nd, self.input_norm, c.norm_epsilon, offset)
        qkv = self._product("qkv", hidden_nd)
        sizes = (c.heads, c.kv_heads, c.head_dim, c.norm_epsilon)
        q_norm, k_norm = self.q_norm, self.k_norm
        if offset and q_norm is not None and k_norm is not None:
            q_norm, k_norm = with_offset(q_norm, offset), with_offset(k_norm, offset)
        return norm_rotate(qkv, q_norm, k_norm, cos[:, rope : rope + 1], sin[:, rope : rope + 1], sizes), x_nd

    def project_qkv(self, x_nd: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [N, Hq, Dh], key and value [N, Hkv, Dh] of the residual stream x [N, d], norms and rope applied.

        Rotary pairs are neighbours here (Hugging Face's halves are reordered at load). The order of a head's elements
        is internal, since attention doesn't depend on it.
        """
        c = self.config
        qkv = self._project(x_nd, cos, sin)[0].unflatten(-1, (-1, c.head_dim))
        q_nhe, k_nge, v_nge = qkv.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        return q_nhe, k_nge, v_nge

    def finish(self, x_nd: Tensor, attention_nhd: Tensor, replay: ExpertReplay | None = None) -> Tensor:
        """Compute the block after attention [N, Hq*Dh]: output projection, residual, norm, MLP, residual."""
        x_nd = self._add("output", x_nd, attention_nhd, self.attention_output_norm)
        hidden_nd, x_nd = normed_stream(x_nd, self.post_norm, self.config.norm_epsilon, self.family.norm_offset)
        gated = GATED[self.family.activation]
        if self.config.mixture is not None and self.kind.sparse:
            return x_nd + self._mix(hidden_nd, gated, replay)
        return self._add("down", x_nd, gated(self._product("gate_up", hidden_nd)), self.mlp_output_norm)

    def _mix(self, hidden_nd: Tensor, gated: Callable[[Tensor], Tensor], replay: ExpertReplay | None) -> Tensor:
        assert self.config.mixture is not None
        m = self.config.mixture
        chosen_nk, weights_nk = route(hidden_nd, self.router_weight, m.per_token, m.normalised, self.adapter, replay)
        if self.routed is not None:
            self.routed.append(chosen_nk)
        gate_up_xfd, down_xdf, ranks = self.gate_up_weight, self.down_weight, self.division.experts
        if ranks is not None:
            gate_up_xfd, down_xdf = ranks.own_experts(gate_up_xfd), ranks.own_experts(down_xdf)
        inputs = hidden_nd, chosen_nk, weights_nk, gate_up_xfd, down_xdf, gated, self.adapter
        return mix_in_fixed_shapes(*inputs) if self.fixed_shapes else mix(*inputs, ranks)

    def _product(self, name: str, x_nd: Tensor, add: Tensor | None = None) -> Tensor:
        """Input rows times the matrix of this name, plus its bias, the adapter's part and ``add``."""
        out_nf = linear(x_nd, getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias"), add)
        return out_nf if self.adapter is None else self.adapter.add(name, out_nf, x_nd)

    def _add(self, name: str, x_nd: Tensor, inner: Tensor, norm: Tensor | None) -> Tensor:
        """Residual stream plus a product, which is normed first if the family has output norms."""
        if norm is None:
            return self._product(name, inner, add=x_nd)
        out_nd = self._product(name, inner)
        return x_nd + rms_norm(out_nd, norm, self.config.norm_epsilon, self.family.norm_offset)

    def forward(
        self, x_nd: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, replay: ExpertReplay | None = None
    ) -> Tensor:
        """Compute the block on packed documents: residual stream [N, d] to [N, d]."""
        c = self.config
        qkv, x_nd = self._project(x_nd, cos, sin)
        attend = packed_attention if self.division.context is None else self.division.context.attention
        attention_nhd = attend(qkv, c.heads, c.kv_heads, c.head_dim, plan, self.kind.scores)
        return self.finish(x_nd, attention_nhd, replay)


class Decoder(PackedModel):
    """A causal language model. Parameters are uninitialised until `loading` or `initialise` fills them.

    A tied head has no separate parameter: it *is* ``embedding_weight``, so no copy, cast or update can separate them.
    """

    _frequencies: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config: DecoderConfig = config
        self.checkpointing: Checkpointing = "none"
        self.embedding_weight = nn.Parameter(torch.empty(config.vocabulary_size, config.width))
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.layers))
        self.final_norm = nn.Parameter(torch.ones(config.width))
        self.head_weight = None if config.tied else nn.Parameter(torch.empty(config.vocabulary_size, config.width))
        frequencies = torch.tensor(config.rope_frequencies(), dtype=torch.float32)
        self.register_buffer("_frequencies", frequencies, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        # A cast of the module must not round the rotary frequencies: angles of far positions would be off.
        super()._apply(fn, recurse)
        exact_frequencies = torch.tensor(self.config.rope_frequencies(), dtype=torch.float32)
        self._frequencies = exact_frequencies.to(self._frequencies.device)
        return self

    def divide(self, division: Division) -> None:
        experts = division.experts
        sizes = [1 if ranks is None else ranks.ranks.size for ranks in division]
        require_divisible(self.config, *sizes)
        super().divide(division)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.division = division
            if experts is not None and layer.kind.sparse:
                layer.gate_up_weight = experts.divide(layer.gate_up_weight)
                layer.down_weight = experts.divide(layer.down_weight)

    @property
    def device(self) -> torch.device:
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_weight.dtype

    def embed(self, ids_n: Tensor) -> Tensor:
        """Token ids [N] (int64) to the residual stream [N, d]."""
        table_vd = self.embedding_weight
        if table_vd.dtype == torch.bfloat16 and torch.is_grad_enabled() and table_vd.device.type == "cpu":
            table_vd = table_vd.float()  # a CPU sums the gradients of a token's rows in the table's dtype, a GPU wider
        x_nd = functional.embedding(ids_n, table_vd).to(self.dtype)
        if not self.config.family.scaled_embedding:
            return x_nd
        return x_nd * torch.tensor(self.config.width**0.5, dtype=x_nd.dtype).item()  # rounded as these models expect

    def rope(self, positions_n: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each float32 [N, R, Dh / 2], for positions [N] and the model's R rotary embeddings (1 or 2);
        each layer uses one of them."""
        angles = positions_n.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        magnitudes = self.config.rope_magnitudes()
        if any(magnitude != 1 for magnitude in magnitudes):
            scale = torch.tensor(magnitudes, device=cos.device)[:, None]
            cos, sin = cos * scale, sin * scale
        return cos, sin

    def head(self, x_nd: Tensor) -> Tensor:
        """Final norm and output head: residual stream [N, d] to logits [N, V]."""
        c = self.config
        weight = self.embedding_weight if self.head_weight is None else self.head_weight
        logits = linear(rms_norm(x_nd, self.final_norm, c.norm_epsilon, c.family.norm_offset), weight)
        return logits if c.final_softcap is None else (logits / c.final_softcap).tanh() * c.final_softcap

    def forward_packed(
        self,
        ids_n: Tensor,
        lengths: list[int],
        continues: list[int] | None = None,
        replay: ExpertReplay | None = None,
    ) -> Tensor:
        """Residual stream [N, d] after the last layer (before `head`) of concatenated documents.

        ``ids_n``: int64 [N] with N = sum(lengths). Each document attends causally to itself alone and its positions
        start at 0; the linear layers have no padding. With ``continues`` documents may share a prefix (see
        `AttentionPlan.build`). ``replay``: experts to choose. Raises ValueError if the lengths don't add up.
        """
        context = self.division.context
        if context is not None:
            ids_n, lengths = context.padded(ids_n, lengths)
            replay = None if replay is None else replay.padded(len(ids_n))
        plan = AttentionPlan.build(lengths, self.device, continues)
        if plan.tokens != ids_n.shape[0]:
            raise ValueError(f"lengths add up to {plan.tokens} tokens, but {ids_n.shape[0]} ids were given")
        rows = slice(None) if context is None else context.rows(plan.tokens)
        cos, sin = self.rope(plan.positions_n[rows])
        x_nd = self.embed(ids_n[rows])
        number_by_layer = {index: number for number, index in enumerate(self.config.sparse_layers)}
        checkpointing = self.checkpointing if torch.is_grad_enabled() else "none"
        with recomputing() if checkpointing == "selective" else contextlib.nullcontext():
            for index, layer in enumerate(self.layers):
                number = number_by_layer.get(index)
                replayed = None if replay is None or number is None else replay.layer(number, rows)
                compute = partial(computed_again, layer) if checkpointing == "full" else layer
                x_nd = compute(x_nd, cos, sin, plan, replayed)
        return x_nd
