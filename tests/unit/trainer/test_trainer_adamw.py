"""AdamW is torch's, bit for bit, and needs none of torch's compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_trainer import make_model

from headway.records.training import OptimiserSettings
from headway.trainer.optimizer import AdamW

SETTINGS = [
    OptimiserSettings(learning_rate=1e-2),
    OptimiserSettings(learning_rate=3e-3, beta1=0.8, beta2=0.99, epsilon=1e-6, weight_decay=0.1),
    OptimiserSettings(learning_rate=1e-3, weight_decay=0.01),
]


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((7, 33), (5,), (1,), (4, 3))]


def test_steps_and_state_are_those_of_torch() -> None:
    mine, torchs = parameters(), parameters()
    ours, reference = AdamW(mine), torch.optim.AdamW(torchs, fused=True)
    for number, settings in enumerate(SETTINGS):
        for index, (one, other) in enumerate(zip(mine, torchs, strict=True)):
            gradient = None if index == 3 and number == 0 else torch.randn(one.shape)  # one joins at the second step
            one.grad, other.grad = gradient, None if gradient is None else gradient.clone()
        for group in reference.param_groups:
            group |= {"lr": settings.learning_rate, "betas": (settings.beta1, settings.beta2)}
            group |= {"eps": settings.epsilon, "weight_decay": settings.weight_decay}
        ours.step(settings)
        reference.step()
        for one, other in zip(mine, torchs, strict=True):
            assert torch.equal(one, other)
            state = reference.state.get(other, {})
            assert ours.state.get(one, {}).keys() == state.keys()
            assert all(torch.equal(ours.state[one][name], state[name]) for name in state)


TRAINS = """
import sys
from pathlib import Path
from tiny_trainer import Context, make_batch, make_experiment
from headway.algorithms.samples import lay_out
from headway.trainer.service import TrainerService

trainer = TrainerService(Context(), experiment=make_experiment(sys.argv[1], Path("/nowhere")), run_id="test")
assert trainer.train_step(lay_out(make_batch(1))).version == 1
import headway.generator.service
heavy = {"torch._dynamo", "torch._inductor", "sympy", "transformers", "scipy", "pandas"}
print(*sorted(heavy & sys.modules.keys()))
"""


@pytest.mark.slow
def test_a_trainer_and_a_replica_load_no_compiler(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    done = subprocess.run([sys.executable, "-c", TRAINS, str(model)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
