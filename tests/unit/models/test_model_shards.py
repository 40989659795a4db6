"""Rows of a model folder, read and written by ranks that hold a part each: every family, any ranks, faults."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_shards import rank_rows, rank_shards
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.models.decoder import Decoder
from headway.models.families import BY_NAME
from headway.models.initialise import initialise_model
from headway.models.layout import fused_expert_entries, hugging_face_entries
from headway.models.loading import build, load_model, load_shards, save_model, save_shards, weights_of
from headway.models.shards.row_map import decoder_tensors
from headway.models.shards.shard import Shard, shards_of
from headway.records.errors import ConfigurationError

torch.set_num_threads(1)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
each_family = pytest.mark.parametrize("family", BY_NAME)


def make(folder: Path, family: str = "qwen3", **options: Any) -> Decoder:
    """A folder of this family whose every row differs, also those of norms; the model with its weights."""
    sizes = dict(layers=2, width=20, heads=4, kv_heads=2, head_dim=6, intermediate=14, experts=5, tied=False)
    initialise_model(folder, ["12+34=46"], character_level=True, family=family, **{**sizes, **options})
    model = load_model(folder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    save_file(whole(model), folder / "model.safetensors", metadata={"format": "pt"})
    return model


def whole(model: Decoder) -> dict[str, Tensor]:
    """The tensors of the model's folder, made without rows."""
    return {entry.name: entry.view.reshape(entry.shape).contiguous() for entry in hugging_face_entries(model)}


def assert_equal(shards: list[Shard], expected: list[Shard]) -> None:
    for shard, other in zip(shards, expected, strict=True):
        assert torch.equal(shard.tensor, other.tensor), shard.name


@given(rows=st.integers(0, 70), ranks=st.integers(1, 12))
def test_ranks_divide_rows_as_torch_does(rows: int, ranks: int) -> None:
    parts = [part.tolist() for part in torch.arange(rows).chunk(ranks)] if rows else []
    parts += [[]] * (ranks - len(parts))
    assert [list(rank_rows(rows, rank, ranks)) for rank in range(ranks)] == parts


@each_family
def test_each_rank_reads_its_rows_and_writes_them_back(tmp_path: Path, family: str) -> None:
    source = make(tmp_path / "m", family)
    weights, expected_files = weights_of(source), whole(source)
    for ranks in (1, 2, 3, 7, 24):
        order = random.Random(ranks).sample(range(ranks), ranks)
        for rank in order:
            shards = rank_shards(weights, rank, ranks, fill=9.0)
            load_shards(tmp_path / "m", source.config, shards)
            assert_equal(shards, rank_shards(weights, rank, ranks))
            save_shards(tmp_path / f"w{ranks}", source.config, shards, rank, ranks, tokenizer_source=tmp_path / "m")
        files = sorted((tmp_path / f"w{ranks}").glob("*.safetensors"))
        written = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert written.keys() == expected_files.keys()
        assert all(torch.equal(written[name], expected_files[name]) for name in written)
        assert min(ranks, 2) <= len(files) <= ranks
        assert (tmp_path / f"w{ranks}" / "tokenizer.json").is_file()
        again = weights_of(load_model(tmp_path / f"w{ranks}"))
        assert all(torch.equal(again[name], weights[name]) for name in weights)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_moe", "mixtral"])
