"""What the orchestrator costs a trained sample: its own CPU time against a floor that is measured beside it.

    python benchmarks/orchestrator.py [--rounds 5] [--samples 4096] [--quick] [--only run|growth|tokens]

The real orchestrator, as `headway train` wires it (ledger, trace, live view), over real worker processes that replay
prepared tokens: groups of 8, 32 prompt and 128 response tokens, one turn, a delta every 16 tokens. Each round is a run
of its own and then the floor over as many samples (`parts/orchestrator_floor.py`): one encode of each token block, one
transaction a group, one frame for each replica and engine step that hands out tokens, one for each batch.

`growth_10k` compares what a sample costs with 10,000 open groups and with 100 (`parts/orchestrator_growth.py`): the
worse of two loads. `ns_per_token` and `bytes_per_token` are measured by `orchestrator_tokens.py`.

Wake-ups are passes of the event loop that had waited for something; system calls are counted in a round of their own,
which `strace` watches, where it is installed.

Last line, one JSON object: `cpu_over_floor`, `growth_10k`, `ns_per_token`, `bytes_per_token`; `cpu_us_per_sample`,
`floor_us_per_sample`, `wakeups_per_sample`, `passes_per_sample` (of the event loop), `switches_per_sample` (voluntary
context switches), `syscalls_per_sample`; `spread`: of the ratio over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import selectors
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator_tokens import token_costs
from parts.orchestrator_floor import floor_s
from parts.orchestrator_growth import cost_s
from parts.orchestrator_replay import PROMPT_TOKENS, RESPONSE_TOKENS, ReplayLauncher

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.generator.client import GeneratorPool
from headway.orchestrator.assembly import Actors, assemble
from headway.orchestrator.queue_snapshots import recording_snapshots
from headway.orchestrator.run import Run
from headway.orchestrator.task_sets import load_task_sets
from headway.orchestrator.train import start_observers
from headway.records.ledger import LedgerLine, StepRecord
from headway.rollout.verification.client import VerifierPool
from headway.runtime.clock import RealClock
from headway.runtime.garbage_collection import short_collections
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.ledger import Ledger
from headway.tokens.tokenizer import Tokenizer
from headway.tokens.tokenizer_training import train_byte_fallback_tokenizer
from headway.trainer.client import TrainerClient

GROUP, GROUPS_PER_STEP, REPLICAS, SLOTS = 8, 32, 2, 64
BATCH = GROUP * GROUPS_PER_STEP
DELTA_S = 0.04  # so 400 samples arrive in a second
TARGETS = {"cpu_over_floor": 4.0, "growth_10k": 1.3, "ns_per_token": 40.0, "bytes_per_token": 16.0}


class CountingSelector(selectors.EpollSelector):
    """Counts how often the loop asked for events, and how often it was given some after a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = self.wakeups = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.passes += 1
        self.wakeups += timeout is None or timeout > 0
        return super().select(timeout)


@dataclass(frozen=True)
class Mark:
    """Counters of this process at one moment."""

    samples: int
    cpu_s: float
    time_s: float
    passes: int
    wakeups: int
    switches: int

    def __sub__(self, other: Mark) -> Mark:
        return Mark(*(mine - theirs for mine, theirs in zip(self.all(), other.all(), strict=True)))

    def all(self) -> tuple[float, ...]:
        return self.samples, self.cpu_s, self.time_s, self.passes, self.wakeups, self.switches


