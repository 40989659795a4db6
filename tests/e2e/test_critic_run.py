"""A run with a critic in groups of one: trained to its end, killed on the way, and the same as its log gives."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch
from tiny_trainer import Context

from headway.algorithms.groups.batches import build_batch
from headway.algorithms.samples import lay_out
from headway.buffer.store import GroupBuffer
from headway.config.load import load_experiment
from headway.telemetry.rollouts.reader import RolloutRecord
from headway.trainer.checkpoints import checkpoint_path
from headway.trainer.service import TrainerService

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
STEPS = 6


def write_config(folder: Path, steps: int) -> Path:
    tiny_run.write_inputs(folder)
    return tiny_run.write_experiment(
        folder,
        run={"steps": steps},
        algorithm={"preset": "ppo", "overlong": "bootstrap"},
        trainer={"learning_rate": 2e-3, "warmup_steps": [2, 2]},
        rollout={"group_size": 1},
        queue={"groups_per_step": 16, "budget": 1, "filter_zero_variance": True},
        checkpoint={"every_steps": 2, "keep_last": 9},
    )


def test_a_killed_run_with_a_critic_counts_each_batch_once(tmp_path: Path) -> None:
    """The trainer dies amid a step, then the orchestrator: values, their scale and the weights are the log's."""
    config = write_config(tmp_path, STEPS)
    run = tmp_path / "run"
    killed = tiny_run.train(config, fault="batch-committed:6")
    assert killed.process.returncode == -signal.SIGKILL, killed.output
    tiny_run.wait_for_exits(killed)
    resumed = tiny_run.train(config, "--resume", fault="training:2")
    assert resumed.process.returncode == 0, resumed.output
    tiny_run.require_whole(run, STEPS)
    assert not tiny_run.events_of(run, "value_update_skipped")
    steps = tiny_run.steps_of(run)
    assert sum(step.samples for step in steps) == 16 * STEPS, "nothing is filtered for equal rewards"
    assert [step.metrics["learning_rate"] for step in steps if step.metrics][:2] == [0, 0]
    assert all({"explained_variance", "value_error"} <= step.metrics.keys() for step in steps if step.metrics)
    error_text = f"the error is {steps[-1].metrics['value_error']:.3g} in units of reward"
    assert error_text in json.loads(tiny_run.output_of("report", run, "--json"))["verdict"]["values_text"]
    assert "What do values explain?" in tiny_run.output_of("report", run)
    record = RolloutRecord(run)  # of what was trained: rollouts that finished shortly before a kill are in no record
    trained = [sequence for step in range(STEPS) for sequence in record.trained(step).values()]
    advantages = np.concatenate([sequence.advantages for sequence in trained]).tolist()
    assert len(set(advantages)) > 10 * STEPS
    _require_state_of_log(config, run)


def test_show_and_the_ledger_have_values_and_advantages_of_samples(tmp_path: Path) -> None:
    done, run, steps = tiny_run.train(write_config(tmp_path, 4)), tmp_path / "run", 4
    assert done.process.returncode == 0, done.output
    lines = tiny_run.output_of("show", run, "--ending", "trained", "--limit", "1000", "--json").splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 16 * steps
    first, last = ([sample for sample in samples if sample["step"] == step] for step in (0, steps - 1))
    assert {sample["value"] for sample in first} == {0.0}, "an untrained critic knows nothing"
    assert len({sample["value"] for sample in last}) > 1
    assert f"· advantage {last[-1]['advantage']:+.3f} · value {last[-1]['value']:.3f} ·" in tiny_run.output_of(
        "show", run, "--group", str(last[-1]["group"])
    )
    for step in tiny_run.steps_of(run):
        advantages = [sample["advantage"] for sample in samples if sample["step"] == step.step]
        assert step.flow.useful_samples == sum(advantage != 0 for advantage in advantages)


def _require_state_of_log(config: Path, run: Path) -> None:
    """Train once more from a checkpoint along the batch log, and compare with the last checkpoint."""
    torch.set_num_threads(1)
    experiment = load_experiment(str(config), [])
    trainers = [
        TrainerService(Context, experiment=experiment.model_dump(mode="json"), run_id=name) for name in ("a", "b")
    ]
    assert trainers[0].load_checkpoint(str(checkpoint_path(run, 2))) == 2
    assert trainers[1].load_checkpoint(str(checkpoint_path(run, STEPS))) == STEPS
    buffer = GroupBuffer(run / "buffer.db", 99)
    for logged in buffer.batches_since(2):
        trainers[0].train_step(lay_out(build_batch(logged.step, logged.groups, experiment)))
    buffer.close()
    critics = [trainer.policy.critic for trainer in trainers]
    assert critics[0] is not None
    assert critics[1] is not None
    for one, other in zip(critics[0].shards(), critics[1].shards(), strict=True):
        assert torch.equal(one.tensor, other.tensor), one.name
    for one, other in zip(*(trainer.learner.parameters for trainer in trainers), strict=True):
        assert torch.equal(one, other)
