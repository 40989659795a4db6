"""A workflow with five stages: generate, a reference model, a reward model, a judge, train. Each may be anywhere.

The reward is the judge's, plus what the reward model gives, less a penalty for leaving the reference.

    python examples/flow_judged.py experiment.toml judge-model reward-model '{"generate": "cpu:0", "reference": "cpu:0",
        "reward": "cpu:0", "judge": "cpu:0", "train": "cpu:1"}'
"""

from __future__ import annotations

import asyncio
import json
import sys

import torch
from flow_grpo import Generate, Groups, Train

from headway.api import Channel, Experiment, Flow, Group, Rollout, Verdict, Worker, load_experiment, run
from headway.models.loading import load_model
from headway.records.generation import GenerationRequest, SamplingParameters
from headway.records.rollout import FinishedGroup
from headway.rollout.verification.verdicts import apply_verdict
from headway.trainer.learner import token_logprobs


class Likelihood(Worker):
    """Adds ``weight`` x the mean log-probability of a response under a model: the reference or a reward model."""

    stateless = True

    def __init__(self, path: str, weight: float, less_own: bool = False) -> None:
        self.model = load_model(path, torch.float32, torch.device(self.context.device.torch_device()))
        self.weight, self.less_own = weight, less_own

    async def run(self, source: Channel, result: Channel) -> None:
        async for chunk in source.chunks():
            async with self.turn():
                scored = [self.added(*one) for one in chunk]
            await result.put_all(scored)

    @torch.no_grad()
    def added(self, group: Group, members: list[Rollout]) -> tuple[Group, list[Rollout]]:
        rewards = [rollout.reward + self.weight * self.mean(rollout) for rollout in members]
        return group, [
            apply_verdict(r, Verdict(reward=reward, solved=False), 0.0)
            for r, reward in zip(members, rewards, strict=True)
        ]

    def mean(self, rollout: Rollout) -> float:
        ids = torch.tensor([*rollout.prompt_ids, *rollout.response_ids])
        hidden = self.model.forward_packed(ids[:-1], [len(ids) - 1])[len(rollout.prompt_ids) - 1 :]
        logprobs, _ = token_logprobs(self.model, hidden, ids[len(rollout.prompt_ids) :], 1.0)
        own = sum(rollout.response_logprobs) / len(rollout.response_logprobs) if self.less_own else 0.0
        return float(logprobs.mean()) - own


class Judge(Worker):
    """Asks a model for a token after each response, and rewards a low one."""

    stateless = True

    def __init__(self, experiment: Experiment, path: str) -> None:
        from headway.generator.local import LocalGenerator

        model = experiment.model.model_copy(update={"path": path})
        self.generator = LocalGenerator(experiment.model_copy(update={"model": model}), self.context)

    async def run(self, source: Channel, result: Channel) -> None:
        async for chunk in source.chunks():
            async with self.turn():
                judged = [(group, await asyncio.gather(*map(self.verdict, members))) for group, members in chunk]
            await result.put_all(FinishedGroup(group=group, rollouts=tuple(members)) for group, members in judged)

    async def verdict(self, rollout: Rollout) -> Rollout:
        ids, one = (*rollout.prompt_ids, *rollout.response_ids), SamplingParameters(max_tokens=1, temperature=0)
        name = f"{rollout.group}-{rollout.member}"
        asked = await self.generator.generate(GenerationRequest(request_id=name, prompt_ids=ids, sampling=one))
        return apply_verdict(rollout, Verdict(reward=rollout.reward + asked.response.ids[0] % 2, solved=False), 0.0)


async def judged(flow: Flow, experiment: Experiment, judge_path: str, reward_path: str) -> list[float]:
    """Train ``run.steps`` steps; returns the loss of each."""
    generate = await flow.workers("generate", Generate, experiment)
    reference = await flow.workers("reference", Likelihood, experiment.model.path, 0.1, less_own=True)
    reward = await flow.workers("reward", Likelihood, reward_path, 1.0)
    judge = await flow.workers("judge", Judge, experiment, judge_path)
    train = await flow.workers("train", Train, experiment, most_workers=1)
    groups, losses = Groups(experiment), list[float]()
    async for step in flow.steps(experiment.run.steps):
        stages = (generate, reference, reward, judge, train)
        report, weights = (await flow.pipeline(groups.of_step(step), *stages))[0]
        await generate.update(weights)
        losses.append(report.metrics["loss"])
        print(f"step {report.version}: loss {losses[-1]:+.6f}, {report.samples} samples", flush=True)
    return losses


if __name__ == "__main__":
    run(judged, json.loads(sys.argv[4]), load_experiment(sys.argv[1], []), *sys.argv[2:4])