class Watch:
    """Marks the counters after the warm-up and after ``samples`` more, then interrupts the run."""

    def __init__(self, selector: CountingSelector, samples: int, at: Callable[[bool], None]) -> None:
        self._selector = selector
        self._steps = max(1, samples // BATCH)
        self._at = at
        self._seen = self._samples = 0
        self.first: Mark | None = None
        self.last: Mark | None = None
        self.interrupt: Callable[[], None] = lambda: None

    def __call__(self, line: LedgerLine) -> None:
        if not isinstance(line, StepRecord) or self.last is not None:
            return
        self._seen += 1
        self._samples += line.samples
        if self._seen == 6:  # budget + 1, and one more
            self.first = self._mark()
            self._at(True)
        elif self.first is not None and self._seen == 6 + self._steps:
            self.last = self._mark()
            self._at(False)
            self.interrupt()

    def _mark(self) -> Mark:
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        one = self._selector
        return Mark(self._samples, time.process_time(), time.monotonic(), one.passes, one.wakeups, switches)


def prepare(folder: Path) -> None:
    """Tasks and a tokenizer; there is no model."""
    prompts = [f"{number:0{PROMPT_TOKENS}d}" for number in range(512)]
    alphabet = [f"{number:0{PROMPT_TOKENS}d}abcdefghijklmnopqrstuvwxyz+-= " for number in range(10)]
    train_byte_fallback_tokenizer(alphabet, 400, folder / "model", character_level=True)
    rows = [{"prompt": prompt, "answer": ""} for prompt in prompts]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def experiment(folder: Path, name: str, rollouts: str = "all") -> Experiment:
    """A run as a user would configure it, without evaluation. ``rollouts``: which are recorded."""
    return validate_experiment(
        {
            "run": {"directory": str(folder / name), "steps": 1_000_000},
            "model": {"path": str(folder / "model")},
            "tasks": {"train": {"path": str(folder / "tasks.jsonl"), "columns": {"answer": ""}}},
            "verifier": {"name": "regex", "parameters": {"pattern": "^"}},
            "rollout": {
                "group_size": GROUP,
                "max_prompt_tokens": PROMPT_TOKENS,
                "max_response_tokens": RESPONSE_TOKENS,
            },
            "generator": {"devices": ["cpu:0"] * REPLICAS, "slots": SLOTS},
            "queue": {"groups_per_step": GROUPS_PER_STEP, "budget": 4},
            "trainer": {"devices": ["cpu:1"]},
            "ledger": {"trackers": (), "rollouts": rollouts},
            "checkpoint": {"every_steps": 1_000_000},
            "evaluation": {"test": "never"},
        },
        "benchmark",
    )


async def wire(settings: Experiment, directory: RunDirectory, ledger: Ledger, stack: AsyncExitStack) -> Run:
    """As `headway.orchestrator.train.wire` does, over replaying workers."""
    clock = RealClock()
    launcher: Any = ReplayLauncher(clock, DELTA_S)
    observers = start_observers(settings, directory, ledger, clock, stack)

    def event(name: str, detail: str) -> None:
        run.context.event(name, detail)

    trainer = TrainerClient(launcher, settings, "orchestrator", log_directory=directory.logs)
    generator = GeneratorPool(launcher, settings, clock, on_event=event, log_directory=directory.logs)
    verifier = VerifierPool(launcher, settings.verifier, clock, log_folder=directory.logs, observe=observers.observe)
    actors = Actors(
        generator=generator,
        trainer=trainer,
        verifier=verifier,
        tokenizer=Tokenizer.load(settings.model.path),
        train_tasks=load_task_sets(settings)["train"],
        record=ledger.record,
        observe=observers.observe,
        recorder=observers.recorder,
    )
    run = assemble(settings, actors, clock, directory.buffer, stack)
    for actor in (trainer, generator, verifier):
        stack.push_async_callback(actor.stop)
    await asyncio.gather(trainer.start(), generator.start(), verifier.start())
    if observers.observe is not None:

        def workers() -> list[Any]:
            return [*generator.worker_states, *trainer.worker_states, *verifier.worker_states]

        await stack.enter_async_context(
            recording_snapshots(run.context, observers.observe, generator.activity, workers)
        )
    return run


def one_run(
    folder: Path, name: str, samples: int, at: Callable[[bool], None] = lambda begins: None, rollouts: str = "all"
) -> Mark:
    """What ``samples`` trained samples cost this process. ``at`` is told when they begin and end."""
    selector = CountingSelector()
    watch = Watch(selector, samples, at)

    async def main() -> None:
        settings = experiment(folder, name, rollouts)
        directory = RunDirectory(settings.run.directory)
        directory.begin(settings, resume=False)
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(short_collections(RealClock()))
                ledger = stack.enter_context(Ledger(directory.path, RealClock()))
                ledger.subscribe(watch)
                run = await wire(settings, directory, ledger, stack)
                watch.interrupt = run.interrupt
                await run.begin()
                await run.train()
                await run.conclude()
        finally:
            directory.release()

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(main())
    shutil.rmtree(folder / name)
    assert watch.first is not None
    assert watch.last is not None
    return watch.last - watch.first


def syscalls(folder: Path, samples: int) -> tuple[float, str] | None:
    """System calls of this process a sample, and the most frequent; None where nothing can count them."""
    if shutil.which("strace") is None:
        return None
    table = folder / "strace"
    tracer: list[subprocess.Popen[bytes]] = []

    def at(begins: bool) -> None:
        if begins:
            command = ["strace", "-c", "-S", "calls", "-o", str(table), "-p", str(os.getpid())]
            tracer.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        else:
            tracer[0].terminate()

    found = one_run(folder, "traced", samples, at)
    tracer[0].wait()
    rows = re.findall(r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)(?:\s+\d+)?\s+(\w+)$", table.read_text(), re.MULTILINE)
    counts = {name: int(calls) / found.samples for calls, name in rows if name != "total"}
    if not counts:
        return None
    return sum(counts.values()), ", ".join(f"{name} {count:.2f}" for name, count in list(counts.items())[:10])


def measure_run(rounds: int, samples: int) -> dict[str, Any]:
    """Rounds of a run and the floor."""
    ratios: list[float] = []
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for number in range(rounds):
            spent = one_run(folder, f"run-{number}", samples)
            floor = floor_s(
                samples, group=GROUP, groups_per_step=GROUPS_PER_STEP, slots=SLOTS, frame_s=DELTA_S / REPLICAS
            )
            per_sample = {
                "cpu_us_per_sample": 1e6 * spent.cpu_s / spent.samples,
                "floor_us_per_sample": 1e6 * floor,
                "wakeups_per_sample": spent.wakeups / spent.samples,
                "passes_per_sample": spent.passes / spent.samples,
                "switches_per_sample": spent.switches / spent.samples,
                "samples_per_s": spent.samples / spent.time_s,
            }
            ratios.append(per_sample["cpu_us_per_sample"] / per_sample["floor_us_per_sample"])
            found.append(per_sample)
            line = ", ".join(f"{key} {value:.3g}" for key, value in per_sample.items())
            print(f"round {number + 1}: {ratios[-1]:.2f} x the floor; {line}", flush=True)
        calls = syscalls(folder, min(samples, 2048))
    if calls is not None:
        print(f"system calls per sample: {calls[0]:.2f} ({calls[1]})", flush=True)
    medians = {key: round(statistics.median(one[key] for one in found), 3) for key in found[0]}
    spread = [round(min(ratios), 2), round(max(ratios), 2)]
    calls_per_sample = None if calls is None else round(calls[0], 3)
    ratio = round(statistics.median(ratios), 2)
    return {"cpu_over_floor": ratio, "spread": spread, **medians, "syscalls_per_sample": calls_per_sample}


def measure_growth(rounds: int, steps: int, many: int) -> dict[str, Any]:
    """The worse load's ratio."""
    found: dict[str, float] = {}
    for load in ("waiting", "buffered"):
        few = [cost_s(load, 100, steps) for _ in range(max(1, rounds))]
        lots = [cost_s(load, many, steps) for _ in range(max(1, rounds // 2))]
        found[load] = statistics.median(lots) / statistics.median(few)
        times = f"{1e6 * statistics.median(lots):.0f} us a sample with {many} open groups, "
        times += f"{1e6 * statistics.median(few):.0f} us with 100"
        print(f"growth, {load}: {found[load]:.2f} ({times})", flush=True)
    return {"growth_10k": round(max(found.values()), 2), **{f"growth_{k}": round(v, 2) for k, v in found.items()}}


def measure_tokens() -> dict[str, Any]:
    """Nanoseconds and bytes of a token between an engine's delta and the trainer's batch."""
    costs = token_costs()
    return {key: costs[key] for key in ("ns_per_token", "bytes_per_token")}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4096, help="trained samples of a round")
    parser.add_argument("--steps", type=int, default=15, help="steps of each growth measurement")
    parser.add_argument("--many", type=int, default=10_000, help="open groups that are compared with 100")
    parser.add_argument("--only", choices=("run", "growth", "tokens"))
    parser.add_argument("--quick", action="store_true", help="one short round of everything: does it work?")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.rounds, chosen.samples, chosen.steps, chosen.many = 1, 512, 2, 200
    found: dict[str, Any] = {}
    if chosen.only in (None, "tokens"):
        found |= measure_tokens()
    if chosen.only in (None, "run"):
        found |= measure_run(chosen.rounds, chosen.samples)
    if chosen.only in (None, "growth"):
        found |= measure_growth(chosen.rounds, chosen.steps, chosen.many)
    for name, target in TARGETS.items():
        if name in found:
            print(f"{name}: {found[name]} (target: at most {target:g})")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
