"""Architectures that transformers has: packed documents equal documents alone, in values, gradients and files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from test_models_families import CASES, random_decoder, reference, small
from tiny_hub import ONE_A_ROW, PACKED, VOCABULARY, make_hub_model, make_seeing_model

from headway.config.adapter import AdapterConfig
from headway.config.model import ModelConfig
from headway.models.hf.adapter import HfAdapter
from headway.models.hf.configuration import adapter_size, implementation_of, read_config
from headway.models.hf.model import HfModel, load_hf, shift_obstacle
from headway.models.loading import adopt_weights, copy_weights, load_model, save_model, weights_of
from headway.models.packed_model import PackedModel
from headway.models.run_model import open_model
from headway.records.errors import ConfigurationError

torch.set_num_threads(1)
LENGTHS = [5, 40, 1, 20, 33]


def token_ids(vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, vocabulary - 1, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def logprobs(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), -1)


def alone(folder: str, ids: torch.Tensor, kind: str = "AutoModelForCausalLM") -> tuple[torch.Tensor, Any]:
    """Log-probabilities of each document through plain transformers, and the model."""
    import transformers

    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    logits = [model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(LENGTHS)]
    return logprobs(torch.cat(logits)), model


def pulled_back(values: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of a fixed random sum of ``values`` by the parameters' names; zeros where nothing flows."""
    upstream = torch.randn(values.shape, generator=torch.Generator().manual_seed(2)) / len(values)
    (values * upstream).sum().backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def largest_difference(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Over the largest of all gradients."""
    assert mine.keys() == theirs.keys()
    largest = max(float(one.abs().max()) for one in theirs.values())
    return max(float((mine[name] - one).abs().max()) for name, one in theirs.items()) / largest


def kept_values(model: HfModel, ids: torch.Tensor) -> int:
    """Count of the values that the backward of a forward pass keeps."""
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.forward_packed(ids, LENGTHS)
    return sum(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PACKED, *ONE_A_ROW])
def test_packed_documents_are_computed_as_alone(tmp_path: Path, kind: str) -> None:
    folder = make_hub_model(tmp_path / "m", kind)
    ids = token_ids()
    model = load_hf(folder, "float32", "cpu")
    assert model.packs == (kind in PACKED)
    expected, plain = alone(folder, ids)
    got = logprobs(model(ids, LENGTHS))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    theirs = pulled_back(expected, plain)
    mine = pulled_back(got, model.module)
    assert largest_difference(mine, theirs) < 1e-4

    model.zero_grad()
    whole = kept_values(model, ids)
    model.checkpointing = "full"
    assert kept_values(model, ids) < whole / 2
    assert largest_difference(pulled_back(logprobs(model(ids, LENGTHS)), model.module), mine) < 1e-5
    assert not model.module.training

    model.save(tmp_path / "saved", folder)
    stored, again = (load_file(Path(one) / "model.safetensors") for one in (folder, tmp_path / "saved"))
    assert stored.keys() == again.keys()
    assert all(torch.equal(stored[name], again[name]) for name in stored)
    assert read_config(ModelConfig(path=folder)) == model.config
    assert model.config.sizes.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)
    assert model.config.flops(LENGTHS) > model.config.product_flops(sum(LENGTHS), sum(LENGTHS)) > 0


def test_of_a_model_that_sees_the_language_model_is_trained(tmp_path: Path) -> None:
    folder = make_seeing_model(tmp_path / "m")
    ids = token_ids()
    model = load_hf(folder, "float32", "cpu")
    expected, _ = alone(folder, ids, "AutoModelForImageTextToText")
    got = logprobs(model(ids, LENGTHS))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    got.sum().backward()
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert trained
    assert not any("vision" in name or "multi_modal" in name for name in trained)
    assert len(weights_of(model)) > len(trained)
    assert set(model.layers.parameters()) < set(model.module.get_decoder().parameters())
    model.save(tmp_path / "saved", folder)
    alone(str(tmp_path / "saved"), ids, "AutoModelForImageTextToText")


def test_of_a_model_that_sees_the_language_model_is_adapted(tmp_path: Path) -> None:
    folder = make_seeing_model(tmp_path / "m")
    for targets in (("all-linear",), ("q_proj",)):
        settings = AdapterConfig(rank=2, alpha=2.0, targets=targets)
        adapter = HfAdapter(load_hf(folder, "float32", "cpu"), folder, settings, 0)
        assert adapter.parameters
        assert all("language_model" in name for name in adapter.parameters)


@pytest.mark.parametrize("kind", ["Olmo2", "Phi3", "GPT2", "DeepseekV3", "Olmoe"])
def test_the_size_of_an_adapter_is_known_before_it_is_made(tmp_path: Path, kind: str) -> None:
    folder = make_hub_model(tmp_path / "m", kind)
    named = {"Phi3": ("qkv_proj",), "GPT2": ("c_attn",)}.get(kind, ("v_proj", "o_proj", "kv_b_proj"))
    for targets in (("all-linear",), named):
        settings = AdapterConfig(rank=3, alpha=2.0, targets=targets)
        adapter = HfAdapter(load_hf(folder, "float32", "cpu"), folder, settings, 0)
        exact = sum(parameter.numel() for parameter in adapter.parameters.values())
        rough = 0.3 if kind in ("DeepseekV3", "Olmoe") else 0.05  # PEFT has rules of its own for each mixture
        assert adapter_size(folder, settings) == pytest.approx(exact, rel=rough)
        adapter.save(tmp_path / "adapter")
        assert adapter_size(folder, AdapterConfig(path=str(tmp_path / "adapter"))) == exact


def test_a_model_that_sees_without_a_decoder_of_its_own_is_refused(tmp_path: Path) -> None:
    from transformers import GitConfig, GitForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = GitConfig(vision_config={**sizes, "image_size": 8, "patch_size": 4}, vocab_size=VOCABULARY, **sizes)
    GitForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="GitForCausalLM has no decoder apart from what sees"):
        load_hf(tmp_path, "float32", "cpu")


def gradients_in_files(model: PackedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Gradients under Hugging Face's names, which a model gives its tensors on their way to the disk."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    if isinstance(model, HfModel):
        model.save(folder)
    else:
        save_model(model, folder)  # pyright: ignore[reportArgumentType]
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_both_implementations_of_a_known_family_are_equal(tmp_path: Path, case: str) -> None:
    reference(case).save_pretrained(tmp_path / "m")
    ids = token_ids(53)
    values: list[torch.Tensor] = []
    gradients: list[dict[str, torch.Tensor]] = []
    for implementation in ("headway", "transformers"):
        model = open_model(ModelConfig(path=str(tmp_path / "m"), implementation=implementation), "float32", "cpu")
        got = logprobs(model(ids, LENGTHS))
        pulled_back(got, model)
        values.append(got.detach())
        gradients.append(gradients_in_files(model, tmp_path / implementation))
    assert float((values[0] - values[1]).abs().max() / values[1].abs().max()) < 1e-5
    assert largest_difference(gradients[0], gradients[1]) < 1e-5


def test_weights_are_exchanged_by_name_and_tied_ones_once(tmp_path: Path) -> None:
    folder = make_hub_model(tmp_path / "m", "Olmo2", tie_word_embeddings=True)
    model, other = (load_hf(folder, "float32", "cpu") for _ in range(2))
    weights = {name: one + 0.01 for name, one in weights_of(model).items()}
    assert not any("lm_head" in name for name in weights)
    ids = token_ids()
    with torch.no_grad():
        before = model(ids, LENGTHS)
        copy_weights(model, weights)
        assert adopt_weights(other, weights)
        after = model(ids, LENGTHS)
        assert torch.equal(after, other(ids, LENGTHS))
    assert not torch.allclose(before, after)
    assert other.module.get_output_embeddings().weight is other.module.get_input_embeddings().weight


def test_a_longer_row_than_its_documents_is_refused(tmp_path: Path) -> None:
    model = load_hf(make_hub_model(tmp_path / "m", "Phi"), "float32", "cpu")
    with pytest.raises(ValueError, match="add up to 4 tokens, but 5 ids"):
        model.forward_packed(torch.zeros(5, dtype=torch.int64), [2, 2])
    with pytest.raises(ValueError, match="none may continue another"):
        model.forward_packed(torch.zeros(4, dtype=torch.int64), [2, 2], [-1, 0])


def test_an_architecture_without_an_attention_interface_has_a_document_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_hub_model(tmp_path / "m", "Olmo2")
    monkeypatch.setattr("transformers.Olmo2ForCausalLM._can_set_attn_implementation", classmethod(lambda cls: False))
    model = load_hf(folder, "float32", "cpu")
    assert not model.packs
    assert "each document is a row of its own" in caplog.text
    ids = token_ids()
    expected, _ = alone(folder, ids)
    torch.testing.assert_close(logprobs(model(ids, LENGTHS)), expected, rtol=1e-4, atol=1e-4)
    assert "7 % of the first micro-batch is padding" in caplog.text


@pytest.mark.parametrize(("floor", "why"), [(8, "log_scaling_n_floor depends on a token's index"), (None, "")])
def test_scales_of_inkling_go_by_a_tokens_place_in_its_row(floor: int | None, why: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("inkling_text", log_scaling_n_floor=floor)
    found = shift_obstacle(Mock(config=config))
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_scales_by_a_tokens_place_in_its_row_keep_documents_in_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuned = dict(attn_temperature_tuning=True, floor_scale=8, attn_scale=2.0, no_rope_layers=[1, 0])
    folder = make_hub_model(tmp_path / "m", "Llama4Text", **tuned)
    model, ids = load_hf(folder, "float32", "cpu"), token_ids()
    assert "attn_temperature_tuning depends on a token's index in its row" in caplog.text
    torch.testing.assert_close(logprobs(model(ids, LENGTHS)), alone(folder, ids)[0], rtol=1e-4, atol=1e-4)


def test_contexts_end_where_rotary_embeddings_would_depend_on_the_longest_document(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    folder = make_hub_model(tmp_path / "long", "Phi3", rope_parameters=long, original_max_position_embeddings=40)
    ids = token_ids()
    model = load_hf(folder, "float32", "cpu")
    assert model.config.max_positions == read_config(ModelConfig(path=folder)).max_positions == 40 == max(LENGTHS)
    assert "beyond 40 tokens rotary embeddings depend on the longest document" in caplog.text
    torch.testing.assert_close(logprobs(model(ids, LENGTHS)), alone(folder, ids)[0], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="a document of 41 tokens is beyond the context of 40"):
        model(ids[:50], [9, 41])
    changed(folder, rope_parameters=None, rope_scaling={**long, "type": "su", "rope_type": None})
    assert read_config(ModelConfig(path=folder)).max_positions == 40

    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}  # whose original length is the context
    folder = make_hub_model(tmp_path / "dynamic", "Olmo2", rope_parameters=dynamic, max_position_embeddings=40)
    model = load_hf(folder, "float32", "cpu")
    assert model.config.max_positions == 40
    before = logprobs(model(ids, LENGTHS))
    torch.testing.assert_close(before, alone(folder, ids)[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(logprobs(model(ids, LENGTHS)), before)


def test_a_bodys_own_forward_survives_its_head(tmp_path: Path) -> None:
    model = load_hf(make_hub_model(tmp_path / "m", "Phi"), "float32", "cpu")
    body: Any = model.module.model
    body.forward = own = partial(type(body).forward, body)
    model(token_ids(), LENGTHS)
    assert vars(body)["forward"] is own


def test_a_saved_config_says_what_the_folders_did(tmp_path: Path) -> None:
    folder = make_hub_model(tmp_path / "m", "Olmoe", output_router_logits=True, dtype="bfloat16")
    model = load_hf(folder, "float32", "cpu")
    for _ in range(2):
        model.save(tmp_path / "saved")
    mine, saved = (json.loads((Path(one) / "config.json").read_text()) for one in (folder, tmp_path / "saved"))
    assert saved == {**mine, "dtype": "float32"}  # that of the tensors
    assert saved["output_router_logits"] is True
    assert model.module.config.output_router_logits is False


def test_exhausted_memory_is_not_taken_for_a_bad_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, exhausted = make_hub_model(tmp_path / "m", "Phi"), Mock(side_effect=torch.OutOfMemoryError("none left"))
    model = load_hf(folder, "float32", "cpu")
    monkeypatch.setattr("headway.models.hf.adapter.get_peft_model", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        HfAdapter(model, folder, AdapterConfig(rank=2, alpha=2.0), 0)
    hub = "headway.models.hf.model.HfModel"
    for place in (f"{hub}._packed", f"{hub}._hidden", "transformers.AutoModelForCausalLM.from_pretrained"):
        monkeypatch.setattr(place, exhausted)
        with pytest.raises(torch.OutOfMemoryError):
            load_hf(folder, "float32", "cpu")


# --- what is refused -------------------------------------------------------------------------------------


def changed(folder: str, **changes: Any) -> str:
    file = Path(folder) / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return folder


def test_which_implementation_runs_a_folder(tmp_path: Path) -> None:
    reference("qwen2").save_pretrained(tmp_path / "qwen2")
    phi = make_hub_model(tmp_path / "phi", "Phi")
    assert implementation_of(tmp_path / "qwen2", None) == "headway"
    assert implementation_of(tmp_path / "qwen2", "transformers") == "transformers"
    assert implementation_of(phi, None) == "transformers"
    with pytest.raises(ConfigurationError, match=r"'PhiForCausalLM'.* is not supported"):
        read_config(ModelConfig(path=phi, implementation="headway"))
    changed(str(tmp_path / "qwen2"), partial_rotary_factor=0.5)
    with pytest.raises(ConfigurationError, match=r"model\.implementation = 'transformers' may run it"):
        read_config(ModelConfig(path=str(tmp_path / "qwen2")))


def test_bad_folders_are_refused_with_the_reason(tmp_path: Path) -> None:
    folder = make_hub_model(tmp_path / "m", "Phi")

    def refused(match: str, **keys: Any) -> None:
        for read in (read_config, lambda chosen: open_model(chosen, "float32", "cpu")):
            with pytest.raises(ConfigurationError, match=match):
                read(ModelConfig(path=folder, **keys))

    changed(folder, architectures=["QuuxForCausalLM"], model_type="quux", transformers_version="9.1")
    refused(r"model_type = 'quux' is unknown to transformers \d+\..* was written by 9\.1")
    changed(folder, auto_map={"AutoConfig": "quux.QuuxConfig"})
    refused("auto_map: 'quux' needs Python code .* with your rights .* model.trust_remote_code = true")
    changed(folder, auto_map=None, model_type="clip")
    refused("model_type = 'clip': transformers has no language model of it")
    changed(folder, model_type="whisper", is_encoder_decoder=True)
    refused("is_encoder_decoder = true isn't supported")
    changed(folder, is_encoder_decoder=None, model_type="phi", audio_config={"width": 3})
    refused("audio_config: models of sound")
    changed(folder, audio_config=None, quantization_config={"bits": 4})
    refused("quantization_config")
    changed(folder, quantization_config=None, vocab_size=VOCABULARY + 1)
    with pytest.raises(ConfigurationError, match=r"transformers can't load it|mismatched keys"):
        load_hf(folder, "float32", "cpu")
    changed(folder, vocab_size=VOCABULARY, num_hidden_layers=3)
    with pytest.raises(ConfigurationError, match=r"missing keys: model\.layers\.2"):
        load_hf(folder, "float32", "cpu")


def test_a_model_whose_forward_pass_fails_is_refused(tmp_path: Path) -> None:
    save_model(random_decoder(small("gemma2")), tmp_path / "m")  # without a window, which transformers insists on
    with pytest.raises(ConfigurationError, match="Gemma2ForCausalLM computes nothing from this folder: ValueError"):
        load_hf(tmp_path / "m", "float32", "cpu")


def test_a_model_whose_head_asks_another_body_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_hub_model(tmp_path / "m", "OPT")
    monkeypatch.setattr("transformers.OPTForCausalLM.get_decoder", lambda self: self.model)
    with pytest.raises(ConfigurationError, match="logits aren't made of what OPTModel computes"):
        load_hf(folder, "float32", "cpu")


def test_half_of_the_shards_is_refused(tmp_path: Path) -> None:
    folder = Path(make_hub_model(tmp_path / "m", "Phi"))
    whole = load_hf(folder, "float32", "cpu")
    whole.module.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2
    load_hf(tmp_path / "parts", "float32", "cpu")
    files[1].unlink()
    with pytest.raises(ConfigurationError, match=rf"1 of {len(files)} files are missing: {files[1].name}"):
        load_hf(tmp_path / "parts", "float32", "cpu")


def test_code_of_a_folder_runs_when_it_is_trusted(tmp_path: Path) -> None:
    folder = make_hub_model(tmp_path / "m", "Olmo2")
    code = (
        "from transformers import Olmo2Config, Olmo2ForCausalLM\n"
        "class QuuxConfig(Olmo2Config):\n    model_type = 'quux'\n"
        "class QuuxForCausalLM(Olmo2ForCausalLM):\n    config_class = QuuxConfig\n"
    )
    (Path(folder) / "quux.py").write_text(code)
    automatic = {"AutoConfig": "quux.QuuxConfig", "AutoModelForCausalLM": "quux.QuuxForCausalLM"}
    changed(folder, model_type="quux", architectures=["QuuxForCausalLM"], auto_map=automatic)
    with pytest.raises(ConfigurationError, match="trust_remote_code"):
        read_config(ModelConfig(path=folder))
    model = open_model(ModelConfig(path=folder, trust_remote_code=True), "float32", "cpu")
    assert isinstance(model, HfModel)
    assert type(model.module).__name__ == "QuuxForCausalLM"
    model.save(tmp_path / "saved", folder)
    load_hf(tmp_path / "saved", "float32", "cpu", trust_remote_code=True)


def test_a_decoder_is_opened_for_a_known_family(tmp_path: Path) -> None:
    reference("qwen2").save_pretrained(tmp_path / "m")
    opened = open_model(ModelConfig(path=str(tmp_path / "m")), "float32", "cpu")
    assert torch.equal(opened(token_ids(53), LENGTHS), load_model(tmp_path / "m")(token_ids(53), LENGTHS))
