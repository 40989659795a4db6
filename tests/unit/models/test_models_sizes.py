"""Sizes read from config.json, against transformers' own models without storage ("meta" tensors).

``published_configs.json`` holds what published files say of shapes, under the models' names; of those with parts for
images the content of text_config.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.models.decoder import Decoder
from headway.models.families import BY_NAME
from headway.models.initialise import initialise_model
from headway.models.size_rules import RULES
from headway.models.sizes import ModelSizes, sizes_from, sizes_of, sizes_of_shapes
from headway.records.errors import ConfigurationError

transformers = pytest.importorskip("transformers")
CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())

# The cheapest of each way to cache, to be run for two tokens: grouped, latent, latent with an indexer, windows, linear
# layers of both kinds.
CACHED = [
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen3.5-27B (text_config)",
    "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-ai/DeepSeek-V3.2",
    "google/gemma-3-1b-it",
    "ibm-granite/granite-4.0-h-small",
    "mistralai/Mamba-Codestral-7B-v0.1",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
]


def on_meta(name: str) -> Any:
    """transformers' model of that configuration, without storage."""
    raw = CONFIGS[name]
    own = {"kimi_k2": "deepseek_v3"}.get(raw["model_type"], raw["model_type"])  # its file brings code of its own
    keys = {key: value for key, value in raw.items() if key not in ("model_type", "architectures")}
    config = transformers.AutoConfig.for_model(own, **keys)
    with torch.device("meta"):
        model = getattr(transformers, raw["architectures"][0])(config)
    model.tie_weights()
    return model.eval()


def test_there_are_configurations_of_each_kind() -> None:
    assert len(CONFIGS) >= 25
    assert {raw["model_type"] for raw in CONFIGS.values()} == set(RULES)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_sizes_are_those_of_transformers(name: str) -> None:
    """Weights, those that a token goes through, and what projections make of keys and values: exact."""
    raw, model = CONFIGS[name], on_meta(name)
    found = sizes_from(raw)
    assert found.parameters == sum(weight.numel() for weight in model.parameters())
    routed = sum(weight.numel() for key, weight in model.named_parameters() if ".experts." in key)
    experts = raw.get("num_experts") or raw.get("num_local_experts") or raw.get("n_routed_experts") or 1
    idle = routed - routed * raw.get("num_experts_per_tok", 1) // experts if routed else 0
    assert found.active_parameters == found.parameters - idle
    assert sum(layer.experts for layer in found.layers) == routed
    made = 0
    for key, module in model.named_modules():
        if re.search(r"\.(k_proj|v_proj|kv_a_proj_with_mqa|indexer\.wk)$", key):
            made += module.out_features
        elif key.endswith("qkv_proj"):
            made += module.out_features - module.in_features
    assert found.cached_values == made


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHED)
def test_the_cache_has_the_bytes_that_are_predicted(name: str) -> None:
    """A forward pass over two tokens; what transformers then holds, in values (and 0-dimensional counters)."""
    model = on_meta(name)
    if any(".experts." in key for key, _ in model.named_parameters()):
        model.set_experts_implementation("batched_mm")  # the default looks at values, which aren't there
    with torch.no_grad(), torch.device("meta"):
        output = model(torch.zeros(1, 2, dtype=torch.long), use_cache=True)
    held: dict[int, int] = {}

    def collect(value: Any) -> None:
        if torch.is_tensor(value):
            held[id(value)] = value.numel() if value.ndim > 0 else 0
        elif isinstance(value, list | tuple | dict):
            for part in value.values() if isinstance(value, dict) else value:
                collect(part)
        elif type(value).__module__ == "transformers.cache_utils":
            collect({key: part for key, part in vars(value).items() if key != "cumulative_length"})

    collect(output.get("past_key_values", output.get("cache_params")))
    assert sizes_from(CONFIGS[name]).kv_bytes(2, 2) == 2 * sum(held.values())


