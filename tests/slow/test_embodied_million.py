"""A million environment steps: memory stays flat, and no simulator is built twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from embodied_runs import walk_experiment

from headway.embodied.driver import train
from headway.records.ledger import LedgerLine, StepRecord
from headway.runtime.devices import resident_bytes

STEPS, LANES, BLOCK_LANES, FRAGMENT_STEPS = 62, 64, 32, 256
GROWTH_BYTES = 24e6  # that allocators may keep between two halves of a run; half a percent of what it handled


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("environment", ["embodied_runs:Walk", "Pendulum-v1"])
def test_a_million_steps_keep_memory_flat(environment: str, tmp_path: Path):
    is_vector = ":" in environment
    if not is_vector:
        pytest.importorskip("gymnasium")
    trouble = tmp_path / "trouble"
    trouble.mkdir()
    driver_bytes: list[int] = []
    records: list[StepRecord] = []

    def on_line(line: LedgerLine) -> None:
        if isinstance(line, StepRecord):
            records.append(line)
            driver_bytes.append(resident_bytes())
            if line.version == STEPS // 4 and is_vector:
                (trouble / "step.kill").write_text("1")

    simulator: dict[str, Any] = {"environment": environment, "lanes": LANES, "block_lanes": BLOCK_LANES}
    simulator |= {"steps_per_fragment": FRAGMENT_STEPS, "arguments": {"trouble": str(trouble)} if is_vector else {}}
    experiment = walk_experiment(
        tmp_path / "run",
        run={"steps": STEPS},
        simulator=simulator,
        trainer={"passes": 1, "minibatch": 2048},
        checkpoint={"every_steps": 10},
    )
    summary = train(experiment, on_line=on_line)
    assert summary.environment_steps == STEPS * LANES * FRAGMENT_STEPS > 1e6
    last = records[-1].episodes
    assert last is not None
    blocks, rebuilt = LANES // BLOCK_LANES, 2 if is_vector else 0  # both blocks had one worker
    assert last.rebuilt == rebuilt
    assert last.constructions == (blocks + rebuilt if is_vector else LANES)
    sizes = {
        "worker": [step.episodes.worker_bytes for step in records if step.episodes],
        "learner": [step.episodes.learner_bytes for step in records if step.episodes],
        "driver": driver_bytes,
    }
    for name, bytes_by_step in sizes.items():
        middle = max(bytes_by_step[STEPS // 3 : STEPS // 2])
        assert bytes_by_step[-1] - middle < GROWTH_BYTES, (name, bytes_by_step)
