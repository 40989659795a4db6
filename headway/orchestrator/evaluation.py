"""Evaluation on held-out tasks, inside the pipeline and outside N: it takes no credit and trains nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from headway.config.schema import Experiment
from headway.control.common_failures import failure_kind
from headway.control.estimates import clustered_standard_error, pass_at
from headway.models.hf.prompts import PromptMaker
from headway.orchestrator.collect_loop import verify_rollouts
from headway.orchestrator.context import RunContext
from headway.orchestrator.recovery import call_with_restart
from headway.orchestrator.source_scores import kernel_shares, source_scores
from headway.records.clients import RolloutMaker, Verifier
from headway.records.generation import PublishedWeights
from headway.records.ledger import EvaluationRecord
from headway.records.rollout import Group, Rollout
from headway.records.task import Task
from headway.rollout.verification.scored_text import ScoredText
from headway.runtime.clock import Clock
from headway.telemetry.ledger import EVENT_BEST, EVENT_LAST_KEPT
from headway.trainer.checkpoints import CANDIDATE, CARD_FILE, has_own_card

OnAttempt = Callable[[int, int], None]  # attempts generated, of all
_EVALUATION_FILE = "evaluation.json"  # beside the weights it judges: their version and validation solve rate


def evaluation_prefix(split: str) -> str:
    """Return the prefix of a split's request ids, which also separates its random numbers from all others."""
    return f"evaluation-{split}-"


async def attempt_tasks(
    tasks: Sequence[Task],
    *,
    rollouts: RolloutMaker,
    verifier: Verifier,
    scored: ScoredText,
    clock: Clock,
    prompts: PromptMaker,
    samples_per_task: int,
    version: int,
    concurrent: int,
    on_attempt: OnAttempt = lambda done, total: None,
) -> list[Rollout]:
    """Attempt every task ``samples_per_task`` times and verify the attempts. At most ``concurrent`` rollouts run at
    once: a rollout's time limit must not run while it waits for a slot. Negative group indices give the attempts
    precedence over training rollouts, so that few versions pass meanwhile. ``on_attempt`` receives the number of
    generated attempts and their total."""
    slots, attempt_numbers = asyncio.Semaphore(concurrent), itertools.count(1)

    async def generate(group: Group, member: int) -> Rollout:
        async with slots:
            rollout = await rollouts.generate_member(group, member)
        on_attempt(next(attempt_numbers), len(tasks) * samples_per_task)
        return rollout

    async def attempt(position: int, task: Task) -> tuple[Rollout, ...]:
        group = Group(
            index=position - len(tasks),
            **await prompts.make(task),
            size=samples_per_task,
            admitted_version=version,
            admitted_s=clock.now(),
        )
        member_rollouts = await asyncio.gather(*(generate(group, m) for m in range(samples_per_task)))
        return await verify_rollouts(task, member_rollouts, verifier, scored, clock)

    rollouts_by_task = await asyncio.gather(*(attempt(i, task) for i, task in enumerate(tasks)))
    return [rollout for members in rollouts_by_task for rollout in members]


def evaluation_record(
    rollouts: Sequence[Rollout],
    *,
    split: str,
    phase: str,
    step: int,
    tasks: Sequence[Task],
    duration_s: float,
    time_s: float,
    ks: Sequence[int] = (),
) -> EvaluationRecord:
    """Compute an evaluation's record from its rollouts: solve rate, standard error, versions, pass@k. ``ks``: the
    values of k; ``tasks``: as given to ``attempt_tasks``. Without a valid rollout nothing was measured: ``samples`` is
    0 and the rates mean nothing."""
    valid_rollouts = [rollout for rollout in rollouts if rollout.failure is None]
    versions = [span.version for rollout in valid_rollouts for span in rollout.versions]
    valid_count = max(len(valid_rollouts), 1)
    solved_by_group: dict[int, list[bool]] = {}
    for rollout in valid_rollouts:
        solved_by_group.setdefault(rollout.group, []).append(rollout.solved)
    solve_rate = sum(rollout.solved for rollout in valid_rollouts) / valid_count
    return EvaluationRecord(
        split=split,
        phase=phase,
        step=step,
        first_version=min(versions, default=step),
        last_version=max(versions, default=step),
        held=len(set(versions)) <= 1,
        tasks=len(tasks),
        samples=len(valid_rollouts),
        solve_rate=solve_rate,
        standard_error=clustered_standard_error([(rollout.group, float(rollout.solved)) for rollout in valid_rollouts]),
        pass_at=pass_at(((sum(solved), len(solved)) for solved in solved_by_group.values()), ks),
        reward_mean=sum(rollout.reward for rollout in valid_rollouts) / valid_count,
        length_mean=sum(rollout.response_tokens for rollout in valid_rollouts) / valid_count,
        failed=len(rollouts) - len(valid_rollouts),
        failure_cause=_common_cause(rollouts, tasks),
        judge_tokens=sum(rollout.judge_tokens for rollout in rollouts),
        judge_cost=sum(rollout.judge_cost for rollout in rollouts),
        duration_s=duration_s,
        time_s=time_s,
        # the group of the first task is -len(tasks), of the last -1
        by_source=source_scores((tasks[rollout.group].source, rollout) for rollout in rollouts),
        kernels=kernel_shares(rollouts),
    )