# Table 1 of "Insights into DeepSeek-V3" (2025), kB a token in bfloat16, and sizes in the models' names or cards, in G.
PUBLISHED = {
    "deepseek-ai/DeepSeek-V3": (70.272, 671, 37),
    "Qwen/Qwen2.5-72B": (327.680, 72.7, 72.7),
    "meta-llama/Llama-3.1-405B": (516.096, 405, 405),
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_sizes(name: str) -> None:
    kilobytes, parameters, active = PUBLISHED[name]
    found = sizes_from(CONFIGS[name])
    assert found.kv_bytes_per_token(2) == pytest.approx(1000 * kilobytes, abs=0.5)
    assert found.parameters / 1e9 == pytest.approx(parameters, rel=0.003)
    assert found.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_windows_bound_the_cache() -> None:
    """Gemma 3 1B: 22 of 26 layers see 512 tokens; each caches 2 x 256 values."""
    found = sizes_from(CONFIGS["google/gemma-3-1b-it"])
    assert found.kv_bytes(512, 2) == 512 * found.kv_bytes_per_token(2) == 512 * 26 * 512 * 2
    assert found.kv_bytes(4096, 2) == (4 * 4096 + 22 * 512) * 512 * 2


@pytest.mark.parametrize("family", sorted(BY_NAME))
def test_own_models_count_as_they_are_built(tmp_path: Path, family: str) -> None:
    made = initialise_model(tmp_path / "model", ["abc"], character_level=True, family=family)
    found = sizes_of(tmp_path / "model")
    assert found.parameters == sum(weight.numel() for weight in Decoder(made).parameters())
    assert found.cached_values == 2 * made.layers * made.kv_heads * made.head_dim
    windows = [made.layer(index).scores.window for index in range(made.layers)]
    assert [layer.window for layer in found.layers] == windows
    assert found.attention_softcap == made.attention_softcap


def test_an_unknown_architecture_is_counted_by_its_shapes(tmp_path: Path) -> None:
    """The same file under a name that no rule has: the same weights and cached values."""
    made = initialise_model(tmp_path, ["abc"], character_level=True, family="qwen3_moe", tied=False)
    known, file = sizes_of(tmp_path), tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "quux", "architectures": ["Quux"]}))
    found = sizes_of(tmp_path)
    assert made.mixture is not None
    for sizes in (known, found):
        assert (sizes.parameters, sizes.active_parameters, sizes.cached_values, sizes.tied) == (
            known.parameters,
            known.active_parameters,
            known.cached_values,
            False,
        )
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"none")
    with pytest.raises(ConfigurationError, match=r"model\.safetensors: not a readable safetensors file"):
        sizes_of(tmp_path)
    weights.unlink()
    with pytest.raises(
        ConfigurationError, match=r"model_type = 'quux' is of unknown shape; known: llama, .*safetensors"
    ):
        sizes_of(tmp_path)


def test_shapes_that_name_no_keys_and_older_names_of_keys() -> None:
    raw = {"model_type": "quux", "n_layer": 2, "n_head": 2, "n_embd": 4, "vocab_size": 5, "n_ctx": 32}
    shapes = {"wte.weight": (5, 4), "visual.blocks.1.up.weight": (9, 4)}
    shapes |= {f"h.{layer}.attn.c_attn.weight": (12, 4) for layer in range(2)}
    found = sizes_of_shapes(raw, shapes)
    assert (found.width, len(found.layers), found.cached_values, found.tied) == (4, 2, 2 * 2 * 4, True)
    assert (found.outside, found.parameters) == (20 + 36, 20 + 36 + 2 * 48)


def test_sizes_are_read_without_torch() -> None:
    code = "import headway.models.sizes, sys; print([name for name in ('torch', 'safetensors') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _sizes(**changes: Any) -> ModelSizes:
    return sizes_from({**CONFIGS["Qwen/Qwen3-30B-A3B"], **changes})


def test_refusals_name_the_key() -> None:
    for key in ("hidden_size", "vocab_size", "num_hidden_layers", "moe_intermediate_size"):
        with pytest.raises(ConfigurationError, match=rf"{key} = None: an integer of at least 1"):
            _sizes(**{key: None})
    with pytest.raises(ConfigurationError, match="text_config: it has parts for images"):
        _sizes(text_config={"hidden_size": 1})
    with pytest.raises(ConfigurationError, match="layer_types has 3 layers, but num_hidden_layers = 24"):
        sizes_from({**CONFIGS["openai/gpt-oss-20b"], "layer_types": ["full_attention"] * 3})
    with pytest.raises(ConfigurationError, match="layer_types has 'chunked_attention'"):
        sizes_from({**CONFIGS["openai/gpt-oss-20b"], "layer_types": ["chunked_attention"] * 24})
    raw = {"model_type": "quux", "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 4, "vocab_size": 5}
    with pytest.raises(ConfigurationError, match="num_experts: missing"):
        sizes_of_shapes(raw, {"model.layers.0.mlp.experts.0.up.weight": (8, 4)})
    with pytest.raises(ConfigurationError, match="quantization_config"):
        sizes_of_shapes({**raw, "quantization_config": {"bits": 4}}, {})
