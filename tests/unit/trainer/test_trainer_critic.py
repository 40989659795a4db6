"""Values, advantages and the value loss of a step against their definition in float64, and what they do to a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sb3_values as sb3
import torch
from critic_batches import defined, rewarded, set_head
from objective_definition import by_response, on_ranks
from tiny_trainer import VOCABULARY, Context, make_experiment, make_model

from headway.algorithms.samples import lay_out
from headway.records.errors import StepRefused
from headway.records.rollout import Branch, Rollout
from headway.records.training import TrainBatch
from headway.telemetry.rollouts.reader import RolloutRecord
from headway.trainer.checkpoints import checkpoint_path
from headway.trainer.critic import critic as critic_module
from headway.trainer.critic.critic import Critic
from headway.trainer.critic.value_loss import clipped_value_loss
from headway.trainer.service import TrainerService

torch.set_num_threads(1)
ADAPTER = {"model": {"adapter": {"rank": 4, "alpha": 8.0}}, "critic": {"path": "adapter"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    for seed, name in enumerate(("m", "critic")):
        make_model(path / name, seed=seed)
        (path / name / "tokenizer.json").write_text("{}")
    return path


def service(folder: Path, run: Path = Path("/nowhere"), **sections: Any) -> TrainerService:
    algorithm = {"preset": "ppo", "overlong": "bootstrap"} | sections.pop("algorithm", {})
    if sections.get("critic", {}).get("path") == "folder":
        sections["critic"] = sections["critic"] | {"path": str(folder / "critic")}
    raw = make_experiment(str(folder / "m"), run, algorithm=algorithm, **sections)
    return TrainerService(Context, experiment=raw, run_id="test")


def critic_of(trainer: TrainerService) -> Critic:
    assert trainer.policy.critic is not None
    return trainer.policy.critic


def weights_of(trainer: TrainerService) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.learner.parameters]


@pytest.mark.parametrize("path", ["trunk", "folder"])
@pytest.mark.parametrize("gae", [[1.0, 1.0], [0.9, 0.8], [1.0, "length"]])
def test_advantages_and_value_gradients_are_those_of_their_definition(folder: Path, gae: list[Any], path: str) -> None:
    sections = {"critic": {"gae": gae, "path": path}}
    trainer, other = service(folder, **sections), service(folder, **sections)
    batch = rewarded(1, groups=9)
    for one in (trainer, other):
        set_head(one)
        critic_of(one)._moments.copy_(torch.tensor([10.0, 0.7, 40.0]))
    progress = trainer.policy.accumulate_gradients(lay_out(batch).arrays())
    critic, prepared = critic_of(trainer), progress.prepared
    assert prepared is not None
    assert prepared.values_n is not None
    expected = defined(other, batch, mean=0.7, deviation=2.0)
    for column, rows in enumerate((expected.values, expected.targets)):
        for sample, found, row in zip(
            batch.samples, by_response(batch, prepared.values_n[:, column]), rows, strict=True
        ):
            np.testing.assert_allclose(np.array(found)[list(sample.rollout.response_mask)], row, atol=3e-5)
    for sample, found, row in zip(
        batch.samples, by_response(batch, prepared.advantages_n), expected.advantages, strict=True
    ):
        mask = np.array(sample.rollout.response_mask)
        np.testing.assert_allclose(np.array(found)[mask], row, atol=3e-5)
        assert not np.array(found)[~mask].any(), "an environment's tokens have none"
    largest = max(float(grad.abs().max()) for grad in (expected.head, *expected.network))
    assert critic.head.grad is not None
    assert float((critic.head.grad.double() - expected.head).abs().max()) < 1e-5 * largest
    if critic._network is not None:
        for found, exact in zip(critic._network.gradients(), expected.network, strict=True):
            assert float((found.double() - exact).abs().max()) < 1e-5 * largest


def test_the_trunk_gets_no_gradient_of_the_values(folder: Path) -> None:
    """The policy's gradient is that of the same advantages without a critic."""
    batch = rewarded(2)
    trainer = service(folder)
    plain = service(folder, algorithm={"preset": "reinforce++", "overlong": "score", "kl_coefficient": 0.0})
    set_head(trainer)
    arrays = lay_out(batch).arrays()
    progress = trainer.policy.accumulate_gradients(arrays)
    assert progress.prepared is not None
    object.__setattr__(arrays, "advantages_n", progress.prepared.advantages_n)
    plain.policy.accumulate_gradients(arrays)
    for one, other in zip(trainer.learner.gradients(), plain.learner.gradients(), strict=True):
        assert torch.equal(one, other)


