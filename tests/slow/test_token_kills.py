"""Token policies whose workers are killed: the run ends as without a kill, and each fragment ends once."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from embodied_runs import pinned_children
from token_runs import token_experiment, token_model

from headway.embodied.driver import train

STEPS = 12


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_a_killed_worker_costs_no_step(seed: int, tmp_path: Path):
    """Simulators with their engine on core 0, the learner on core 1; one of them is killed at a moment of the seed."""
    model, rng, killed = token_model(tmp_path / "model"), random.Random(seed), list[int]()
    core, steps = seed % 2, rng.randint(1, STEPS - 3)
    begun = tmp_path / "run" / "ledger.jsonl"

    def kill() -> None:
        while not begun.is_file() or begun.read_text().count('{"kind":"step"') < steps:
            time.sleep(0.005)
        time.sleep(0.1 * rng.random())
        for pid in pinned_children(core)[:1]:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    experiment = token_experiment(tmp_path / "run", model, run={"steps": STEPS, "seed": seed})
    summary = train(experiment)
    thread.join(1.0)
    assert (summary.steps, summary.accounting_balanced) == (STEPS, True)
    assert (summary.endings, len(killed)) == ({"trained": 2 * STEPS}, 1)
