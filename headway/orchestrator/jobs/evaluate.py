"""Scores a model outside a training run, with a generator and a verifier pool alone."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

from headway.config.adapter import AdapterConfig
from headway.config.schema import Experiment
from headway.generator.client import GeneratorPool
from headway.models.hf.prompts import PromptMaker, open_pictures
from headway.models.routing import without_replay
from headway.orchestrator.actors.environments import open_multi_turn_host
from headway.orchestrator.evaluation import OnAttempt, attempt_tasks, evaluation_prefix, evaluation_record
from headway.orchestrator.nodes.machines import Machines, open_machines
from headway.orchestrator.preflight.hooks import require_kernel_services
from headway.orchestrator.preflight.references import leave_out_unproved
from headway.orchestrator.task_sets import load_task_sets, named_verifiers, require_rendered_tasks
from headway.records.clients import RolloutMaker
from headway.records.errors import ConfigurationError
from headway.records.ledger import EvaluationRecord
from headway.rollout.makers.select import make_rollouts
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.rollout.verification.client import VerifierPool
from headway.rollout.verification.scored_text import ScoredText
from headway.runtime.clock import RealClock
from headway.runtime.scratch import ScratchFolder
from headway.tokens.tokenizer import Tokenizer


def _print_event(name: str, detail: str, /, **_: object) -> None:
    print(detail, file=sys.stderr)


class Scorer:
    """Scores the tasks of one split with the weights that its generator holds."""

    def __init__(self, experiment: Experiment, split: str, machines: Machines) -> None:
        task_sets = load_task_sets(experiment)
        if split not in task_sets:
            raise ConfigurationError(f"tasks.{split} is missing; the experiment has: {', '.join(task_sets)}")
        self._experiment = experiment
        self._split = split
        self._tasks = task_sets[split]
        self._clock = RealClock()
        self._scratch = ScratchFolder("headway-eval-")  # of pixel arrays
        run_settings = experiment.run.model_copy(update={"directory": str(self._scratch.path)})
        experiment = self._experiment = experiment.model_copy(update={"run": run_settings})
        self._tokenizer = Tokenizer.of(experiment)
        if experiment.environment.name == "single_turn":
            require_rendered_tasks(self._tokenizer, self._tasks)
        self._launcher = launcher = machines.launcher
        self._pictures = open_pictures(experiment, {split: self._tasks}, launcher, self._clock)
        self._prompts = PromptMaker(self._tokenizer, experiment.model.template, self._pictures)
        self.generator = GeneratorPool(launcher, experiment, self._clock, bring_to=machines.bring_to)
        named_settings, retries = named_verifiers(experiment, {split: self._tasks}), experiment.rollout.retries
        self._verifier = VerifierPool(launcher, experiment.verifier, self._clock, named=named_settings, retries=retries)
        self._rollouts: RolloutMaker | None = None

    async def start(self, stack: AsyncExitStack) -> None:
        """Start the processes; ``stack`` stops them. Raises ConfigurationError where the environment's tasks or
        services won't do."""
        experiment, clock = self._experiment, self._clock
        await require_kernel_services(experiment, self._tasks)
        host = await stack.enter_async_context(
            open_multi_turn_host(experiment, self._launcher, clock, lambda name, detail, **data: None)
        )
        seed = experiment.run.seed
        sampler = TurnSampler(self.generator.generate, self._tokenizer, experiment.rollout, clock, run_seed=seed)
        prefix, temperature = evaluation_prefix(self._split), experiment.evaluation.temperature
        self._rollouts = make_rollouts(experiment, sampler, host).for_evaluation(prefix, temperature)
        stack.callback(self._scratch.remove)
        stack.push_async_callback(self._verifier.stop)
        await self._verifier.start()
        if self._tokenizer.added_stops:
            _print_event("stop_tokens_added", self._tokenizer.added_text)
        task_sets = {self._split: self._tasks}
        task_sets = await leave_out_unproved(experiment, task_sets, self._verifier, _print_event)
        self._tasks = task_sets[self._split]
        for actor in (self.generator, *([] if self._pictures is None else [self._pictures])):
            stack.push_async_callback(actor.stop)
        await self.generator.start()

    async def score(
        self, phase: str, step: int = 0, on_progress: OnAttempt = lambda done, total: None
    ) -> EvaluationRecord:
        """Attempt and verify every task with the present weights."""
        if self._rollouts is None:
            raise RuntimeError("score() before start()")
        started_s = self._clock.now()
        rollouts = await attempt_tasks(
            self._tasks,
            rollouts=self._rollouts,
            verifier=self._verifier,
            scored=ScoredText.of(self._experiment, self._tokenizer),
            clock=self._clock,
            prompts=self._prompts,
            samples_per_task=self._experiment.evaluation.samples_per_task,
            version=step,
            concurrent=self._experiment.concurrent_rollouts,
            on_attempt=on_progress,
        )
        return evaluation_record(
            rollouts,
            split=self._split,
            phase=phase,
            step=step,
            tasks=self._tasks,
            duration_s=self._clock.now() - started_s,
            time_s=0.0,
            ks=self._experiment.ledger.pass_at,
        )


def evaluate_model(
    experiment: Experiment,
    *,
    model_path: str,
    split: str,
    adapter_path: str = "",
    on_progress: OnAttempt = lambda done, total: None,
) -> EvaluationRecord:
    """`headway eval`: measure the solve rate of the model at ``model_path`` on one split. ``adapter_path``: the
    adapter; by default the experiment's, which is the model itself where it is a new one."""
    adapter = AdapterConfig(path=adapter_path) if adapter_path else experiment.model.adapter
    model = experiment.model.model_copy(update={"path": model_path, "adapter": adapter})
    scored_experiment = without_replay(experiment.model_copy(update={"model": model}))

    async def score() -> EvaluationRecord:
        async with AsyncExitStack() as stack:
            machines = await stack.enter_async_context(open_machines(scored_experiment, RealClock()))
            scorer = Scorer(machines.experiment, split, machines)
            await scorer.start(stack)
            return await scorer.score("held", on_progress=on_progress)

    return asyncio.run(score())
