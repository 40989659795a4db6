"""The weights that a folder means, numbers that stay numbers, and folders that are there when a run says so."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.cli import main as cli
from headway.config.adapter import AdapterConfig
from headway.models.adapter_files import load_adapter, open_adapter, save_adapter
from headway.models.configuration import DecoderConfig
from headway.models.initialise import initialise_model
from headway.models.loading import load_model, save_model
from headway.records.errors import ConfigurationError
from headway.trainer.kl import kl_estimate

torch.set_num_threads(1)
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def make(folder: Path, seed: int = 0, tied: bool = True) -> dict[str, Tensor]:
    """A small model's folder; its tensors."""
    initialise_model(
        folder, ["12+34=46"], vocabulary_size=300, layers=1, width=32, intermediate=48, seed=seed, tied=tied
    )
    return load_file(folder / FILE)


def changed(tensors: dict[str, Tensor], by: float = 1.0) -> dict[str, Tensor]:
    return {name: tensor + by for name, tensor in tensors.items()}


def shard(folder: Path, tensors: dict[str, Tensor], names: tuple[str, ...] = ()) -> None:
    """``tensors`` in two files and an index of them, which has ``names`` in place of the files' where given."""
    half = len(tensors) // 2
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    parts = [dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])]
    for file, part in zip(files, parts, strict=True):
        save_file(part, folder / file)
    where = {name: file for file, part in zip(names or files, parts, strict=True) for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def read(folder: Path) -> dict[str, Tensor] | None:
    """The tensors that a model of the folder has, by transformers' names; None where it is refused."""
    try:
        model = load_model(folder)
    except ConfigurationError:
        return None
    out = folder.parent / f"{folder.name}-read"
    save_model(model, out)
    return load_file(out / FILE)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in wanted.items() if name in found)


# --- which file --------------------------------------------------------------------------------------------


def stale_index(folder: Path, tensors: dict[str, Tensor]) -> None:
    shard(folder, changed(tensors))


def stale_index_of_part(folder: Path, tensors: dict[str, Tensor]) -> None:
    """One shard is the old one; the other tensors are in the single file by the index, too."""
    shard(folder, changed(tensors), ("model-00001-of-00002.safetensors", FILE))


def missing_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    shard(folder, changed(tensors))
    for file in folder.glob("model-0000*"):
        file.unlink()


def another_file(name: str) -> Callable[[Path, dict[str, Tensor]], None]:
    return lambda folder, tensors: save_file(changed(tensors), folder / name)


