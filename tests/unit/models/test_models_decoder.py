"""The decoder against transformers, one document at a time against packed, hand-written against plain gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.models import kernels
from headway.models.attention_plan import PADDING_RATIO, AttentionPlan
from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.initialise import initialise_parameters
from headway.models.loading import build
from headway.records.errors import ConfigurationError

torch.set_num_threads(1)


def tiny(**changes: object) -> DecoderConfig:
    fields: dict[str, object] = dict(
        vocabulary_size=61, width=24, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=40, max_positions=512
    )
    return DecoderConfig(**{**fields, **changes})  # type: ignore[arg-type]


def random_model(seed: int = 0, dtype: str = "float32", **changes: object) -> Decoder:
    model = build(tiny(**changes), dtype)
    initialise_parameters(model, seed)
    with torch.no_grad():  # norms and biases away from their neutral start
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                noise = torch.empty(parameter.shape).uniform_(-0.3, 0.3, generator=generator)
                parameter.add_(noise.to(parameter.dtype))
    return model


def gradients(model: Decoder, ids: torch.Tensor, lengths: list[int], weight: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (model(ids, lengths) * weight).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@settings(deadline=None, max_examples=12)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.booleans(), st.integers(0, 9))
def test_packing_preserves_logits_and_gradients(lengths, llama, seed):
    model = random_model(seed, qk_norm=not llama, attention_bias=llama, mlp_bias=llama)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 61, (sum(lengths),), generator=generator)
    weight = torch.randn(sum(lengths), 61, generator=generator) / sum(lengths)
    together = gradients(model, ids, lengths, weight)
    assert together.keys() == dict(model.named_parameters()).keys()
    packed = model(ids, lengths)
    alone: dict[str, torch.Tensor] = {}
    for part, part_weight, part_packed in zip(
        ids.split(lengths), weight.split(lengths), packed.split(lengths), strict=True
    ):
        torch.testing.assert_close(model(part, [len(part)]), part_packed, rtol=0, atol=1e-5)
        for name, gradient in gradients(model, part, [len(part)], part_weight).items():
            alone[name] = alone.get(name, 0) + gradient
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, alone[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_attention_plan_places_every_token_once_with_bounded_padding(lengths):
    plan = AttentionPlan.build(lengths)
    assert plan.tokens == sum(lengths)
    assert plan.positions_n.tolist() == [i for n in lengths for i in range(n)]
    owners = torch.cat([bucket.gather_bl for bucket in plan.buckets])
    assert owners[plan.scatter_n].tolist() == list(range(sum(lengths)))
    padded = sum(bucket.documents * bucket.length for bucket in plan.buckets)
    assert padded == len(owners)
    assert padded <= PADDING_RATIO * sum(lengths) + len(lengths)
    assert sum(bucket.documents for bucket in plan.buckets) == len(lengths)
    assert len(plan.buckets) <= 2 + math.log(max(lengths) / min(lengths)) / math.log(PADDING_RATIO)


@pytest.mark.parametrize("lengths", [[], [3, 0], [-1, 4]])
def test_attention_plan_refuses_empty_documents(lengths):
    with pytest.raises(ValueError, match="at least one token"):
        AttentionPlan.build(lengths)


def test_decoder_refuses_lengths_that_do_not_sum_to_tokens():
    with pytest.raises(ValueError, match="add up to 5 tokens, but 4 ids"):
        random_model()(torch.zeros(4, dtype=torch.int64), [2, 3])


def test_layer_forward_equals_projection_attention_and_finish():
    """What the engine composes: projections, its own attention, finish."""
    model = random_model()
    ids = torch.arange(9)
    with torch.no_grad():
        x = model.embed(ids)
        cos, sin = model.rope(torch.arange(9))
        for layer in model.layers:
            q, k, v = layer.project_qkv(x, cos, sin)
            assert q.shape == (9, 4, 8)
            assert k.shape == v.shape == (9, 2, 8)
            keys, values = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
            scores = torch.einsum("qhe,khe->hqk", q, keys) / math.sqrt(8)
            scores += torch.full((9, 9), -math.inf).triu(1)
            x = layer.finish(x, torch.einsum("hqk,khe->qhe", scores.softmax(-1), values).flatten(1))
        torch.testing.assert_close(model.head(x), model(ids, [9]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_is_equal_with_and_without_gradient(dtype):
    model = random_model(dtype=dtype)
    ids, lengths = torch.arange(30), [7, 20, 3]
    with torch.no_grad():
        without = model(ids, lengths)
    assert torch.equal(without, model(ids, lengths))
    with torch.inference_mode():
        assert torch.equal(without, model(ids, lengths))


def plain_rms(x, weight, epsilon=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def test_rms_norm_gradients_match_autograd():
    x = torch.randn(7, 12, requires_grad=True)
    weight = torch.randn(12, requires_grad=True)
    upstream = torch.randn(7, 12)
    mine = torch.autograd.grad(kernels.rms_norm(x, weight, 1e-6), (x, weight), upstream)
    plain = torch.autograd.grad(plain_rms(x, weight), (x, weight), upstream)
    torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normed", [True, False])
def test_norm_and_rotation_gradients_match_autograd(normed):
    heads, kv_heads, dim, n = 4, 2, 6, 5
    source = torch.randn(n, (heads + 2 * kv_heads) * dim, requires_grad=True)
    q_norm = torch.randn(dim, requires_grad=True) if normed else None
    k_norm = torch.randn(dim, requires_grad=True) if normed else None
    angles = torch.randn(n, 1, dim // 2)
    upstream = torch.randn(n, (heads + 2 * kv_heads) * dim)

    def plain():
        x = source.view(n, -1, dim)
        q, k, v = x.split((heads, kv_heads, kv_heads), dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = plain_rms(q, q_norm), plain_rms(k, k_norm)
        turned = []
        for part in (q, k):
            a, b = part[..., 0::2], part[..., 1::2]
            pair = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos())
            turned.append(torch.stack(pair, dim=-1).flatten(-2))
        return torch.cat((*turned, v), dim=1).flatten(1)

    inputs = [t for t in (source, q_norm, k_norm) if t is not None]
    mine = kernels.norm_rotate(source * 1, q_norm, k_norm, angles.cos(), angles.sin(), (heads, kv_heads, dim, 1e-6))
    torch.testing.assert_close(mine, plain(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(mine, inputs, upstream),
        torch.autograd.grad(plain(), inputs, upstream),
        rtol=1e-4,
        atol=1e-4,
    )


def gelu_tanh(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize(
    ("gated", "activation"), [(kernels.gated_silu, torch.nn.functional.silu), (kernels.gated_gelu, gelu_tanh)]
)
def test_gradients_of_gated_activations_match_autograd(gated, activation):
    x = torch.randn(6, 10, requires_grad=True)
    upstream = torch.randn(6, 5)
    plain = activation(x[:, :5]) * x[:, 5:]
    torch.testing.assert_close(gated(x), plain)
    mine = torch.autograd.grad(gated(x), x, upstream)
    torch.testing.assert_close(mine, torch.autograd.grad(plain, x, upstream), rtol=1e-5, atol=1e-5)


def test_finite_differences_agree_with_the_gradient():
    model = random_model(layers=1, width=12, intermediate=16, head_dim=4)
    model.double()
    ids, lengths = torch.arange(11), [4, 1, 6]
    weight = torch.randn(11, 61, dtype=torch.float64)
    for name, gradient in gradients(model, ids, lengths, weight).items():
        parameter = dict(model.named_parameters())[name]
        at = int(gradient.abs().argmax())
        values = []
        for step in (1e-3, -1e-3):  # norms and softmax inside run in float32 where the model's dtype is wider
            with torch.no_grad():
                parameter.view(-1)[at] += step
                values.append(float((model(ids, lengths) * weight).sum()))
                parameter.view(-1)[at] -= step
        slope = (values[0] - values[1]) / 2e-3
        assert slope == pytest.approx(float(gradient.view(-1)[at]), rel=2e-2), name


def test_bfloat16_has_a_residual_stream_and_gradients_of_bfloat16():
    model, narrow = random_model(), random_model(dtype="bfloat16")
    ids, lengths = torch.arange(40), [13, 27]
    reference = model(ids, lengths)
    hidden = narrow.forward_packed(ids, lengths)
    logits = narrow.head(hidden)
    assert hidden.dtype == logits.dtype == torch.bfloat16
    assert (logits.float() - reference).abs().max() < 0.05 * reference.abs().max()
    logits.float().sum().backward()
    assert {p.grad.dtype for p in narrow.parameters() if p.grad is not None} == {torch.bfloat16}


def test_a_frequent_tokens_gradient_is_summed_in_float32():
    """4,096 ones are 256 where each is added in bfloat16, as a CPU's embedding does."""
    model = random_model(dtype="bfloat16")
    model.embed(torch.zeros(4096, dtype=torch.int64)).float().sum().backward()
    assert model.embedding_weight.grad is not None
    assert (model.embedding_weight.grad[0] == 4096).all()


