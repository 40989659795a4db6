"""The fake trainer keeps the real one's rules, in virtual time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_trainer import make_batch

from headway.runtime.clock import VirtualClock, run_virtual
from headway.trainer.checkpoints import checkpoint_path, verify
from headway.trainer.fake import FakeTrainer


def test_steps_take_virtual_time_and_versions_count_completed_ones(tmp_path: Path) -> None:
    async def main(clock) -> None:
        trainer = FakeTrainer(clock, 0.5, publish_s=1.0, skip_steps=frozenset({1}))
        await trainer.start()
        report = await trainer.train_step(make_batch(0))
        assert (report.version, report.samples, clock.now()) == (1, 12, 6.0)
        assert (await trainer.train_step(make_batch(0, step=1))).skipped
        assert not (await trainer.train_step(make_batch(0, step=1))).skipped
        assert (await trainer.publish(2)).version == 2
        assert clock.now() == 19.0
        path = str(checkpoint_path(tmp_path, 2))
        await trainer.save_checkpoint(path, {0: [0], 1: [1]})
        await trainer.restart()
        with pytest.raises(ValueError, match="version 0"):
            await trainer.train_step(make_batch(0, step=2))
        assert await trainer.load_checkpoint(path) == 2
        assert verify(path).consumed == {0: [0], 1: [1]}

    run_virtual(main)


def test_step_time_may_be_a_function_of_the_batch() -> None:
    async def main(clock: VirtualClock) -> None:
        await FakeTrainer(clock, lambda batch: 3.0).train_step(make_batch(0))
        assert clock.now() == 3.0

    run_virtual(main)


def test_client_fake_and_checkpoints_need_no_torch() -> None:
    code = (
        "import sys, headway.trainer.client, headway.trainer.fake, headway.trainer.checkpoints; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
