"""Weights of policies in simulators: equal, bit for bit, wherever the stages run, also when every lane is lost once."""

from __future__ import annotations

from pathlib import Path

import pytest
from embodied_runs import digest, walk_experiment

from headway.embodied.block import seed_of
from headway.embodied.driver import train
from headway.records.ledger import StepRecord
from headway.telemetry.ledger import read_ledger

STEPS, LANES, FRAGMENT_STEPS, SEED = 20, 16, 24, 3
DIES_AT = 7 * FRAGMENT_STEPS + 10  # in the middle of a fragment
PLACEMENTS: dict[str, tuple[list[str], list[str]]] = {
    "spatial, one worker": (["cpu:0"], ["cpu:1"]),
    "temporal, one worker": (["cpu:0"], ["cpu:0"]),
    "hybrid, two workers": (["cpu:0", "cpu:1"], ["cpu:1"]),
    "hybrid on the first core, two workers": (["cpu:0", "cpu:1"], ["cpu:0"]),
}


def trained(directory: Path, block_lanes: int, placement: str, *, is_mortal: bool = True) -> str:
    """The digest of a run's last checkpoint."""
    simulators, learner = PLACEMENTS[placement]
    blocks = LANES // block_lanes
    first_seeds = [seed_of(SEED, block, 0, 0, 0) for block in range(blocks)]
    experiment = walk_experiment(
        directory,
        run={"steps": STEPS, "seed": SEED},
        simulator={
            "lanes": LANES,
            "block_lanes": block_lanes,
            "steps_per_fragment": FRAGMENT_STEPS,
            "devices": simulators,
            "arguments": {"mortal": first_seeds if is_mortal else [], "dies_at": DIES_AT},
        },
        trainer={"devices": learner},
        checkpoint={"every_steps": STEPS},
    )
    summary = train(experiment)
    assert (summary.steps, summary.accounting_balanced) == (STEPS, True)
    steps = [line for line in read_ledger(directory) if isinstance(line, StepRecord)]
    last = steps[-1].episodes
    assert last is not None
    assert last.rebuilt == (blocks if is_mortal else 0)
    assert [step.version for step in steps if step.episodes and step.episodes.rebuilt] == (
        list(range(8, STEPS + 1)) if is_mortal else []
    )
    assert 0 < last.success_rate < 1  # some episodes are terminated, others truncated
    return digest(directory, STEPS)


@pytest.mark.real
@pytest.mark.parametrize("block_lanes", [4, 8])
def test_weights_are_equal_in_every_placement_with_a_refill(block_lanes: int, tmp_path: Path):
    digests = {name: trained(tmp_path / str(index), block_lanes, name) for index, name in enumerate(PLACEMENTS)}
    assert len(set(digests.values())) == 1, digests
    undisturbed = trained(tmp_path / "undisturbed", block_lanes, "spatial, one worker", is_mortal=False)
    assert undisturbed not in digests.values()
