"""Kills amid the passes of a run with a critic: it ends with the bits of the undisturbed run."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from safetensors.numpy import load_file

from headway.models.initialise import initialise_model
from headway.trainer.checkpoints import find_checkpoints

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
# Passages of each point that a life may see, at most those of three steps: two passes of two updates each.
POINTS = {"training": 12, "accumulating": 12, "valuing": 12, "committing": 3}


def write_experiment(folder: Path, inputs: Path, critic: str, steps: int) -> Path:
    folder.mkdir()
    return tiny_run.write_experiment(
        folder,
        run={"steps": steps, "deterministic": True},
        algorithm={"preset": "ppo", "overlong": "bootstrap"},
        critic={"path": critic},
        trainer={"learning_rate": 2e-3, "passes": 2, "optimizer_steps_per_batch": 2, "micro_batch_tokens": 96},
        rollout={"group_size": 1},
        queue={"groups_per_step": 16, "budget": 0, "filter_zero_variance": True},
        checkpoint={"every_steps": 2},
        **tiny_run.inputs_in(inputs),
    )


def state_of(run: Path) -> dict[str, bytes]:
    """The tensors of the last checkpoint: weights, and the state of optimisers and critic."""
    files = sorted(find_checkpoints(run)[-1].rglob("*.safetensors"))
    return {name: array.tobytes() for file in files for name, array in load_file(file).items()}


@pytest.mark.parametrize(
    ("kills", "critic"),
    [pytest.param(4, "trunk", marks=pytest.mark.slow), pytest.param(20, "folder", marks=pytest.mark.long)],
)
def test_kills_amid_passes_change_no_bit(tmp_path: Path, kills: int, critic: str) -> None:
    """Each life of the run loses its trainer, and then, amid the repeated step, both at once."""
    chance, steps = random.Random(kills), 2 * kills + 2
    tiny_run.write_inputs(tmp_path)
    prompts = [f"{a}+{b}=" for a in range(10, 30) for b in range(10)]
    sizes: dict[str, Any] = {"layers": 1, "width": 48, "heads": 2, "kv_heads": 1, "intermediate": 48}
    initialise_model(tmp_path / "critic", prompts, seed=5, character_level=True, **sizes)
    path = str(tmp_path / "critic") if critic == "folder" else critic
    undisturbed = write_experiment(tmp_path / "undisturbed", tmp_path, path, steps)
    command = tiny_run.train(undisturbed)
    assert command.process.returncode == 0, command.output
    disturbed, resume = write_experiment(tmp_path / "disturbed", tmp_path, path, steps), list[str]()
    for _ in range(kills // 2):
        points = [(point, chance.randint(1, POINTS[point])) for point in chance.choices(list(POINTS), k=2)]
        faults = [f"{prefix}{point}:{count}" for prefix, (point, count) in zip(("", "all-"), points, strict=True)]
        command = tiny_run.train(disturbed, *resume, fault=",".join(faults))
        assert command.process.returncode == -signal.SIGKILL, command.output
        journal = command.journal.read_text()
        assert all(f"fault {fault}\n" in journal for fault in faults), journal
        tiny_run.wait_for_exits(command)
        print(f"{' then '.join(faults)}: {tiny_run.audited(command.run).completed_steps} steps completed")
        resume = ["--resume"]
    command = tiny_run.train(disturbed, *resume)
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(command.run, steps)
    expected, state = state_of(tmp_path / "undisturbed" / "run"), state_of(command.run)
    assert {"critic/head@0", "critic/returns@0", "critic/head/exp_avg@0"} <= state.keys() == expected.keys()
    assert [name for name in expected if state[name] != expected[name]] == []
