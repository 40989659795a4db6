"""GRPO as a workflow: generate, score, train. With budget 0 it trains the same weights as `headway train`, bit by bit.

Where its stages run is the plan's matter: any of these may be given, and no line below changes.

    python examples/flow_grpo.py experiment.toml '{"generate": "cpu:0", "score": "cpu:0", "train": "cpu:1"}'
    python examples/flow_grpo.py experiment.toml '{"generate": "cpu:0", "score": "cpu:0", "train": "cpu:0"}'
"""

from __future__ import annotations

import asyncio
import json
import sys

from headway.algorithms.groups.batches import build_batch
from headway.algorithms.groups.outcome import group_outcome
from headway.algorithms.samples import lay_out
from headway.api import Channel, Experiment, Flow, Worker, load_experiment, run
from headway.records.generation import PublishedWeights
from headway.records.rollout import FinishedGroup, Group, Rollout
from headway.records.training import StepReport
from headway.rollout.makers.single_turn import SingleTurn
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.rollout.verification.verdicts import apply_verdict, to_verdict
from headway.rollout.verification.verifiers import resolve_verifier
from headway.runtime.clock import RealClock
from headway.tasks.cursor import TaskCursor
from headway.tasks.sources import load_tasks
from headway.tokens.tokenizer import Tokenizer


class Generate(Worker):
    """Samples the members of groups."""

    def __init__(self, experiment: Experiment) -> None:
        from headway.generator.local import LocalGenerator

        self.generator = LocalGenerator(experiment, self.context)
        if experiment.run.offload:
            self.offload, self.onload = self.generator.offload, self.generator.onload
        tokenizer, seed = Tokenizer.load(experiment.model.path), experiment.run.seed
        sample = self.generator.generate
        self.rollouts = SingleTurn(TurnSampler(sample, tokenizer, experiment.rollout, RealClock(), run_seed=seed))

    async def run(self, groups: Channel, answers: Channel) -> None:
        async for chunk in groups.chunks():
            async with self.turn():
                sampled = await asyncio.gather(*(self.sample(group) for group in chunk))
            await answers.put_all(zip(chunk, sampled, strict=True))

    async def sample(self, group: Group) -> list[Rollout]:
        return await asyncio.gather(*(self.rollouts.generate_member(group, n) for n in range(group.size)))

    def update(self, weights: PublishedWeights) -> None:
        self.generator.update_weights(weights)


class Score(Worker):
    """Verifies the members of groups."""

    def __init__(self, experiment: Experiment) -> None:
        self.verify, self.limits = resolve_verifier(experiment.verifier), experiment.queue
        self.tokenizer = Tokenizer.load(experiment.model.path)

    async def run(self, answers: Channel, finished: Channel) -> None:
        async for group, members in answers:
            async with self.turn():
                texts = [self.tokenizer.decode(rollout.response_ids) for rollout in members]
                verdicts = [to_verdict(self.verify(group.task, text)) for text in texts]
                judged = [apply_verdict(r, v, 0.0) for r, v in zip(members, verdicts, strict=True)]
            if group_outcome(judged, size=group.size, limits=self.limits).ending is None:
                await finished.put(FinishedGroup(group=group, rollouts=tuple(judged)))


class Train(Worker):
    """Takes a step for all groups of a channel, in parts as they come."""

    def __init__(self, experiment: Experiment) -> None:
        from headway.trainer.service import TrainerService

        self.trainer = TrainerService(self.context, experiment=experiment.model_dump(mode="json"), run_id=self.run_id)
        self.experiment, self.close = experiment, self.trainer.close
        if experiment.run.offload:
            self.offload, self.onload = self.trainer.offload, self.trainer.onload

    async def run(self, finished: Channel) -> tuple[StepReport, PublishedWeights | None]:
        start = self.trainer.version * self.experiment.queue.groups_per_step
        async for part in finished.chunks(order=lambda one: one.group.index, start=start):
            batch = lay_out(build_batch(self.trainer.version, part, self.experiment))
            async with self.turn():
                report = self.trainer.forward_backward(batch) if self.chunk else self.trainer.train_step(batch)
        async with self.turn():
            report = report if isinstance(report, StepReport) else self.trainer.optim_step()
            return report, self.trainer.publish(report.version)

    def save(self, path: str) -> None:
        self.trainer.save_weights(path)


class Groups:
    """The groups of step after step."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.tokenizer = experiment, Tokenizer.load(experiment.model.path)
        self.count, seed = experiment.queue.groups_per_step, experiment.run.seed
        self.tasks = TaskCursor(load_tasks(experiment.tasks.train, seed), seed)

    def of_step(self, step: int) -> list[Group]:
        return [self.group(step, step * self.count + index) for index in range(self.count)]

    def group(self, step: int, index: int) -> Group:
        task, size = self.tasks.next(), self.experiment.rollout.group_size
        prompt = self.tokenizer.render(task.prompt, self.experiment.model.template)
        return Group(index=index, task=task, prompt_ids=prompt, size=size, admitted_version=step, admitted_s=0.0)


async def grpo(flow: Flow, experiment: Experiment, output: str) -> list[StepReport]:
    """Train ``run.steps`` steps; returns the report of each."""
    generate = await flow.workers("generate", Generate, experiment)
    score = await flow.workers("score", Score, experiment)
    train = await flow.workers("train", Train, experiment, most_workers=1)
    groups, reports = Groups(experiment), list[StepReport]()
    async for step in flow.steps(experiment.run.steps):
        report, weights = (await flow.pipeline(groups.of_step(step), generate, score, train))[0]
        await generate.update(weights)
        reports.append(report)
        print(f"step {report.version}: loss {report.metrics['loss']:+.6f}, {report.samples} samples", flush=True)
    await train.on(0).save(output)
    return reports


if __name__ == "__main__":
    output = sys.argv[3] if len(sys.argv) > 3 else "flow-grpo-model"
    run(grpo, json.loads(sys.argv[2]), load_experiment(sys.argv[1], []), output)
