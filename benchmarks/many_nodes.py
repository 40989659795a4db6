"""What an event costs the orchestrator with many nodes, of which some fail, against few.

    python benchmarks/many_nodes.py [--rounds 3] [--nodes 256] [--few 16] [--hours 0.5] [--lost-per-hour 0.05]

The real loops, rules, buffer, pool and router over fake workers in virtual time: one generator replica a node, and work
in proportion to the nodes. Every hour a share of the nodes fails, in turn for good or for two minutes: a node that
comes back has its replica restarted, another takes the place of one that doesn't (`GeneratorPool.join`). An *event* is
a message of a replica: what its requests have sampled in 8 s, or the ends of some. The time that the fakes take is
measured and left out. Few nodes run for longer, so that both sides count as many events, and the rounds of both sides
alternate.

Books balance when at the end every admitted rollout has ended once (`buffer.audit`), at every size and in every round.

Last line, one JSON object: `cpu_per_event_256_over_16` (medians), `spread` (of the rounds' ratios), `books_balance`,
`nodes_lost`, `nodes_joined`, `events`, `cpu_us_per_event` by nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parts.fakes import FakeLauncher, FakeWorker, fake_worker
from parts.orchestrator_growth import apart_from_fakes

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.generator.client import GeneratorPool
from headway.generator.fake_replica import ReplicaCosts
from headway.orchestrator.assembly import Actors, assemble
from headway.records.errors import HeadwayError
from headway.records.generation import GenerationRequest
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.records.rollout import Verdict
from headway.records.task import Task
from headway.rollout.fake import FakeVerifier
from headway.runtime.clock import Clock, run_virtual
from headway.runtime.devices import parse_device
from headway.runtime.nodes.node import NodeLost
from headway.runtime.workers import WorkerSpec
from headway.trainer.fake import FakeTrainer

SIZE, SLOTS = 4, 8  # rollouts of a group; slots of a node's replica, half of which generate at a time
TOKENS, TOKEN_S, DELTA_S = 128, 0.5, 8.0
AWAY_S, REPLACED_S = 120.0, 60.0  # until a node is back; until another is there in its place
TARGET = 1.3
_TASKS = 500


class Tokenizer:
    """Prompts of 32 tokens, a different one for each task."""

    stop_ids = (1,)

    def render(self, prompt: Any, template: str) -> tuple[int, ...]:
        number = int(prompt if isinstance(prompt, str) else prompt[0]["content"])
        return (2 + number, *range(2, 33))

    def decode(self, ids: Any) -> str:
        return "text"


class NodesLauncher(FakeLauncher):
    """Starts workers on nodes that fail."""

    def __init__(self, clock: Clock, costs: ReplicaCosts, **options: Any) -> None:
        super().__init__(clock, costs, **options)
        self.gone: set[str] = set()
        self.back_s: dict[str, float] = {}
        self.on_node: dict[str, FakeWorker] = {}

    async def start(self, spec: WorkerSpec) -> FakeWorker:
        """A worker, once its node is there. Raises NodeLost for one that is gone for good."""
        node = parse_device(spec.device).node
        if node in self.gone:
            raise NodeLost(f"node {node} has not come back")
        await self.clock.sleep(max(0.0, self.back_s.get(node, 0.0) - self.clock.now()))
        worker = self.on_node[node] = await super().start(spec)
        return worker


@dataclass(frozen=True)
class Found:
    """What a run cost, and what became of its nodes and books."""

    cpu_s: float
    events: int
    lost: int
    joined: int
    steps: int
    complaints: list[str]

    @property
    def cpu_us(self) -> float:
        """CPU of an event, microseconds."""
        return 1e6 * self.cpu_s / self.events


def experiment(folder: Path, nodes: int, hours: float) -> Experiment:
    """A run that trains on a group for each node in every step."""
    names = [f"n{number}" for number in range(nodes)]
    return validate_experiment(
        {
            "run": {"directory": str(folder), "steps": 1_000_000, "time_limit_s": 3600 * hours},
            "model": {"path": "none"},
            "tasks": {"train": {"path": "none"}},
            "evaluation": {"test": "never"},
            "checkpoint": {"every_steps": 1_000_000},
            "rollout": {"group_size": SIZE, "max_response_tokens": TOKENS, "timeout_s": 3600},
            "cluster": {"address": "127.0.0.1:0", "nodes": names},
            "generator": {"slots": SLOTS, "devices": [f"{name}/cpu:0" for name in names]},
            "queue": {"groups_per_step": nodes, "budget": 1, "max_concurrent_rollouts": SIZE * nodes},
        },
        "benchmark",
    )


def run(nodes: int, hours: float, lost_per_hour: float, seed: int) -> Found:
    """One run to its end."""
    with apart_from_fakes() as apart, tempfile.TemporaryDirectory() as folder:
        return run_virtual(lambda clock: _run(clock, Path(folder), nodes, hours, lost_per_hour, seed, apart))


class Failures:
    """Nodes that fail in turn for good, and are replaced, or for a while."""

    def __init__(
        self,
        clock: Clock,
        pool: GeneratorPool,
        launcher: NodesLauncher,
        nodes: int,
        lost_per_hour: float,
        draw: random.Random,
    ) -> None:
        self.lost = 0
        self._clock, self._pool, self._launcher, self._draw = clock, pool, launcher, draw
        self._per_s = nodes * lost_per_hour / 3600
        self._newcomers = itertools.count(nodes)

    async def loop(self) -> None:
        """Runs until it is cancelled."""
        replacing: list[asyncio.Task[None]] = []
        try:
            while True:
                await self._clock.sleep(self._draw.expovariate(self._per_s))
                node, worker = self._draw.choice(sorted((n, w) for n, w in self._launcher.on_node.items() if w.alive))
                self.lost += 1
                if self.lost % 2:
                    self._launcher.gone.add(node)
                    replacing.append(asyncio.create_task(self._replace()))
                else:
                    self._launcher.back_s[node] = self._clock.now() + AWAY_S
                worker.kill(f"node {node} is lost")
        finally:
            for task in replacing:
                task.cancel()

    async def _replace(self) -> None:
        await self._clock.sleep(REPLACED_S)
        await self._pool.join(f"n{next(self._newcomers)}/cpu:0")


async def _run(
    clock: Clock, folder: Path, nodes: int, hours: float, lost_per_hour: float, seed: int, apart: Any
) -> Found:
    settings = experiment(folder, nodes, hours)
    lines: list[LedgerLine] = []
    counts = {"events": 0, "joined": 0}
    verdicts = itertools.count()

    def length_of(request: GenerationRequest) -> int:
        return 1 + (request.sampling.seed * 2654435761) % TOKENS

    def reward(task: Task, text: str) -> Verdict:
        solved = bool(next(verdicts) % 2)
        return Verdict(reward=float(solved), solved=solved)

    def on_event(name: str, detail: str, /, **fields: Any) -> None:
        counts["joined"] += name in ("generator_joined", "generator_restarted")
        lines.append(EventRecord(event=name, detail=detail))

    costs = ReplicaCosts(token_s=TOKEN_S, slots=SLOTS)
    launcher = NodesLauncher(clock, costs, length_of=length_of, update_s=0.5)
    pool = GeneratorPool(launcher, settings, clock, on_event=on_event)
    absorb = pool._router.absorb  # pyright: ignore[reportPrivateUsage]

    def counted(replica: Any, data: Any) -> None:
        counts["events"] += 1
        absorb(replica, data)

    pool._router.absorb = counted  # type: ignore[method-assign]
    trainer = FakeTrainer(clock, lambda batch: 10.0, publish_s=1.0, keep_batches=False)
    actors = Actors(
        generator=pool,
        trainer=trainer,
        verifier=FakeVerifier(reward, clock),
        tokenizer=Tokenizer(),
        train_tasks=[Task(task_id=str(i), prompt=str(i)) for i in range(_TASKS)],
        record=lines.append,
    )
    failures = Failures(clock, pool, launcher, nodes, lost_per_hour, random.Random(seed))

    with ExitStack() as stack:
        whole = assemble(settings, actors, clock, folder / "buffer.db", stack)
        for actor in (pool, trainer, actors.verifier):
            await actor.start()
        await whole.begin()
        before_s = time.process_time() - apart.spent_s
        failing = asyncio.create_task(failures.loop())
        await whole.train()
        spent_s = time.process_time() - apart.spent_s - before_s
        failing.cancel()
        await asyncio.gather(failing, return_exceptions=True)
        complaints: list[str] = []
        try:
            await whole.conclude()
        except HeadwayError as error:
            complaints.append(str(error))
        complaints += whole.context.buffer.audit()
        with contextlib.suppress(HeadwayError):
            await pool.stop()
    steps = sum(isinstance(line, StepRecord) for line in lines)
    return Found(spent_s, counts["events"], failures.lost, counts["joined"], steps, complaints)


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--few", type=int, default=16)
    parser.add_argument("--hours", type=float, default=0.5, help="virtual, with many nodes")
    parser.add_argument("--lost-per-hour", type=float, default=0.05, help="share of the nodes")
    chosen = parser.parse_args(arguments)
    fake_worker.STREAM_INTERVAL_S = DELTA_S
    many, few = chosen.nodes, chosen.few
    found: dict[int, list[Found]] = {few: [], many: []}
    for number in range(chosen.rounds):
        for nodes in (few, many):
            one = run(nodes, chosen.hours * many / nodes, chosen.lost_per_hour, number)
            found[nodes].append(one)
            says = f"round {number + 1}, {nodes} nodes: {one.cpu_us:.0f} us an event, {one.events} events, "
            says += f"{one.steps} steps, {one.lost} nodes lost, {one.joined} back or in their place"
            print(says, *one.complaints, sep="\n  ", flush=True)
    ratios = [large.cpu_us / small.cpu_us for small, large in zip(found[few], found[many], strict=True)]
    medians = {nodes: statistics.median(one.cpu_us for one in rounds) for nodes, rounds in found.items()}
    ratio = medians[many] / medians[few]
    print(f"CPU of an event, {many} nodes over {few}: {ratio:.2f} (target: at most {TARGET:g})")
    everything = [one for rounds in found.values() for one in rounds]
    result = {
        f"cpu_per_event_{many}_over_{few}": round(ratio, 2),
        "spread": [round(min(ratios), 2), round(max(ratios), 2)],
        "books_balance": not any(one.complaints for one in everything),
        "nodes_lost": sum(one.lost for one in everything),
        "nodes_joined": sum(one.joined for one in everything),
        "events": sum(one.events for one in everything),
        "cpu_us_per_event": {str(nodes): round(cost, 1) for nodes, cost in medians.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
