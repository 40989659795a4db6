"""The load of the pipeline benchmark: model, tasks, forced lengths, and each side's closed loop alone."""

from __future__ import annotations

import asyncio
import json
import math
import random
import subprocess
import sys
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, quantiles
from typing import TypeVar

import msgspec
import numpy as np

from headway.algorithms.groups.batches import build_batch
from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.generator.client import GeneratorPool
from headway.records.clients import Watch
from headway.records.generation import GenerationRequest, GenerationResult
from headway.records.rollout import FinishedGroup, Group, Rollout
from headway.records.training import TrainBatch
from headway.rollout.makers.single_turn import SingleTurn
from headway.rollout.makers.turn_sampler import Generate, TurnSampler
from headway.rollout.seeds import rollout_seed
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.tasks.cursor import TaskCursor
from headway.tasks.sources import load_tasks
from headway.tokens.tokenizer import Tokenizer
from headway.trainer.client import TrainerClient
from parts.pipeline_machine import Usage, between, snapshot

T = TypeVar("T")

GROUP = 8
GROUPS_PER_STEP = 8
BATCH = GROUP * GROUPS_PER_STEP
SOLVED = "solved"  # the verifier of tasks that every attempt solves


@dataclass(frozen=True)
class Shape:
    """What is generated and trained."""

    layers: int
    width: int
    heads: int
    intermediate: int
    prompt_tokens: int
    median_tokens: int  # of a response
    spread: float  # standard deviation of the logarithm of its length
    longest_tokens: int
    uniform: float = 0.0  # share of the tasks that every attempt solves: generated, verified and filtered

    def length(self, seed: int) -> int:
        """The forced length of the response sampled under ``seed``: log-normal, capped."""
        uniform = (random.Random(seed).getrandbits(52) + 0.5) / 2**52
        drawn = self.median_tokens * math.exp(self.spread * NormalDist().inv_cdf(uniform))
        return min(self.longest_tokens, max(1, round(drawn)))

    def lengths(self, seed: int, groups: range) -> list[int]:
        return [self.length(rollout_seed(seed, group, member)) for group in groups for member in range(GROUP)]

    def p99_over_median(self) -> float:
        """Of 20,000 drawn lengths."""
        drawn = quantiles((self.length(seed) for seed in range(20_000)), n=100)
        return drawn[98] / drawn[49]

    def force(self, generate: Generate) -> Generate:
        """``generate`` with every response as long as its seed says."""

        def forced(request: GenerationRequest, watch: Watch | None = None, /) -> Awaitable[GenerationResult]:
            sampling = msgspec.structs.replace(
                request.sampling, max_tokens=self.length(request.sampling.seed), stop_token_ids=(), stop=()
            )
            return generate(msgspec.structs.replace(request, sampling=sampling), watch)

        return forced


def prepare(folder: Path, shape: Shape) -> float:
    """Write tasks and a randomly initialised model into ``folder``; returns its million parameters."""
    rng = random.Random(0)
    prompts = ["".join(rng.choices("0123456789+-= abcdef", k=shape.prompt_tokens)) for _ in range(512)]
    tasks = folder / "tasks.jsonl"
    solved = round(shape.uniform * len(prompts))
    kinds = [{"verifier": SOLVED}] * solved + [{}] * (len(prompts) - solved)
    rows = [{"prompt": prompt, **kind} for prompt, kind in zip(prompts, kinds, strict=True)]  # the cursor shuffles
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {
        "layers": shape.layers,
        "width": shape.width,
        "heads": shape.heads,
        "kv-heads": shape.heads // 2,
        "intermediate": shape.intermediate,
        "max-positions": shape.prompt_tokens + shape.longest_tokens + 8,
    }
    model = folder / "model"
    options = [f"--{name}={value}" for name, value in sizes.items()]
    command = ["init-model", str(model), "--texts", str(tasks), "--character-level", *options]
    # In a process of its own: the orchestrator, which is this process, never loads torch.
    subprocess.run([sys.executable, "-m", "headway.cli.main", *command], check=True, stdout=subprocess.DEVNULL)
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) / 4e6  # float32


@dataclass(frozen=True)
class Placement:
    """Where the two sides compute, and how many requests each replica holds."""

    generator: tuple[str, ...]
    trainer: tuple[str, ...]
    slots: int

    def __str__(self) -> str:
        """Replicas and slots, and the cores of the generator and of the trainer: ``1 x 64 slots on 0|1``."""
        return f"{len(self.generator)} x {self.slots} slots on {_cores(self.generator)}|{_cores(self.trainer)}"


