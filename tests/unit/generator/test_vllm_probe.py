"""The probes tell which module computes with other weights; on modules that look like vLLM's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.generator.engines.vllm.probe import Difference, differing_module


class Packed:
    """A quant method whose products go through a copy, as on a CPU."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, layer.packed, bias)  # type: ignore[arg-type]

    def embedding(self, layer: nn.Module, ids: Tensor) -> Tensor:
        raise NotImplementedError


class PackedEmbedding(Packed):
    def embedding(self, layer: nn.Module, ids: Tensor) -> Tensor:
        return layer.weight[ids]  # type: ignore[index]


class Linear(nn.Module):
    """Its weight is gone once it is packed."""

    def __init__(self, packed: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dtype=packed.dtype))
        self.packed = packed
        self.bias = None if bias is None else nn.Parameter(bias)
        self.quant_method = Packed()


class VocabParallelEmbedding(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.packed = weight, weight.detach().clone()
        self.quant_method = PackedEmbedding()


class ParallelLMHead(VocabParallelEmbedding):
    """Both are known by their names."""


class Norm(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


VOCABULARY, PADDED, WIDTH = 10, 16, 12


def published(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "model.embed_tokens.weight": random(VOCABULARY, WIDTH),
        "model.layers.0.self_attn.q_proj.weight": random(8, WIDTH),
        "model.layers.0.self_attn.k_proj.weight": random(4, WIDTH),
        "model.layers.0.self_attn.v_proj.weight": random(4, WIDTH),
        "model.layers.0.self_attn.q_proj.bias": random(8),
        "model.layers.0.self_attn.k_proj.bias": random(4),
        "model.layers.0.self_attn.v_proj.bias": random(4),
        "model.layers.0.input_layernorm.weight": random(WIDTH),
        "model.layers.0.mlp.down_proj.weight": random(WIDTH, 20),
    }


def model_with(tensors: dict[str, Tensor]) -> nn.Module:
    """As vLLM would hold them: q, k and v in one matrix, the vocabulary padded, the head tied."""
    attention = [tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    biases = [tensors[f"model.layers.0.self_attn.{name}_proj.bias"] for name in "qkv"]
    embedding = tensors["model.embed_tokens.weight"]
    padded = nn.Parameter(torch.cat([embedding, embedding.new_zeros(PADDED - VOCABULARY, WIDTH)]))
    layer = nn.ModuleDict(
        {
            "input_layernorm": Norm(tensors["model.layers.0.input_layernorm.weight"].clone()),
            "self_attn": nn.ModuleDict({"qkv_proj": Linear(torch.cat(attention), torch.cat(biases))}),
            "mlp": nn.ModuleDict({"down_proj": Linear(tensors["model.layers.0.mlp.down_proj.weight"].clone())}),
        }
    )
    inner = nn.ModuleDict({"embed_tokens": VocabParallelEmbedding(padded), "layers": nn.ModuleList([layer])})
    return nn.ModuleDict({"model": inner, "lm_head": ParallelLMHead(padded)})


def test_a_matrix_that_lies_the_other_way_round_is_left_to_the_probe_of_sequences() -> None:
    """Products of a packed matrix with inputs of another size read memory that isn't theirs."""
    tensors = published(torch.float32)
    model: Any = model_with(tensors)
    linear = model["model"]["layers"][0]["mlp"]["down_proj"]
    linear.input_size = 20
    assert differing_module(model, tensors, 1) is None
    name = "model.layers.0.mlp.down_proj.weight"
    assert differing_module(model, tensors | {name: tensors[name].t().contiguous()}, 1) is None
    found = differing_module(model, tensors | {name: -tensors[name]}, 1)
    assert found is not None
    assert found.module == "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_published_weights_pass(dtype: torch.dtype) -> None:
    tensors = published(dtype)
    with torch.no_grad():
        for update in range(5):
            assert differing_module(model_with(tensors), tensors, update) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("model.layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm"),
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj"),
    ],
)
def test_another_version_of_any_tensor_is_named(name: str, module: str, dtype: torch.dtype) -> None:
    """One per cent of change, everywhere."""
    tensors = published(dtype)
    stale = tensors | {name: tensors[name] * 1.01}
    with torch.no_grad():
        found = differing_module(model_with(stale), tensors, 3)
    assert found is not None
    assert found.module == module
    assert found.difference > found.allowed


def test_a_tied_head_that_was_not_packed_again() -> None:
    """The embedding is the new one, what the head multiplies with is not."""
    tensors = published(torch.float32)
    model = model_with(tensors)
    with torch.no_grad():
        model["lm_head"].packed.mul_(0.99)  # type: ignore[index]
        found = differing_module(model, tensors, 0)
    assert isinstance(found, Difference)
    assert found.module == "lm_head"


def test_a_single_weight_is_seen_by_the_random_rows() -> None:
    tensors = published(torch.float32)
    model = model_with(tensors)
    with torch.no_grad():
        model["model"]["layers"][0]["mlp"]["down_proj"].packed[3, 5] += 0.01  # type: ignore[index]
        found = differing_module(model, tensors, 0)
    assert found is not None
    assert found.module == "model.layers.0.mlp.down_proj"


def test_nan_is_a_difference() -> None:
    tensors = published(torch.float32)
    model = model_with(tensors)
    with torch.no_grad():
        model["lm_head"].packed[:] = torch.nan  # type: ignore[index]
        found = differing_module(model, tensors, 0)
    assert found is not None
    assert found.module == "lm_head"
