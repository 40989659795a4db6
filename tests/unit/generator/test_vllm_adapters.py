"""Adapters of the vLLM engines without vLLM: revisions and room for them, what is refused, what a probe expects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headway.config.adapter import AdapterConfig
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm.adapters import VllmAdapters, VllmRevision
from headway.generator.engines.vllm.reference import PublishedModel
from headway.generator.engines.vllm.server_info import _require_lora
from headway.models.adapter_files import load_adapter, open_adapter
from headway.models.loading import save_model, weights_of
from headway.records.errors import ConfigurationError
from headway.weights.shared_memory import Publisher
from tests.conformance.reference import forced_logprobs, random_model

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def adapters_of(folder: Path, *, family: str = "qwen3", revisions: int = 2, **fields: Any) -> VllmAdapters:
    model = random_model(1, family=family)
    save_model(model, folder / "model")
    config = AdapterConfig(**({"rank": 4, "alpha": 8} | fields))
    base = PublishedModel(model.config)
    base.take(weights_of(model))
    settings = EngineSettings(
        model_path=str(folder / "model"),
        dtype="float32",
        slots=4,
        max_context_tokens=64,
        adapters={"policy": config, "critic": config},
        adapter_revisions=revisions,
        exchange_directory=str(folder),
    )
    return VllmAdapters(settings, base)


def test_arguments_of_vllm(tmp_path: Path) -> None:
    """Room for two versions of the policy, another adapter and the bare model; vLLM's limit above rank 4."""
    assert adapters_of(tmp_path, targets=("q_proj", "down_proj")).arguments == {
        "enable_lora": True,
        "max_loras": 4,
        "max_cpu_loras": 4,
        "max_lora_rank": 8,
        "lora_target_modules": ["down_proj", "q_proj"],
    }
    assert adapters_of(tmp_path / "large", rank=65, alpha=65).arguments["max_lora_rank"] == 128


def test_what_vllm_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'policy' has model.layers.0.mlp.experts.down_proj: vLLM's LoRA of"):
        adapters_of(tmp_path, family="qwen3_moe", target_parameters=("mlp.experts.down_proj",))
    with pytest.raises(ConfigurationError, match="rank is too large for vLLM; valid: up to 512"):
        adapters_of(tmp_path / "large", rank=513, alpha=1)


def test_revisions_and_room(tmp_path: Path) -> None:
    adapters = adapters_of(tmp_path)
    base, critic, *policy = (
        VllmRevision(name, version, f"{name}-{version}", number)
        for number, (name, version) in enumerate(
            [("base", 0), ("critic", 0), ("policy", 0), ("policy", 1), ("policy", 2)]
        )
    )
    for revision in (base, critic, policy[0]):
        assert adapters.crowding(revision.name, ()) is None
        adapters.add(revision)
    assert adapters.chosen("", None) is adapters.chosen("policy", 7) is policy[0]
    assert (adapters.chosen("base", None), adapters.chosen("critic", 5)) == (base, critic)
    adapters.add(policy[1])
    assert adapters.chosen("policy", 0) is policy[0]  # it resumes on what it began with
    assert adapters.chosen("policy", None) is policy[1]
    assert adapters.idle({policy[0], None}) == []
    assert adapters.idle({critic}) == [policy[0]]
    assert adapters.crowding("policy", {policy[0]}) is policy[1]  # none is held that would have to begin anew
    assert adapters.crowding("policy", set(policy)) is policy[0]  # never one that new requests of another name get
    adapters.registered.remove(policy[0])
    assert adapters.crowding("policy", ()) is None
    assert adapters.chosen("policy", 0) is policy[1]


def test_a_version_is_written_as_a_folder_that_is_gone_afterwards(tmp_path: Path) -> None:
    adapters, model = adapters_of(tmp_path), random_model(1)
    newer = open_adapter(tmp_path / "model", model.config, AdapterConfig(rank=4, alpha=8))
    for pair in newer.pairs():
        pair.b.data = torch.randn(pair.b.shape, generator=torch.Generator().manual_seed(2))
    with Publisher("vllm-adapters", directory=tmp_path) as publisher:
        published = publisher.publish(3, newer.weights())
        for name in ("", "base", "poet"):
            with pytest.raises(ConfigurationError, match=f"an update of adapter '{name}'; valid: policy, critic$"):
                adapters.fetch(msgspec.structs.replace(published, adapter=name))
        adapters.fetch(msgspec.structs.replace(published, adapter="policy"))
    with adapters.written("policy") as (label, folder):
        found = load_adapter(folder, tmp_path / "model", model.config)
    assert label.startswith("headway-")
    assert not folder.exists()
    for name, tensor in newer.weights().items():
        assert torch.equal(found.weights()[name], tensor)
    expected = forced_logprobs(model, IDS[:1], IDS[1:], 1.0)
    assert (torch.tensor(adapters.logprobs("base", IDS)) - expected).abs().max() < 1e-5
    assert (torch.tensor(adapters.logprobs("policy", IDS)) - expected).abs().max() > 0.1


def test_the_target_that_a_proof_lacks_is_named(tmp_path: Path) -> None:
    """Each kind of target changes the proof's log-probabilities by far more than is allowed."""
    adapters = adapters_of(tmp_path)
    whole = adapters.logprobs("policy", IDS, prove=True)
    assert adapters.absent("policy", IDS, whole) == ""
    for end in adapters.arguments["lora_target_modules"]:
        lora = adapters._lora("policy", True)
        for pair in lora.pairs():
            if pair.target.name.endswith(end):
                pair.b.data.zero_()
        got = adapters._model.logprobs(IDS, lora=lora)
        assert max(abs(one - other) for one, other in zip(got, whole, strict=True)) > 0.05
        assert adapters.absent("policy", IDS, got) == f"; it leaves out {end}"


class Stub:
    address = "http://a:1"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"max_loras": 3, "max_cpu_loras": 4, "max_lora_rank": 8, "target_modules": ["q_proj"]},
        {"max_loras": 4, "max_cpu_loras": 4, "max_lora_rank": 1, "target_modules": ["q_proj"]},
        {"max_loras": 4, "max_cpu_loras": 4, "max_lora_rank": 8, "target_modules": ["o_proj"]},
        {"max_loras": 4, "max_cpu_loras": 4, "max_lora_rank": 8, "target_modules": ["q_proj", "lm_head"]},
        {"max_loras": 4, "max_cpu_loras": 4, "max_lora_rank": 8, "target_modules": None},
    ],
)
def test_a_server_that_can_not_hold_the_adapters(given: dict[str, Any]) -> None:
    wanted = {"max_loras": 4, "max_cpu_loras": 4, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]}
    enough = {"max_loras": 5, "max_cpu_loras": 6, "max_lora_rank": 8, "target_modules": ["q_proj", "o_proj"]}
    server: Any = Stub()
    _require_lora(server, enough, wanted)
    options = "--enable-lora --max-loras 4 --max-cpu-loras 4 --max-lora-rank 8 --lora-target-modules q_proj, and VLLM_"
    with pytest.raises(ConfigurationError, match=options):
        _require_lora(server, given, wanted)
