"""The `headway` command with a fault built in: ``python faulty_headway.py JOURNAL FAULT train CONFIG ...``.

FAULT is ``none`` or ``POINT:N`` (in the trainer also several, one per life, with commas): at the N-th passage of the
point the process is ended by SIGKILL, as a crash would, in the very middle of things. Every worker's name and process
id go to JOURNAL, and the fault when it strikes. ``stale-head`` and others: the replicas are those of faulty_vllm.py.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from headway.cli.main import main
from headway.runtime.workers import LocalLauncher

# point -> (module, class, method, before or after it): in the orchestrator's process
POINTS: dict[str, tuple[str, str, str, str]] = {
    "group-admitted": ("headway.buffer.store", "GroupBuffer", "admit", "after"),
    "group-finished": ("headway.buffer.store", "GroupBuffer", "finish_group", "after"),
    "batch-committed": ("headway.buffer.store", "GroupBuffer", "commit_batch", "after"),  # its step has not begun
    "parked": ("headway.buffer.store", "GroupBuffer", "park", "after"),
    "step-computed": ("headway.buffer.store", "GroupBuffer", "complete_step", "before"),  # the trainer has, the log not
    "step-completed": ("headway.buffer.store", "GroupBuffer", "complete_step", "after"),
    "published": ("headway.generator.client", "GeneratorPool", "update_weights", "before"),  # nobody has applied it
    "applied": ("headway.generator.client", "GeneratorPool", "update_weights", "after"),
    "log-durable": ("headway.buffer.store", "GroupBuffer", "make_durable", "after"),
    "checkpoint-written": ("headway.buffer.store", "GroupBuffer", "release_covered", "before"),
    "candidate-saved": ("headway.orchestrator.evaluation", "Evaluations", "_keep_as_best", "before"),
    "renamed": ("pathlib", "Path", "rename", "after"),  # while best/ is replaced: best -> best.old, candidate -> best
}
# faults in the trainer's process: see faulty_trainer.py; "all-..." also ends the orchestrator
TRAINER_POINTS = (
    "checkpoint-files",
    "checkpoint-rename",
    "checkpoint-pruning",
    "training",
    "accumulating",
    "valuing",
    "committing",
    "publishing",
)


REPLICAS = {
    "stale-head": "StaleHead",
    "wrong-rope": "WrongRope",
    "stale-layer": "StaleLayer",
    "lost-pictures": "LostPictures",
}
# ... where the trainer is a fake: the same passages of trainer/checkpoints.py
THIN_POINTS = {
    "published": ("headway.generator.fake", "FakeGenerator", "update_weights", "before"),
    "applied": ("headway.generator.fake", "FakeGenerator", "update_weights", "after"),
    "checkpoint-files": ("headway.trainer", "checkpoints", "checksum_of", "before"),
    "checkpoint-rename": ("pathlib", "Path", "rename", "before"),
    "checkpoint-pruning": ("headway.trainer", "checkpoints", "_remove", "before"),
}


def strike(journal: str, fault: str) -> None:
    """Say so, then die."""
    with open(journal, "a") as file:
        file.write(f"fault {fault}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def install(journal: str, fault: str) -> None:
    name, _, count = fault.partition(":")
    if name.startswith("thin-"):
        use_fakes()
        point = name.removeprefix("thin-")
        if point != "none":
            _wrap(journal, fault, *(POINTS | THIN_POINTS)[point], int(count or 1))
    elif name in POINTS:
        _wrap(journal, fault, *POINTS[name], int(count or 1))
    elif name.removeprefix("all-") in TRAINER_POINTS:
        import headway.trainer.client as client

        client.SERVICE = "faulty_trainer:FaultyTrainer"
        Path(journal).with_suffix(".trainer").write_text("\n".join([journal, *fault.split(",")]))
    elif name in REPLICAS:
        import headway.generator.routing.replica as replica

        replica._FACTORY = f"faulty_vllm:{REPLICAS[name]}"
    elif name != "none":
        raise SystemExit(f"no such fault: {fault}")


def use_fakes() -> None:
    """Put fakes in the place of the processes that `headway train` starts."""
    from headway.generator.fake import FakeGenerator
    from headway.orchestrator import train
    from headway.rollout.fake import FakeVerifier
    from headway.runtime.clock import RealClock
    from headway.trainer.fake import FakeTrainer

    clock, wired = RealClock(), cast("Any", train)
    wired.TrainerClient = lambda launcher, experiment, identity, **_: FakeTrainer(clock, 0.001)
    wired.GeneratorPool = lambda launcher, experiment, clock, **_: FakeGenerator(
        clock, slots=experiment.generator.slots, token_s=0.001
    )
    wired.VerifierPool = lambda launcher, settings, clock, **_: FakeVerifier(lambda task, text: len(text) % 2, clock)


def _wrap(journal: str, fault: str, module: str, owner: str, method: str, when: str, count: int) -> None:
    cls: Any = getattr(__import__(module, fromlist=[owner]), owner)
    original: Callable[..., Any] = getattr(cls, method)
    passages = 0

    def passed() -> None:
        nonlocal passages
        passages += 1
        if passages == count:
            strike(journal, fault)

    if when == "before":

        def wrapped(*args: Any, **named: Any) -> Any:
            passed()
            return original(*args, **named)
    elif method == "update_weights":

        async def wrapped(*args: Any, **named: Any) -> Any:
            result = await original(*args, **named)
            passed()
            return result
    else:

        def wrapped(*args: Any, **named: Any) -> Any:
            result = original(*args, **named)
            passed()
            return result

    setattr(cls, method, wrapped)


def note_workers(journal: str) -> None:
    """Write the process id of every worker to the journal."""
    original = LocalLauncher.start

    def note(line: str) -> None:
        with open(journal, "a") as file:
            file.write(line + "\n")

    async def start(self: LocalLauncher, spec: Any) -> Any:
        worker = await original(self, spec)
        note(f"worker {spec.name} {worker.pid}")
        return worker

    LocalLauncher.start = start  # type: ignore[method-assign]


if __name__ == "__main__":
    journal_path, wanted, *command = sys.argv[1:]
    note_workers(journal_path)
    install(journal_path, wanted)
    sys.exit(main(command))
