"""Adapters in PEFT's format, both ways: equal logits and gradients, what is not supported refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models_families import LENGTHS, random_decoder, reference, reference_logits, small, token_ids
from torch import Tensor

from headway.config.adapter import AdapterConfig
from headway.models.adapter_files import load_adapter, open_adapter, save_adapter
from headway.models.adapter_targets import CONFIG_FILE
from headway.models.decoder import Decoder
from headway.models.loading import load_model, save_model
from headway.models.lora import Lora, use
from headway.records.errors import ConfigurationError

torch.set_num_threads(1)
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
# Case of test_models_families.py, targets, target_parameters.
CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "dense": ("qwen3, windows above, yarn", ("all-linear",), ()),
    "biased": ("qwen2", ("q_proj", "v_proj"), ()),
    "gemma": ("gemma2", ("all-linear",), ()),
    "mixture": ("qwen3_moe", ("all-linear", "mlp.gate"), EXPERTS),
    "other mixture": ("mixtral", ("o_proj",), EXPERTS),
    "one parameter": ("qwen3_moe", ("o_proj",), EXPERTS[:1]),
    "the other": ("qwen3_moe", ("o_proj",), EXPERTS[1:]),
}
EACH = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp("base")
            reference(case).save_pretrained(made[case])
        return made[case]

    return folder


def trained(lora: Lora) -> Lora:
    generator = torch.Generator().manual_seed(4)
    for parameter in lora.parameters.values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return lora


def peft_model(base: Path, adapter: Path) -> Any:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)


def logits_of(model: Decoder, lora: Lora) -> Tensor:
    use(model, lora.layers)
    return model.requires_grad_(False)(token_ids(), LENGTHS)


@EACH
def test_peft_computes_the_same_from_our_files_and_the_same_gradients(
    tmp_path: Path, case: str, base: Callable[[str], Path]
) -> None:
    name, targets, parameters = CASES[case]
    folder = base(name)
    model = load_model(folder)
    settings = AdapterConfig(rank=3, alpha=6.0, rslora=True, targets=targets, target_parameters=parameters)
    lora = trained(open_adapter(folder, model.config, settings))
    save_adapter(lora, tmp_path / "ours", folder)
    theirs = peft_model(folder, tmp_path / "ours")
    mine, its = logits_of(model, lora), reference_logits(theirs, token_ids())
    assert float((mine - its).abs().max()) < 1e-5
    weights = torch.randn(mine.shape, generator=torch.Generator().manual_seed(5))
    (mine * weights).mean().backward()
    (its * weights).mean().backward()
    gradients = {key: one.grad for key, one in theirs.named_parameters() if one.requires_grad}
    values = {key: parameter.data.clone() for key, parameter in lora.parameters.items()}
    for parameter in lora.parameters.values():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    save_adapter(lora, tmp_path / "gradients", folder)  # in their order of rows, under their names
    ours = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    assert {key.replace(".default", "") for key in gradients} == ours.keys()
    for key, gradient in gradients.items():
        assert gradient is not None
        torch.testing.assert_close(ours[key.replace(".default", "")], gradient, rtol=1e-5, atol=1e-5)
    assert len(values) == len(ours)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("whole", [False, True])
def test_an_adapter_that_peft_made_is_loaded_continued_and_saved_alike(
    tmp_path: Path, case: str, whole: bool, base: Callable[[str], Path]
) -> None:
    import peft
    import transformers

    name, targets, parameters = CASES[case]
    folder = base(name)
    if whole:  # for some mixtures PEFT makes it parameters of a doubled rank
        chosen: Any = {"target_modules": "all-linear"}
    else:
        chosen = {
            "target_modules": [one for one in targets if one not in ("all-linear", "mlp.gate")] or ["q_proj", "v_proj"],
            "target_parameters": list(parameters) or None,
        }
    torch.manual_seed(3)  # PEFT draws A and B
    settings = peft.LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, task_type="CAUSAL_LM", **chosen)
    theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), settings)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_model(folder)
    lora = load_adapter(tmp_path / "theirs", folder, model.config)
    mine, its = logits_of(model, lora), reference_logits(theirs, token_ids())
    assert float((mine - its).abs().max()) < 1e-5
    mine.mean().backward()
    assert all(parameter.grad is not None for parameter in lora.parameters.values())
    save_adapter(lora, tmp_path / "again", folder)
    stored, again = (load_file(tmp_path / at / "adapter_model.safetensors") for at in ("theirs", "again"))
    assert stored.keys() == again.keys()
    assert all(torch.equal(one, again[key]) for key, one in stored.items())
    its = reference_logits(peft_model(folder, tmp_path / "again"), token_ids())
    assert float((mine - its).abs().max()) < 1e-5


def test_ranks_and_alphas_by_pattern_are_read_and_written(tmp_path: Path, base: Callable[[str], Path]) -> None:
    import peft
    import transformers

    folder = base("qwen2")
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, init_lora_weights=False, target_modules="all-linear", task_type="CAUSAL_LM",
        rank_pattern={"q_proj": 5, r"layers\.1\.mlp\.up_proj": 2}, alpha_pattern={"layers.0.self_attn.o_proj": 7},
    )  # fmt: skip
    torch.manual_seed(6)
    theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), settings)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_model(folder)
    lora = load_adapter(tmp_path / "theirs", folder, model.config)
    of = {adapted.target.name.removeprefix("model.layers."): adapted for adapted in lora.targets}
    assert {(one.rank, one.alpha) for one in lora.targets} == {(3, 5), (5, 5), (2, 5), (3, 7)}
    assert (of["1.mlp.up_proj"].rank, of["0.self_attn.o_proj"].alpha) == (2, 7)
    assert of["0.self_attn.q_proj"].scale == pytest.approx(5 / 5**0.5)
    its = reference_logits(theirs, token_ids())
    assert float((logits_of(model, lora) - its).abs().max()) < 1e-5
    save_adapter(lora, tmp_path / "again", folder)
    assert load_adapter(tmp_path / "again", folder, model.config).targets == lora.targets  # exactly
    again = reference_logits(peft_model(folder, tmp_path / "again"), token_ids())
    assert float((again - its).abs().max()) < 1e-5


def test_what_is_written_are_the_settings_themselves(tmp_path: Path, base: Callable[[str], Path]) -> None:
    folder, settings = base("qwen2"), AdapterConfig(rank=3, alpha=6.0, rslora=True, targets=("q_proj",))
    config = load_model(folder).config
    lora = open_adapter(folder, config, settings)
    save_adapter(lora, tmp_path / "ours", folder)
    written = json.loads((tmp_path / "ours" / CONFIG_FILE).read_text())
    assert (written["r"], written["lora_alpha"], written["use_rslora"]) == (3, 6.0, True)
    assert (written["rank_pattern"], written["alpha_pattern"]) == ({}, {})
    again = load_adapter(tmp_path / "ours", folder, config)
    assert [one.scale for one in again.targets] == [one.scale for one in lora.targets]  # bit for bit


def test_a_list_of_modules_may_name_those_of_other_architectures(tmp_path: Path, base: Callable[[str], Path]) -> None:
    import peft
    import transformers

    folder = base("qwen2")
    settings = peft.LoraConfig(r=2, target_modules=["c_attn", "v_proj"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), settings)
    theirs.save_pretrained(tmp_path / "theirs")
    lora = load_adapter(tmp_path / "theirs", folder, load_model(folder).config)
    assert {one.target.name.rpartition(".")[2] for one in lora.targets} == {"v_proj"}


@pytest.mark.parametrize("how", ["pissa", "olora"])
def test_an_adapter_beside_a_base_that_peft_changed_is_refused(
    tmp_path: Path, how: Any, base: Callable[[str], Path]
) -> None:
    import peft
    import transformers

    folder = base("qwen2")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    settings = peft.LoraConfig(r=2, init_lora_weights=how, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, settings).save_pretrained(tmp_path / "theirs")
    with pytest.raises(ConfigurationError, match=f"init_lora_weights = '{how}'.*path_initial_model"):
        load_adapter(tmp_path / "theirs", folder, load_model(folder).config)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Path]:
    """(base, adapter)."""
    model = random_decoder(small("qwen3"))
    save_model(model, tmp_path / "base")
    lora = open_adapter(tmp_path / "base", model.config, AdapterConfig(rank=2, alpha=4.0))
    save_adapter(lora, tmp_path / "adapter", tmp_path / "base")
    return tmp_path / "base", tmp_path / "adapter"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"exclude_modules": ["v_proj"]}, "exclude_modules"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
        ({"use_qalora": True}, "use_qalora"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "config.json: target_modules: no layer has 'embed_tokens'"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\] = 0: valid: a number above 0"),
        ({"alpha_pattern": {"up_proj": "4"}}, r"alpha_pattern\['up_proj'\] = '4': valid"),
        ({"lora_alpha": None}, "lora_alpha = None"),
        ({"r": 0}, "r = 0"),
        ({"r": 3}, "has shape"),
        ({"target_modules": ["q_proj"]}, "doesn't explain"),
        ({"target_modules": ["q_prj"]}, "q_prj.*nearest: .*q_proj"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    stored: tuple[Path, Path], change: dict[str, Any], words: str
) -> None:
    base, adapter = stored
    file = adapter / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigurationError, match=words):
        load_adapter(adapter, base, load_model(base).config)


def test_files_beside_the_weights_may_change(stored: tuple[Path, Path]) -> None:
    base, adapter = stored
    (base / "generation_config.json").write_text("{}")
    (base / "other").mkdir()
    save_file({"x": torch.zeros(1)}, base / "other" / "model.safetensors")
    load_adapter(adapter, base, load_model(base).config)


def test_an_adapter_of_another_base_is_refused(stored: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = stored
    other = random_decoder(small("qwen3"), seed=1)
    save_model(other, tmp_path / "other")
    with pytest.raises(ConfigurationError, match="of another base"):
        load_adapter(adapter, tmp_path / "other", other.config)
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file), file)  # one trained elsewhere says nothing of its base: its shapes do
    load_adapter(adapter, tmp_path / "other", other.config)
    narrow = random_decoder(small("qwen3", width=16))
    save_model(narrow, tmp_path / "narrow")
    with pytest.raises(ConfigurationError, match="has shape"):
        load_adapter(adapter, tmp_path / "narrow", narrow.config)
    file.write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match="not a readable"):
        load_adapter(adapter, base, load_model(base).config)
    with pytest.raises(ConfigurationError, match="not an adapter"):
        load_adapter(base, base, load_model(base).config)


def test_experts_of_a_folder_have_no_dropout(tmp_path: Path, base: Callable[[str], Path]) -> None:
    folder = base("qwen3_moe")
    config = load_model(folder).config
    for name, parameters in (("experts", EXPERTS), ("none", ())):
        settings = AdapterConfig(rank=2, alpha=4.0, targets=("q_proj",), target_parameters=parameters)
        save_adapter(open_adapter(folder, config, settings), tmp_path / name, folder)
    with pytest.raises(ConfigurationError, match=r"dropout = 0\.1 and experts in .*experts: .*valid: 0"):
        open_adapter(folder, config, AdapterConfig(path=str(tmp_path / "experts"), dropout=0.1))
    open_adapter(folder, config, AdapterConfig(path=str(tmp_path / "none"), dropout=0.1))
