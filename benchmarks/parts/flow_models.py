"""Workflows of the flow benchmark with real models: samples of long-tailed lengths, a judge model, training."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence

import msgspec

from headway.algorithms.groups.batches import build_batch
from headway.algorithms.samples import lay_out
from headway.config.schema import Experiment
from headway.flow.channel import Channel
from headway.flow.run import Flow
from headway.flow.worker import Worker
from headway.records.execution import ExecutionPlan, FlowStep
from headway.records.generation import GenerationRequest, PublishedWeights, SamplingParameters
from headway.records.rollout import FinishedGroup, Group, Rollout, Verdict
from headway.rollout.makers.single_turn import SingleTurn
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.rollout.verification.verdicts import apply_verdict
from headway.runtime.clock import RealClock
from headway.tasks.cursor import TaskCursor
from headway.tasks.sources import load_tasks
from headway.tokens.tokenizer import Tokenizer
from headway.trainer.checkpoints import checkpoint_path
from parts.pipeline_load import Shape

JUDGE_TOKENS = 48


class Samples(Worker):
    """Samples groups, every response as long as its seed says."""

    def __init__(self, experiment: Experiment, shape: Shape) -> None:
        from headway.generator.local import LocalGenerator

        self.generator = LocalGenerator(experiment, self.context)
        tokenizer, seed = Tokenizer.load(experiment.model.path), experiment.run.seed
        generate = shape.force(self.generator.generate)
        self.rollouts = SingleTurn(TurnSampler(generate, tokenizer, experiment.rollout, RealClock(), run_seed=seed))
        self.weights: PublishedWeights | None = None

    async def run(self, groups: Channel, result: Channel) -> None:
        async for chunk in groups.chunks():
            async with self.turn():
                sampled = await asyncio.gather(*(self._sample(group) for group in chunk))
            await result.put_all(sampled)

    async def _sample(self, group: Group) -> FinishedGroup:
        members = await asyncio.gather(*(self.rollouts.generate_member(group, n) for n in range(group.size)))
        return FinishedGroup(
            group=group, rollouts=tuple(_rewarded(rollout, rollout.response_ids) for rollout in members)
        )

    def update(self, weights: PublishedWeights) -> None:
        self.weights = weights
        self.generator.update_weights(weights)

    def state(self) -> PublishedWeights | None:
        return self.weights

    def restore(self, weights: PublishedWeights | None) -> None:
        if weights is not None:
            self.update(weights)


class Judges(Worker):
    """Scores responses by what a model of its own writes after them."""

    stateless = True

    def __init__(self, experiment: Experiment) -> None:
        from headway.generator.local import LocalGenerator

        self.generator = LocalGenerator(experiment, self.context)

    async def run(self, groups: Channel, result: Channel) -> None:
        async for chunk in groups.chunks():
            async with self.turn():
                judged = await asyncio.gather(*(self._judge(group) for group in chunk))
            await result.put_all(judged)

    async def _judge(self, group: FinishedGroup) -> FinishedGroup:
        return msgspec.structs.replace(group, rollouts=tuple(await asyncio.gather(*map(self._scored, group.rollouts))))

    async def _scored(self, rollout: Rollout) -> Rollout:
        request = GenerationRequest(
            request_id=f"{rollout.group}-{rollout.member}",
            prompt_ids=(*rollout.prompt_ids, *rollout.response_ids)[-64:],
            sampling=SamplingParameters(max_tokens=JUDGE_TOKENS, seed=rollout.member),
        )
        return _rewarded(rollout, (await self.generator.generate(request)).response.ids)


class Trains(Worker):
    """Takes a step for all groups of a channel, in parts as they come."""

    def __init__(self, experiment: Experiment) -> None:
        from headway.trainer.service import TrainerService

        self.trainer = TrainerService(self.context, experiment=experiment.model_dump(mode="json"), run_id=self.run_id)
        self.experiment, self.close = experiment, self.trainer.close

    async def run(self, groups: Channel) -> PublishedWeights:
        async for part in groups.chunks():
            batch = lay_out(build_batch(self.trainer.version, part, self.experiment))
            async with self.turn():
                self.trainer.forward_backward(batch)
        async with self.turn():
            return self.trainer.publish(self.trainer.optim_step().version)

    def state(self) -> str:
        path = checkpoint_path(tempfile.mkdtemp(prefix="headway-flow-benchmark-"), self.trainer.version)
        path.parent.mkdir()
        self.trainer.save_checkpoint(str(path), {})
        return str(path)

    def restore(self, path: str) -> None:
        self.trainer.load_checkpoint(path)


def _rewarded(rollout: Rollout, ids: Sequence[int]) -> Rollout:
    """A reward that isn't the same for all of a group."""
    return apply_verdict(rollout, Verdict(reward=float(sum(ids) % 7) / 7, solved=False), 0.0)


async def trained(
    flow: Flow, experiment: Experiment, shape: Shape, steps: int, judged: bool
) -> tuple[list[FlowStep], ExecutionPlan]:
    """Generate, judge where that is wanted, train; returns the steps."""
    samples = await flow.workers("generate", Samples, experiment, shape)
    judges = await flow.workers("judge", Judges, experiment) if judged else None
    trains = await flow.workers("train", Trains, experiment, most_workers=1)
    tokenizer = Tokenizer.load(experiment.model.path)
    tasks = TaskCursor(load_tasks(experiment.tasks.train, experiment.run.seed), experiment.run.seed)
    size, count = experiment.rollout.group_size, experiment.queue.groups_per_step
    weights: PublishedWeights | None = None
    async for step in flow.steps(steps):
        groups, sampled, scored = (flow.channel(name) for name in ("groups", "sampled", "scored"))
        for index in range(count):  # the same lengths in every step, so that plans can be compared
            prompt = tokenizer.render(tasks.next().prompt, experiment.model.template)
            task = load_tasks(experiment.tasks.train, experiment.run.seed)[0]
            await groups.put(
                Group(index=index, task=task, prompt_ids=prompt, size=size, admitted_version=step, admitted_s=0.0)
            )
        groups.close()
        sampling = samples.run(groups, sampled)
        judging = None if judges is None else judges.run(sampled, scored)
        training = trains.run(sampled if judges is None else scored)
        await sampling
        sampled.close()
        if judging is not None:
            await judging
        scored.close()
        weights = (await training)[0]
        await samples.update(weights)
    return list(flow.history), flow.plan
