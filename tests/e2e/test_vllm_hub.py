"""vLLM as the engine of models that the trainer runs in transformers: log-probabilities over updates, and a run."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_run
import torch
from test_hub_run import written
from tiers import first
from tiny_hub import make_hub_model
from vllm_engines import needs_vllm
from vllm_servers import KEY, LONGEST_TOKENS, served

from headway.generator.engines.select import build_engine
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm.server_client import KEY_VARIABLE
from headway.models.hf.model import HfModel, load_hf
from headway.models.loading import weights_of
from headway.records.errors import WeightsMismatch
from headway.runtime.devices import parse_device
from headway.weights.shared_memory import Publisher
from tests.conformance.engine import Session, request

pytestmark = needs_vllm
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # of 32 dimensions
NATS = 1e-3
_KEPT: list[Any] = []  # an engine of vLLM's that is collected ends the groups of all engines of its process


def forced(model: HfModel, prompt: list[int], ids: tuple[int, ...]) -> torch.Tensor:
    row = torch.tensor([*prompt, *ids])
    with torch.no_grad():
        logits = model(row, [len(row)])[len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, row[len(prompt) :, None])[:, 0]


@pytest.mark.long
def test_a_run(tmp_path: Path) -> None:
    """First: vLLM wraps the classes of transformers in this process in the tests below."""
    config = written(
        tmp_path,
        "Olmo2",
        HEADS,
        generator={"slots": 16, "engine": "vllm", "probe_every_updates": 1},
        queue={"groups_per_step": 4, "budget": 0, "filter_zero_variance": False},
    )
    command = tiny_run.train(config, limit_s=500)
    assert command.process.returncode == 0, command.output
    steps = tiny_run.steps_of(tmp_path / "run")
    assert len(steps) == 3
    assert all(step.metrics["mismatch_max"] < NATS for step in steps)


def engine_of(folder: str, device: str = "cpu:0", engine: str = "vllm") -> Any:
    context: Any = SimpleNamespace(device=parse_device(device), log=logging.getLogger("test"))
    settings = EngineSettings(
        model_path=folder, dtype="float32", slots=4, max_context_tokens=96, engine=engine, prefill_tokens_per_step=512
    )
    _KEPT.append(build_engine(settings, context))
    return _KEPT[-1]


def changed(trained: HfModel) -> dict[str, torch.Tensor]:
    """Another version's weights, which ``trained`` has from now on."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return weights_of(trained)


def require_equal(engine: Any, trained: HfModel, version: int) -> None:
    """What is sampled has the trainer's log-probabilities."""
    session, worst = Session(engine), 0.0
    prompts = {"a": [3, 4, 5, 6], "b": [8], "c": list(range(9, 29))}
    session.submit(*(request(f"{name}{version}", ids, max_tokens=14) for name, ids in prompts.items()))
    results = session.run()
    for name, ids in prompts.items():
        found = results[f"{name}{version}"].response
        assert {span.version for span in found.versions} == {version}
        worst = max(worst, float((torch.tensor(found.logprobs) - forced(trained, ids, found.ids)).abs().max()))
    print(f"{trained.config.model_type}, version {version}: largest difference {worst:.1e} nats")
    assert worst < NATS


def test_a_server_computes_what_the_trainer_does_before_and_after_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_hub_model(tmp_path / "m", "Olmo2", **HEADS, max_position_embeddings=LONGEST_TOKENS)
    trained = load_hf(folder, "float32", "cpu")
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with served(Path(folder), tmp_path / "server.log") as server, Publisher(f"vllm-hub-{os.getpid()}") as publisher:
        engine = engine_of(folder, server.address, "vllm-server")
        require_equal(engine, trained, 0)
        engine.apply(publisher.publish(1, changed(trained)), "recompute")
        require_equal(engine, trained, 1)


@pytest.mark.parametrize("kind", first(1, ["GPT2", "Olmo2", "Phi3", "Granite"], pytest.mark.long))
def test_log_probabilities_are_the_trainers_before_and_after_an_update(tmp_path: Path, kind: str) -> None:
    folder = make_hub_model(tmp_path / "m", kind, **HEADS)
    trained, engine = load_hf(folder, "float32", "cpu"), engine_of(folder)
    for module in trained.modules():  # whose class vLLM has wrapped, where it has no code of its own
        module.do_not_compile = True  # pyright: ignore[reportArgumentType]
    require_equal(engine, trained, 0)
    with Publisher(f"vllm-hub-{os.getpid()}") as publisher:
        engine.apply(publisher.publish(1, changed(trained)), "recompute")  # proved by the probes
        require_equal(engine, trained, 1)
        other = dict(weights_of(trained))
        with pytest.MonkeyPatch.context() as patch:  # vLLM misses one matrix
            patch.setattr("headway.generator.engines.vllm.worker.load_weights", lambda model, config, tensors: None)
            name = next(name for name in reversed(other) if name.endswith(("lm_head.weight", "wte.weight")))
            other[name] = other[name] * 2
            with pytest.raises(WeightsMismatch, match=r"module (lm_head|transformer\.wte)"):
                engine.apply(publisher.publish(2, other), "recompute")