def test_the_clipped_loss_takes_the_larger_error() -> None:
    values = torch.tensor([0.0, 0.5, 0.5, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    start, targets = torch.zeros(5, dtype=torch.float64), torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    losses = clipped_value_loss(values, start, targets)
    torch.testing.assert_close(losses, torch.tensor([0.5, 0.32, 1.125, 0.32, 0.405], dtype=torch.float64))
    losses.sum().backward()
    expected = torch.tensor([-1.0, 0.0, 1.5, 0.0, -0.9], dtype=torch.float64)
    torch.testing.assert_close(values.grad, expected)


def test_stable_baselines3_has_the_same_loss_where_both_take_the_clipped_error() -> None:
    new, old, returns = (torch.from_numpy(array) for array in (sb3.NEW_VALUES, sb3.VALUES, sb3.RETURNS))
    losses = clipped_value_loss(new, old, returns, clip=0.2)
    assert 2 * float(losses.mean()) == pytest.approx(sb3.VALUE_LOSS, rel=1e-6)
    assert 2 * float(clipped_value_loss(new, old, returns, clip=9.0).mean()) < 0.7 * sb3.VALUE_LOSS


def test_returns_count_once_and_only_with_a_version(folder: Path) -> None:
    """A batch whose step is skipped, or replayed from a checkpoint, counts at most once."""
    trainer = service(folder)
    critic = critic_of(trainer)
    report = trainer.train_step(lay_out(rewarded(3)))
    tokens = critic.scale.count
    assert (report.version, tokens) == (1, report.loss_tokens)
    broken = rewarded(4, 1)
    broken_rollout = msgspec.structs.replace(
        broken.samples[1].rollout,
        response_logprobs=tuple(float("nan") for _ in broken.samples[1].rollout.response_ids),
    )
    samples = list(broken.samples)
    samples[1] = msgspec.structs.replace(samples[1], rollout=broken_rollout)
    head = critic.head.detach().clone()
    assert trainer.train_step(lay_out(TrainBatch(step=1, samples=tuple(samples)))).skipped
    assert critic.scale.count == tokens
    assert torch.equal(critic.head, head), "a step without a version trains nothing"
    after = trainer.train_step(lay_out(broken))
    assert critic.scale.count == tokens + after.loss_tokens


def test_a_new_scale_keeps_all_values(folder: Path) -> None:
    trainer = service(folder, critic={"learning_rate": 0.0}, trainer={"learning_rate": 0.0})
    critic, batch = critic_of(trainer), rewarded(5)
    trainer.train_step(lay_out(batch))
    assert abs(critic.scale.mean) > 0.05
    set_head(trainer)

    def values(step: int) -> np.ndarray:
        progress = trainer.policy.run(lay_out(batch).arrays(), trainer.learner.optimiser_settings(0.0), step)
        assert progress.prepared is not None
        assert progress.prepared.values_n is not None
        return progress.prepared.values_n[:, 0]

    first, deviation = values(1), critic.scale.deviation
    np.testing.assert_allclose(values(2), first, atol=1e-5)
    assert critic.scale.deviation != deviation


def test_a_penalty_in_the_reward_is_a_reward_of_its_token(folder: Path) -> None:
    """With discount and decay 1 and no values it is subtracted from all earlier tokens, as without a critic."""
    penalised = {"kl_coefficient": 0.5, "kl_in": "reward", "kl_estimator": "k1", "overlong": "score"}
    batch = rewarded(6)
    trainer = service(
        folder, algorithm=penalised, critic={"gae": [1.0, 1.0]}, model={"reference": str(folder / "critic")}
    )
    arrays = lay_out(batch).arrays()
    progress = trainer.policy.accumulate_gradients(arrays)
    prepared = progress.prepared
    assert prepared is not None
    assert prepared.reference_n is not None
    assert prepared.start_n is not None
    assert prepared.values_n is not None
    penalties = by_response(batch, 0.5 * (prepared.start_n - prepared.reference_n))
    rewards = by_response(batch, arrays.advantages_n)
    for sample, found, penalty, reward in zip(
        batch.samples, by_response(batch, prepared.values_n[:, 2]), penalties, rewards, strict=True
    ):
        mask = np.array(sample.rollout.response_mask)
        to_go = np.cumsum((np.array(reward) - penalty)[mask][::-1])[::-1]
        np.testing.assert_allclose(np.array(found)[mask], to_go, atol=1e-5)


def test_values_are_learned_first_and_the_policy_waits(folder: Path) -> None:
    rates = {"warmup_steps": [2, 4], "learning_rate": 1e-2}
    trainer = service(folder, critic={"learning_rate": 1e-2}, trainer=rates)
    before, heads = weights_of(trainer), []
    for step in range(4):
        report = trainer.train_step(lay_out(rewarded(step, step)))
        heads.append(critic_of(trainer).head.detach().clone())
        changed = any(not torch.equal(a, b) for a, b in zip(before, weights_of(trainer), strict=True))
        assert (report.metrics["learning_rate"], changed) == ([0, 0, 5e-3, 1e-2][step], step >= 2)
    assert not torch.equal(heads[0], heads[1])


def test_a_value_gradient_that_is_not_finite_skips_the_critic_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = service(folder)
    trainer.train_step(lay_out(rewarded(6)))
    critic = critic_of(trainer)
    head, before = critic.head.detach().clone(), weights_of(trainer)
    moments = {name: tensor.clone() for name, tensor in critic._optimiser.state[critic.head].items()}
    with monkeypatch.context() as patched:
        broken = lambda values_m, *others: clipped_value_loss(values_m, *others) * float("nan")  # noqa: E731
        patched.setattr(critic_module, "clipped_value_loss", broken)
        report = trainer.train_step(lay_out(rewarded(7, 1)))
    assert (report.version, report.skipped, report.metrics["skipped_value_updates"]) == (2, False, 1)
    assert "critic: loss nan" in report.reason
    assert all(torch.equal(tensor, moments[name]) for name, tensor in critic._optimiser.state[critic.head].items())
    assert any(not torch.equal(a, b) for a, b in zip(before, weights_of(trainer), strict=True))
    assert not torch.equal(head, critic.head), "only its scale has changed"
    report = trainer.train_step(lay_out(rewarded(8, 2)))
    assert (report.reason, report.metrics["skipped_value_updates"]) == ("", 0)


def test_values_are_learned(folder: Path) -> None:
    critic = {"learning_rate": 1e-2, "gae": [1.0, 1.0], "path": "folder"}
    trainer = service(folder, critic=critic, trainer={"learning_rate": 0.0})

    def batch(step: int) -> TrainBatch:
        """The reward is the first token's number."""
        samples = [
            msgspec.structs.replace(s, rewards=(float(s.rollout.prompt_ids[0]) / 8,), bootstraps=False)
            for s in rewarded(step % 2, step, groups=12, turns=False).samples
        ]
        return TrainBatch(step=step, samples=tuple(samples))

    reports = [trainer.train_step(lay_out(batch(step))).metrics for step in range(60)]
    assert reports[0]["explained_variance"] == pytest.approx(0.0)
    assert reports[-1]["explained_variance"] > 0.5
    assert reports[-1]["value_error"] < 0.7 * reports[0]["value_error"]


@pytest.mark.parametrize("path", ["trunk", "folder"])
@pytest.mark.parametrize("groups", [6, 1])
def test_two_ranks_compute_what_one_does(folder: Path, groups: int, path: str) -> None:
    """With one group a rank has no data."""
    batch, sections = rewarded(5, groups=groups), {"critic": {"path": path}}
    alone, trainers = service(folder, **sections), [service(folder, **sections) for _ in range(2)]
    for trainer in (alone, *trainers):
        set_head(trainer)
    alone.policy.accumulate_gradients(lay_out(batch).arrays())
    on_ranks(trainers, lambda trainer, share: trainer.policy.accumulate_gradients(share(batch).arrays()))
    expected, heads = critic_of(alone).head.grad, [critic_of(trainer).head.grad for trainer in trainers]
    total = sum(head for head in heads if head is not None)
    assert expected is not None
    assert float((total - expected).abs().max()) < 2e-6 * float(expected.abs().max())
    for trainer in (alone, *trainers):
        trainer.policy.clear()
    alone_report = alone.train_step(lay_out(batch))
    reports = on_ranks(trainers, lambda trainer, share: trainer.train_step(share(batch)))
    for name in ("explained_variance", "value_error", "loss"):
        assert reports[0].metrics.get(name) == pytest.approx(alone_report.metrics.get(name), abs=1e-5)
    for trainer in trainers:
        torch.testing.assert_close(critic_of(trainer).head, critic_of(alone).head, rtol=0, atol=2e-5)
        assert critic_of(trainer).scale.mean == pytest.approx(critic_of(alone).scale.mean, abs=1e-6)


@pytest.mark.parametrize("sections", [{}, {"critic": {"path": "folder"}}, ADAPTER], ids=["trunk", "folder", "adapter"])
def test_a_resumed_run_has_the_same_bits(folder: Path, tmp_path: Path, sections: dict[str, Any]) -> None:
    straight = service(folder, tmp_path, **sections)
    paths = [str(checkpoint_path(tmp_path, version)) for version in (0, 2)]
    straight.save_checkpoint(paths[0], {})
    for step in range(4):
        straight.train_step(lay_out(rewarded(step, step)))
        if step == 1:
            straight.save_checkpoint(paths[1], {})
    for version, path in zip((2, 0), reversed(paths), strict=True):
        resumed = service(folder, tmp_path, **sections)
        resumed.train_step(lay_out(rewarded(9)))
        assert resumed.load_checkpoint(path) == version
        for step in range(version, 4):
            resumed.train_step(lay_out(rewarded(step, step)))
        one, other = critic_of(straight), critic_of(resumed)
        assert one.scale == other.scale
        for first, second in zip(one.shards(), other.shards(), strict=True):
            assert torch.equal(first.tensor, second.tensor), first.name
        for first, second in zip(weights_of(straight), weights_of(resumed), strict=True):
            assert torch.equal(first, second)


def test_parts_are_refused(folder: Path) -> None:
    with pytest.raises(StepRefused, match=r"algorithm.advantage = 'gae' .* no parts"):
        service(folder).forward_backward(lay_out(rewarded(1)))


def test_a_folder_may_lack_ids_of_padding(folder: Path) -> None:
    """It reads them as its last one."""
    small = make_model(folder / "small", vocabulary=VOCABULARY - 2, seed=1)
    trainer = service(folder, critic={"path": small})
    set_head(trainer)
    batch, values = rewarded(1, groups=9), list[np.ndarray]()
    for most in (VOCABULARY, VOCABULARY - 3):
        arrays = lay_out(batch).arrays()
        assert arrays.token_ids_n.max() == VOCABULARY - 1
        np.minimum(arrays.token_ids_n, most, out=arrays.token_ids_n)
        prepared = trainer.policy.accumulate_gradients(arrays).prepared
        assert prepared is not None
        assert prepared.values_n is not None
        values.append(prepared.values_n)
    np.testing.assert_array_equal(*values)


def test_a_tree_is_refused() -> None:
    batch = rewarded(1)
    rollout = batch.samples[0].rollout
    branch = Branch(
        prompt_ids=rollout.prompt_ids,
        response_ids=rollout.response_ids,
        response_logprobs=rollout.response_logprobs,
        response_mask=rollout.response_mask,
        versions=rollout.versions,
    )
    tree: Rollout = msgspec.structs.replace(rollout, branches=(branch,))
    sample = msgspec.structs.replace(batch.samples[0], rollout=tree)
    with pytest.raises(ValueError, match=r"rollout 0-0: .*no branches"):
        lay_out(TrainBatch(step=0, samples=(sample,)))


def test_the_record_has_values_and_the_report_advantages(folder: Path, tmp_path: Path) -> None:
    """Of each sample the mean over its loss tokens alone, the 0 of an environment's tokens not counted."""
    trainer, batch = service(folder, tmp_path), rewarded(5, groups=7)
    set_head(trainer)
    expected = defined(service_with_head(folder), batch)
    report = trainer.train_step(lay_out(batch))
    trainer.close()
    record = RolloutRecord(tmp_path).trained(0)
    rows = zip(batch.samples, report.sample_advantages, expected.values, expected.advantages, strict=True)
    assert len({len(row) for row in expected.advantages}) > 1
    for sample, mean, values, advantages in rows:
        mask = np.array(sample.rollout.response_mask)
        recorded = record[sample.rollout.group, sample.rollout.member, 0]
        assert recorded.values is not None
        np.testing.assert_allclose(recorded.values[mask], values, atol=3e-5)
        np.testing.assert_allclose(recorded.advantages[mask], advantages, atol=3e-5)
        assert np.isnan(recorded.values[~mask]).all()
        assert mean == pytest.approx(float(np.mean(advantages)) if advantages else 0.0, abs=3e-5)


def service_with_head(folder: Path) -> TrainerService:
    trainer = service(folder)
    set_head(trainer)
    return trainer
