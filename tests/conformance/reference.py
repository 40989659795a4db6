"""What an engine's tokens are checked against: plain forwards, one sequence at a time, no engine code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.models.configuration import DecoderConfig, ExpertMixture, SlidingWindow
from headway.models.decoder import Decoder
from headway.models.families import family_named
from headway.models.loading import build
from headway.records.generation import VersionSpan

WINDOW = SlidingWindow(tokens=6, layers=(0,))  # most sequences are longer
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "mistral": {"window": SlidingWindow(tokens=6, layers=(0, 1))},
    "qwen2": {"attention_bias": True, "window": SlidingWindow(tokens=6, layers=(1,))},
    "gemma2": {"window": WINDOW, "attention_softcap": 3.0, "final_softcap": 5.0, "query_scale": 5.0},
    "gemma3": {"window": WINDOW, "qk_norm": True, "rope_theta": 1e6, "local_rope_theta": 1e4, "query_scale": 5.0},
    "qwen3_moe": {"qk_norm": True, "mixture": ExpertMixture(experts=4, per_token=2, intermediate=24)},
    "mixtral": {"mixture": ExpertMixture(experts=4, per_token=1, intermediate=24), "window": WINDOW},
}


def random_model(
    seed: int, *, vocabulary: int = 40, width: int = 32, tied: bool = True, family: str = "qwen3", head_dim: int = 8
) -> Decoder:
    """A small model whose next-token distributions are far from uniform and differ a lot between seeds."""
    model = build(
        DecoderConfig(
            vocabulary_size=vocabulary,
            width=width,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=head_dim,
            intermediate=48,
            max_positions=512,
            architecture=family_named(family).architecture,
            tied=tied,
            **{"qk_norm": False, **FAMILIES[family]},
        )
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.35, generator=generator)
    return model


@torch.no_grad()
def forced_logprobs(model: Decoder, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
    """log-softmax(z/T) of each response token under ``model`` alone, one forward without any cache. [N]"""
    ids = torch.tensor([*prompt, *response])
    logits = model.head(model.forward_packed(ids, [len(ids)]))[len(prompt) - 1 : -1]
    scaled = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    return scaled.gather(-1, ids[len(prompt) :, None])[:, 0]


@torch.no_grad()
def replayed_logprobs(
    model_of: Callable[[int], Decoder],
    prompt: Sequence[int],
    response: Sequence[int],
    spans: Sequence[VersionSpan],
    temperature: float,
) -> Tensor:
    """The response's log-probabilities when every version wrote the KV of the tokens it was fed and later versions
    attended to that KV as it was (mode ``keep``). Token by token, one sequence, KV in plain lists. [N]"""
    versions = [span.version for span in spans for _ in range(span.tokens)]
    ids = [*prompt, *response]
    kv: dict[int, list[tuple[Tensor, Tensor]]] = {}
    out: list[Tensor] = []
    for position in range(len(ids) - 1):
        model = model_of(versions[max(0, position - len(prompt) + 1)])
        x = model.embed(torch.tensor([ids[position]]))
        cos, sin = model.rope(torch.tensor([position]))
        for index, layer in enumerate(model.layers):
            q, k, v = layer.project_qkv(x, cos, sin)  # type: ignore[operator]
            past = kv.setdefault(index, [])
            past.append((k[0], v[0]))
            keys = torch.stack([pair[0] for pair in past], 1)  # [k, t, c]
            values = torch.stack([pair[1] for pair in past], 1)
            grouped = q[0].view(keys.shape[0], -1, keys.shape[-1])  # [k, g, c]
            scores = layer.kind.scores
            products = scores.scale * grouped @ keys.transpose(1, 2)
            if scores.softcap is not None:
                products = scores.softcap * torch.tanh(products / scores.softcap)
            if scores.window is not None:
                products[..., : -scores.window] = -torch.inf
            weights = torch.softmax(products, dim=-1)
            x = layer.finish(x, (weights @ values).reshape(1, -1))  # type: ignore[operator]
        if position >= len(prompt) - 1:
            scaled = torch.log_softmax(model.head(x)[0].float() / (temperature or 1.0), dim=-1)
            out.append(scaled[ids[position + 1]])
    return torch.stack(out)
