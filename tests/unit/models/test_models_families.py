"""Every family against transformers: logits, gradients, names on disk; windows, caps and mixtures taken apart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.models.configuration import DecoderConfig, ExpertMixture, SlidingWindow
from headway.models.decoder import Decoder
from headway.models.experts import mix, mix_in_fixed_shapes, route
from headway.models.families import BY_NAME
from headway.models.initialise import initialise_model
from headway.models.kernels import GATED
from headway.models.layout import hugging_face_entries
from headway.models.loading import copy_weights, load_model, save_model, weights_of
from headway.models.sizes import sizes_from
from headway.records.errors import ConfigurationError

torch.set_num_threads(1)

SIZES: dict[str, Any] = dict(
    vocab_size=53,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    intermediate_size=48,
    max_position_embeddings=256,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
WINDOWS = dict(use_sliding_window=True, sliding_window=16, max_window_layers=1)
# Family of transformers, its options: together they use every feature of every row of `families.py`.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": 16}),
    "mistral, no window, yarn": ("Mistral", {"sliding_window": None, "rope_parameters": YARN}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": LINEAR}),
    "qwen2, windows above": ("Qwen2", WINDOWS),
    "qwen3, windows above, yarn": ("Qwen3", {**WINDOWS, "rope_parameters": YARN}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 3.0}),
    "gemma2, no caps": ("Gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", {"sliding_window": 16, "query_pre_attn_scalar": 7, "sliding_window_pattern": 2}),
    "gemma3, capped, biased": (
        "Gemma3",
        {"sliding_window": 200, "final_logit_softcapping": 4.0, "attention_bias": True},
    ),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "sliding_window": None}),
    "qwen3_moe, some dense": (
        "Qwen3Moe",
        {**EXPERTS, **WINDOWS, "num_experts_per_tok": 1, "mlp_only_layers": [2], "decoder_sparse_step": 1},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 16}),
}
EACH = pytest.mark.parametrize("case", CASES)
LENGTHS = [5, 75, 1, 20]


def reference(case: str) -> Any:
    import transformers

    kind, options = CASES[case]
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(
        config(**{**SIZES, **options, "attn_implementation": "eager"})
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def token_ids() -> torch.Tensor:
    return torch.randint(0, 53, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def reference_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)])


def gradients_by_name(model: Decoder) -> dict[str, torch.Tensor]:
    """Gradients under Hugging Face's names: those of a model whose weights they are."""
    grads = Decoder(model.config)
    copy_weights(grads, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return {entry.name: entry.view.reshape(entry.shape) for entry in hugging_face_entries(grads)}


@pytest.mark.slow
@EACH
def test_logits_gradients_and_files_equal_transformers(tmp_path: Path, case: str) -> None:
    theirs = reference(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    ids = token_ids()
    expected, got = reference_logits(theirs, ids), ours(ids, LENGTHS)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=3e-5)

    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(2)) / len(ids)
    (expected * upstream).sum().backward()
    (got * upstream).sum().backward()
    mine = gradients_by_name(ours)
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    assert mine.keys() == stored.keys()
    theirs_by_name = _their_gradients(theirs, tmp_path / "gradients")
    for name, gradient in mine.items():
        scale = float(theirs_by_name[name].abs().max())
        torch.testing.assert_close(
            gradient, theirs_by_name[name], rtol=1e-4, atol=2e-5 * scale + 1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )

    save_model(ours, tmp_path / "ours")
    again = load_file(tmp_path / "ours" / "model.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], stored[name]) for name in stored)
    back = type(theirs).from_pretrained(tmp_path / "ours", dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(reference_logits(back, ids), expected, rtol=1e-5, atol=3e-5)
    assert load_model(tmp_path / "ours").config == ours.config


def _their_gradients(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """transformers names tensors on their way to the disk, so its gradients go there too."""
    with torch.no_grad():
        for parameter in model.parameters():
            values = parameter.detach().clone()
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = values  # put back below
        model.save_pretrained(folder)
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
            parameter.grad = None
    return load_file(folder / "model.safetensors")


def small(family: str, **changes: Any) -> DecoderConfig:
    """A configuration of each family, without the tokenizer that `init-model` trains."""
    row = BY_NAME[family]
    fields: dict[str, Any] = dict(
        architecture=row.architecture,
        vocabulary_size=40,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate=48,
        max_positions=128,
        qk_norm=row.qk_norm,
        attention_bias=bool(row.attention_bias),
    )
    return DecoderConfig(**{**fields, **changes})


def random_decoder(config: DecoderConfig, seed: int = 0) -> Decoder:
    model = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


MIXTURE = ExpertMixture(experts=5, per_token=2, intermediate=16, normalised=True)
MIXED = small("qwen3_moe", mixture=MIXTURE)


def test_experts_on_disk_may_be_fused(tmp_path: Path) -> None:
    """transformers 5 holds a layer's experts in one tensor; files that do so too are read, and both trees are ours."""
    for family in ("qwen3_moe", "mixtral"):
        model = random_decoder(small(family, mixture=ExpertMixture(experts=5, per_token=2, intermediate=48)))
        folder = tmp_path / family
        save_model(model, folder)
        tensors = load_file(folder / "model.safetensors")
        names = BY_NAME[family].experts
        assert names is not None
        for index in range(2):
            p = f"model.layers.{index}."
            parts = {
                kind: [tensors.pop(p + getattr(names, kind).format(e)) for e in range(5)]
                for kind in ("gate", "up", "down")
            }
            both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
            tensors[p + "mlp.experts.gate_up_proj"] = torch.stack(both)
            tensors[p + "mlp.experts.down_proj"] = torch.stack(parts["down"])
            tensors[p + "mlp.gate.weight"] = tensors.pop(p + names.router)
        save_file(tensors, folder / "model.safetensors")
        loaded = weights_of(load_model(folder))
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in weights_of(model).items())
        del tensors["model.layers.1.mlp.experts.down_proj"]
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ConfigurationError, match=r"tensors missing: model.layers.1.*experts.0"):
            load_model(folder)


def plain_mixture(
    hidden: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Token by token, expert by expert."""
    rows = []
    for row in hidden:
        probabilities = torch.softmax(router @ row, dim=-1)
        values, chosen = probabilities.topk(2)
        out = torch.zeros_like(row)
        for value, expert in zip(values / values.sum(), chosen, strict=True):
            gate, up = (gate_up[expert] @ row).chunk(2)
            out = out + value * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("how", [mix, mix_in_fixed_shapes])
@pytest.mark.parametrize("inner", [16, 7], ids=["grouped product", "one product an expert"])
def test_mixture_matches_definition_and_gradients(how: Any, inner: int) -> None:
    torch.manual_seed(3)
    hidden, router = torch.randn(9, 8), torch.randn(6, 8)
    hidden[:, 0], router[4] = 3.0, torch.eye(8)[0] * -20  # an expert that nobody goes to
    gate_up, down = torch.randn(6, 2 * inner, 8), torch.randn(6, 8, inner)
    inputs = [tensor.requires_grad_() for tensor in (hidden, router, gate_up, down)]
    chosen, weights = route(hidden, router, 2, normalised=True)
    counts = torch.bincount(chosen.flatten(), minlength=6)
    assert counts[4] == 0
    assert counts.sum() == 18
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))
    mine = how(hidden, chosen, weights, gate_up, down, GATED["silu"])
    expected = plain_mixture(hidden, router, gate_up, down)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(9, 8)
    got = torch.autograd.grad(mine, inputs, upstream)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_finite_differences_agree_with_the_gradient_of_a_mixture() -> None:
    """In float64, where nothing rounds: the router's gradient goes through the weights of the chosen experts alone."""
    torch.manual_seed(5)
    shapes = ((7, 6), (5, 6), (5, 8, 6), (5, 6, 4))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def output(hidden: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return mix(hidden, *route(hidden, router, 2, normalised=True), gate_up, down, GATED["silu"])

    assert torch.autograd.gradcheck(output, tensors, fast_mode=True)


def test_fixed_shape_mixture_is_independent_of_neighbours() -> None:
    model = random_decoder(MIXED)
    for layer in model.layers:
        layer.fixed_shapes = True
    x = torch.randn(8, 32)
    other = torch.cat((x[:1], torch.randn(7, 32)))
    attention = torch.randn(8, 32)
    with torch.no_grad():
        layer = model.layers[0]
        assert torch.equal(layer.finish(x, attention)[0], layer.finish(other, attention)[0])


def test_flops_count_computed_products() -> None:
    sparse = DecoderConfig(**{**MIXED.__dict__, "layers": 1})
    attention = (2 * 4 + 2 * 2) * 8 * 32
    per_token = attention + 32 * 5 + 2 * 3 * 32 * 16
    assert sparse.matmul_parameters(0, active=True) == per_token
    assert sparse.matmul_parameters(0) == attention + 32 * 5 + 5 * 3 * 32 * 16
    assert sparse.flops([1]) == 2 * per_token + 4 * 4 * 8 + 2 * 40 * 32
    assert sizes_from(sparse.to_mapping("float32")).parameters == sum(p.numel() for p in Decoder(sparse).parameters())
    local = small("mistral", layers=1, window=SlidingWindow(tokens=3, layers=(0,)))
    full = small("mistral", layers=1)
    assert full.flops([5]) - local.flops([5]) == 4 * 4 * 8 * (15 - (1 + 2 + 3 + 3 + 3))
    assert local.flops([2]) == full.flops([2])


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("length", [1, 3, 5, 9, 10, 11, 23])
def test_blocked_windows_match_masked_attention(softcap: float | None, length: int) -> None:
    from headway.models.configuration import Scores
    from headway.models.masked import causal_attention

    torch.manual_seed(length)
    q = torch.randn(2, 4, length, 6, requires_grad=True)
    k, v = (torch.randn(2, 2, length, 6, requires_grad=True) for _ in range(2))
    mine = causal_attention(q, k, v, Scores(scale=0.7, window=5, softcap=softcap))
    scores = 0.7 * torch.einsum("bhle,bhte->bhlt", q, k.repeat_interleave(2, 1))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(length)
    hidden = (at[None] > at[:, None]) | (at[None] <= at[:, None] - 5)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    expected = weights @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(mine.shape)
    for one, other in zip(
        torch.autograd.grad(mine, (q, k, v), upstream), torch.autograd.grad(expected, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_narrow_gemma_keeps_its_small_norm_weights() -> None:
    """1 + weight is rounded after the product: in bfloat16, 1 + 0.001 is 1."""
    from headway.models.kernels import rms_norm

    x = torch.full((1, 4), 3.0, dtype=torch.bfloat16)
    x[0, 0] = 2.98  # a unit whose product with 1.003 rounds up
    weight = torch.full((4,), 0.003, dtype=torch.bfloat16)
    expected = (x.float() * x.float().square().mean().rsqrt() * (1 + weight.float())).to(torch.bfloat16)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert torch.equal(rms_norm(x, weight, 0.0, 1.0), expected)
    assert not torch.equal(rms_norm(x, torch.zeros_like(weight), 0.0, 1.0), expected)


@pytest.mark.parametrize("config", [MIXED, small("gemma2", attention_softcap=5.0, final_softcap=9.0)])
def test_a_model_in_bfloat16_is_trained_near_the_exact_one(config: DecoderConfig) -> None:
    model = random_decoder(config)
    ids = torch.arange(40)
    wide = model(ids, [13, 27]).detach()
    model.to(torch.bfloat16)
    hidden = model.forward_packed(ids, [13, 27])
    narrow = model.head(hidden)
    assert hidden.dtype == narrow.dtype == torch.bfloat16
    assert (narrow - wide).abs().median() < 0.02 * wide.abs().max()
    narrow.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


REFUSED = [
    (
        {"architectures": ["BloomForCausalLM"]},
        "'BloomForCausalLM'.*supported: LlamaForCausalLM, Mistral.*Gemma3ForCausalLM",
    ),
    ({"architectures": ["Gemma3ForConditionalGeneration"]}, "reads images; the text-only Gemma3ForCausalLM"),
    ({"architectures": None, "model_type": "gpt2"}, "'gpt2' is not supported"),
    ({"hidden_activation": "relu"}, "hidden_activation = 'relu'.*Gemma3ForCausalLM; supported: 'gelu_pytorch_tanh'"),
    ({"use_bidirectional_attention": True}, "causal attention"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not computed by Gemma3ForCausalLM"),
    ({"final_logit_softcapping": -1}, "final_logit_softcapping = -1: a positive number"),
    ({"layer_types": ["full_attention"]}, "a list of 2 layer types"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'.*supported: full_attention, slid"),
    ({"sliding_window": 0}, "sliding_window = 0: a positive number of tokens"),
    ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "'longrope'.*default, linear, llama3, yarn"),
    (
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        r"rope_parameters.sliding_attention: only rope type 'default'",
    ),
    ({"quantization_config": {"bits": 4}}, "quantised"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_unsupported_settings_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    gemma = small("gemma3", window=SlidingWindow(tokens=8, layers=(0,)), local_rope_theta=10000.0, query_scale=8.0)
    with pytest.raises(ConfigurationError, match=message):
        DecoderConfig.from_mapping({**gemma.to_mapping("float32"), **change})


def test_mistral_windows_cover_all_layers_or_none() -> None:
    raw = small("mistral", window=SlidingWindow(tokens=8, layers=(0, 1))).to_mapping("float32")
    with pytest.raises(ConfigurationError, match="layer_types has 'full_attention' beside sliding_window = 8"):
        DecoderConfig.from_mapping({**raw, "layer_types": ["sliding_attention", "full_attention"]})
    llama = small("llama").to_mapping("float32")
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM does not compute"):
        DecoderConfig.from_mapping({**llama, "layer_types": ["sliding_attention", "full_attention"]})
    with pytest.raises(ConfigurationError, match="3 experts for each token of 2"):
        small("mixtral", mixture=ExpertMixture(experts=2, per_token=3, intermediate=4))


def test_files_of_transformers_4_are_read() -> None:
    """The keys of google/gemma-3-1b-it and Qwen/Qwen3-30B-A3B as they were published."""
    gemma = DecoderConfig.from_mapping(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 7,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "intermediate_size": 40,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        }
    )
    assert gemma.window == SlidingWindow(tokens=512, layers=(0, 1, 2, 3, 4, 6))
    assert (gemma.rope_theta, gemma.local_rope_theta, gemma.tied) == (1e6, 1e4, True)
    assert gemma.rope_frequencies()[0][0] == 1 / 8
    assert gemma.rope_frequencies()[1][0] == 1
    moe = DecoderConfig.from_mapping(
        {**MIXED.to_mapping("float32"), "num_local_experts": None, "decoder_sparse_step": 2}
    )
    assert moe.mixture == ExpertMixture(**{**MIXTURE.__dict__, "dense_layers": (0,)})


@pytest.mark.parametrize("family", BY_NAME)
def test_init_model_makes_every_family(tmp_path: Path, family: str) -> None:
    sizes: dict[str, Any] = dict(vocabulary_size=300, layers=3, width=32, intermediate=16, max_positions=64)
    config = initialise_model(tmp_path / "m", ["1+2=3"], family=family, experts=3, **sizes)
    assert config.family.name == family
    model = load_model(tmp_path / "m")
    assert model.config == config
    logits = model(torch.arange(40), [40]).detach()
    assert 0.3 < float(logits.std()) < 3
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == config.family.model_type
    assert (config.window is not None) == (family in ("gemma2", "gemma3"))
    assert (config.mixture is not None) == (family in ("qwen3_moe", "mixtral"))


def test_init_model_refuses_options_the_family_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="family = 'gpt2' is not supported; supported: llama"):
        initialise_model(tmp_path / "m", ["x"], family="gpt2")
    with pytest.raises(ConfigurationError, match="window = 8: the family 'llama' has no sliding window"):
        initialise_model(tmp_path / "m", ["x"], family="llama", window=8)
    with pytest.raises(ConfigurationError, match="9 experts for each token of 8"):
        initialise_model(tmp_path / "m", ["x"], family="mixtral", experts_per_token=9)
