"""The reference of vLLM's probes where the trainer runs transformers' module: names, values, log-probabilities, KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_hub import PACKED, SIZES, make_hub_model

from headway.config.model import ModelConfig
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm.core import engine_arguments
from headway.generator.engines.vllm.reference import PublishedModel
from headway.models.hf.configuration import read_config
from headway.models.hf.model import load_hf
from headway.models.loading import weights_of
from headway.models.run_model import open_model
from headway.records.errors import ConfigurationError
from headway.runtime.devices import parse_device

torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ["Olmo2", "Phi3", "Olmoe", "GptOss", "GPT2", "DeepseekV3", "FalconH1"])
def test_a_published_version_has_the_names_and_values_of_a_folder(tmp_path: Path, kind: str) -> None:
    """Experts apart, buffers included, tied heads once: what vLLM reads from the folder at its start."""
    folder = make_hub_model(tmp_path / "m", kind)
    trained = load_hf(folder, "float32", "cpu")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)
    published = PublishedModel.of(ModelConfig(path=folder))
    published.take(weights_of(trained))
    trained.save(tmp_path / "saved")
    stored, given = load_file(tmp_path / "saved" / "model.safetensors"), dict(published.tensors())
    assert given.keys() == stored.keys() == load_file(f"{folder}/model.safetensors").keys()
    assert all(torch.equal(one, stored[name]) for name, one in given.items())
    left_out = given.keys() - published.multiplied().keys()
    assert bool(left_out) == (kind == "GPT2")
    assert all(name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) for name in left_out)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        logprobs = (trained(torch.tensor(ids), [8])[:-1] / 0.7).log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(ids)[1:, None])[:, 0]
    assert published.logprobs(ids, 0.7) == pytest.approx(expected.tolist(), abs=1e-4)
    pointers = {one.data_ptr() for one in trained.parameters()}
    assert published._model is not None
    assert {one.data_ptr() for one in published._model.parameters()} == pointers  # no memory of its own


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder, other = (make_hub_model(tmp_path / kind, kind) for kind in ("Olmo2", "Phi3"))
    published = PublishedModel.of(ModelConfig(path=folder))
    published.load("float32")
    before = published.logprobs([1, 2, 3])
    with pytest.raises(ConfigurationError, match="the published weights are not this model's"):
        published.take(weights_of(load_hf(other, "float32", "cpu")))
    assert published.logprobs([1, 2, 3]) == before


def test_a_family_that_headway_has_is_run_as_the_trainer_runs_it(tmp_path: Path) -> None:
    import transformers

    config = transformers.Qwen2Config(**{**SIZES, "num_key_value_heads": 2})
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    found: list[list[float]] = []
    for name in ("headway", "transformers"):
        chosen = ModelConfig(path=str(tmp_path), implementation=name)
        published = PublishedModel.of(chosen)
        published.take(weights_of(open_model(chosen, "float32", "cpu")))
        assert dict(published.tensors()).keys() == load_file(tmp_path / "model.safetensors").keys()
        found.append(published.logprobs([3, 1, 4, 1, 5]))
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def arguments(folder: str, **fields: Any) -> dict[str, Any]:
    settings = EngineSettings(model_path=folder, dtype="bfloat16", slots=4, max_context_tokens=64, **fields)
    return engine_arguments(settings, read_config(ModelConfig(path=folder)), parse_device("cuda:0"))


def test_room_for_the_cache_follows_from_sizes(tmp_path: Path) -> None:
    """Of latent attention what is compressed; where layers keep a state vLLM decides itself."""
    plain = arguments(make_hub_model(tmp_path / "o", "Olmo2"))["kv_cache_memory_bytes"]
    assert plain % (16 * 2 * 2 * 2 * 8 * 2) == 0  # block, layers, key and value, heads of 8, bfloat16
    latent = arguments(make_hub_model(tmp_path / "d", "DeepseekV3"))["kv_cache_memory_bytes"]
    options = PACKED["DeepseekV3"]
    assert latent / plain == (options["kv_lora_rank"] + options["qk_rope_head_dim"]) / (2 * 2 * 8)
    assert "kv_cache_memory_bytes" not in arguments(make_hub_model(tmp_path / "f", "FalconH1"))
    assert "trust_remote_code" not in arguments(str(tmp_path / "o"))
    assert arguments(str(tmp_path / "o"), trust_remote_code=True)["trust_remote_code"] is True
