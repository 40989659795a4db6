"""What an engine's tokens are checked against: plain forwards, one sequence at a time, no engine code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.loading import build
from headway.records.generation import VersionSpan


def random_model(
    seed: int, *, vocabulary: int = 40, width: int = 32, qk_norm: bool = True, tied: bool = True
) -> Decoder:
    """A small model whose next-token distributions are far from uniform and differ a lot between seeds."""
    model = build(
        DecoderConfig(
            vocabulary_size=vocabulary,
            width=width,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=8,
            intermediate=48,
            max_positions=512,
            architecture="Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM",
            tied=tied,
            qk_norm=qk_norm,
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
            weights = torch.softmax(grouped @ keys.transpose(1, 2) / keys.shape[-1] ** 0.5, dim=-1)
            x = layer.finish(x, (weights @ values).reshape(1, -1))  # type: ignore[operator]
        if position >= len(prompt) - 1:
            scaled = torch.log_softmax(model.head(x)[0].float() / (temperature or 1.0), dim=-1)
            out.append(scaled[ids[position + 1]])
    return torch.stack(out)
