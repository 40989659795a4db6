"""Folders whose files can be read in two ways, and weights that aren't numbers: as transformers reads them, or refused
wherever a model is opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_hub
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.config.adapter import AdapterConfig
from headway.config.model import ModelConfig
from headway.models.adapter_files import load_adapter, open_adapter, save_adapter
from headway.models.hf.configuration import read_config
from headway.models.hf.model import load_hf
from headway.models.initialise import initialise_model
from headway.models.loading import load_model
from headway.models.run_model import merge_folders, open_hf_adapter
from headway.models.weight_files import weight_files
from headway.records.errors import ConfigurationError

torch.set_num_threads(1)

NORM = "model.norm.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def qwen(folder: Path, **options: Any) -> Path:
    sizes = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "intermediate": 48}
    initialise_model(folder, ["12+34=46"], character_level=True, **sizes | options)
    return folder


def phi(folder: Path, **options: Any) -> Path:
    tiny_hub.make_hub_model(folder, "Phi3", **options)
    return folder


def opened(folder: Path) -> dict[str, Tensor]:
    return dict(load_model(folder).named_parameters())


def opened_by_transformers(folder: Path) -> dict[str, Tensor]:
    return dict(load_hf(folder, "float32", "cpu").named_parameters())


Opens = Callable[[Path], Any]
MAKES: list[tuple[Callable[..., Path], Opens]] = [(qwen, opened), (phi, opened_by_transformers)]
both = pytest.mark.parametrize(("make", "opens"), MAKES, ids=["decoder", "transformers"])
openings = pytest.mark.parametrize("reads", ["opens", "check"])


def single(folder: Path, **changed: Tensor) -> dict[str, Tensor]:
    """The tensors of model.safetensors, written again with those of ``changed``."""
    tensors = load_file(folder / "model.safetensors") | changed
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def sharded(folder: Path, tensors: dict[str, Tensor], *, parts: int = 2) -> None:
    """Write ``tensors`` as shards with an index, beside what is there."""
    names, where = sorted(tensors), dict[str, str]()
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        save_file({name: tensors[name] for name in names[part::parts]}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names[part::parts], file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_by(reads: str, opens: Opens) -> Opens:
    """A model that is opened, or what `headway check`, `serve` and vLLM read of it first."""
    return opens if reads == "opens" else lambda folder: read_config(ModelConfig(path=str(folder)))


@both
@openings
@pytest.mark.parametrize("where", [[], "model.safetensors", {NORM: 3}])
def test_an_index_that_is_none_is_named(
    tmp_path: Path, make: Callable[..., Path], opens: Opens, reads: str, where: Any
) -> None:
    folder = make(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(ConfigurationError, match=r"weight_map = .*valid: an object of file names"):
        read_by(reads, opens)(folder)


# --- two sets of weights ----------------------------------------------------------------------------------


@both
@openings
@pytest.mark.parametrize("differs", ["a value", "a tensor more", "a tensor less", "a type", "a shape"])
def test_an_index_and_a_single_file_that_differ_are_refused(
    tmp_path: Path, make: Callable[..., Path], opens: Opens, reads: str, differs: str
) -> None:
    folder = make(tmp_path / "m")
    old = single(folder)
    if differs == "a value":
        old[NORM] = old[NORM].clone()
        old[NORM][-1] += 1e-3
    elif differs == "a tensor more":
        old["model.other.weight"] = torch.ones(3)
    elif differs == "a tensor less":
        del old[NORM]
    elif differs == "a type":
        old[NORM] = (old[NORM] + 0.3).to(torch.bfloat16)
    else:
        old[NORM] = old[NORM][:-1].clone()
    sharded(folder, old)
    with pytest.raises(
        ConfigurationError, match=r"model\.safetensors and .* hold two sets of weights, which differ in model"
    ):
        read_by(reads, opens)(folder)


@both
def test_two_sets_that_are_equal_are_read(tmp_path: Path, make: Callable[..., Path], opens: Opens) -> None:
    folder = make(tmp_path / "m")
    before = opens(folder)
    sharded(folder, single(folder))
    after = opens(folder)
    assert all(torch.equal(before[name], after[name]) for name in before)


@both
def test_an_index_whose_shards_are_gone_is_dead(tmp_path: Path, make: Callable[..., Path], opens: Opens) -> None:
    folder = make(tmp_path / "m")
    before = opens(folder)
    sharded(folder, {name: one + 1 for name, one in single(folder).items()})
    next(folder.glob("model-*")).unlink()
    after = opens(folder)
    assert all(torch.equal(before[name], after[name]) for name in before)


@both
@pytest.mark.parametrize("other", ["model_old", "model-backup", "consolidated", "adapter_model", "model.fp16", "zz"])
def test_other_files_beside_the_single_one_are_not_read(
    tmp_path: Path, make: Callable[..., Path], opens: Opens, other: str
) -> None:
    folder = make(tmp_path / "m")
    before = opens(folder)
    save_file({name: one + 1 for name, one in single(folder).items()}, folder / f"{other}.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()[NORM]
    after = opens(folder)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(theirs, single(folder)[NORM])


@pytest.mark.parametrize("reads", ["opens", "check"])
def test_without_an_index_two_files_of_one_tensor_are_refused(tmp_path: Path, reads: str) -> None:
    folder = qwen(tmp_path / "m")
    tensors = single(folder)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    opened(folder)  # one set under another name
    save_file({NORM: tensors[NORM] + 1}, folder / "b.safetensors")
    with pytest.raises(ConfigurationError, match=r"a\.safetensors and b\.safetensors hold two sets of weights.*norm"):
        read_by(reads, opened)(folder)


def test_shards_that_hold_a_tensor_twice_are_refused(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "m")
    tensors = single(folder)
    sharded(folder, tensors)
    (folder / "model.safetensors").unlink()
    opened(folder)
    first, second = sorted(folder.glob("model-*"))
    held, name = load_file(second), next(iter(load_file(first)))
    save_file(held | {name: load_file(first)[name] + 1}, second)  # the index names the first alone
    with pytest.raises(ConfigurationError, match="hold two sets"):
        opened(folder)


@both
def test_a_configuration_that_names_its_file_is_followed(
    tmp_path: Path, make: Callable[..., Path], opens: Opens
) -> None:
    folder = make(tmp_path / "m")
    tensors, file = single(folder), folder / "config.json"
    save_file(tensors | {NORM: tensors[NORM] + 1}, folder / "mine.safetensors", metadata={"format": "pt"})
    file.write_text(json.dumps(json.loads(file.read_text()) | {"transformers_weights": "mine.safetensors"}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()[NORM]
    assert torch.equal(theirs, tensors[NORM] + 1)
    assert any(one.shape == theirs.shape and torch.equal(one, theirs) for one in opens(folder).values())


@pytest.mark.parametrize(
    "content", [b"", b"none", b"\0" * 8, b"\xff" * 64, b"\2\0\0\0\0\0\0\0[]", b"\0\0\2\0\0\0\0\0" + b"[" * 131072]
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    folder = qwen(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    for reads in ("opens", "check"):
        with pytest.raises(ConfigurationError, match=r"model\.safetensors: not a readable safetensors file"):
            read_by(reads, opened)(folder)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    file = qwen(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    for reads in ("opens", "check"):
        with pytest.raises(ConfigurationError, match=r"model\.safetensors: not a readable safetensors file.*truncated"):
            read_by(reads, opened)(file.parent)


def test_a_folder_without_weights_has_no_files(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"no \*\.safetensors file"):
        weight_files(folder)


# --- heads ------------------------------------------------------------------------------------------------


@both
@openings
def test_another_head_beside_a_tied_configuration_is_refused(
    tmp_path: Path, make: Callable[..., Path], opens: Opens, reads: str
) -> None:
    folder = make(tmp_path / "m")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(HEAD, None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    before = opens(folder)
    single(folder, **{HEAD: tensors[EMBEDDING].clone()})
    after = read_by(reads, opens)(folder)
    if reads == "opens":
        assert all(torch.equal(before[name], after[name]) for name in before)
    head = tensors[EMBEDDING].clone()
    head[-1, -1] += 1e-3
    single(folder, **{HEAD: head})
    with pytest.raises(ConfigurationError, match="tie_word_embeddings = false"):
        read_by(reads, opens)(folder)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))
    assert any(torch.equal(one, head) for one in opens(folder).values())  # as the error says


def test_a_head_of_another_type_is_compared_by_value(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "m")
    rounded = single(folder)[EMBEDDING].bfloat16()
    single(folder, **{EMBEDDING: rounded.float(), HEAD: rounded})
    opened(folder)
    read_config(ModelConfig(path=str(folder)))
    single(folder, **{HEAD: rounded * 2})
    with pytest.raises(ConfigurationError, match="ties the head"):
        opened(folder)


# --- numbers that aren't ----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path, make: Callable[..., Path], opens: Opens, value: float
) -> None:
    folder = make(tmp_path / "m")
    norm = single(folder)[NORM]
    norm[3] = value
    single(folder, **{NORM: norm})
    with pytest.raises(ConfigurationError, match="holds NaN or infinite numbers as float32; valid: finite"):
        opens(folder)


def test_weights_that_a_narrow_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "m")
    single(folder, **{NORM: single(folder)[NORM] * 1e6})
    load_model(folder, "bfloat16")
    with pytest.raises(ConfigurationError, match="as float16"):
        load_model(folder, "float16")


@pytest.fixture
def adapter(tmp_path: Path) -> tuple[Path, Path]:
    """(base, adapter)."""
    base = qwen(tmp_path / "base")
    lora = open_adapter(base, load_model(base).config, AdapterConfig(rank=2, alpha=4.0))
    save_adapter(lora, tmp_path / "adapter", base)
    return base, tmp_path / "adapter"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_is_refused_in_each_type(
    adapter: tuple[Path, Path], tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    base, folder = adapter
    file = folder / "adapter_model.safetensors"
    tensors = {name: one.to(dtype) for name, one in load_file(file).items()}
    save_file(tensors, file)
    load_adapter(folder, base, load_model(base).config)
    name = sorted(tensors)[1]
    tensors[name][-1, -1] = value
    save_file(tensors, file)
    with pytest.raises(ConfigurationError, match=f"adapter_model.safetensors: {name} holds NaN or infinite"):
        load_adapter(folder, base, load_model(base).config)
    with pytest.raises(ConfigurationError, match="holds NaN or infinite"):
        merge_folders(base, folder, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_beside_transformers_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    base = phi(tmp_path / "base")
    settings = AdapterConfig(rank=2, alpha=4.0)
    made = open_hf_adapter(load_hf(base, "float32", "cpu"), base, settings, 0)
    made.save(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[min(tensors)][0, 0] = float("nan")
    save_file(tensors, file)
    again = AdapterConfig(path=str(tmp_path / "adapter"))
    with pytest.raises(ConfigurationError, match="holds NaN or infinite"):
        open_hf_adapter(load_hf(base, "float32", "cpu"), base, again, 0)
    with pytest.raises(ConfigurationError, match="holds NaN or infinite"):
        made.load(tmp_path / "adapter")


def test_a_merge_that_overflows_is_refused_and_leaves_nothing(adapter: tuple[Path, Path], tmp_path: Path) -> None:
    base, folder = adapter
    file = folder / "adapter_model.safetensors"
    save_file({name: one * 0 + 3e19 for name, one in load_file(file).items()}, file)
    with pytest.raises(ConfigurationError, match=r"merged: .* holds NaN or infinite numbers as float32"):
        merge_folders(base, folder, tmp_path / "merged")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["adapter", "base"]
