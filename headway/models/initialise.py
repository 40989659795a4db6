"""Creation of a small, randomly initialised model of any family, with a new tokenizer, without a network."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from headway.models.configuration import DecoderConfig, ExpertMixture, SlidingWindow
from headway.models.decoder import Decoder
from headway.models.families import Family, family_named
from headway.models.loading import build, save_model
from headway.records.errors import ConfigurationError
from headway.runtime.scratch import ScratchFolder, flush, flush_folder
from headway.tokens.tokenizer import Tokenizer
from headway.tokens.tokenizer_training import BOS, EOS, PAD, train_byte_fallback_tokenizer

NARROW_VOCABULARY = 64
_NARROW_WINDOW = 8  # tokens: less than most documents have


def initialise_model(
    output: str | Path,
    texts: Iterable[str],
    vocabulary_size: int = 512,
    layers: int = 3,
    width: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 256,
    max_positions: int = 1024,
    tied: bool = True,
    seed: int = 0,
    *,
    family: str = "qwen3",
    head_dim: int | None = None,
    rope_theta: float | None = None,
    window: int | None = None,
    experts: int = 8,
    experts_per_token: int = 2,
    character_level: bool = False,
) -> DecoderConfig:
    """Write a complete model folder at ``output`` (config, safetensors, tokenizer); it must not exist yet.

    ``vocabulary_size`` bounds the tokenizer trained on ``texts``; the model's vocabulary is the tokenizer's size
    rounded up to 8. ``character_level``: no merges. ``window``: sliding window in tokens, on the family's layers with
    windows (default: a quarter of the context for Gemma 2 and 3, none for others). ``experts`` and
    ``experts_per_token`` apply to families with a mixture, where ``intermediate`` is the size of one expert;
    ``rope_theta``: default the family's. Equal arguments give equal files.
    Raises ConfigurationError for inconsistent sizes or an existing output.
    """
    model_family = family_named(family)
    target = Path(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"{target} exists already; choose another output")
    head_dim = _head_dim(width, heads) if head_dim is None else head_dim
    corpus = list(texts)
    if not any(corpus):
        raise ConfigurationError("init-model: no text to train the tokenizer on")
    target.parent.mkdir(parents=True, exist_ok=True)
    with ScratchFolder(f".{target.name}.headway-", ".partial", target.parent) as scratch:
        folder = scratch / target.name  # with the mode of any new folder; the scratch folder is private to this user
        folder.mkdir()
        tokenizer = train_byte_fallback_tokenizer(corpus, vocabulary_size, folder, character_level=character_level)
        config = DecoderConfig(
            architecture=model_family.architecture,
            qk_norm=model_family.qk_norm,
            attention_bias=bool(model_family.attention_bias),
            norm_epsilon=model_family.default_epsilon,
            window=_window(model_family, window, layers, max_positions),
            local_rope_theta=10000.0 if model_family.local_rope else None,
            attention_softcap=50.0 if model_family.attention_softcap else None,
            final_softcap=30.0 if model_family.attention_softcap else None,
            query_scale=float(head_dim) if model_family.query_scale else None,
            mixture=_mixture(model_family, experts, experts_per_token, intermediate),
            vocabulary_size=-(-tokenizer.vocabulary_size // 8) * 8,
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=intermediate,
            max_positions=max_positions,
            tied=tied,
            rope_theta=rope_theta or model_family.default_theta,
            bos_token_id=tokenizer.token_id(BOS),
            eos_token_id=tokenizer.eos_id,
            pad_token_id=tokenizer.token_id(PAD),
        )
        _write_generation_config(folder, config, tokenizer)
        model = build(config)
        initialise_parameters(model, seed)
        save_model(model, folder)
        flush_folder(folder)
        folder.rename(target)
        flush(target.parent)
    return config


def _head_dim(width: int, heads: int) -> int:
    if heads < 1:
        raise ConfigurationError(f"heads = {heads}: must be at least 1")
    if width % heads:
        raise ConfigurationError(f"width = {width} is not a multiple of heads = {heads}; give head_dim")
    return width // heads


def _write_generation_config(folder: Path, config: DecoderConfig, tokenizer: Tokenizer) -> None:
    assert tokenizer.token(tokenizer.eos_id) == EOS
    generation_config = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": [tokenizer.eos_id, tokenizer.token_id("<|im_end|>")],
        "pad_token_id": config.pad_token_id,
        "do_sample": True,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=2) + "\n", encoding="utf-8")


def _window(kind: Family, tokens: int | None, layers: int, max_positions: int) -> SlidingWindow | None:
    """The window, on all layers or all but every second (Gemma 2) or third (Gemma 3; its published models have every
    sixth, but small models have too few layers)."""
    if kind.windowed == "none":
        if tokens is not None:
            raise ConfigurationError(f"window = {tokens}: the family {kind.name!r} has no sliding window")
        return None
    if tokens is None and isinstance(kind.windowed, int):
        tokens = max(1, max_positions // 4)
    if tokens is None:
        return None
    if tokens < 1:
        raise ConfigurationError(f"window = {tokens}: must be at least 1")
    period = min(kind.windowed, 3) if isinstance(kind.windowed, int) else layers + 1
    return SlidingWindow(tokens=tokens, layers=tuple(index for index in range(layers) if (index + 1) % period))


def _mixture(kind: Family, experts: int, per_token: int, intermediate: int) -> ExpertMixture | None:
    if kind.experts is None:
        return None
    return ExpertMixture(experts=experts, per_token=per_token, intermediate=intermediate)


def write_narrow_decoder(config: DecoderConfig, folder: str | Path, seed: int) -> None:
    """Write a random model with the heads, experts and kinds of layers of ``config`` into ``folder``, narrow and
    without a tokenizer."""
    kinds = [config.layer(index) for index in range(config.layers)]
    layers = min(config.layers, max(2, 1 + max(map(kinds.index, kinds))))
    window, mixture = config.window, config.mixture
    if window is not None:
        kept_layers = tuple(index for index in window.layers if index < layers)
        window = SlidingWindow(tokens=min(window.tokens, _NARROW_WINDOW), layers=kept_layers)
    if mixture is not None:
        dense_layers = tuple(index for index in mixture.dense_layers if index < layers)
        mixture = replace(mixture, intermediate=min(mixture.intermediate, 16), dense_layers=dense_layers)
    narrow_config = replace(
        config,
        vocabulary_size=NARROW_VOCABULARY,
        width=min(config.width, 32),
        head_dim=min(config.head_dim, 8),
        intermediate=min(config.intermediate, 64),
        layers=layers,
        window=window,
        mixture=mixture,
        rope_scaling=None,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = build(narrow_config)
    initialise_parameters(model, seed)
    save_model(model, folder)


def initialise_parameters(model: Decoder, seed: int) -> None:
    """Fill every parameter in place. The values depend on ``seed`` alone, not on device and dtype.

    Matrices are normal with deviation 1/sqrt(inputs), which keeps activations at unit scale at any width; those that
    write to the residual stream are divided by sqrt(2 layers) (GPT-2, section 2.3). Norms are 1, biases 0.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_scale = 1 / math.sqrt(2 * model.config.layers)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf_name = name.rsplit(".", 1)[-1]
            if leaf_name.endswith("norm"):
                parameter.fill_(1.0 - model.config.family.norm_offset)
            elif leaf_name.endswith("bias"):
                parameter.zero_()
            else:
                scale = 1 / math.sqrt(parameter.shape[-1])
                if leaf_name in ("output_weight", "down_weight"):
                    scale *= residual_scale
                values = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, scale, generator=generator)
                parameter.copy_(values)
