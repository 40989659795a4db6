"""The learner: a step against PPO written with torch's modules, its state, and what must not change a step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_fragments import CONTINUOUS, DISCRETE, PICTURE, experiment, fragment
from torch import nn

from headway.embodied.learner import FragmentLearner
from headway.embodied.objective import LossTerms
from headway.embodied.policies import LanePolicy
from headway.embodied.records import Spaces
from headway.records.errors import CheckpointCorrupt

PICTURES = Spaces(PICTURE, CONTINUOUS.actions)


def opened(spaces: Spaces = CONTINUOUS, **sections) -> FragmentLearner:
    return FragmentLearner(experiment(**sections), spaces, "cpu:0")


def fragments_of(learner: FragmentLearner, seed: int = 0, spaces: Spaces = CONTINUOUS, **sections):
    policy = LanePolicy(spaces, experiment(**sections).policy)
    policy.load(weights := learner.weights())
    return [fragment(policy, spaces, 100 * seed + n, block=n, version=weights.version) for n in range(2)]


def bits(learner: FragmentLearner) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in learner.state().items()}


def test_steps_are_those_of_ppo_with_torch_modules_and_adam():
    """One minibatch of all transitions, without normalisation: the order can't matter."""
    keys = {"policy": {"normalize": False}, "trainer": {"minibatch": 4096, "passes": 3, "learning_rate": 0.01}}
    keys |= {"algorithm": {"entropy_coefficient": 0.3}}
    learner = opened(**keys)
    fragments = fragments_of(learner, **keys)
    parameters = learner._network.views(torch.from_numpy(learner.weights().parameters_p))
    towers = []
    for tower, head in enumerate(("actor", "critic")):
        layers = []
        for name in ("hidden0", "hidden1", head):
            weight, bias = (
                parameters[key][tower] if name != head else parameters[key] for key in (name, f"{name}_bias")
            )
            layer = nn.Linear(*weight.shape)
            layer.weight.data.copy_(weight.T)
            layer.bias.data.copy_(bias.reshape(-1))
            layers += [layer, nn.Tanh()]
        towers.append(nn.Sequential(*layers[:-1]))
    actor, critic = towers
    log_deviations = nn.Parameter(torch.zeros(3))
    trained = [*actor.parameters(), *critic.parameters(), log_deviations]
    adam = torch.optim.Adam(trained, lr=0.01, eps=1e-5)
    terms = learner._batch(fragments, 1.0).terms
    counted = [one.counted_tb for one in fragments]
    seen, actions, behaviour = (
        torch.from_numpy(
            np.concatenate([getattr(one, key)[mask] for one, mask in zip(fragments, counted, strict=True)])
        )
        for key in ("observations_tb", "actions_tb", "logprobs_tb")
    )
    advantages, targets = torch.from_numpy(terms.advantages_n), torch.from_numpy(terms.targets_n)
    losses = []
    for _ in range(3):
        normal = torch.distributions.Normal(actor(seen.float()), log_deviations.exp())
        ratios = (normal.log_prob(actions).sum(-1) - behaviour).exp()
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        loss = -torch.min(ratios * scaled, ratios.clamp(0.8, 1.2) * scaled).mean()
        loss = loss + 0.5 * nn.functional.mse_loss(critic(seen.float())[:, 0], targets)
        loss = loss - 0.3 * normal.entropy().sum(-1).mean()
        losses.append(float(loss.detach()))
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        adam.step()
    metrics = learner.step(fragments)
    for tower, (sequence, head) in enumerate(zip(towers, ("actor", "critic"), strict=True)):
        for layer, name in zip(sequence[::2], ("hidden0", "hidden1", head), strict=True):
            ours = learner._parameters[name].detach()
            torch.testing.assert_close(ours[tower] if name != head else ours, layer.weight.T, rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(
        learner._parameters["log_deviations"].detach(), log_deviations.detach(), rtol=1e-3, atol=2e-5
    )
    assert learner.version == 1
    assert metrics["grad_norm"] > 0.5
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["skipped_updates"] == metrics["skipped_minibatches"] == 0


@pytest.mark.parametrize("spaces", [CONTINUOUS, DISCRETE, PICTURES])
@pytest.mark.parametrize("correction", ["none", "vtrace"])
def test_learner_goes_on_from_a_state_to_the_same_bits(spaces, correction, tmp_path: Path):
    keys = {"algorithm": {"correction": correction}}
    first = opened(spaces, **keys)
    first.step(fragments_of(first, 0, spaces))
    state = first.state()
    first.write(tmp_path)
    later = fragments_of(first, 1, spaces)
    first.step(later)
    assert first.version == 2
    restored, read = opened(spaces, **keys), opened(spaces, **keys)
    restored.load(state)
    read.read(tmp_path)
    for other in (restored, read):
        assert bits(other) != bits(first)
        other.step(later)
        assert bits(other) == bits(first)
        assert other.weights().version == 2


def test_checkpoint_of_another_policy_and_damaged_ones_are_refused_by_file(tmp_path: Path):
    learner = opened()
    with pytest.raises(CheckpointCorrupt, match=r"learner\.safetensors"):
        learner.read(tmp_path)
    opened(policy={"hidden": [9]}).write(tmp_path)
    former = bits(learner)
    with pytest.raises(CheckpointCorrupt, match=r"learner\.safetensors.*size"):
        learner.read(tmp_path)
    (tmp_path / "learner.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointCorrupt, match=r"learner\.safetensors"):
        learner.read(tmp_path)
    assert bits(learner) == former


@pytest.mark.parametrize("correction", ["none", "recompute", "vtrace"])
def test_steps_that_only_reset_carry_nothing(correction):
    keys = {"algorithm": {"correction": correction}}
    fragments = fragments_of(opened(**keys))
    assert not all(one.counted_tb.all() for one in fragments)
    changed = [
        replace(
            one,
            observations_tb=np.where(one.counted_tb[..., None], one.observations_tb, 7.0),
            actions_tb=np.where(one.counted_tb[..., None], one.actions_tb, 0.5),
            logprobs_tb=np.where(one.counted_tb, one.logprobs_tb, -3.0).astype(np.float32),
            values_tb=np.where(one.counted_tb, one.values_tb, 9.0).astype(np.float32),
        )
        for one in fragments
    ]
    learners = opened(**keys), opened(**keys)
    for learner, round_fragments in zip(learners, (fragments, changed), strict=True):
        learner.step(round_fragments)
    assert bits(learners[0]) == bits(learners[1])


def test_truncations_count_on_the_final_observation_and_terminations_on_nothing():
    fragments = fragments_of(opened())
    moved = [replace(one, final_observations_n=one.final_observations_n + 1.0) for one in fragments]
    terms, moved_terms = (opened()._batch(some, 1.0).terms.advantages_n for some in (fragments, moved))
    starts = np.flatnonzero(np.concatenate([one.counted_tb.ravel() for one in fragments]))
    ends = {
        kind: np.isin(starts, np.flatnonzero(np.concatenate([getattr(one, kind).ravel() for one in fragments])))
        for kind in ("terminated_tb", "truncated_tb")
    }
    differs = terms != moved_terms
    assert ends["terminated_tb"].any()
    assert differs[ends["truncated_tb"]].all()
    assert not differs[ends["terminated_tb"]].any()


@pytest.mark.parametrize("correction", ["recompute", "vtrace"])
def test_corrections_change_nothing_where_nothing_is_stale(correction):
    learner = opened()
    learner.step(fragments_of(learner))
    fragments = fragments_of(learner, 1)
    corrected = opened(algorithm={"correction": correction})
    corrected.load(learner.state())
    for ours, theirs in zip(learner._batch(fragments, 1.7).terms, corrected._batch(fragments, 1.7).terms, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_correction_is_against_the_policy_of_the_steps_start():
    keys = {"algorithm": {"correction": "recompute", "behaviour_weight_cap": 1.1}, "trainer": {"learning_rate": 0.05}}
    learner = opened(**keys)
    stale = fragments_of(learner)
    learner.step(fragments_of(learner, 1))
    terms = learner._batch(stale, 1.0).terms
    behaviour = np.concatenate([one.logprobs_tb[one.counted_tb] for one in stale])
    policy_now = fragments_of(learner, 0)  # the same noise: other log-probabilities and values
    assert np.abs(behaviour - terms.proximal_n).max() > 0.05
    weights = np.exp(terms.proximal_n - behaviour)
    np.testing.assert_allclose(terms.weights_n, np.minimum(weights, 1.1), rtol=1e-4)
    assert weights.max() > 1.1
    stored = np.concatenate([one.values_tb[one.counted_tb] for one in stale])
    present = np.concatenate([one.values_tb[one.counted_tb] for one in policy_now])
    assert np.abs(stored - present).max() > 0.05
    np.testing.assert_allclose(terms.start_values_n, present, rtol=1e-3, atol=1e-4)
    metrics = learner.step(stale)
    assert metrics["behaviour_weight_max"] == pytest.approx(1.1)


def test_rewards_are_divided_by_the_deviation_of_returns_and_clipped():
    learner = opened()
    fragments = fragments_of(learner)
    huge = fragments[0].rewards_tb.copy()
    huge[np.argwhere(fragments[0].counted_tb)[0][0], 0] = 1e9
    metrics = learner.step([replace(fragments[0], rewards_tb=huge), fragments[1]])
    statistics = learner._statistics
    assert metrics["reward_scale"] == pytest.approx(float(statistics.returns.deviation))
    assert metrics["reward_scale"] > 1e7
    again = opened()
    bounded = again._batch([replace(fragments[0], rewards_tb=huge), fragments[1]], 1.0).terms.advantages_n
    assert np.abs(bounded).max() < 100  # ten deviations a step


def test_observations_count_from_the_next_version_on():
    learner = opened()
    fragments = fragments_of(learner)
    assert learner.weights().observation_mean.tolist() == [0.0] * 5
    batch = learner._batch(fragments, 1.0)
    scored, _ = learner._evaluated(batch.inputs_n, batch.actions_n)
    np.testing.assert_allclose(scored, batch.terms.proximal_n, rtol=1e-4, atol=1e-5)
    corrected = opened(algorithm={"correction": "recompute"})
    assert corrected.step(fragments)["behaviour_weight_max"] == pytest.approx(1.0, abs=1e-3)
    learner.step(fragments)
    seen = np.concatenate([one.observations_tb[one.counted_tb] for one in fragments])
    assert learner._statistics.observations.count == len(seen)
    np.testing.assert_allclose(learner.weights().observation_mean, seen.mean(0), rtol=1e-12)


def test_step_without_a_finite_gradient_changes_nothing_and_makes_no_version():
    learner = opened()
    learner.step(fragments_of(learner))
    former, fragments = bits(learner), fragments_of(learner, 1)
    broken = [replace(one, values_tb=np.full_like(one.values_tb, np.nan)) for one in fragments]
    metrics = learner.step(broken)
    assert bits(learner) == former
    assert metrics["skipped_updates"] == 2 * math.ceil(sum(one.transitions for one in fragments) / 16)
    assert learner.step(fragments)["skipped_updates"] == 0
    assert learner.version == 2


def test_single_bad_transition_costs_the_updates_that_have_it():
    learner = opened()
    fragments = fragments_of(learner)
    logprobs = fragments[1].logprobs_tb.copy()
    logprobs[tuple(np.argwhere(fragments[1].counted_tb)[3])] = np.nan
    metrics = learner.step([fragments[0], replace(fragments[1], logprobs_tb=logprobs)])
    assert metrics["skipped_updates"] == 2  # one in each pass
    assert learner.version == 1
    assert all(np.isfinite(array).all() for array in learner.state().values())


@pytest.mark.parametrize("key", ["early_stop_kl", "early_stop_ratio"])
def test_early_stop_ends_a_steps_updates_behind_the_first(key):
    keys = {"trainer": {"learning_rate": 0.05, "passes": 4}}
    learner = opened(algorithm={key: 1e-9}, **keys)
    fragments = fragments_of(learner)
    planned = 4 * math.ceil(sum(one.transitions for one in fragments) / 16)
    assert learner.step(fragments)["skipped_minibatches"] == planned - 1
    assert learner.version == 1
    assert opened(algorithm={key: 1e9}, **keys).step(fragments)["skipped_minibatches"] == 0


def test_passes_are_shuffled_by_seed_version_and_number(monkeypatch):
    orders = []

    def recorded(self, idx_m):
        if not isinstance(idx_m, slice):
            orders.append(tuple(idx_m.tolist()))
        return rows(self, idx_m)

    rows = LossTerms.rows
    monkeypatch.setattr(LossTerms, "rows", recorded)
    for seed in (3, 4, 3):
        learner = opened(run={"seed": seed}, trainer={"learning_rate": 0.0})
        for _ in range(2):
            learner.step(fragments_of(learner))
    passes = [orders[n : n + 3] for n in range(0, 18, 3)]  # of each step: those that count, then its two passes
    assert all(sorted(order) == list(range(len(counted))) for counted, *shuffled in passes for order in shuffled)
    assert len({order for _, *shuffled in passes[:4] for order in shuffled}) == 8
    assert passes[4:] == passes[:2]


def test_learning_rate_follows_its_schedule():
    schedule = {"schedule": "linear", "warmup_steps": 1}
    learner = opened(run={"steps": 3}, trainer=schedule)
    rates = [learner.step(fragments_of(learner, n))["learning_rate"] for n in range(3)]
    assert rates == pytest.approx([3e-4, 3e-4, 1.5e-4])


def test_weights_begin_orthogonal_and_follow_from_the_seed():
    learner = opened()
    hidden = learner._parameters["hidden1"].detach()
    assert not torch.equal(hidden[0], hidden[1])
    torch.testing.assert_close(hidden[0].T @ hidden[0], 2.0 * torch.eye(6), atol=1e-5, rtol=0)
    assert learner._parameters["actor"].detach().norm() < 0.02
    assert bits(opened()) == bits(learner) != bits(opened(run={"seed": 4}))


def test_discrete_policy_learns_the_action_that_is_rewarded():
    keys = {"trainer": {"learning_rate": 0.01, "minibatch": 48, "passes": 4}, "algorithm": {"discount": 0.0}}
    learner = opened(DISCRETE, **keys)
    for number in range(25):
        fragments = fragments_of(learner, number, DISCRETE)
        learner.step([replace(one, rewards_tb=np.where(one.actions_tb == 2, 1.0, 0.0)) for one in fragments])
    policy = LanePolicy(DISCRETE, experiment().policy)
    policy.load(learner.weights())
    drawn = np.concatenate([one.actions_tb.ravel() for one in fragments_of(learner, 99, DISCRETE)])
    assert (drawn == 2).mean() > 0.9
