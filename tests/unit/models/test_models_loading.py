"""Model folders: the same logits as transformers both ways, clear errors, ties that hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.initialise import initialise_model, initialise_parameters
from headway.models.loading import build, copy_weights, load_model, parse_dtype, save_model, weights_of
from headway.records.errors import ConfigurationError
from headway.runtime.scratch import ScratchFolder
from headway.tokens.tokenizer import Tokenizer
from headway.trainer.peak_flops import measure_peak_flops

torch.set_num_threads(1)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIZES = dict(
    vocab_size=53,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    intermediate_size=48,
    max_position_embeddings=256,
)


def small(tied: bool = True, **changes: object) -> Decoder:
    fields: dict[str, object] = dict(
        vocabulary_size=53, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate=24, max_positions=64
    )
    model = build(DecoderConfig(**{**fields, "tied": tied, **changes}))  # type: ignore[arg-type]
    initialise_parameters(model, 0)
    return model


def reference_model(kind: str, tied: bool, **options: object):
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SIZES, tie_word_embeddings=tied, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


@pytest.mark.parametrize(
    ("kind", "tied", "options"),
    [
        ("Qwen3", True, {}),
        ("Qwen3", False, {"attention_bias": True}),
        ("Llama", True, {}),
        ("Llama", False, {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}),
    ],
)
@torch.no_grad()
def test_logits_equal_transformers_after_save_and_load(tmp_path, kind, tied, options):
    theirs = reference_model(kind, tied, **options)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    ours = load_model(tmp_path / "theirs")
    lengths = [5, 150, 1, 9]
    ids = torch.randint(0, 53, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    expected = torch.cat([theirs(part[None]).logits[0] for part in ids.split(lengths)])
    torch.testing.assert_close(ours(ids, lengths), expected, rtol=1e-5, atol=1e-5)

    save_model(ours, tmp_path / "ours")
    back = type(theirs).from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    again = torch.cat([back(part[None]).logits[0] for part in ids.split(lengths)])
    # Not to the bit: transformers maps files into memory, where alignment decides how products are summed.
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(load_model(tmp_path / "ours")(ids, lengths), ours(ids, lengths))
    given, kept = (
        {k: v for f in (tmp_path / w).glob("*.safetensors") for k, v in load_file(f).items()}
        for w in ("theirs", "ours")
    )
    assert given.keys() == kept.keys()
    assert all(torch.equal(given[name], kept[name]) for name in given)
    assert ("lm_head.weight" in kept) is not tied


def test_tied_head_follows_embedding_on_every_update_path():
    model, other = small(), small()
    initialise_parameters(other, seed=7)
    ids = torch.arange(12)
    published = {name: tensor.clone() for name, tensor in weights_of(other).items()}
    assert sum(tensor.shape == (53, 16) for tensor in published.values()) == 1
    copy_weights(model, published)
    assert torch.equal(model(ids, [12]), other(ids, [12]))
    with torch.no_grad():
        model.embedding_weight.zero_()
    assert not model(ids, [12]).any()  # body and head move together
    cast = small().to(torch.bfloat16)
    with torch.no_grad():
        cast.embedding_weight.zero_()
    assert not cast(ids, [12]).any()


def test_copy_weights_casts_and_checks_before_it_writes():
    model, other = small(), small()
    initialise_parameters(other, seed=3)
    half = {name: tensor.to(torch.bfloat16) for name, tensor in weights_of(other).items()}
    copy_weights(model, half)
    assert torch.equal(model.final_norm, half["final_norm"].float())
    before = {name: tensor.clone() for name, tensor in weights_of(model).items()}
    wrong = {**weights_of(other), "final_norm": torch.zeros(3)}
    with pytest.raises(ConfigurationError, match=r"final_norm: shape \[3\].*\[16\]"):
        copy_weights(model, wrong)
    missing = weights_of(other)
    del missing["final_norm"]
    with pytest.raises(ConfigurationError, match="differ in names: final_norm"):
        copy_weights(model, missing)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(model).items())


def damage_config(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))


def test_errors_name_damaged_folders(tmp_path):
    with pytest.raises(ConfigurationError, match=r"no such folder.*nowhere"):
        load_model(tmp_path / "nowhere")
    folder = tmp_path / "m"
    save_model(small(), folder)
    damage_config(folder, hidden_size=24)
    with pytest.raises(ConfigurationError, match=r"has shape .* config.json implies"):
        load_model(folder)
    damage_config(folder, hidden_size=16, num_hidden_layers=3)
    with pytest.raises(ConfigurationError, match=r"tensors missing: model.layers.2.*more"):
        load_model(folder)
    damage_config(folder, num_hidden_layers=1)
    with pytest.raises(ConfigurationError, match=r"does not have: model.layers.1"):
        load_model(folder)
    damage_config(folder, num_hidden_layers=2, tie_word_embeddings=False)
    with pytest.raises(ConfigurationError, match=r"tensors missing: lm_head.weight"):
        load_model(folder)
    damage_config(folder, tie_word_embeddings=True)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigurationError, match="not a readable safetensors file"):
        load_model(folder)
    weights.unlink()
    with pytest.raises(ConfigurationError, match=r"no \*\.safetensors file"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="not readable as JSON"):
        load_model(folder)
    with pytest.raises(ConfigurationError, match="dtype = 'int8'"):
        parse_dtype("int8")


def test_a_tied_folder_that_repeats_its_head_is_read(tmp_path):
    save_model(small(), tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "m" / "model.safetensors")
    assert torch.equal(load_model(tmp_path / "m").embedding_weight, small().embedding_weight)


def make(path: Path, **changes: object) -> DecoderConfig:
    options: dict[str, object] = dict(vocabulary_size=320, layers=2, width=32, intermediate=48, max_positions=64)
    return initialise_model(path, ["12+34=46", "7*8=56 so"], **{**options, **changes})  # type: ignore[arg-type]


def test_init_model_is_deterministic(tmp_path):
    config = make(tmp_path / "a")
    make(tmp_path / "b")
    make(tmp_path / "c", seed=1)
    files = sorted(os.listdir(tmp_path / "a"))
    assert files == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert (tmp_path / "a" / files[2]).read_bytes() != (tmp_path / "c" / files[2]).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]
    tokenizer = Tokenizer.load(tmp_path / "a")
    assert config == DecoderConfig.from_pretrained(tmp_path / "a")
    assert tokenizer.vocabulary_size <= config.vocabulary_size < tokenizer.vocabulary_size + 8
    assert config.eos_token_id == tokenizer.eos_id


def test_fresh_logits_are_small_at_any_width(tmp_path):
    for width in (32, 128):
        make(tmp_path / str(width), width=width)
        model = load_model(tmp_path / str(width))
        logits = model(torch.arange(40), [40]).detach()
        assert 0.3 < float(logits.std()) < 3


def test_init_model_refuses_inconsistent_sizes(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ConfigurationError, match="exists already"):
        make(tmp_path / "taken")
    with pytest.raises(ConfigurationError, match="not a multiple of heads"):
        make(tmp_path / "x", width=33)
    for wrong in ("heads", "kv_heads", "layers"):
        with pytest.raises(ConfigurationError, match=f"{wrong} = 0: must be at least 1"):
            make(tmp_path / "x", **{wrong: 0})
    with pytest.raises(ConfigurationError, match="at least 267"):
        make(tmp_path / "x", vocabulary_size=200)
    with pytest.raises(ConfigurationError, match="no text"):
        initialise_model(tmp_path / "x", [])
    assert os.listdir(tmp_path) == ["taken"]


def test_init_model_removes_leftovers_of_killed_run(tmp_path):
    left, others = [".m.headway-killed_8.partial"], [".mm.headway-killed_8.partial", ".m.killed_8.partial"]
    for name in (*left, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with ScratchFolder(".m.headway-", ".partial", tmp_path) as running:
        make(tmp_path / "m")
        assert sorted(os.listdir(tmp_path)) == sorted(["m", *others, running.name])


def test_a_failed_init_model_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "m").mkdir()  # an empty folder may be there, and stays
    with monkeypatch.context() as patch:
        patch.setattr("headway.models.shards.tensor_files.os.pwrite", full)
        with pytest.raises(OSError, match="No space"):
            make(tmp_path / "m")
    assert os.listdir(tmp_path) == ["m"]
    assert os.listdir(tmp_path / "m") == []
    config = make(tmp_path / "m")
    assert config == DecoderConfig.from_pretrained(tmp_path / "m")


def test_measured_peak_is_plausible():
    assert 1e9 < measure_peak_flops(limit_s=0.05) < 1e14


def test_configuration_is_read_without_torch():
    code = "import sys, headway.models.configuration; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
