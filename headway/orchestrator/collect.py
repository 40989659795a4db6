"""The collect loop: finished -> verified -> buffer."""

from __future__ import annotations

import asyncio

from headway.control.learning_signal import group_outcome
from headway.orchestrator.accounts import end_finished
from headway.orchestrator.context import RunContext
from headway.orchestrator.dispatch import Generated
from headway.records.rollout import FinishedGroup, Group, Rollout
from headway.rollout.single_turn import apply_verdict
from headway.runtime.channel import Channel


class Collect:
    """Verifies generated groups and commits them.

    Consumes: generated groups (dispatch's channel).
    Waits for: the verifier pool.
    Unblocked by: dispatch (a group's last member ends its generation).
    """

    def __init__(self, run: RunContext, generated: Channel[Generated]) -> None:
        self._run = run
        self._generated = generated

    async def loop(self) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as verifications:
            while True:
                group, rollouts = await self._generated.get()
                job = self._verify_and_commit(group, rollouts)
                verifications.create_task(job, name=f"verify-{group.index}")

    async def _verify_and_commit(self, group: Group, rollouts: tuple[Rollout, ...]) -> None:
        run = self._run
        verified = await self.verify(group, rollouts)
        if group.index not in run.state.running:
            return  # it ended as overdue while it was being verified
        finished = FinishedGroup(group=group, rollouts=verified)
        queue = run.experiment.queue
        outcome = group_outcome(
            verified,
            size=group.size,
            min_valid_ratio=queue.min_valid_ratio,
            filter_zero_variance=queue.filter_zero_variance,
        )
        # From this commit on the group is finished: nothing loses it.
        run.buffer.finish_group(finished, outcome.ending, outcome.reason)
        del run.state.running[group.index]
        run.meter.finished(finished, accepted=outcome.ending is None)
        if outcome.ending is None:
            run.state.finished[group.index] = finished
            run.state.finished_at_s[group.index] = run.clock.now()
        else:
            end_finished(run, finished, outcome.ending, outcome.reason)
        run.state.changed.notify()

    async def verify(self, group: Group, rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        """The members with their rewards; those that failed before stay as they are."""
        run = self._run
        valid = [rollout for rollout in rollouts if rollout.failure is None]
        if not valid:
            return rollouts
        responses = [run.tokenizer.decode(rollout.response_ids) for rollout in valid]
        verdicts = await run.verifier.verify(group.task, responses)
        now = run.clock.now()
        by_member = {
            rollout.member: apply_verdict(rollout, verdict, now)
            for rollout, verdict in zip(valid, verdicts, strict=True)
        }
        return tuple(by_member.get(rollout.member, rollout) for rollout in rollouts)
