"""Rows of transformers' models, read and written by ranks: all architectures of the tests, by one map."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_hub
import torch
import transformers
from model_shards import rank_shards
from safetensors.torch import load_file
from torch import Tensor

from headway.models.hf.model import load_hf, stored_parts
from headway.models.hf.shards import fill_hf, hf_tensors, load_hf_shards, open_hf_on_meta
from headway.models.shards.row_map import RowNumbers
from headway.models.shards.shard import by_name
from headway.models.shards.tensor_files import write_model_files
from headway.records.errors import ConfigurationError

torch.set_num_threads(1)
EVERY = sorted(tiny_hub.PACKED | tiny_hub.ONE_A_ROW)
SOME = {"Olmo2", "DeepseekV3", "GptOss", "Bamba", "Qwen3Next", "GPT2"}
each = pytest.mark.parametrize(
    "kind", [kind if kind in SOME else pytest.param(kind, marks=pytest.mark.slow) for kind in EVERY]
)


def in_files(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@each
@torch.no_grad()
def test_a_module_of_the_meta_device_is_filled_and_written_by_ranks(tmp_path: Path, kind: str) -> None:
    tiny_hub.make_hub_model(tmp_path / "m", kind)
    model = load_hf(tmp_path / "m", "float32", "cpu")
    stored, ids = stored_parts(model.module), torch.arange(7)[None]
    empty = open_hf_on_meta(tmp_path / "m", "float32").to_empty(device="cpu")
    fill_hf(empty, tmp_path / "m")
    module = empty.module
    assert empty.packs == model.packs
    assert all(torch.equal(part, stored[name]) for name, part in stored_parts(module).items())
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    torch.testing.assert_close(module(ids).logits, expected(ids).logits, rtol=1e-5, atol=1e-6)  # buffers too
    for rank in range(3):
        shards = rank_shards(stored, rank, 3, fill=9.0)
        load_hf_shards(tmp_path / "m", module, shards)
        for shard, other in zip(shards, rank_shards(stored, rank, 3), strict=True):
            assert torch.equal(shard.tensor, other.tensor), shard.name
        model.save(tmp_path / "w", tmp_path / "m", by_rows=True)
        write_model_files(tmp_path / "w", hf_tensors(module).values(), by_name(shards), rank, 3)
    written, source = in_files(tmp_path / "w"), in_files(tmp_path / "m")
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], source[name]) for name in source)
    again = stored_parts(load_hf(tmp_path / "w", "float32", "cpu").module)
    assert all(torch.equal(again[name], stored[name]) for name in stored)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tiny_hub.make_hub_model(tmp_path / "m", "Olmo2")
    module = open_hf_on_meta(tmp_path / "m", "float32").module
    tiny_hub.make_hub_model(tmp_path / "w", "Olmo2", num_hidden_layers=1)
    with pytest.raises(ConfigurationError, match=r"tensors missing: model.layers.1.*\(11 in all\)"):
        load_hf_shards(tmp_path / "w", module, [])


def test_a_tensor_that_mixes_rows_of_parameters_is_refused_by_name(tmp_path: Path) -> None:
    tiny_hub.make_hub_model(tmp_path / "m", "Olmo2")
    assert len(hf_tensors(open_hf_on_meta(tmp_path / "m", "float32").module)) == 25
    numbers = RowNumbers({"a.weight": torch.zeros(3, 4), "b.weight": torch.zeros(2, 4)})
    a, b = numbers.columns().values()
    assert numbers.locate("fine", a.flip(0)).rows.tolist() == [2, 1, 0]
    for column in (torch.cat([a, b]), a.T, a.flatten()):
        with pytest.raises(ConfigurationError, match=r"x.weight isn't made of rows of a.weight, so that ranks can't"):
            numbers.locate("x.weight", column)