def test_bfloat16_cast_keeps_rotary_frequencies_exact():
    wide, narrow = random_model(), random_model(dtype="bfloat16")
    ids = torch.arange(50)
    assert narrow._frequencies.dtype == torch.float32
    assert torch.equal(narrow._frequencies, wide._frequencies)
    reference = wide(ids, [50])
    assert (narrow(ids, [50]).float() - reference).abs().max() < 0.05 * reference.abs().max()
    assert narrow.dtype == torch.bfloat16


def test_flops_count_computed_products():
    config = tiny()
    per_token = 2 * (2 * ((4 + 2 + 2 + 4) * 8 * 24 + 3 * 24 * 40) + 61 * 24)
    assert config.flops([1]) == per_token + 2 * 4 * 4 * 8
    assert config.flops([3, 2]) == 5 * per_token + 2 * 4 * 4 * 8 * (6 + 3)
    assert config.flops([3], head_tokens=1) == config.flops([3]) - 2 * 2 * 61 * 24


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM, .*Qwen3ForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'.*supported: default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "llama3' needs 'low_freq_factor'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"num_key_value_heads": 3}, "multiple of kv_heads"),
        ({"hidden_size": "24"}, "hidden_size = '24'"),
        ({"head_dim": 7}, "even number"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_unsupported_settings_are_refused_by_name(change, message):
    raw = tiny().to_mapping("float32")
    del raw["rope_parameters"]
    with pytest.raises(ConfigurationError, match=message):
        DecoderConfig.from_mapping({**raw, **change})


def test_configuration_round_trips():
    for config in (tiny(tied=False, eos_token_id=(2, 4)), tiny(architecture="LlamaForCausalLM", qk_norm=False)):
        assert DecoderConfig.from_mapping(config.to_mapping("float32")) == config
