"""A run on devices whose memory holds fewer tokens than a micro-batch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny_run

pytestmark = pytest.mark.real


@pytest.mark.slow
def test_micro_batches_that_exceed_the_memory_are_halved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, in steps of two parts: the run goes on with half, and is resumable where that doesn't fit either."""
    (tmp_path / "short_of_memory.py").write_text(
        "import os, torch\n"
        "from headway.trainer.losses import ppo_clip\n"
        "def loss(terms, settings):\n"
        "    if len(terms.logprobs_m) > int(os.environ['HOLDS']):\n"
        "        raise torch.OutOfMemoryError('CUDA out of memory')\n"
        "    return ppo_clip(terms, settings)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    tiny_run.write_inputs(tmp_path)
    config = tiny_run.write_experiment(
        tmp_path,
        run={"steps": 2, "seed": 7, "directory": str(tmp_path / "run")},
        algorithm={"loss": "short_of_memory:loss"},
        trainer={"micro_batch_tokens": 128, "devices": ["cpu:0", "cpu:1"], "shared_prefix": False},
        queue={"groups_per_step": 4, "budget": 2, "filter_zero_variance": False, "groups_per_part": 2},
        checkpoint={"every_steps": 1},
        rollout={"group_size": 8},
    )
    monkeypatch.setenv("HOLDS", "20")
    ended = tiny_run.train(config)
    assert ended.process.returncode == 1, ended.output
    assert "trainer.micro_batch_tokens = 64 don't fit in a device's memory" in ended.output
    assert "valid: at most 32" in ended.output
    monkeypatch.setenv("HOLDS", "50")
    resumed = tiny_run.train(config, "--resume")
    assert resumed.process.returncode == 0, resumed.output
    [event] = tiny_run.events_of(tmp_path / "run", "micro_batches_halved")
    assert "at most 64 from now on" in event.detail
    tiny_run.require_whole(tmp_path / "run", 2)