def _cores(devices: Sequence[str]) -> str:
    return ",".join(device.removeprefix("cpu:") for device in devices)


def apart(slots: int) -> Placement:
    """One core each."""
    return Placement(("cpu:0",), ("cpu:1",), slots)


def experiment(
    folder: Path,
    name: str,
    shape: Shape,
    *,
    placement: Placement,
    budget: int,
    steps: int,
    update_mode: str = "keep",
) -> Experiment:
    """One variant's experiment: policy wait, everything else as in a real run."""
    return validate_experiment(
        {
            "run": {"directory": str(folder / name), "steps": steps},
            "model": {"path": str(folder / "model")},
            "tasks": {"train": {"path": str(folder / "tasks.jsonl"), "columns": {"answer": ""}}},
            # Half of the random responses end in a low digit: rewards, advantages and gradients are not all zero.
            "verifier": {"name": "regex", "parameters": {"pattern": "[0-4][^0-9]*$"}},
            "verifiers": {SOLVED: {"name": "regex", "parameters": {"pattern": "^"}}},
            "rollout": {
                "group_size": GROUP,
                "max_prompt_tokens": shape.prompt_tokens,
                "max_response_tokens": shape.longest_tokens,
            },
            "generator": {"devices": placement.generator, "slots": placement.slots, "update_mode": update_mode},
            "queue": {
                "groups_per_step": GROUPS_PER_STEP,
                "budget": budget,
                "overdue": "wait",
            },
            "trainer": {"devices": placement.trainer},
            "evaluation": {"test": "never"},
        },
        "benchmark",
    )


@dataclass(frozen=True)
class Rate:
    """A measured closed loop."""

    per_s: float  # samples
    usage: Usage


class Production:
    """The generator alone: as many rollouts in flight as the system would have, each replaced when it ends."""

    def __init__(self, settings: Experiment, shape: Shape) -> None:
        self._shape = shape
        self._clock = RealClock()
        self.pool = GeneratorPool(LocalLauncher(self._clock), settings, self._clock, log_directory=logs(settings))
        self._tokenizer = Tokenizer.load(settings.model.path)
        self._tasks = TaskCursor(load_tasks(settings.tasks.train, settings.run.seed), settings.run.seed)
        self._settings = settings
        generate, seed = shape.force(self.pool.generate), settings.run.seed
        sampler = TurnSampler(generate, self._tokenizer, settings.rollout, self._clock, run_seed=seed)
        self._rollouts = SingleTurn(sampler)
        self._groups: list[Group] = []
        self._next = 0
        self.finished: dict[int, list[Rollout]] = {}
        self.count = 0
        self._changed = asyncio.Event()

    async def loop(self) -> None:
        """Generate until cancelled."""
        async with asyncio.TaskGroup() as lanes:
            for _ in range(self._settings.concurrent_rollouts):
                lanes.create_task(self._lane())

    async def _lane(self) -> None:
        while True:
            index, member = divmod(self._next, GROUP)
            self._next += 1
            rollout = await self._rollouts.generate_member(self._group(index), member)
            if rollout.failure is not None:
                raise RuntimeError(rollout.failure.cause)
            self.finished.setdefault(index, []).append(rollout)
            self.count += 1
            self._changed.set()

    def _group(self, index: int) -> Group:
        while len(self._groups) <= index:
            task = self._tasks.next()
            prompt_ids = self._tokenizer.render(task.prompt, self._settings.model.template)
            group = Group(
                index=len(self._groups),
                task=task,
                prompt_ids=prompt_ids,
                size=GROUP,
                admitted_version=0,
                admitted_s=self._clock.now(),
            )
            self._groups.append(group)
        return self._groups[index]

    async def reach(self, count: int) -> None:
        """Wait until ``count`` rollouts have finished."""
        while self.count < count:
            self._changed.clear()
            await self._changed.wait()

    async def whole(self, groups: range) -> list[FinishedGroup]:
        """The finished groups of this range, waited for."""
        while any(len(self.finished.get(index, ())) < GROUP for index in groups):
            self._changed.clear()
            await self._changed.wait()
        return [
            FinishedGroup(
                group=self._groups[index],
                rollouts=tuple(_rewarded(r) for r in sorted(self.finished[index], key=lambda r: r.member)),
            )
            for index in groups
        ]

    async def tokens(self) -> int:
        return (await self.pool.statistics())[0].generated_tokens


def _rewarded(rollout: Rollout) -> Rollout:
    """A coin for a reward, like the verifier's."""
    return msgspec.structs.replace(rollout, reward=float(sum(rollout.response_ids) % 2))


