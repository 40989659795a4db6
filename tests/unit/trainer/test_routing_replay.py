"""Routing replay from engine to trainer: disagreement, metrics, wrong records, what is replayed and what isn't."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny_trainer import Context, make_experiment

from headway.algorithms.samples import lay_out
from headway.config.load import validate_experiment
from headway.generator.engines.torch.engine import TorchEngine
from headway.generator.routing.replica import replica_spec
from headway.models.decoder import Decoder
from headway.models.loading import load_model, save_model
from headway.models.routing import replayed_routing
from headway.records.errors import ConfigurationError, ExpertsMismatch
from headway.records.generation import GenerationResult
from headway.records.rollout import Rollout, Sample
from headway.records.tokens import EXPERTS, ExpertRouting, TokenIds, TokenMask, TokenRows
from headway.records.training import DrawnDemonstration, TrainBatch
from headway.trainer.service import TrainerService
from tests.conformance.engine import VOCABULARY, Session, request
from tests.conformance.reference import random_model

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory.mktemp("model") / "m", "qwen3_moe")


def folder_of(path: Path, family: str) -> str:
    save_model(random_model(5, vocabulary=VOCABULARY, family=family), path)
    return str(path)


def service(model: str, **sections: Any) -> TrainerService:
    return TrainerService(Context, experiment=make_experiment(model, Path("/nowhere"), **sections), run_id="test")


def noisy(model: str, noise: float) -> Decoder:
    """The model with noise in its routers' weights, as rounding would put it into their scores."""
    found = load_model(model, torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in found.layers:
            layer.router_weight += noise * torch.randn(layer.router_weight.shape, generator=generator)
    return found


def sampled(engine: Decoder, groups: int = 3, members: int = 3, prompt_tokens: int = 4) -> TrainBatch:
    """A batch that an engine with this model samples, a group's members from one prompt."""
    session = Session(TorchEngine(copy.deepcopy(engine), slots=4, max_context_tokens=96, return_experts=True))
    chance, samples = random.Random(0), list[Sample]()
    for group in range(groups):
        prompt = [chance.randrange(VOCABULARY) for _ in range(prompt_tokens + group)]
        for member in range(members):
            session.submit(request(f"{group}-{member}", prompt, max_tokens=5 + member, seed=7 * group + member))
    for name, result in session.run().items():
        group, member = map(int, name.split("-"))
        rollout = rollout_from(list(session.requests[name].prompt_ids), result, group, member)
        samples.append(Sample(rollout=rollout, advantage=chance.uniform(-1, 1)))
    return TrainBatch(step=0, samples=tuple(sorted(samples, key=lambda one: one.rollout.rollout_id)))


def rollout_from(prompt: list[int], result: GenerationResult, group: int, member: int) -> Rollout:
    response = result.response
    return Rollout(
        group=group, member=member, prompt_ids=prompt, response_ids=response.ids,
        response_logprobs=response.logprobs, response_mask=(True,) * len(response.ids),
        versions=response.versions, token_rows=response.token_rows,
    )  # fmt: skip


def with_rows(batch: TrainBatch, rows: TokenRows | None) -> TrainBatch:
    given = {} if rows is None else {EXPERTS: rows}
    samples = [
        msgspec.structs.replace(one, rollout=msgspec.structs.replace(one.rollout, token_rows=given))
        for one in batch.samples
    ]
    return TrainBatch(step=batch.step, samples=tuple(samples))


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_replay_takes_the_noisy_engines_experts(model: str, shared_prefix: bool) -> None:
    """Log-probabilities of engine and trainer differ by what weights of other scores make of the same experts, far
    less than by other experts; and no token goes elsewhere."""
    batch, trainer = sampled(noisy(model, 0.1)), {"shared_prefix": shared_prefix, "micro_batch_tokens": 40}
    on = service(model, trainer=trainer).train_step(lay_out(batch)).metrics
    off = service(model, trainer=trainer, algorithm={"routing_replay": False}).train_step(lay_out(batch)).metrics
    assert on["experts_disagree"] > 0.02
    assert on["experts_disagree_replayed"] == 0.0
    assert 0.5 < on["experts_replayed"] < 1.0  # a prompt's tokens have none in the last layer
    assert on["mismatch_k3"] < 0.5 * off["mismatch_k3"]
    assert not any(name.startswith("experts") for name in off)


@pytest.mark.parametrize("shared_prefix", [True, False])
@pytest.mark.parametrize("demonstrates", [False, True])
def test_a_teacher_that_is_the_policy_replays_its_experts(model: str, shared_prefix: bool, demonstrates: bool) -> None:
    """Its divergence is 0, also where it reads a batch of its own, without the demonstrations."""
    sections: dict[str, Any] = {
        "trainer": {"shared_prefix": shared_prefix, "micro_batch_tokens": 60},
        "algorithm": {"teacher": "t", "policy_coefficient": 0.0},
        "teachers": {"t": {"path": "self"}},
    }
    batch = sampled(noisy(model, 0.1), prompt_tokens=20)
    if demonstrates:
        sections["demonstrations"] = {"data": "rows.jsonl"}
        learned = TokenMask([False, False, True, True])
        demonstration = DrawnDemonstration(row=0, ids=TokenIds((1, 2, 3, 4)), learned=learned)
        batch = TrainBatch(step=0, samples=batch.samples, demonstrations=(demonstration,))
    metrics = service(model, **sections).train_step(lay_out(batch)).metrics
    assert metrics["experts_disagree"] > 0.02
    assert abs(metrics["stream_teacher_loss"]) <= 1e-6


def test_an_equal_engine_disagrees_nowhere_and_replay_changes_nothing(model: str) -> None:
    batch = sampled(noisy(model, 0.0))
    replayed, plain = service(model), service(model, algorithm={"routing_replay": "off"})
    metrics = replayed.train_step(lay_out(batch)).metrics
    other = plain.train_step(lay_out(batch)).metrics
    assert (metrics["experts_disagree"], metrics["experts_disagree_replayed"]) == (0.0, 0.0)
    assert metrics["mismatch_max"] < 1e-4
    assert metrics["loss"] == pytest.approx(other["loss"], abs=1e-7)
    for a, b in zip(replayed.learner.parameters, plain.learner.parameters, strict=True):
        assert torch.allclose(a, b, atol=1e-7)


def test_bfloat16_engines_are_replayed(model: str) -> None:
    batch = sampled(load_model(model, torch.bfloat16), groups=6)
    metrics = service(model).train_step(lay_out(batch)).metrics
    assert metrics["experts_disagree_replayed"] == 0.0
    assert metrics["experts_replayed"] > 0.5


def test_parts_and_recomputed_log_probabilities_replay_as_well(model: str) -> None:
    batch = sampled(noisy(model, 0.1))
    whole = service(model, algorithm={"proximal": "recompute"})
    metrics = whole.train_step(lay_out(batch)).metrics
    assert metrics["behaviour_weight_mean"] == pytest.approx(
        service(model).train_step(lay_out(batch)).metrics["behaviour_weight_mean"], abs=1e-6
    )
    parts = service(model)
    for at in (0, 3):
        parts.forward_backward(lay_out(TrainBatch(step=0, samples=batch.samples[at : at + 3])))
    parts.forward_backward(lay_out(TrainBatch(step=0, samples=batch.samples[6:])))
    together = parts.optim_step().metrics
    for name in ("experts_replayed", "experts_disagree", "experts_disagree_replayed"):
        assert together[name] == pytest.approx(metrics[name], abs=1e-12)


def test_rollouts_without_records_are_routed_by_the_trainer(model: str) -> None:
    metrics = service(model).train_step(lay_out(with_rows(sampled(noisy(model, 0.1)), None))).metrics
    assert (metrics["experts_replayed"], metrics["experts_disagree"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "why"),
    [([[0, 1]] * 3, "2 layers with 2 experts"), ([[0, 1, 2, 4]], "expert 4 of a layer that has 4")],
)
def test_experts_of_another_model_end_the_step_by_name(model: str, rows: list[list[int]], why: str) -> None:
    batch = with_rows(sampled(noisy(model, 0.0)), TokenRows.of(rows))
    with pytest.raises(ExpertsMismatch, match=why):
        service(model).train_step(lay_out(batch))


def test_the_key_says_where_experts_are_returned_and_replayed(model: str, tmp_path: Path) -> None:
    def routing(path: str, **sections: Any) -> ExpertRouting | None:
        experiment = validate_experiment(make_experiment(path, tmp_path, **sections), "experiment")
        found = replayed_routing(experiment)
        asked = replica_spec(0, "cpu:0", experiment, None).arguments["return_experts"]
        assert asked is (found is not None)
        return found

    shape = ExpertRouting(layers=2, per_token=2, experts=4)
    dense = folder_of(tmp_path / "dense", "qwen3")
    assert routing(model) == routing(model, algorithm={"routing_replay": True}) == shape
    assert routing(model, algorithm={"routing_replay": "off"}) is None
    assert routing(dense) is None
    assert routing(str(tmp_path / "nothing")) is None
    gpu = {"engine": "vllm", "devices": ["cuda:0"]}
    assert routing(model, generator=gpu) is None
    assert routing(model, generator=gpu, algorithm={"routing_replay": "on"}) == shape
    with pytest.raises(ConfigurationError, match="has no experts; valid: 'auto', 'off'"):
        routing(dense, algorithm={"routing_replay": "on"})
    server = {"engine": "vllm-server", "devices": ["http://127.0.0.1:1"]}
    for generator in (server, {"engine": "vllm", "devices": ["cpu:0"]}):
        with pytest.raises(ConfigurationError, match="doesn't return the experts"):
            routing(model, generator=generator, algorithm={"routing_replay": True})