def _common_cause(rollouts: Sequence[Rollout], tasks: Sequence[Task]) -> str:
    """The cause of a failure of the most frequent kind; "" where none failed."""
    failed_attempts = [(rollout.failure, tasks[rollout.group]) for rollout in rollouts if rollout.failure is not None]
    cause_by_kind = {failure_kind(failure, task): failure.cause for failure, task in failed_attempts}
    kind_counts = Counter(failure_kind(failure, task) for failure, task in failed_attempts).most_common(1)
    return cause_by_kind[kind_counts[0][0]] if kind_counts else ""


def end_reason(experiment: Experiment, version: int, solve_rate: float) -> str:
    """Return the reason for which a run ends at ``version``; "" where it continues. A run ends after all its steps, or
    when ``solve_rate``, its best validation score, reaches the target."""
    steps, target_rate = experiment.run.steps, experiment.evaluation.stop_at_solve_rate
    if target_rate is not None and solve_rate >= target_rate:
        return f"validation solve rate {solve_rate:.3f} >= evaluation.stop_at_solve_rate {target_rate:g}"
    return f"all {steps:,} steps of run.steps are done" if version >= steps else ""


class Evaluations:
    """Validation during the run, the best checkpoint by it, and the held test before and after."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._running: asyncio.Task[None] | None = None
        self._last_step = 0
        self._last_s = run.clock.now()
        self.best_version: int | None = None
        self.best_solve_rate = -1.0
        self._folder = Path(run.directory)
        self._load_best()

    def _load_best(self) -> None:
        best_folder, retired_folder = self._folder / "best", self._folder / "best.old"
        if retired_folder.exists() and not best_folder.exists():
            retired_folder.rename(best_folder)
        if (best_folder / _EVALUATION_FILE).exists():
            best_record = json.loads((best_folder / _EVALUATION_FILE).read_text(encoding="utf-8"))
            if best_record["solve_rate"] is not None:
                self.best_version, self.best_solve_rate = int(best_record["version"]), float(best_record["solve_rate"])

    async def evaluate_held(self, split: str, phase: str) -> EvaluationRecord | None:
        """Evaluate with nothing else running and no update under way."""
        tasks = self._run.evaluation_tasks.get(split, [])
        return await self._evaluate(split, phase, tasks) if tasks else None

    async def evaluate_after_training(self) -> None:
        """Judge the last version by validation, then test the better of it and the best one kept. Where validation
        measured nothing there is no best version, and the last one is kept."""
        run = self._run
        version = run.state.version
        if run.meter.applied_version != version:  # it was not due for publishing
            weights = await call_with_restart(run, lambda: run.trainer.publish(version), version)
            await run.generator.update_weights(weights)
            run.meter.applied_version = version
        last_record = await self.evaluate_held("validation", "after")
        is_judged = last_record is not None and not last_record.mostly_failed
        solve_rate = last_record.solve_rate if last_record is not None and is_judged else -1.0
        if last_record is not None and self.best_version is not None and self.best_solve_rate > solve_rate:
            await run.generator.update_weights(await call_with_restart(run, self._publish_best, version))
        else:
            await self._save_candidate(version)
            self._keep_as_best(version, solve_rate if is_judged else None)
        await self.evaluate_held("test", "after")

    async def keep_last_version(self) -> None:
        """Keep the last version as it is, unjudged, where no validation during the run has found a best one."""
        if self.best_version is None:
            await self._save_candidate(self._run.state.version)
            self._keep_as_best(self._run.state.version, None)

    def record_best_again(self, recorded: int | None) -> None:
        """Record the best version's event again where a kill came between ``best/`` and that event. ``recorded``: the
        best version in the ledger."""
        if self.best_version not in (None, recorded):
            self._run.event(EVENT_BEST, f"solve rate {self.best_solve_rate:.3f}", version=self.best_version)

    async def _publish_best(self) -> PublishedWeights:
        assert self.best_version is not None
        await self._run.trainer.load_weights(str(self._folder / "best"))
        return await self._run.trainer.publish(self.best_version)

    async def _save_candidate(self, version: int) -> None:
        path = str(self._folder / CANDIDATE)
        await call_with_restart(self._run, lambda: self._run.trainer.save_weights(path), version)

    def _keep_as_best(self, version: int, solve_rate: float | None) -> None:
        """Rename the candidate to ``best/``; a kill meanwhile leaves one of the two complete. ``solve_rate`` None: it
        wasn't evaluated."""
        candidate_folder, best_folder = self._folder / CANDIDATE, self._folder / "best"
        (candidate_folder / _EVALUATION_FILE).write_text(json.dumps({"version": version, "solve_rate": solve_rate}))
        retired_folder = self._folder / "best.old"
        shutil.rmtree(retired_folder, ignore_errors=True)
        if (best_folder / CARD_FILE).is_file() and not has_own_card(best_folder):
            shutil.copy2(best_folder / CARD_FILE, candidate_folder)
        if best_folder.exists():
            best_folder.rename(retired_folder)
        candidate_folder.rename(best_folder)
        shutil.rmtree(retired_folder, ignore_errors=True)
        if solve_rate is None:
            self._run.event(EVENT_LAST_KEPT, f"best/ has version {version}: none was evaluated on validation tasks")
            return
        self.best_version, self.best_solve_rate = version, solve_rate
        self._run.event(EVENT_BEST, f"solve rate {solve_rate:.3f}", version=version)

    def _due(self) -> bool:
        """Whether a during-run validation is due and none is running."""
        run, evaluation = self._run, self._run.experiment.evaluation
        if "validation" not in run.evaluation_tasks or (self._running is not None and not self._running.done()):
            return False
        steps_due = evaluation.every_steps and run.state.version - self._last_step >= evaluation.every_steps
        time_due = evaluation.every_s is not None and run.clock.now() - self._last_s >= evaluation.every_s
        return bool(steps_due or time_due)

    async def save_candidate_if_due(self) -> bool:
        """Keep the weights of the version just published, to be judged by the coming evaluation."""
        if not self._due():
            return False
        self._last_step, self._last_s = self._run.state.version, self._run.clock.now()
        await self._save_candidate(self._last_step)
        return True

    def start(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """Evaluate ``version`` (just applied) beside the running rollouts, as one of ``tasks``. Its failure ends the
        run at once."""
        self._running = tasks.create_task(self._validate(version), name=f"validate-{version}")

    async def finish(self) -> None:
        """Wait for the validation under way."""
        if self._running is not None:
            await self._running
            self._running = None

    def cancel(self) -> None:
        """Cancel the validation under way: the run ends before it would."""
        if self._running is not None:
            self._running.cancel()
            self._running = None

    async def _validate(self, version: int) -> None:
        record = await self._evaluate("validation", "during", self._run.evaluation_tasks["validation"])
        if not record.mostly_failed and record.solve_rate > self.best_solve_rate:
            self._keep_as_best(version, record.solve_rate)
        self._run.state.changed.notify()  # it may have reached the target

    async def _evaluate(self, split: str, phase: str, tasks: Sequence[Task]) -> EvaluationRecord:
        run, evaluation = self._run, self._run.experiment.evaluation
        step, started_s = run.state.version, run.clock.now()
        rollouts = await attempt_tasks(
            tasks,
            rollouts=run.rollouts.for_evaluation(evaluation_prefix(split), evaluation.temperature),
            verifier=run.verifier,
            scored=ScoredText.of(run.experiment, run.tokenizer),
            clock=run.clock,
            prompts=run.prompts,
            samples_per_task=evaluation.samples_per_task,
            version=run.meter.applied_version,
            concurrent=run.experiment.concurrent_rollouts,
        )
        record = evaluation_record(
            rollouts,
            split=split,
            phase=phase,
            step=step,
            tasks=tasks,
            duration_s=run.clock.now() - started_s,
            time_s=run.time_s(),
            ks=run.experiment.ledger.pass_at,
        )
        run.record(record)
        return record
