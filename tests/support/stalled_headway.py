"""The `headway` command with a stall built in: ``python stalled_headway.py JOURNAL STALL train CONFIG ...``.

The limits of the watch are short_path, so that a stall is named within seconds, and every worker's name and process id
go to JOURNAL. STALL: ``none``, ``collective`` (rank 0 of the trainer skips those of a step), ``generator`` (stuck in
its 40th step), ``fakes`` and ``fakes-verifier`` (nothing is planted; trainer and generator are fakes, which start at
once; the verifier is one too, or is not). With STALL_LIMITS=real in the environment the limits are the real ones.
"""

from __future__ import annotations

import os
import sys
import threading

import faulty_headway

from headway.algorithms.samples import FlatBatch
from headway.cli.main import main
from headway.control.stalls import StallLimits
from headway.generator.service import GeneratorService
from headway.orchestrator import train
from headway.orchestrator.stalls.watch import WatchSettings
from headway.records.training import StepReport
from headway.trainer.service import TrainerService

SHORT = WatchSettings(tick_s=0.25, lag_s=2.0, limits=StallLimits(floor_s=3.0, unknown_s=8.0, fact_s=2.0, grace_s=5.0))


class SkippingTrainer(TrainerService):
    """A rank 0 that takes no part in the sums of its third step, as a branch on its own data may have it."""

    def train_step(self, batch: FlatBatch) -> StepReport:
        if self.ranks.rank == 0 and self.version == 2:
            self.ranks.size = 1
        return super().train_step(batch)


class StuckGenerator(GeneratorService):
    """A replica that never ends its 40th step."""

    def tick(self) -> bool:
        self.ticks = getattr(self, "ticks", 0) + 1
        if self.ticks == 40:
            wait_in_kernel()
        return super().tick()


def wait_in_kernel() -> None:
    """What a kernel that never ends looks like from Python: a call that doesn't return, the lock released."""
    threading.Event().wait()


def install(stall: str) -> None:
    if stall == "collective":
        import headway.trainer.client as client

        client.SERVICE = "stalled_headway:SkippingTrainer"
    elif stall == "generator":
        import headway.generator.routing.replica as replica

        replica._FACTORY = "stalled_headway:StuckGenerator"
    elif stall.startswith("fakes"):
        verifier = train.VerifierPool
        faulty_headway.use_fakes()
        if stall == "fakes-verifier":
            train.VerifierPool = verifier
    elif stall != "none":
        raise SystemExit(f"no such stall: {stall}")


if __name__ == "__main__":
    journal, wanted, *command = sys.argv[1:]
    faulty_headway.note_workers(journal)
    if os.environ.get("STALL_LIMITS") != "real":
        train.STALLS = SHORT
    install(wanted)
    sys.exit(main(command))
