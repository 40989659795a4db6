"""What a run will need, by arithmetic, and what is there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_figures import (
    CHECKPOINTING,
    CONFIG,
    GIB,
    MODEL,
    PARAMETERS,
    experiment,
    machine_with,
    sizes,
    uses_of,
)

from headway.config.auto import Machine
from headway.models.configuration import ExpertMixture, SlidingWindow
from headway.orchestrator.preflight import capacity, memory
from headway.orchestrator.preflight.capacity import exports_weights, memory_findings, memory_places
from headway.orchestrator.preflight.memory import memory_uses
from headway.records.check_report import Finding, MemoryPlace, MemoryUse
from headway.runtime.nodes import conditions
from headway.tokens.grammar import MOST_CACHED_BYTES
from headway.weights.slots import SHARED_MEMORY


def test_parameters() -> None:
    assert MODEL.parameters == PARAMETERS


def test_a_teachers_replica_gets_no_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "sizes_of", lambda path: MODEL)
    teacher = {"path": str(tmp_path), "devices": ["cpu:1"], "top_k": 5}
    parts = uses_of(tmp_path, algorithm={"teacher": "big"}, teachers={"big": teacher})["teacher-big-0 memory"].parts
    assert parts["weights"] == parts["packed weights"] == 4 * PARAMETERS
    assert parts["update buffer"] == 0
    assert parts["KV cache"] == 2 * 2 * 2 * (512 + 16) * 16 * 4  # of one sequence


def test_a_generator_on_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = uses_of(tmp_path)["generator-0 memory"].parts
    assert parts["weights"] == parts["packed weights"] / 2 == parts["update buffer"] == 4 * PARAMETERS
    # two of: layers, heads, tokens in blocks, numbers, bytes
    assert parts["KV cache"] == 2 * 2 * 2 * (10 * 512 + 16) * 16 * 4
    with monkeypatch.context() as plain:
        plain.setenv("HEADWAY_NATIVE_KERNELS", "0")
        assert uses_of(tmp_path)["generator-0 memory"].parts["packed weights"] == 0
    assert uses_of(tmp_path, generator={"devices": ["cpu:0-1"]})["generator-0 memory"].parts["packed weights"] == 0
    short_numbers: dict[str, Any] = {"dtype": "bfloat16"}
    monkeypatch.setattr(memory, "cpu_multiplies_bfloat16", lambda: True)
    half = uses_of(tmp_path, generator=short_numbers)["generator-0 memory"].parts
    assert (half["KV cache"], half["packed weights"]) == (parts["KV cache"] // 2, 0)
    monkeypatch.setattr(memory, "cpu_multiplies_bfloat16", lambda: False)
    widened = uses_of(tmp_path, generator=short_numbers)["generator-0 memory"].parts
    assert (widened["KV cache"], widened["update buffer"]) == (parts["KV cache"], 2 * PARAMETERS)
    short = uses_of(tmp_path, generator={"kv_capacity_tokens": 250})["generator-0 memory"].parts
    assert short["KV cache"] == 2 * 2 * 2 * (256 + 16) * 16 * 4  # as many tokens as there are blocks for


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_are_those_the_kernels_pack(family: str, tied: bool) -> None:
    torch = pytest.importorskip("torch")
    from headway.generator.engines.torch.model_runner import ModelRunner
    from tests.conformance.reference import random_model

    torch.set_num_threads(1)
    runner = ModelRunner(random_model(0, family=family, tied=tied), slots=1, context_tokens=8, fixed_shapes=False)
    if runner._kernels is None:
        pytest.skip("no C++ compiler here")
    packed = sum(weight.numel() for weight, _ in runner._kernels._panels.values())
    norms = sum(weight.numel() for weight in runner.model.parameters() if weight.ndim == 1)
    assert packed == sizes(runner.model.config).dense_parameters - norms


def test_a_trainer_rank_on_cores(tmp_path: Path) -> None:
    parts = uses_of(tmp_path)["trainer-0 memory"].parts
    assert parts["weights"] + parts["gradients"] + parts["AdamW"] == 16 * PARAMETERS
    assert "reference" not in parts
    assert parts["logits"] == 5 * 4 * 16384 * 1000
    penalised = uses_of(tmp_path, algorithm={"kl_coefficient": 0.1})["trainer-0 memory"].parts
    assert penalised["reference"] == 4 * PARAMETERS
    two = uses_of(tmp_path, trainer={"devices": ["cpu:0", "cpu:1"]})
    assert two["trainer-1 memory"].parts["gradients"] == 8 * PARAMETERS
    twice = uses_of(tmp_path, trainer={"micro_batch_tokens": 32768 // 2 * 2, "dtype": "bfloat16"})
    assert twice["trainer-0 memory"].parts["activations"] < 2 * parts["activations"]
    narrow = twice["trainer-0 memory"].parts
    assert narrow["weights"] + narrow["gradients"] + narrow["AdamW"] == 18 * PARAMETERS  # trainer/master_weights.py
    fixed = uses_of(tmp_path, trainer={"packing": "fixed", "micro_batch_samples": 3})["trainer-0 memory"].parts
    assert fixed["activations"] == MODEL.activation_bytes(1500, 4)  # three of the longest samples
    assert MODEL.activation_bytes(2000, 4) == 2 * MODEL.activation_bytes(1000, 4)


def test_what_the_optimiser_and_an_average_of_weights_add(tmp_path: Path) -> None:
    """In bytes a weight: Muon has one moment of each in layers, an average 4 and a model of 2 that computes with it."""
    outside = MODEL.outside
    plain, muon = uses_of(tmp_path), uses_of(tmp_path, trainer={"optimizer": "muon"})
    saved = {name: uses[name].parts for uses in (plain, muon) for name in uses if name.startswith("checkpoints")}
    assert muon["trainer-0 memory"].parts["AdamW"] == 4 * PARAMETERS + 4 * outside
    states = [uses["trainer-0 memory"].parts["checkpoint"] for uses in (plain, muon)]
    assert states == [12 * PARAMETERS, 8 * PARAMETERS + 4 * outside]
    assert saved
    average = {"kl_coefficient": 0.1, "reference_decay": 0.9}
    for dtype, reference in (("float32", 4), ("bfloat16", 6)):
        parts = uses_of(tmp_path, algorithm=average, trainer={"dtype": dtype})["trainer-0 memory"].parts
        assert parts["reference"] == reference * PARAMETERS
        assert parts["checkpoint"] == 16 * PARAMETERS
    halves = {"devices": ["cpu:0", "cpu:1"], "shards": 2, "dtype": "bfloat16"}
    frozen, moving = (
        uses_of(tmp_path, algorithm=algorithm, trainer=halves)["trainer-0 memory"].parts["reference"]
        for algorithm in ({"kl_coefficient": 0.1}, average)
    )
    assert moving - frozen == 2 * (PARAMETERS // 2)  # its rows are float32, and their layers are gathered from them


def test_a_teacher_and_an_average_are_both_counted(tmp_path: Path) -> None:
    algorithm = {"kl_coefficient": 0.1, "reference_decay": 0.9, "teacher": "t"}
    uses = uses_of(tmp_path, algorithm=algorithm, teachers={"t": {"path": "m"}}, trainer={"dtype": "bfloat16"})
    parts = uses["trainer-0 memory"].parts
    assert (parts["reference"], parts["teacher t"]) == (6 * PARAMETERS, 2 * PARAMETERS)


def test_an_entropy_bonus_needs_more_of_a_chunk_of_logits(tmp_path: Path) -> None:
    parts = uses_of(tmp_path, algorithm={"entropy_coefficient": 0.01})["trainer-0 memory"].parts
    assert parts["logits"] == 7 * 4 * 16384 * 1000


# --- layouts of the trainer's ranks ----------------------------------------------------------------------


def test_a_small_batch_needs_no_more_than_its_tokens(tmp_path: Path) -> None:
    small = uses_of(tmp_path, queue={"groups_per_step": 1}, rollout={"group_size": 2})["trainer-0 memory"].parts
    assert small["activations"] == MODEL.activation_bytes(1000, 4)


def test_checkpointing_keeps_the_input_of_each_layer(tmp_path: Path) -> None:
    deep = sizes(layers=40)
    plain, selective, checkpointed = (deep.activation_bytes(1000, 4, kept) for kept in CHECKPOINTING)
    assert checkpointed < plain / 8 < selective < plain
    assert checkpointed > 40 * 1000 * 4 * 64
    parts = [
        uses_of(tmp_path, trainer={"gradient_checkpointing": kept})["trainer-0 memory"].parts for kept in CHECKPOINTING
    ]
    assert parts[2]["activations"] < parts[1]["activations"] < parts[0]["activations"]


def test_capped_scores_are_computed_in_full() -> None:
    assert MODEL.score_bytes(1000, 500, 4) == 0
    gemma = replace(CONFIG, architecture="Gemma2ForCausalLM", qk_norm=False, attention_softcap=50.0)
    capped = sizes(gemma)
    assert capped.score_bytes(1000, 500, 4) == 2 * 4 * 1000 * 500 * 8
    assert capped.score_bytes(1000, 500, 2) == 2 * 4 * 1000 * 500 * 10
    assert capped.score_bytes(1000, 500, 4, "full") == 4 * 1000 * 500 * 8
    window = SlidingWindow(tokens=100, layers=(0,))
    windowed = sizes(gemma, window=window)
    assert windowed.score_bytes(1000, 500, 4) == 4 * 1000 * (500 + 200) * 8


def test_a_resumed_request_prefills_its_response_too(tmp_path: Path) -> None:
    few, many = (
        uses_of(tmp_path, rollout={"max_response_tokens": tokens})["generator-0 memory"].parts["activations"]
        for tokens in (100, 300)
    )
    assert many > few


def test_published_weights_are_main_memory() -> None:
    uses = [
        MemoryUse(name="orchestrator", location="memory", parts={"base": 10}),
        MemoryUse(name="published weights", location=str(SHARED_MEMORY), parts={"versions": 32}),
    ]
    assert {place.name: place.needed_bytes for place in memory_places(uses)} == {"memory": 42, str(SHARED_MEMORY): 32}


def test_on_a_gpu_the_host_keeps_the_process(tmp_path: Path) -> None:
    uses = uses_of(tmp_path, generator={"devices": ["cuda:0"]}, trainer={"devices": ["cuda:0"]})
    assert uses["generator-0 cuda:0"].parts["weights"] == 4 * PARAMETERS
    assert "KV cache" not in uses["generator-0 memory"].parts
    assert uses["generator-0 memory"].parts["update buffer"] == 4 * PARAMETERS
    needed = {place.name: place.needed_bytes for place in memory_places(list(uses.values()))}
    together = uses["generator-0 cuda:0"].total_bytes + uses["trainer-0 cuda:0"].total_bytes
    assert needed["cuda:0"] == together


def vllm(devices: list[str], dtype: str = "bfloat16", **fields: Any) -> dict[str, Any]:
    arguments = fields.pop("engine_arguments", {})
    return {"engine": "vllm", "devices": devices, "dtype": dtype, "engine_arguments": arguments} | fields


def test_ranks_of_vllm_share_weights_and_kv(tmp_path: Path) -> None:
    alone = uses_of(tmp_path, generator=vllm(["cuda:0"]))
    assert alone["generator-0 cuda:0"].parts["weights"] == 2 * PARAMETERS  # as the dtype has them, at all times
    assert alone["generator-0 cuda:0"].parts["KV cache"] == 2 * 2 * 10 * 2 * 500 * 16 * 2
    shared = {"tensor_parallel_size": 2}
    uses = uses_of(tmp_path, generator=vllm(["cuda:0", "cuda:2"], engine_arguments=shared))
    on_gpus = [f"generator-{index} cuda:{2 * index}" for index in range(2)]
    on_gpus += [f"generator-{index} rank 1 cuda:{2 * index + 1}" for index in range(2)]
    for name in on_gpus:
        assert uses[name].parts["weights"] == PARAMETERS
        assert uses[name].parts["KV cache"] == alone["generator-0 cuda:0"].parts["KV cache"] // 2
        assert "update buffer" not in uses[name.rpartition(" ")[0] + " memory"].parts, "versions are read in their slot"
    wide = uses_of(tmp_path, generator=vllm(["cuda:0"], engine_arguments={"tensor_parallel_size": 4}))
    kv = [
        use.parts["KV cache"] for name, use in wide.items() if "cuda" in name
    ]  # a head on each of four, which are two
    assert kv == [alone["generator-0 cuda:0"].parts["KV cache"] // 2] * 4


def test_a_model_that_fits_on_two_gpus_is_not_refused(tmp_path: Path) -> None:
    machine = machine_with(7 * GIB // 4, count=2)
    large = sizes(width=1024, layers=24, heads=16, kv_heads=4, head_dim=64, intermediate=4096)
    rollout = {"max_prompt_tokens": 100, "max_response_tokens": 200}
    for ranks, fits in ((1, False), (2, True)):
        generator = vllm(["cuda:0"], engine_arguments={"tensor_parallel_size": ranks}, slots=64)
        uses = memory_uses(experiment(tmp_path, generator=generator, rollout=rollout), large)
        found = [one for one in memory_findings(uses, memory_places(uses, machine=machine)) if "cuda" in one.message]
        assert (not [one for one in found if one.level == "error"]) == fits


def test_kv_of_vllm_is_one_pool(tmp_path: Path) -> None:
    token = 2 * 2 * 2 * 16 * 4  # two of: layers, heads, numbers
    for fields, expected in (
        ({"kv_capacity_tokens": 700}, 700 * token),
        ({"engine_arguments": {"kv_cache_memory_bytes": 12345}}, 12345),
        ({"engine_arguments": {"gpu_memory_utilization": 0.5}}, 0),  # what is there
    ):
        parts = uses_of(tmp_path, generator=vllm(["cpu:0"], "float32", **fields))["generator-0 memory"].parts
        assert parts["KV cache"] == expected
        assert (parts["weights"], parts["packed weights"]) == (4 * PARAMETERS, 4 * 1000 * 64)  # the tied head's copy


def test_files(tmp_path: Path) -> None:
    uses = memory_uses(experiment(tmp_path, checkpoint={"keep_last": 3}), MODEL)
    files = {use.name: use for use in uses}
    assert files["published weights"].total_bytes == 3 * 4 * PARAMETERS
    assert files["checkpoints"].parts["checkpoints"] == 4 * 12 * PARAMETERS
    assert files["buffer"].location == str(tmp_path / "run")


def test_beside_an_adapter_the_model_has_no_gradients_and_no_optimiser(tmp_path: Path) -> None:
    adapter = {"rank": 4, "alpha": 8.0}
    trained = 2 * 4 * (64 + 64 + 2 * (64 + 32) + 64 + 64 + 2 * (64 + 128) + 128 + 64)  # q, o, k, v, gate, up, down
    penalty = {"kl_coefficient": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_mapping("float32")))
    full = uses_of(tmp_path, algorithm=penalty)
    apart = uses_of(tmp_path, algorithm=penalty, model={"path": str(tmp_path), "adapter": adapter})
    for uses, weights, count, reference in (
        (full, 4 * PARAMETERS, PARAMETERS, 4 * PARAMETERS),
        (apart, 4 * (PARAMETERS + trained), trained, 0),  # the reference is the model without its adapter
    ):
        parts = uses["trainer-0 memory"].parts
        assert (parts["weights"], parts["gradients"], parts["AdamW"]) == (weights, 4 * count, 8 * count)
        assert parts["reference"] == reference
    finish, budget = {"update_mode": "finish"}, {"budget": 3}
    bfloat16 = {"trainer": {"dtype": "bfloat16"}, "model": {"path": str(tmp_path), "adapter": adapter}}
    narrow = uses_of(tmp_path, **bfloat16)["trainer-0 memory"].parts
    assert (narrow["weights"], narrow["AdamW"]) == (2 * PARAMETERS + 6 * trained, 8 * trained)
    several = uses_of(tmp_path, model={"path": str(tmp_path), "adapter": adapter}, queue=budget, generator=finish)
    revisions = [uses["generator-0 memory"].parts["adapter"] for uses in (full, apart, several)]
    assert revisions == [0, 2 * 12 * trained, 5 * 12 * trained]
    activations = [uses["trainer-0 memory"].parts["activations"] for uses in (full, apart)]
    assert activations[0] == activations[1]
    files = {use.name: use for use in apart.values()}
    assert files["published weights"].total_bytes == 3 * 4 * trained
    assert files["checkpoints"].parts["checkpoints"] == 3 * 12 * trained  # two, and one being written


# --- what is there ---------------------------------------------------------------------------------------


def find(place: str, needed: int, capacity: int, available: int, name: str = "generator-0") -> list[Finding]:
    use = MemoryUse(name=name, location=place, parts={"KV cache": needed})
    there = MemoryPlace(name=place, needed_bytes=needed, capacity_bytes=capacity, available_bytes=available)
    return list(memory_findings([use], [there]))


@pytest.mark.parametrize("place", ["memory", "cuda:0"])
def test_what_cannot_fit_is_an_error_and_what_hardly_fits_a_warning(place: str) -> None:
    [error] = find(place, 11 * GIB, 10 * GIB, 9 * GIB)
    assert error.level == "error"
    assert error.key == "generator.slots"
    assert f"up to 11.00 GiB of {place} needed (most by generator-0: KV cache)" in error.message
    assert "only 10.00 GiB" in error.message
    [warning] = find(place, 91 * GIB, 200 * GIB, 100 * GIB)
    assert warning.level == "warning"
    assert "100.00 GiB are free now" in warning.message
    assert find(place, 89 * GIB, 200 * GIB, 100 * GIB) == []


def test_a_place_of_unknown_size_is_passed_over(tmp_path: Path) -> None:
    uses = memory_uses(experiment(tmp_path, generator={"devices": ["cuda:0"], "slots": 10**7}), MODEL)
    places = memory_places(uses, machine=Machine())
    assert next(place for place in places if place.name == "cuda:0").capacity_bytes is None
    assert not [finding for finding in memory_findings(uses, places) if "cuda" in finding.message]


def test_a_container_is_as_large_as_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = conditions.machine_memory()
    assert real is not None
    monkeypatch.setattr(
        conditions, "_number", lambda file: {"memory.max": GIB, "memory.current": GIB // 4}.get(file.name)
    )
    assert conditions.machine_memory() == (GIB, GIB * 3 // 4)


def test_sides_that_offload_each_other_need_the_larger_one(tmp_path: Path) -> None:
    def needed(offload: bool, **sides: dict[str, Any]) -> tuple[int, int, int, int]:
        on_one = {"generator": {"devices": ["cuda:0"]}, "trainer": {"devices": ["cuda:0"]}} | sides
        uses = memory_uses(experiment(tmp_path, run={"directory": "r", "offload": offload}, **on_one), MODEL)
        places = {place.name: place.needed_bytes for place in memory_places(uses, machine=machine_with(GIB, 2))}
        on_gpu = [use.total_bytes for use in uses if use.location == "cuda:0"]
        return places["cuda:0"], sum(on_gpu), max(on_gpu), places["memory"]

    together, both, _, host = needed(False)
    assert together == both
    in_turns, both, larger, host_with_copies = needed(True)
    assert in_turns == larger + memory.CUDA_CONTEXT_BYTES < both
    host -= 12 * PARAMETERS  # the copy that is written beside the next steps
    assert host_with_copies - host == (4 + 16) * PARAMETERS + 2 * 2 * 2 * 16 * 4 * (
        10 * 512 + 16
    )  # weights and KV; 16 each
    alone, _, larger, apart = needed(True, trainer={"devices": ["cuda:1"]})
    assert alone == larger
    assert apart == host


SEPARATE = {"generator": {"devices": ["cuda:0"], "dtype": "bfloat16"}, "trainer": {"devices": ["cuda:1"]}}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_versions_stay_on_the_gpu_where_two_more_copies_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """A replica with float32 weights needs a copy more as well."""
    monkeypatch.setattr(capacity, "sizes_of", lambda folder: MODEL)
    sections: dict[str, Any] = SEPARATE | {"generator": {"devices": ["cuda:0"], "dtype": dtype}}
    chosen = experiment(tmp_path, **sections)
    places = memory_places(memory_uses(chosen, MODEL), machine=machine_with(GIB, 2))
    trainer_bytes, generator_bytes = (
        next(place.needed_bytes for place in places if place.name == name) for name in ("cuda:1", "cuda:0")
    )
    width = 2 if dtype == "bfloat16" else 4
    copies = 2 * width * PARAMETERS, 0 if width == 2 else width * PARAMETERS
    least = max(trainer_bytes + copies[0], generator_bytes + copies[1]) / capacity.FULL_SHARE
    assert exports_weights(chosen, machine_with(round(least) + 1, 2))
    assert not exports_weights(chosen, machine_with(round(least) - 1, 2))
    assert not exports_weights(chosen, machine_with(GIB, 1))  # of cuda:1 nothing is known


@pytest.mark.parametrize("sections", [
    {"generator": {"devices": ["cuda:0"], "engine": "vllm"}},
    {"generator": {"devices": ["cuda:0", "cpu:0"]}},
    {"generator": {"devices": ["cuda:0", "n1/cuda:0"]}, "cluster": {"nodes": {"n1": ""}, "address": "10.0.0.1:7400"}},
    {"trainer": {"devices": ["cpu:0"]}},
    {"trainer": {"devices": ["cuda:0", "cuda:1"], "shards": 2}},
    {"trainer": {"devices": ["cuda:0"]}, "run": {"offload": True}},
    {"model": {"adapter": {"rank": 8, "alpha": 8}}},
    {"control": {"devices": "move"}},
])  # fmt: skip
def test_who_else_reads_the_hosts_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]
) -> None:
    monkeypatch.setattr(capacity, "sizes_of", lambda folder: MODEL)
    assert exports_weights(experiment(tmp_path, **SEPARATE), machine_with(4 * GIB, 2))
    assert not exports_weights(experiment(tmp_path, **(SEPARATE | sections)), machine_with(4 * GIB, 2))


def test_what_is_on_nodes_is_not_charged_to_this_machine(tmp_path: Path):
    here = memory_uses(experiment(tmp_path, generator={"devices": ["cpu:0"]}), MODEL)
    there = memory_uses(experiment(tmp_path, generator={"devices": ["b/cpu:0", "b/cuda:1"], "slots": 10**7}), MODEL)
    places = {place.name: place for place in memory_places(there)}
    assert places["memory of node b"].capacity_bytes is None
    assert places["b/cuda:1"].capacity_bytes is None
    generator = next(use for use in here if use.name == "generator-0")
    deltas = sum(use.parts.get("deltas", 0) for use in there if "of node" not in use.location)
    assert deltas > 0
    needed = {place.name: place for place in memory_places(here)}["memory"].needed_bytes
    assert needed - generator.total_bytes == places["memory"].needed_bytes - deltas
    assert not [finding for finding in memory_findings(there, list(places.values())) if "generator" in finding.message]


def test_kept_sets_are_counted_where_samples_are_truncated(tmp_path: Path) -> None:
    """As many ids as may be stored, or as the vocabulary or top_k has: 2 bytes each here, and 4 of their count."""
    allowed = {"allow_truncated_sampling": True, "truncation_support_tokens": 20}
    for how, ids in (({"top_p": 0.9}, 20), ({"top_k": 7}, 7)):
        on = {name.split()[0]: use for name, use in uses_of(tmp_path, rollout=how, algorithm=allowed).items()}
        chosen = experiment(tmp_path, rollout=how, algorithm=allowed)
        batch = chosen.queue.groups_per_step * chosen.largest_group
        each = chosen.rollout.max_response_tokens * (2 * ids + 4)
        assert on["orchestrator"].parts["kept sets"] == batch * (chosen.queue.budget + 1) * each
        assert on["buffer"].parts["kept sets"] > batch * (chosen.queue.budget + 1) * each
        assert on["trainer-0"].parts["kept sets"] == batch * each
    for off in (uses_of(tmp_path), uses_of(tmp_path, algorithm=allowed)):
        assert not any("kept sets" in use.parts for use in off.values())


def test_grammars_are_counted_where_programs_call_the_model(tmp_path: Path) -> None:
    agent: dict[str, Any] = {"environment": {"name": "agent", "agent": "a:b"}}
    replayed = uses_of(tmp_path, **agent, algorithm={"allow_truncated_sampling": True})
    assert {name.split()[0] for name, use in replayed.items() if use.parts.get("grammars") == MOST_CACHED_BYTES} == {
        "orchestrator",
        "generator-0",
        "trainer-0",
    }
    counted = {name.split()[0] for name, use in uses_of(tmp_path, **agent).items() if "grammars" in use.parts}
    assert counted == {"orchestrator", "generator-0"}  # evaluations may always be constrained
    assert not any("grammars" in use.parts for use in uses_of(tmp_path).values())


def test_recorded_experts_are_counted_wherever_tokens_are_kept(tmp_path: Path) -> None:
    """Two layers of two experts: 4 bytes of a token and 4 of its row's length."""
    mixture = replace(
        CONFIG, architecture="Qwen3MoeForCausalLM", mixture=ExpertMixture(experts=8, per_token=2, intermediate=32)
    )
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(mixture.to_mapping("float32")))
    sections: dict[str, Any] = {"model": {"path": str(tmp_path / "m")}}
    on = uses_of(tmp_path, **sections)
    off = uses_of(tmp_path, **sections, algorithm={"routing_replay": "off"})
    more = {
        name.split()[0]: {part: on[name].parts[part] - size for part, size in off[name].parts.items()} for name in off
    }
    chosen = experiment(tmp_path, **sections)
    open_tokens = 500 * chosen.queue.groups_per_step * (chosen.queue.budget + 1) * chosen.largest_group
    assert more["orchestrator"]["open rollouts"] == 8 * open_tokens
    assert more["buffer"]["payloads"] >= 8 * open_tokens
    assert more["generator-0"]["KV cache"] == 8 * (10 * 512 + 16)  # in whole blocks
    assert more["trainer-0"]["activations"] > 0
