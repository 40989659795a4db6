"""What ranks that divide a model need, and which layouts fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_figures import (
    CONFIG,
    GIB,
    MODEL,
    PARAMETERS,
    experiment,
    machine_with,
    sizes,
)

from headway.config.auto import Machine
from headway.control.tuning.diagnosis import all_device_splits
from headway.models.configuration import ExpertMixture
from headway.models.sizes import ModelSizes
from headway.orchestrator.preflight import capacity, memory
from headway.orchestrator.preflight.experiment_file import prepared
from headway.orchestrator.preflight.memory import memory_uses
from headway.records.errors import ConfigurationError

FOUR = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def parts_of(folder: Path, model: ModelSizes = MODEL, **trainer: Any) -> dict[str, int]:
    parts, moved = memory.trainer_parts(experiment(folder, trainer={"devices": FOUR, **trainer}), model)
    return parts | {f"host {name}": nbytes for name, nbytes in moved.items()}


@pytest.mark.parametrize(("keys", "ranks"), [
    ({"shards": 4}, 4),
    ({"shards": "all"}, 4),
    ({"shards": 2}, 2),
    ({"shards": 2, "context_parallel": 2}, 4),  # ranks that divide a sequence are shards too
    ({"shards": 1, "context_parallel": 2}, 2),
])  # fmt: skip
def test_shards_and_context_ranks_divide_the_state(tmp_path: Path, keys: dict[str, Any], ranks: int) -> None:
    parts = parts_of(tmp_path, **keys)
    own = -(-PARAMETERS // ranks)
    assert (parts["weights"], parts["AdamW"]) == (4 * own, 8 * own)
    assert parts["gradients"] == 4 * own * (2 if ranks < 4 else 1)  # copies sum theirs in one more
    layer, outside = (PARAMETERS - 64_064) // 2, 64_064
    assert parts["gathered"] == 4 * (outside + 3 * layer) + 4 * outside + max(4 * outside, 8 * layer)
    narrow = parts_of(tmp_path, **keys, dtype="bfloat16")
    assert narrow["weights"] == 4 * own  # gathered from the masters


def test_context_ranks_divide_the_tokens(tmp_path: Path) -> None:
    whole, halves, quarters = (
        parts_of(tmp_path, shards="all", context_parallel=count, micro_batch_tokens=2000) for count in (1, 2, 4)
    )
    assert whole["activations"] == 2 * halves["activations"] == 4 * quarters["activations"]
    assert whole["gathered"] == quarters["gathered"]


def mixture_sizes() -> ModelSizes:
    mixture = ExpertMixture(experts=8, per_token=2, intermediate=32)
    return sizes(replace(CONFIG, architecture="Qwen3MoeForCausalLM", mixture=mixture, tied=False))


def test_expert_ranks_gather_their_experts_alone(tmp_path: Path) -> None:
    model = mixture_sizes()
    experts = model.layers[0].experts
    assert experts == 8 * 3 * 32 * 64
    whole, divided = (parts_of(tmp_path, model, shards=4, expert_parallel=count) for count in (1, 4))
    assert whole["weights"] == divided["weights"]
    assert whole["gathered"] - divided["gathered"] == 3 * 4 * (experts - experts // 4)  # of three layers
    assert divided["activations"] > whole["activations"]  # with the rows that are exchanged


@pytest.mark.parametrize(("host_memory", "moved"), [
    ("optimiser", {"AdamW"}), ("all", {"weights", "gradients", "AdamW"})])  # fmt: skip
def test_what_the_hosts_memory_has_isnt_on_the_gpu(tmp_path: Path, host_memory: str, moved: set[str]) -> None:
    here, there = parts_of(tmp_path, shards=2), parts_of(tmp_path, shards=2, host_memory=host_memory)
    assert {f"host {name}" for name in moved} == there.keys() - here.keys()
    assert all(there[f"host {name}"] == here[name] and name not in there for name in moved)
    alone = parts_of(tmp_path, host_memory=host_memory)
    assert ("gathered" in alone) is (host_memory == "all")


def test_what_ranks_exchange(tmp_path: Path) -> None:
    def exchanged(model: ModelSizes = MODEL, **trainer: Any) -> dict[str, int]:
        return memory.exchanged_bytes(
            experiment(tmp_path, trainer={"devices": FOUR, "micro_batch_tokens": 2000, **trainer}), model
        )

    half = exchanged(shards=2)
    assert half == {
        "gathered weights": (2 * PARAMETERS - 64_064) * 4 // 2,  # twice, and once what is outside of the layers
        "summed gradients": 4 * PARAMETERS // 2,
    }
    assert exchanged(shards=4)["gathered weights"] * 2 == half["gathered weights"] * 3
    context = exchanged(shards=2, context_parallel=2)
    assert context["exchanged tokens"] == 2 * 2 * (8 * 16 + 4 * 16) // 2 * 4 * 2000 // 2
    moe = exchanged(mixture_sizes(), shards=4, expert_parallel=2)
    assert moe["exchanged tokens"] == 2 * 2 * 2 * 2 * 64 // 2 * 4 * 2000
    assert moe["gathered weights"] < exchanged(mixture_sizes(), shards=4)["gathered weights"]


def test_the_fewest_shards_that_have_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "sizes_of", lambda folder: MODEL)
    chosen = experiment(
        tmp_path, generator={"devices": ["cpu:0"]}, trainer={"devices": FOUR, "micro_batch_tokens": 500}
    )
    needed: dict[int, int] = {}
    for shards in (1, 2, 4):
        uses = memory_uses(capacity.with_trainer(chosen, shards=shards), MODEL)
        needed[shards] = max(use.total_bytes for use in uses if use.location == "cuda:0")
    assert needed[1] > needed[2] > needed[4]
    for shards, nbytes in needed.items():
        machine = machine_with(round(nbytes / capacity.FULL_SHARE) + 1, 4)
        assert capacity.fewest_shards(chosen, machine) == shards
    assert capacity.fewest_shards(chosen, machine_with(needed[4], 4)) == 4  # none has it: all
    assert capacity.fewest_shards(chosen, Machine()) == 1  # nothing is known of these GPUs

    on_node = capacity.with_trainer(chosen, devices=tuple(f"a/{device}" for device in FOUR))
    for shards, nbytes in needed.items():
        gpu_bytes = round(nbytes / capacity.FULL_SHARE) + 1
        assert capacity.fewest_shards(on_node, machine_with(gpu_bytes, 1)) == shards  # as this machine's
        gpu = replace(capacity.NODE_GPU, memory_bytes=gpu_bytes, free_bytes=gpu_bytes)
        monkeypatch.setattr(capacity, "NODE_GPU", gpu)
        assert capacity.fewest_shards(on_node, Machine()) == shards


@pytest.mark.parametrize(("shards", "layout"), [("auto", (1, 1, 1)), (4, (4, 1, 1)), ("all", (4, 1, 1))])
def test_the_ranks_of_sft_are_those_that_divide_its_model(tmp_path: Path, shards: Any, layout: Any) -> None:
    chosen = experiment(tmp_path, sft={"devices": [f"cpu:{core}" for core in range(4)]}, trainer={"devices": ["cpu:0"]})
    raw = chosen.model_dump(mode="json")
    raw["trainer"]["shards"] = shards
    for_sft = prepared(raw, "experiment", ranks_of="sft").trainer
    assert (*for_sft.devices,) == chosen.sft.devices
    assert for_sft.layout_of(4) == layout
    raw["trainer"]["shards"] = 3
    with pytest.raises(
        ConfigurationError, match=r"shards = 3 doesn't divide the 4 ranks of sft\.devices; valid: 1, 2, 4"
    ):
        prepared(raw, "experiment", ranks_of="sft")
    raw["trainer"] |= {"devices": ["cpu:0"] * 3}
    raw["sft"]["devices"] = ["cpu:0"]
    assert prepared(raw, "experiment", ranks_of="sft").trainer.shards == 3  # a single rank divides nothing


def test_check_says_why_a_model_is_divided_and_which_layout_would_fit(tmp_path: Path) -> None:
    chosen = experiment(
        tmp_path, generator={"devices": ["cpu:0"]}, trainer={"devices": FOUR, "micro_batch_tokens": 500}
    )

    def findings(needed_for: dict[str, Any], **trainer: Any) -> list[str]:
        fitting = capacity.with_trainer(chosen, **needed_for)
        nbytes = max(use.total_bytes for use in memory_uses(fitting, MODEL) if use.location == "cuda:0")
        machine = machine_with(round(nbytes / capacity.FULL_SHARE) + 1, 4)
        changed = capacity.with_trainer(chosen, **trainer)
        return [finding.message for finding in capacity.layout_findings(changed, MODEL, machine)]

    assert findings({}) == []
    [reason] = findings({"shards": 2}, shards=2)
    assert "2 ranks divide a copy of the model, because with 1 trainer-0 makes cuda:0 need" in reason
    assert "for a micro-batch of the largest size a rank receives" in reason
    assert "of gathered weights" in reason
    [advice] = findings({"shards": 4})
    assert advice.endswith("; trainer.shards = 4 has the memory")
    [advice] = findings({"shards": 4, "host_memory": "optimiser"})
    assert advice.endswith('; trainer.shards = 4 with trainer.host_memory = "optimiser" has the memory')
    too_small = machine_with(1 << 20, 4)
    [nothing] = capacity.layout_findings(chosen, MODEL, too_small)
    assert nothing.message.endswith("no division of a copy among these 4 ranks has the memory")


def test_only_splits_whose_devices_have_the_memory_are_considered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy fits on three ranks as on two, and not on one."""
    deep = sizes(layers=40)
    monkeypatch.setattr(capacity, "sizes_of", lambda folder: deep)
    sides: dict[str, Any] = {"generator": {"devices": ["cuda:0", "cuda:1"], "dtype": "bfloat16"}}
    sides["trainer"] = {"devices": ["cuda:2", "cuda:3"], "shards": 2, "micro_batch_tokens": 500}
    chosen = experiment(tmp_path, **sides)
    splits = all_device_splits(chosen)
    assert {(split.ranks, split.settings.get("trainer.shards")) for split in splits} == {(1, "1"), (3, "3")}
    needed = max(use.total_bytes for use in memory_uses(chosen, deep) if use.location.startswith("cuda"))
    machine = machine_with(round(needed / capacity.FULL_SHARE) + 1, 4)
    assert {split.ranks for split in capacity.fitting_splits(chosen, splits, machine)} == {3}
    assert capacity.fitting_splits(chosen, splits, machine_with(8 * GIB, 4)) == splits
    assert capacity.fitting_splits(chosen, splits, machine_with(1 << 20, 4)) == splits  # nor has the present one
