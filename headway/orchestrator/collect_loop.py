"""The collect loop: finished -> verified -> buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headway.algorithms.groups.filters import GroupFilters
from headway.control.common_failures import CommonFailureDetector, mostly_solved, same_reward
from headway.control.stalls import LOOPS
from headway.orchestrator.context import RunContext
from headway.orchestrator.dispatch_loop import Generated
from headway.orchestrator.group_endings import end_finished, end_removed_members
from headway.orchestrator.task_selection import evidence_of
from headway.records.clients import Verifier
from headway.records.curriculum import TaskEvidence
from headway.records.errors import HookFailed, NoProgress
from headway.records.rollout import Ending, FinishedGroup, Group, Rollout
from headway.records.task import Task
from headway.rollout.verification.scored_text import ScoredText
from headway.rollout.verification.verdicts import apply_verdict
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.clock import Clock
from headway.telemetry.ledger import EVENT_MOSTLY_SOLVED, EVENT_NO_PROGRESS
from headway.telemetry.pages import troubleshooting

GIVE_UP_AFTER_BATCHES = 100  # of groups in a row that end untrained: chance alone may last long, but not so long


class CollectLoop:
    """Verifies generated groups and commits them.

    Consumes: generated groups (dispatch's queue).
    Waits for: the verifier pool, teachers.
    Unblocked by: dispatch (a group's last member ends its generation).
    """

    def __init__(self, run: RunContext, generated: BoundedQueue[Generated]) -> None:
        self._run = run
        self._generated = generated
        self._filters = GroupFilters(run.experiment, lambda rollout: run.tokenizer.decode(rollout.judged_ids))
        self._rules = run.experiment.rules
        self._scored = ScoredText.of(run.experiment, run.tokenizer)
        self._reported_hooks: set[str] = set()  # hooks whose failure is in the ledger
        groups_per_step = run.experiment.queue.groups_per_step
        accepted_count = groups_per_step if run.buffer.completed_steps else 0
        self._common_failures = CommonFailureDetector(groups_per_step=groups_per_step, accepted=accepted_count)

    async def loop(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as verifications:
            while True:
                group, rollouts = await self._generated.get()
                verification = self._verify_and_commit(group, rollouts)
                verifications.create_task(verification, name=f"verify-{group.index}")

    async def _verify_and_commit(self, group: Group, rollouts: tuple[Rollout, ...]) -> None:
        run = self._run
        with run.waits.on("verdicts", LOOPS, f"group {group.index}"):
            verified = await verify_rollouts(group.task, rollouts, run.verifier, self._scored, run.clock)
        if run.teachers is not None:
            verified = await run.teachers.score(group, verified)
        if group.index not in run.state.running:
            return  # it ended as overdue while it was being verified
        filtered_group = self._filters.apply(FinishedGroup(group=group, rollouts=verified))
        finished, outcome = filtered_group.finished, filtered_group.outcome
        for problem in filtered_group.problems:
            self._report_hook_failure(problem)
        evidence = None if outcome.ending == "failed" else evidence_of(finished, self._rules.of(group.task.source))
        # From this commit on the group is finished: nothing loses it.
        run.buffer.finish_group(finished, outcome.ending, outcome.reason, evidence)
        self._learn(evidence)
        end_removed_members(run, finished)
        run.parking.forget(group.index)
        run.meter.finished(finished, accepted=outcome.ending is None, meta=filtered_group.meta)
        failures = [rollout.failure for rollout in finished.rollouts]
        self._common_failures = self._common_failures.after(failures, group.task, accepted=outcome.ending is None)
        if outcome.ending is None:
            run.state.finish_group(finished, run.clock.now())
            run.state.untrained_groups = 0
            run.state.untrained_rewards.clear()
        else:
            run.state.close_group(group.index)
            end_finished(run, finished, outcome.ending, outcome.reason)
            self._require_progress(finished, outcome.ending, outcome.reason)
        run.state.changed.notify()

    def _report_hook_failure(self, problem: HookFailed) -> None:
        """Report a hook's first failure in the ledger; later ones are only counted in the accounting."""
        if problem.key not in self._reported_hooks:
            self._reported_hooks.add(problem.key)
            self._run.event("hook_failed", str(problem), hook=problem.key)

    def _learn(self, evidence: TaskEvidence | None) -> None:
        """Pass the evidence to the curriculum, and report where it moves its band."""
        band_move = None if evidence is None else self._run.task_selector.learn(evidence)
        if band_move is not None:
            detail = f"min_signal {band_move.old_limit:.2f} -> {band_move.new_limit:.2f}: {band_move.reason}"
            share = round(band_move.zero_variance_share, 4)
            self._run.event("curriculum_band", detail, zero_variance_share=share, groups=band_move.groups)

    def _require_progress(self, last: FinishedGroup, ending: Ending, reason: str) -> None:
        """Report that group after group ends untrained. Raises NoProgress after `GIVE_UP_AFTER_BATCHES`, and soon where
        nearly all rollouts fail for one reason."""
        run, state, queue = self._run, self._run.state, self._run.experiment.queue
        state.untrained_groups += 1
        if reason == "zero_variance":
            valid_rollouts = last.valid
            state.untrained_rewards[valid_rollouts[0].reward, all(rollout.solved for rollout in valid_rollouts)] += 1
        causes = sorted({rollout.failure.cause for rollout in last.rollouts if rollout.failure is not None})[:3]
        if detail := self._common_failures.unrecoverable:
            run.event(EVENT_NO_PROGRESS, detail, groups=state.untrained_groups, reason=reason, **state.accounting.data)
            raise NoProgress(detail)
        batch_count, odd_groups = divmod(state.untrained_groups, queue.groups_per_step)
        gives_up = batch_count >= GIVE_UP_AFTER_BATCHES
        report_due = batch_count > state.reported_untrained_batches and batch_count.bit_count() == 1
        if odd_groups or not (gives_up or report_due):  # reported at 1, 2, 4, 8 ... batches, each once a run
            return
        state.reported_untrained_batches = batch_count
        tally = state.untrained_rewards if state.untrained_rewards.total() == state.untrained_groups else {}
        event_name = EVENT_MOSTLY_SOLVED if mostly_solved(tally) else EVENT_NO_PROGRESS
        ending_text = "had no learning signal" if event_name == EVENT_MOSTLY_SOLVED else "ended untrained"
        detail = f"{state.untrained_groups} groups in a row {ending_text}, the last one as {ending} ({reason})"
        detail += "".join(f"; {cause}" for cause in causes)
        detail += f"; {same_reward(tally)} ({troubleshooting('Most groups are filtered')})" if tally else ""
        ending_counts = state.accounting.data if gives_up else {}
        run.event(event_name, detail, groups=state.untrained_groups, reason=reason, **ending_counts)
        if gives_up:
            raise NoProgress(f"{detail}, for {GIVE_UP_AFTER_BATCHES} batches")


async def verify_rollouts(
    task: Task, rollouts: Sequence[Rollout], verifier: Verifier, scored: ScoredText, clock: Clock
) -> tuple[Rollout, ...]:
    """Verify a task's rollouts and return them with their verdicts. Those that failed, were removed from their group or
    are verified already are returned as they are."""
    unverified = [rollout for rollout in rollouts if rollout.valid and not rollout.finished_s]
    if not unverified:
        return tuple(rollouts)
    verdicts = await verifier.verify(task, [scored.rollout(rollout) for rollout in unverified])
    now_s = clock.now()
    judged = {r.member: apply_verdict(r, verdict, now_s) for r, verdict in zip(unverified, verdicts, strict=True)}
    return tuple(judged.get(rollout.member, rollout) for rollout in rollouts)