async def alone_production(settings: Experiment, shape: Shape, groups: range) -> tuple[Rate, list[TrainBatch]]:
    """Rate of the generator alone over about as many rollouts as ``groups`` has, and the batches of those groups that
    can be trained on; only their samples count.

    Counted in tokens and divided by the groups' own mean length, so that which of the long ones happened to end
    inside the window doesn't matter.
    """
    side = Production(settings, shape)
    await side.pool.start()
    loop = asyncio.create_task(side.loop())
    try:
        await _or_failure(loop, side.reach(groups.start * GROUP))
        start, tokens = snapshot(), await side.tokens()
        await _or_failure(loop, side.reach(groups.stop * GROUP))
        end, tokens = snapshot(), await side.tokens() - tokens
        finished = await _or_failure(loop, side.whole(groups))
    finally:
        await _cancelled(loop)
        await side.pool.stop()
    usage = between(start, end)
    trainable = [group for group in finished if group.group.task.verifier != SOLVED]
    samples = tokens / mean_length(finished) * (1 - shape.uniform)
    return Rate(samples / usage.seconds, usage), batches_of(trainable, settings)


def batches_of(finished: Sequence[FinishedGroup], settings: Experiment) -> list[TrainBatch]:
    """Batches in admission order."""
    chunks = [finished[at : at + GROUPS_PER_STEP] for at in range(0, len(finished), GROUPS_PER_STEP)]
    return [build_batch(step, chunk, settings) for step, chunk in enumerate(chunks)]


def mean_length(finished: Sequence[FinishedGroup]) -> float:
    return float(np.mean([len(rollout.response_ids) for group in finished for rollout in group.rollouts]))


async def consume(trainer: TrainerClient, batches: Sequence[TrainBatch], first_step: int) -> None:
    """Train on one batch after the other, the next at once."""
    for step, batch in enumerate(batches, first_step):
        await trainer.train_step(msgspec.structs.replace(batch, step=step))


def _trainer(name: str, settings: Experiment) -> TrainerClient:
    identity = f"{name}-{random.getrandbits(32):x}"
    return TrainerClient(LocalLauncher(RealClock()), settings, identity, log_directory=logs(settings))


def logs(settings: Experiment) -> Path:
    """Where workers' logs go. By their names `pipeline_machine` tells the workers apart."""
    return Path(settings.run.directory) / "logs"


async def alone_consumption(settings: Experiment, batches: Sequence[TrainBatch]) -> tuple[Rate, float]:
    """Rate of the trainer alone on recorded batches, after two to warm up; and the core's matmul peak, FLOP/s."""
    trainer = _trainer("alone", settings)
    await trainer.start()
    try:
        peak = await trainer.measure_peak()
        await consume(trainer, batches[:2], 0)
        start = snapshot()
        await consume(trainer, batches, 2)
        usage = between(start, snapshot())
    finally:
        await trainer.stop()
    return Rate(sum(len(batch.samples) for batch in batches) / usage.seconds, usage), peak


async def together(settings: Experiment, shape: Shape, batches: Sequence[TrainBatch]) -> tuple[float, float, Usage]:
    """Both closed loops at once, with nothing between them: production and consumption per second."""
    side = Production(settings, shape)
    trainer = _trainer("together", settings)
    await asyncio.gather(side.pool.start(), trainer.start())
    samples = sum(len(batch.samples) for batch in batches)
    lengths = shape.lengths(settings.run.seed, range(round(samples / GROUP / (1 - shape.uniform))))  # of all groups
    loop = asyncio.create_task(side.loop())
    try:
        await _or_failure(loop, consume(trainer, batches[:2], 0))
        await _or_failure(loop, side.reach(BATCH))
        start, tokens = snapshot(), await side.tokens()
        await _or_failure(loop, consume(trainer, batches, 2))
        end, tokens = snapshot(), await side.tokens() - tokens
    finally:
        await _cancelled(loop)
        await asyncio.gather(side.pool.stop(), trainer.stop())
    usage = between(start, end)
    produced = tokens / float(np.mean(lengths)) * (1 - shape.uniform)
    return produced / usage.seconds, samples / usage.seconds, usage


async def _or_failure(loop: asyncio.Task[None], job: Awaitable[T]) -> T:
    """``job``'s result; raises at once when ``loop`` ends instead."""
    task = asyncio.ensure_future(job)
    await asyncio.wait((loop, task), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        loop.result()
    return await task


async def _cancelled(loop: asyncio.Task[None]) -> None:
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
