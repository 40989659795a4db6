"""Evaluation on held-out tasks, inside the pipeline and outside N: it takes no credit and trains nothing."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from headway.orchestrator.context import RunContext
from headway.records.clients import Verifier
from headway.records.ledger import EvaluationRecord
from headway.records.rollout import Group, Rollout
from headway.records.task import Task
from headway.rollout.single_turn import SingleTurn, apply_verdict
from headway.runtime.clock import Clock
from headway.runtime.ledger import EVENT_BEST
from headway.tokens.tokenizer import Template, Tokenizer

_JUDGEMENT = "evaluation.json"  # beside the weights it judges: their version and validation solve rate


async def attempt_tasks(
    tasks: Sequence[Task],
    *,
    rollouts: SingleTurn,
    verifier: Verifier,
    tokenizer: Tokenizer,
    clock: Clock,
    template: Template,
    samples_per_task: int,
    version: int,
) -> list[Rollout]:
    """Attempt every task ``samples_per_task`` times and verify. Served before training rollouts
    (negative group indices are the lowest priorities), so that few versions pass meanwhile."""

    async def attempt(position: int, task: Task) -> list[Rollout]:
        group = Group(
            index=position - len(tasks),
            task=task,
            prompt_ids=tokenizer.render(task.prompt, template),
            size=samples_per_task,
            admitted_version=version,
            admitted_s=clock.now(),
        )
        members = await asyncio.gather(*(rollouts.generate_member(group, m) for m in range(samples_per_task)))
        valid = [rollout for rollout in members if rollout.failure is None]
        verdicts = await verifier.verify(task, [tokenizer.decode(r.response_ids) for r in valid]) if valid else []
        judged = {r.member: apply_verdict(r, v, clock.now()) for r, v in zip(valid, verdicts, strict=True)}
        return [judged.get(rollout.member, rollout) for rollout in members]

    per_task = await asyncio.gather(*(attempt(i, task) for i, task in enumerate(tasks)))
    return [rollout for members in per_task for rollout in members]


def evaluation_record(
    rollouts: Sequence[Rollout], *, split: str, phase: str, step: int, tasks: int, duration_s: float, time_s: float
) -> EvaluationRecord:
    """Solve rate with its standard error over the valid rollouts, and the versions they were sampled under."""
    valid = [rollout for rollout in rollouts if rollout.failure is None]
    versions = [span.version for rollout in valid for span in rollout.versions]
    count = max(len(valid), 1)
    solve_rate = sum(rollout.solved for rollout in valid) / count
    return EvaluationRecord(
        split=split,
        phase=phase,
        step=step,
        first_version=min(versions, default=step),
        last_version=max(versions, default=step),
        held=len(set(versions)) <= 1,
        tasks=tasks,
        samples=len(valid),
        solve_rate=solve_rate,
        standard_error=math.sqrt(solve_rate * (1 - solve_rate) / count),
        reward_mean=sum(rollout.reward for rollout in valid) / count,
        length_mean=sum(len(rollout.response_ids) for rollout in valid) / count,
        failed=len(rollouts) - len(valid),
        duration_s=duration_s,
        time_s=time_s,
    )


class Evaluations:
    """Validation during the run, the best checkpoint by it, and the held test before and after."""

    def __init__(self, run: RunContext, rollouts: SingleTurn) -> None:
        self._run = run
        self._rollouts = rollouts
        self._running: asyncio.Task[None] | None = None
        self._last_step = 0
        self._last_s = run.clock.now()
        self.best_version: int | None = None
        self.best_solve_rate = -1.0
        self.target_reached = False
        self._folder = Path(run.directory)
        self._load_best()

    def _load_best(self) -> None:
        best, retired = self._folder / "best", self._folder / "best.old"
        if retired.exists() and not best.exists():
            retired.rename(best)
        if (best / _JUDGEMENT).exists():
            judgement = json.loads((best / _JUDGEMENT).read_text(encoding="utf-8"))
            self.best_version, self.best_solve_rate = int(judgement["version"]), float(judgement["solve_rate"])

    async def held(self, split: str, phase: str) -> EvaluationRecord | None:
        """Evaluate with nothing else running and no update under way."""
        tasks = self._run.evaluation_tasks.get(split, [])
        return await self._evaluate(split, phase, tasks) if tasks else None

    async def after(self) -> None:
        """Judge the last version by validation, then test the better of it and the best one kept."""
        run = self._run
        last = await self.held("validation", "after")
        if last is not None and self.best_version is not None and self.best_solve_rate > last.solve_rate:
            await run.trainer.load_weights(str(self._folder / "best"))
            await run.generator.update_weights(await run.trainer.publish(self.best_version))
        else:
            await run.trainer.save_weights(str(self._folder / "candidate"))
            self._keep_best(run.state.version, last.solve_rate if last is not None else 0.0)
        await self.held("test", "after")

    def _keep_best(self, version: int, solve_rate: float) -> None:
        """The candidate becomes ``best/``; a kill in between leaves one of the two whole."""
        self.best_version, self.best_solve_rate = version, solve_rate
        candidate, best = self._folder / "candidate", self._folder / "best"
        (candidate / _JUDGEMENT).write_text(json.dumps({"version": version, "solve_rate": solve_rate}))
        retired = self._folder / "best.old"
        shutil.rmtree(retired, ignore_errors=True)
        if best.exists():
            best.rename(retired)
        candidate.rename(best)
        shutil.rmtree(retired, ignore_errors=True)
        self._run.event(EVENT_BEST, f"solve rate {solve_rate:.3f}", version=version)

    def _due(self) -> bool:
        """A during-run validation is due and none is running."""
        run, evaluation = self._run, self._run.experiment.evaluation
        if "validation" not in run.evaluation_tasks or (self._running is not None and not self._running.done()):
            return False
        by_steps = evaluation.every_steps and run.state.version - self._last_step >= evaluation.every_steps
        by_time = evaluation.every_s is not None and run.clock.now() - self._last_s >= evaluation.every_s
        return bool(by_steps or by_time)

    async def save_candidate_if_due(self) -> bool:
        """Keep the weights of the version just published, to be judged by the coming evaluation."""
        if not self._due():
            return False
        self._last_step, self._last_s = self._run.state.version, self._run.clock.now()
        await self._run.trainer.save_weights(str(self._folder / "candidate"))
        return True

    def start(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """Evaluate ``version`` (just applied) beside the running rollouts, as one of ``tasks``: should it fail, so
        does the run, at once."""
        self._running = tasks.create_task(self._validate(version), name=f"validate-{version}")

    async def finish(self) -> None:
        """Wait for a validation under way."""
        if self._running is not None:
            await self._running
            self._running = None

    async def _validate(self, version: int) -> None:
        record = await self._evaluate("validation", "during", self._run.evaluation_tasks["validation"])
        if record.solve_rate > self.best_solve_rate:
            self._keep_best(version, record.solve_rate)
        target = self._run.experiment.evaluation.stop_at_solve_rate
        if target is not None and record.solve_rate >= target:
            self.target_reached = True
            self._run.state.changed.notify()

    async def _evaluate(self, split: str, phase: str, tasks: Sequence[Task]) -> EvaluationRecord:
        run = self._run
        step, started = run.state.version, run.clock.now()
        rollouts = await attempt_tasks(
            tasks,
            rollouts=self._rollouts,
            verifier=run.verifier,
            tokenizer=run.tokenizer,
            clock=run.clock,
            template=run.experiment.model.template,
            samples_per_task=run.experiment.evaluation.samples_per_task,
            version=run.meter.applied_version,
        )
        record = evaluation_record(
            rollouts,
            split=split,
            phase=phase,
            step=step,
            tasks=len(tasks),
            duration_s=run.clock.now() - started,
            time_s=run.time_s(),
        )
        run.record(record)
        return record
