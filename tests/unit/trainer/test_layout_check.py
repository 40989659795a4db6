"""Comparing ranks that divide a model with one rank: every architecture agrees, in seconds, and a planted fault is
found in its layer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from rank_faults import with_fault
from rank_processes import compared, processes

from headway.models.configuration import DecoderConfig
from headway.models.hf.configuration import HfConfig
from headway.models.hf.narrow import write_narrow_hf
from headway.models.initialise import write_narrow_decoder
from headway.trainer.layout_check import _backward_order, _require_small
from tests.conformance.reference import random_model
from tests.unit.trainer.test_sharding import experiment_of

torch.set_num_threads(1)
pytestmark = pytest.mark.real
LIMIT_S = 5.0
COMPARED = ("plain", "windows", "mixture", "untied", "adapter", "recomputed", "transformers", "rows", "in host memory")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.mark.parametrize("case", COMPARED)
def test_layouts_agree_within_seconds(folder: Path, case: str) -> None:
    for result, error, seconds in processes(4).call(compared, folder, experiment_of(folder, case, 2)):
        assert error == ""
        match = re.fullmatch(r"gradients of 4 ranks and of one differ by (\S+) of the largest; limit 1e-05 .*", result)
        assert match is not None, result
        assert 0 < float(match[1]) < 2e-6
        assert seconds < LIMIT_S


@pytest.mark.parametrize(("case", "shards", "keys"), [
    ("windows", 1, {"context_parallel": 4}),
    ("transformers", 2, {"context_parallel": 2}),
    ("mixture", 2, {"expert_parallel": 2}),
    ("mixture", 2, {"expert_parallel": 2, "context_parallel": 2}),
])  # fmt: skip
def test_ranks_that_divide_tokens_and_experts_agree(folder: Path, case: str, shards: int, keys: dict[str, int]) -> None:
    for result, error, _ in processes(4).call(compared, folder, experiment_of(folder, case, shards, **keys)):
        assert (result[:41], error) == ("gradients of 4 ranks and of one differ by", "")


@pytest.mark.parametrize("fault", ["gather sums", "gradients are averaged"])
def test_faults_of_divided_tokens_and_experts_are_found(folder: Path, fault: str) -> None:
    keys = {"context_parallel": 2} if fault == "gather sums" else {"expert_parallel": 2}
    experiment = experiment_of(folder, "mixture", 1 if fault == "gather sums" else 2, **keys)
    for _, error, _ in processes(2).call(with_fault, folder, fault, compared, experiment):
        assert "of one differ by" in error


@pytest.mark.parametrize("case", ["plain", "mixture", "transformers"])
def test_layouts_agree_in_bfloat16(folder: Path, case: str) -> None:
    (result, error, _), *_ = processes(2).call(compared, folder, experiment_of(folder, case, 2, dtype="bfloat16"))
    assert error == ""
    expected = "limit 1e-05 (float32)" if case == "mixture" else "limit 0.02 (bfloat16)"
    assert result.endswith(expected)


@pytest.mark.parametrize("case", ["plain", "windows", "transformers"])
def test_layers_that_average_are_named(folder: Path, case: str) -> None:
    """Only the root's divisor is set: gradients of layers are averaged, and the last one is reached first."""
    call = compared, experiment_of(folder, case, 2)
    for result, error, _ in processes(2).call(with_fault, folder, "averaged_layers", *call):
        assert result == ""
        assert re.search(r"differ by 0\.\d+|differ by \d\.\de-0[12]", error), error
        assert re.search(r", in \S*layers\.1\.\S+ first; the limit is 1e-05", error), error


def test_an_adapter_whose_matrices_are_divided_is_found(folder: Path) -> None:
    for _, error, _ in processes(2).call(
        with_fault, folder, "stale_parameters", compared, experiment_of(folder, "adapter of transformers", 2)
    ):
        assert "differ by" in error


def test_parameters_in_the_order_of_the_backward() -> None:
    names = ["embedding_weight", "layers.0.qkv_weight", "layers.11.qkv_weight", "layers.2.output_weight", "head_weight"]
    ordered = ["head_weight", "layers.11.qkv_weight", "layers.2.output_weight", "layers.0.qkv_weight", names[0]]
    assert sorted(names, key=_backward_order) == ordered
    named = ["lm_head.weight", "model.layers.3.mlp.weight", "transformer.h.1.attn", "transformer.wte.weight"]
    assert sorted(reversed(named), key=_backward_order) == named


def test_the_worst_rank_decides() -> None:
    ranks = [{"layers.0.a": 1e-7, "layers.1.b": 2e-7}, {"layers.0.a": 3e-7, "layers.1.b": 0.0}]
    assert "differ by 3.0e-07" in _require_small(ranks, "float32")
    with pytest.raises(Exception, match=r"by inf of the largest, in layers\.1\.b first.* 1 of 2 parameters"):
        _require_small([ranks[0], {"layers.0.a": 0.0, "layers.1.b": float("inf")}], "float32")


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma2", "qwen3_moe", "llama"])
def test_a_narrow_decoder_has_the_heads_experts_and_kinds_of_layers(tmp_path: Path, family: str) -> None:
    config = random_model(0, family=family).config
    write_narrow_decoder(config, tmp_path, 0)
    narrow = DecoderConfig.from_pretrained(tmp_path)
    assert (narrow.heads, narrow.kv_heads, narrow.architecture) == (config.heads, config.kv_heads, config.architecture)
    assert (narrow.routing is None) is (config.routing is None)
    assert narrow.width <= 32
    kinds = [{(kind.rope, kind.sparse, kind.scores.window is None) for kind in map(one.layer, range(one.layers))}
             for one in (config, narrow)]  # fmt: skip
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("kind", ["Olmo2", "DeepseekV3", "GptOss", "Bamba", "GPT2"])
def test_a_narrow_model_of_transformers(tmp_path: Path, kind: str) -> None:
    from tiny_hub import make_hub_model

    source = make_hub_model(tmp_path / "source", kind, num_hidden_layers=2)
    assert write_narrow_hf(source, tmp_path / "narrow", 0) == ""
    narrow = HfConfig.from_pretrained(tmp_path / "narrow")
    assert narrow.vocabulary_size == 64
    assert narrow.model_type == HfConfig.from_pretrained(source).model_type