def test_transformers_reads_what_ranks_wrote(tmp_path: Path, family: str) -> None:
    import transformers

    source = make(tmp_path / "m", family, layers=6, intermediate=60)
    for rank in range(3):
        save_shards(tmp_path / "w", source.config, rank_shards(weights_of(source), rank, 3), rank, 3)
    index = json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights_of(source).values())
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32) for folder in "mw"
    ]
    ours, theirs = (dict(model.named_parameters()) for model in models)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.integers(1, 9), layers=st.integers(1, 3), heads=st.sampled_from([(1, 1), (4, 2), (6, 3)]),
    half=st.integers(1, 5), width=st.integers(1, 19), inner=st.integers(1, 9), experts=st.integers(2, 6),
)  # fmt: skip
def test_every_row_is_in_one_file_tensor(
    tmp_path_factory: pytest.TempPathFactory, heads: tuple[int, int], half: int, inner: int, ranks: int, **sizes: int
) -> None:
    folder = tmp_path_factory.mktemp("m")
    options = dict(heads=heads[0], kv_heads=heads[1], head_dim=2 * half, intermediate=inner, **sizes)
    model = make(folder / "m", "qwen3_moe", **options)
    counts = {
        name: torch.zeros(p.numel() // (p.shape[-1] if p.ndim > 1 else 1)) for name, p in weights_of(model).items()
    }
    for tensor in decoder_tensors(model.config).values():
        counts[tensor.parameter][torch.from_numpy(tensor.rows)] += 1
    assert all((count == 1).all() for count in counts.values())
    for rank in range(ranks):
        shards = rank_shards(weights_of(model), rank, ranks, fill=9.0)
        load_shards(folder / "m", model.config, shards)
        assert_equal(shards, rank_shards(weights_of(model), rank, ranks))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_layers_whose_experts_are_one_tensor_are_read(tmp_path: Path, family: str) -> None:
    source = make(tmp_path / "m", family)
    tensors = whole(source)
    for entry, replaced_names in fused_expert_entries(source):
        tensors[entry.name] = entry.view.contiguous()
        for name in replaced_names:
            del tensors[name]
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    for rank in range(3):
        shards = rank_shards(weights_of(source), rank, 3, fill=9.0)
        load_shards(tmp_path / "m", source.config, shards)
        assert_equal(shards, rank_shards(weights_of(source), rank, 3))


@pytest.mark.parametrize(("dtype", "stored"), list(itertools.product([torch.float32, torch.bfloat16], repeat=2)))
def test_rows_are_cast_as_whole_tensors_are(tmp_path: Path, dtype: torch.dtype, stored: torch.dtype) -> None:
    source = make(tmp_path / "m", tied=True)
    save_file({name: t.to(stored) for name, t in whole(source).items()}, tmp_path / "m" / "model.safetensors")
    expected = {name: tensor.to(stored).to(dtype) for name, tensor in weights_of(source).items()}
    for rank in range(2):
        shards = rank_shards(expected, rank, 2, fill=9.0)
        load_shards(tmp_path / "m", source.config, shards)
        assert_equal(shards, rank_shards(expected, rank, 2))
        save_shards(tmp_path / "w", source.config, shards, rank, 2)
    assert json.loads((tmp_path / "w" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert all(torch.equal(t, expected[n]) for n, t in weights_of(load_model(tmp_path / "w", dtype)).items())


def test_a_whole_model_is_written_as_safetensors_writes_it(tmp_path: Path) -> None:
    source = make(tmp_path / "m")
    save_model(source, tmp_path / "w")
    assert (tmp_path / "w" / "model.safetensors").read_bytes() == (tmp_path / "m" / "model.safetensors").read_bytes()
    assert not (tmp_path / "w" / "model.safetensors.index.json").exists()
    with safe_open(tmp_path / "w" / "model.safetensors", "pt") as reader:
        assert reader.metadata() == {"format": "pt"}


def test_the_rank_that_holds_a_row_of_a_tied_head_compares_it(tmp_path: Path) -> None:
    source = make(tmp_path / "m", tied=True)
    tensors = whole(source)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    shards = [rank_shards(weights_of(source), rank, 3, fill=9.0) for rank in range(3)]
    for rank in range(3):
        load_shards(tmp_path / "m", source.config, shards[rank])
    tensors[HEAD][-1, -1] += 1
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    load_shards(tmp_path / "m", source.config, shards[0])
    with pytest.raises(ConfigurationError, match=r"ties the head.*lm_head.weight in model.safetensors is another"):
        load_shards(tmp_path / "m", source.config, shards[2])


def test_bad_files_are_named_before_a_rank_changes(tmp_path: Path) -> None:
    source = make(tmp_path / "m")
    file, tensors = tmp_path / "m" / "model.safetensors", whole(source)
    shards = rank_shards(weights_of(source), 0, 2, fill=9.0)

    def refused(match: str, **changes: Tensor) -> None:
        if changes:
            save_file({**tensors, **{NAMES[key]: tensor for key, tensor in changes.items()}}, file)
        with pytest.raises(ConfigurationError, match=match):
            load_shards(tmp_path / "m", source.config, shards)

    refused(r"model.safetensors: model.norm.weight has shape \[3\], config.json implies \[20\]", norm=torch.ones(3))
    refused(r"model.norm.weight has numbers of type I32; valid: F64, F32", norm=torch.ones(20, dtype=torch.int32))
    content = file.read_bytes()
    for cut in (content[:-1], content[:100], b""):
        file.write_bytes(cut)
        refused("model.safetensors: not a readable safetensors file")
    assert all((shard.tensor == 9.0).all() for shard in shards)
    refused(r"model.safetensors: model.norm.weight holds NaN", norm=torch.full((20,), float("nan")))


NAMES = {"norm": "model.norm.weight"}


def test_a_shard_is_copied_into_memory_of_its_own(tmp_path: Path) -> None:
    model = build(make(tmp_path / "m").config)
    [shard] = shards_of({"final_norm": model.final_norm})
    copy = shard.copied()
    with torch.no_grad():
        model.final_norm.fill_(7)
    assert (shard.tensor == 7).all()
    assert not (copy.tensor == 7).any()