def part_of_another(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({"model.norm.weight": tensors["model.norm.weight"] * 3}, folder / "trained.safetensors")


BESIDE = {
    "an old index": stale_index,
    "an old index of a part": stale_index_of_part,
    "an index without its files": missing_shards,
    "a file of another name": another_file("old.safetensors"),
    "a training checkpoint": another_file("optimizer.safetensors"),
    "shards without an index": another_file("model-00001-of-00001.safetensors"),
    "part of a model": part_of_another,
    "a consolidated file": another_file("consolidated.safetensors"),
}


@pytest.mark.parametrize("case", BESIDE)
def test_a_single_file_is_the_model_or_the_folder_is_refused(tmp_path: Path, case: str) -> None:
    tensors = make(tmp_path / "m")
    BESIDE[case](tmp_path / "m", tensors)
    found = read(tmp_path / "m")
    assert found is None or same(found, tensors)


@pytest.mark.parametrize("case", BESIDE)
def test_transformers_reads_the_same_weights(tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM

    tensors = make(tmp_path / "m")
    BESIDE[case](tmp_path / "m", tensors)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert same(theirs.state_dict(), tensors)


def test_shards_with_their_index_are_the_model(tmp_path: Path) -> None:
    tensors = make(tmp_path / "m")
    (tmp_path / "m" / FILE).unlink()
    shard(tmp_path / "m", tensors)
    found = read(tmp_path / "m")
    assert found is not None
    assert same(found, tensors)


def test_an_index_that_agrees_changes_nothing(tmp_path: Path) -> None:
    tensors = make(tmp_path / "m")
    where = dict.fromkeys(tensors, FILE)
    (tmp_path / "m" / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    found = read(tmp_path / "m")
    assert found is not None
    assert same(found, tensors)


# --- tied heads --------------------------------------------------------------------------------------------

HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda e: torch.randn(e.shape, generator=torch.Generator().manual_seed(1)),
    "zeros": torch.zeros_like,
    "one entry": lambda e: e.index_put((torch.tensor(3), torch.tensor(2)), torch.tensor(0.5)),
    "twice": lambda e: 2 * e,
    "one row": lambda e: torch.cat([e[:5], e[5:6] + 0.25, e[6:]]),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
def test_another_head_under_tied_embeddings_is_refused_or_kept(tmp_path: Path, head: str, sharded: bool) -> None:
    folder = tmp_path / "m"
    tensors = make(folder)
    embedding = tensors["model.embed_tokens.weight"]
    given = {**tensors, "lm_head.weight": HEADS[head](embedding).contiguous()}
    save_file(given, folder / FILE)
    if sharded:
        shard(folder, given)
        (folder / FILE).unlink()
    found = read(folder)
    assert found is None or torch.equal(found.get("lm_head.weight", embedding), given["lm_head.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_equal_head_under_tied_embeddings_is_ignored(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tmp_path / "m"
    tensors = {name: tensor.to(dtype) for name, tensor in make(folder).items()}
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / FILE)
    assert load_model(folder).config.tied


def test_an_untied_head_stays(tmp_path: Path) -> None:
    tensors = make(tmp_path / "m", tied=False)
    found = read(tmp_path / "m")
    assert found is not None
    assert torch.equal(found["lm_head.weight"], tensors["lm_head.weight"])


# --- KL estimates ------------------------------------------------------------------------------------------

FAR = [20.5, 21.0, 25.0, 30.0, 50.0, 80.0, 100.0, 300.0]


def gradient(estimator: Any, distance: float, behaviour: float = 0.0) -> tuple[float, float]:
    """The estimate and its gradient where log pi_theta - log pi_ref is ``distance``."""
    logprobs = torch.tensor([-400.0], requires_grad=True)
    value = kl_estimate(estimator, logprobs, torch.tensor([-400.0 - distance]), torch.tensor([-400.0 - behaviour]))
    value.sum().backward()
    assert logprobs.grad is not None
    return float(value.detach()), float(logprobs.grad)


@pytest.mark.parametrize("distance", [*FAR, 19.0, 2.0, 0.1])
@pytest.mark.parametrize("side", [-1, 1], ids=["below the reference", "above the reference"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1_unbiased", "k3_unbiased"])
def test_the_gradient_keeps_its_sign(estimator: str, distance: float, side: int) -> None:
    value, slope = gradient(estimator, side * distance)
    wanted = {"k1": 1.0, "k1_unbiased": side * distance + 1.0}.get(estimator, float(side))
    assert abs(value) < float("inf")
    assert abs(slope) < float("inf")
    assert slope * wanted > 0
    if estimator == "k3":
        assert value >= 0


@pytest.mark.parametrize("distance", FAR)
@pytest.mark.parametrize("estimator", ["k3", "k3_unbiased"])
def test_a_step_along_the_gradient_nears_the_reference(estimator: str, distance: float) -> None:
    _, slope = gradient(estimator, -distance)
    assert slope < 0  # minimised, the policy's probability grows towards the reference's


@pytest.mark.parametrize("behaviour", [-25.0, -1.0, 1.0, 25.0])
@pytest.mark.parametrize("distance", [-40.0, -25.0])
def test_the_sign_stays_off_policy(behaviour: float, distance: float) -> None:
    assert gradient("k3_unbiased", distance, behaviour)[1] < 0


# --- adapters -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and an adapter beside it."""
    folder = tmp_path_factory.mktemp("adapted")
    make(folder / "model")
    settings = AdapterConfig(rank=2, alpha=4.0)
    lora = open_adapter(folder / "model", DecoderConfig.from_pretrained(folder / "model"), settings)
    save_adapter(lora, folder / "adapter", folder / "model")
    return folder


def spoil(folder: Path, value: float, which: str, place: int, dtype: torch.dtype = torch.float32) -> None:
    file = folder / "adapter" / "adapter_model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    name = [name for name in sorted(tensors) if which in name][place]
    tensors[name].view(-1)[-1] = value
    with safe_open(file, framework="pt") as content:
        metadata = content.metadata()
    save_file(tensors, file, metadata)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("which", "place"), [("lora_A", 0), ("lora_B", -1), ("lora_B", 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_is_no_numbers_is_refused(
    tmp_path: Path,
    adapted: Path,
    value: float,
    which: str,
    place: int,
    dtype: torch.dtype,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(adapted, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path, value, which, place, dtype)
    paths = [str(tmp_path / name) for name in ("model", "adapter", "merged")]
    assert cli.main(["merge", *paths]) == 2
    said = re.sub(r"\s+", "", capsys.readouterr().err)
    assert which in said
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_adapter_that_is_no_numbers_is_not_begun_with(tmp_path: Path, adapted: Path, value: float) -> None:
    shutil.copytree(adapted, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path, value, "lora_A", 0)
    config = DecoderConfig.from_pretrained(tmp_path / "model")
    with pytest.raises(ConfigurationError, match="lora_A"):
        open_adapter(tmp_path / "model", config, AdapterConfig(path=str(tmp_path / "adapter")))
    with pytest.raises(ConfigurationError, match="lora_A"):
        load_adapter(tmp_path / "adapter", tmp_path / "model", config)


def test_an_adapter_of_numbers_is_merged(tmp_path: Path, adapted: Path) -> None:
    shutil.copytree(adapted, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path, 0.5, "lora_B", 0)
    assert cli.main(["merge", *(str(tmp_path / name) for name in ("model", "adapter", "merged"))]) == 0
    before, after = load_file(tmp_path / "model" / FILE), load_file(tmp_path / "merged" / FILE)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
