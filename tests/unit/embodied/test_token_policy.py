"""A token policy and its learner in one process: tokens of fragments, log-probabilities, groups, published weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from token_runs import token_experiment, token_model

from headway.config.simulation import SimulatorExperiment
from headway.embodied.block import LaneBlock, seed_of
from headway.embodied.policies import open_policy
from headway.embodied.records import Fragment
from headway.embodied.tokens.lanes import open_lanes
from headway.embodied.tokens.learner import TokenLearner
from headway.runtime.devices import parse_device
from headway.runtime.stalls.watchdog import Watchdog
from headway.trainer.critic import critic as critic_module

torch.set_num_threads(1)


def context() -> Any:
    return SimpleNamespace(device=parse_device("cpu:0"), log=SimpleNamespace(warning=lambda *_: None))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return token_model(tmp_path_factory.mktemp("tokens") / "model")


def block_of(experiment: SimulatorExperiment, number: int = 0) -> tuple[LaneBlock, Any]:
    simulator = open_lanes(experiment, 8, partial(seed_of, 3, number, 0), in_groups=True)
    policy = open_policy(experiment, simulator, context())
    options: dict[str, Any] = {"seed": 3, "number": number, "steps": 4, "episodic": True}
    return LaneBlock(simulator, policy, simulator.spaces, watchdog=Watchdog(60.0), **options), policy


def with_successes(fragment: Fragment, successes: list[bool]) -> Fragment:

    ends = sorted(fragment.episodes, key=lambda end: end.lane)
    pairs = zip(ends, successes, strict=True)
    changed = tuple(msgspec.structs.replace(end, success=success) for end, success in pairs)
    return type(fragment)(**{**vars(fragment), "episodes": changed})


def test_fragments_have_an_episode_of_every_lane_and_its_tokens(model: str, tmp_path: Path):
    block, policy = block_of(token_experiment(tmp_path, model))
    fragment, again = block.collect(0), block.collect(0)
    tokens = fragment.tokens
    assert tokens is not None
    assert sorted(end.lane for end in fragment.episodes) == [*range(8)]
    assert len(tokens.prompts_k) == len(tokens.responses_k) == 4 * 8
    assert len(tokens.ids_n) == tokens.prompts_k.sum() + tokens.responses_k.sum()
    assert len(tokens.logprobs_r) == tokens.responses_k.sum()
    assert (tokens.logprobs_r <= 0).all()
    starts = np.cumsum(tokens.responses_k) - tokens.responses_k
    sums = np.add.reduceat(tokens.logprobs_r, starts).reshape(4, 8)
    np.testing.assert_allclose(fragment.logprobs_tb, sums, rtol=1e-6)
    assert set(np.unique(fragment.actions_tb)) <= {-1, -0.5, 0, 0.5, 1}
    assert len(np.unique(fragment.actions_tb)) > 1  # lanes of a group have noise of their own
    assert (again.observations_tb[0] != fragment.observations_tb[0]).any()
    assert policy.take_tokens() is None


def test_evaluations_sample_at_their_temperature(model: str, tmp_path: Path):
    responses = {}
    for temperature in (0.0, 1.0):
        block, policy = block_of(token_experiment(tmp_path, model, evaluation={"temperature": temperature}))
        observations_b = block.collect(0).observations_tb[0]
        noises = [np.full((8, 1), noise, np.float32) for noise in (0.25, 0.75, 0.25)]
        responses[temperature] = [policy.act_in_evaluation(observations_b, noise_b) for noise_b in noises]
        assert (responses[temperature][0] == responses[temperature][2]).all()
    assert (responses[0.0][0] == responses[0.0][1]).all()
    assert (responses[1.0][0] != responses[1.0][1]).any()


def test_equal_seeds_make_equal_fragments(model: str, tmp_path: Path):
    fragments = [block_of(token_experiment(tmp_path, model))[0].collect(0) for _ in range(2)]
    first, second = (fragment.tokens for fragment in fragments)
    assert first is not None
    assert second is not None
    for left, right in zip(first[1:], second[1:], strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("adapter", [{}, {"adapter": {"rank": 4, "alpha": 8}}])
def test_engine_and_trainer_agree_before_and_after_a_published_step(model: str, adapter: Any, tmp_path: Path):
    (tmp_path / "run").mkdir()
    experiment = token_experiment(tmp_path / "run", model, model=adapter, trainer={"minibatch": 4096})
    (block, policy), learner = block_of(experiment), TokenLearner(experiment, _spaces(experiment), context())
    try:
        for version in range(2):
            policy.load(learner.weights())
            fragment = with_successes(block.collect(version), [True, False, False, True] * 2)
            metrics = learner.step([fragment])
            assert learner.version == version + 1
            assert metrics["mismatch_max"] < 1e-4
            assert metrics["grad_norm"] > 0
            assert (metrics["groups"], metrics["filtered_groups"], metrics["success"]) == (2, 0, 0.5)
    finally:
        learner._service.close()  # type: ignore[attr-defined]


def test_groups_of_equal_success_are_filtered_and_change_nothing(model: str, tmp_path: Path):
    (tmp_path / "run").mkdir()
    experiment = token_experiment(tmp_path / "run", model)
    block, learner = block_of(experiment)[0], TokenLearner(experiment, _spaces(experiment), context())
    try:
        fragment = block.collect(0)
        before = [tensor.clone() for tensor in learner._service.learner.weights().values()]  # type: ignore[attr-defined]
        metrics = learner.step([with_successes(fragment, [True] * 4 + [False] * 4)])
        assert (metrics["groups"], metrics["filtered_groups"], learner.version) == (2, 2, 1)
        assert all(
            torch.equal(one, other)
            for one, other in zip(before, learner._service.learner.weights().values(), strict=True)  # type: ignore[attr-defined]
        )
        half = learner.step([with_successes(fragment, [True] * 4 + [False, True, True, True])])
        assert half["filtered_groups"] == 1
        decisions = fragment.counted_tb[:, 4:].sum()
        tokens = fragment.tokens
        assert tokens is not None
        trained = tokens.responses_k.reshape(4, 8)[:, 4:][fragment.counted_tb[:, 4:]].sum()
        assert half["loss_tokens"] == trained >= 2 * decisions
    finally:
        learner._service.close()  # type: ignore[attr-defined]


def test_a_learner_goes_on_from_what_it_wrote(model: str, tmp_path: Path):
    (tmp_path / "run").mkdir()
    experiment = token_experiment(tmp_path / "run", model)
    block = block_of(experiment)[0]
    fragment = with_successes(block.collect(0), [True, False, False, True] * 2)
    learners = [TokenLearner(experiment, _spaces(experiment), context()) for _ in range(2)]
    try:
        learners[0].step([fragment])
        learners[0].write(tmp_path / "state")
        learners[1].read(tmp_path / "state")
        assert learners[1].version == 1
        for learner in learners:
            learner.step([fragment])
        first, second = (learner._service.learner.weights() for learner in learners)  # type: ignore[attr-defined]
        assert all(torch.equal(first[name], second[name]) for name in first)
    finally:
        for learner in learners:
            learner._service.close()  # type: ignore[attr-defined]


def _spaces(experiment: SimulatorExperiment) -> Any:
    return open_lanes(experiment, 8, partial(seed_of, 3, 0, 0)).spaces


def test_a_critic_values_the_decisions_of_an_episode_one_after_another(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "run").mkdir()
    experiment = token_experiment(tmp_path / "run", model, simulator={"group_lanes": 1}, trainer={"minibatch": 4096})
    block, learner = block_of(experiment)[0], TokenLearner(experiment, _spaces(experiment), context())
    calls: list[Any] = []
    original = critic_module.values_of_tokens
    monkeypatch.setattr(
        critic_module, "values_of_tokens", lambda *terms: calls.append((terms, original(*terms))) or calls[-1][1]
    )
    try:
        fragment = block.collect(0)
        metrics = learner.step([fragment])
        tokens = fragment.tokens
        assert tokens is not None
        (rewards_m, _, episode_m, *_), values = calls[0]
        counted_bt = fragment.counted_tb.T
        sizes_b = np.where(counted_bt, tokens.responses_k.reshape(4, 8).T, 0).sum(1)
        np.testing.assert_array_equal(np.bincount(episode_m), sizes_b)
        successes = [bool(end.success) for end in sorted(fragment.episodes, key=lambda end: end.lane)]
        assert len({*successes}) == 2
        np.testing.assert_array_equal(np.bincount(episode_m, rewards_m), successes)
        np.testing.assert_allclose(values.returns_m, np.repeat(successes, sizes_b))  # of all decisions, undiscounted
        assert np.isfinite(metrics["explained_variance"])
        assert metrics["filtered_groups"] == 0
    finally:
        learner._service.close()  # type: ignore[attr-defined]
