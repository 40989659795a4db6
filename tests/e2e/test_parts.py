"""Runs whose batches are trained in parts, with real workers that are killed amid one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from tiny_trainer import Context

from headway.algorithms.groups.batches import build_batch
from headway.algorithms.samples import lay_out
from headway.buffer.store import GroupBuffer
from headway.config.load import load_experiment
from headway.trainer.checkpoints import checkpoint_path
from headway.trainer.service import TrainerService

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
STEPS, PER_STEP = 6, 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_run.write_inputs(folder)
    return tiny_run.inputs_in(folder)


@pytest.mark.slow
def test_a_run_killed_amid_parts_ends_with_the_weights_that_its_log_gives(inputs: Any, tmp_path: Path) -> None:
    """The orchestrator dies between two parts of a step, then the trainer amid one: the same parts again."""
    config = tiny_run.write_experiment(
        tmp_path,
        run={"steps": STEPS},
        queue={"groups_per_step": PER_STEP, "groups_per_part": 1, "budget": 1},
        checkpoint={"every_steps": 2, "keep_last": 9},
        **inputs,
    )
    run = tmp_path / "run"
    killed = tiny_run.train(config, fault=f"batch-committed:{3 * PER_STEP + 2}")
    assert killed.process.returncode == -signal.SIGKILL, killed.output
    tiny_run.wait_for_exits(killed)
    resumed = tiny_run.train(config, "--resume", fault=f"accumulating:{PER_STEP + 2}")
    assert resumed.process.returncode == 0, resumed.output
    assert tiny_run.events_of(run, "trainer_restored")
    tiny_run.require_whole(run, STEPS)
    assert all(step.groups == PER_STEP for step in tiny_run.steps_of(run))
    _require_weights_of_log(config, run)


def _require_weights_of_log(config: Path, run: Path) -> None:
    """Train once more from a checkpoint along the batch log, and compare with the last checkpoint."""
    torch.set_num_threads(1)
    experiment = load_experiment(str(config), [])
    trainer = TrainerService(Context, experiment=experiment.model_dump(mode="json"), run_id="again")
    assert trainer.load_checkpoint(str(checkpoint_path(run, 2))) == 2
    buffer = GroupBuffer(run / "buffer.db", 99)
    for logged in buffer.batches_since(2):
        assert [len(part) for part in logged.parts] == [1] * PER_STEP
        for part in logged.parts:
            trainer.forward_backward(lay_out(build_batch(logged.step, part, experiment)))
        trainer.optim_step()
    buffer.close()
    again = [parameter.detach().clone() for parameter in trainer.learner.parameters]
    assert trainer.load_checkpoint(str(checkpoint_path(run, STEPS))) == STEPS
    for one, other in zip(again, trainer.learner.parameters, strict=True):
        assert torch.equal(one, other)
