"""Environment for kernels written by the policy and evaluated by kernel services: compiled, checked, timed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from headway.kernels.client import KernelClient, KernelServiceFailed
from headway.kernels.prompts import feedback, source_in
from headway.kernels.reward import kernel_reward
from headway.kernels.tasks import kernel_task
from headway.records.errors import ConfigurationError, InfrastructureError
from headway.records.kernels import KERNEL_ANSWERS, KernelAnswer, KernelBackend, KernelEvaluation, KernelSubmission
from headway.records.task import Task
from headway.rollout.environment import Answer, Environment, Episode
from headway.rollout.parameters import require_choice
from headway.runtime.addresses import read_keys
from headway.runtime.clock import RealClock

_KEPT_CHARACTERS = 300
_NO_SOURCE = "There is no module with ModelNew in this answer. Write it whole, between ```python and ```."


class Kernel(Environment):
    """Environment of several turns whose answers are modules that define ``ModelNew`` (the last code block with one).

    A kernel service evaluates each module, and the policy gets the result as feedback, until ``turns`` answers were
    evaluated or one has a reward of ``stop_at``. Each turn has a reward on TritonForge's ladder (`kernels.reward`): 0.1
    compiled, 0.3 correct and up to 2 for the speed-up. The rollout's reward is its best turn's; with
    ``algorithm.turn_discount`` (0.4 there) each turn learns from its own reward and those of later turns. A task's
    metadata has a `KernelTask` under ``kernel``.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        key_file: str = "",
        system: str = "",
        backend: str = "",
        turns: int = 3,
        stop_at: float = 1.3,
        timed: bool = True,
        correct_trials: int = 5,
        timed_trials: int = 100,
        timeout_s: float = 120.0,
        source_characters: int = 40_000,
        seed: int = 42,
    ) -> None:
        """``addresses``: http://HOST:PORT of kernel services. ``key_file``: the file with their key. ``system``: the
        first message of every conversation. ``backend``: replaces the tasks' own. ``turns``: evaluated answers of a
        rollout. ``stop_at``: reward of a turn that ends the rollout. ``timed`` False: correctness alone.
        ``correct_trials``, ``timed_trials``, ``seed``: of an evaluation; ``timeout_s``: its limit, less than
        environment.timeout_s. ``source_characters``: longer programs aren't evaluated."""
        if backend:
            require_choice("environment.parameters.backend", backend, KernelBackend)
        if turns < 1:
            raise ConfigurationError(f"environment.parameters.turns = {turns}: at least 1")
        self.system = system
        self.longest_s = {"timeout_s": timeout_s}
        self._backend = backend
        self._turns, self._stop_at = turns, stop_at
        trial_counts = {"correct_trials": correct_trials, "timed_trials": timed_trials}
        self._submission = partial(KernelSubmission, timed=timed, seed=seed, timeout_s=timeout_s, **trial_counts)
        self._source_characters = source_characters
        key = next(iter(read_keys(key_file, "environment.parameters.key_file =")), "")
        self._client = KernelClient(addresses, RealClock(), key=key)

    async def require_services(self, tasks: Iterable[Task]) -> None:
        """Raise ConfigurationError unless the tasks are kernel tasks and a service is reachable for each of their
        backends."""
        needed_backends = {kernel_task(task, self._backend).backend for task in tasks}
        async with self._client as client:
            await client.require_backends(needed_backends)

    async def stop(self) -> None:
        await self._client.close()

    async def begin(self, episode: Episode) -> None:
        kernel_task(episode.task, self._backend)  # an invalid task fails before the first sample
        await super().begin(episode)

    async def reply(self, episode: Episode, answer: Answer) -> None:
        judgements = episode.state.setdefault("judged", [])
        source = source_in(answer.text)
        if not source:
            evaluation, reply = KernelEvaluation(fault="syntax_error", text="no ModelNew"), _NO_SOURCE
        elif len(source) > self._source_characters:
            evaluation = KernelEvaluation(fault="syntax_error", text="too long")
            reply = f"This source has {len(source):,} characters; {self._source_characters:,} at most are evaluated."
        else:
            evaluation = await self._evaluation(episode.task, source)
            reply = feedback(evaluation)
        judgement = outline(evaluation)
        judgements.append(msgspec.to_builtins(judgement))
        if judgement.reward >= self._stop_at:
            episode.end("fast enough")
        elif len(judgements) >= self._turns:
            episode.end("turns")
        else:
            episode.add_message(self.shortened(reply))

    async def score(self, episode: Episode) -> dict[str, Any]:
        answers: list[dict[str, Any]] = episode.state.get("judged", [])
        if not answers:
            return {"reward": 0.0, "solved": False, KERNEL_ANSWERS: []}
        best = max(answers, key=lambda judgement: judgement["reward"])
        rewards = [judgement["reward"] for judgement in answers]
        rewards += [0.0] * (episode.turns - len(answers))  # truncated answers have no evaluation
        return {"reward": best["reward"], "solved": best["correct"], "turn_rewards": rewards, KERNEL_ANSWERS: answers}

    async def _evaluation(self, task: Task, source: str) -> KernelEvaluation:
        """Evaluate a source. Raises InfrastructureError where the evaluation failed for another reason than it."""
        submission = self._submission(task=kernel_task(task, self._backend), source=source)
        try:
            evaluation = await self._client.evaluate(submission)
        except KernelServiceFailed as error:
            raise InfrastructureError(str(error)) from error
        if evaluation.infrastructure:
            raise InfrastructureError(evaluation.infrastructure)
        return evaluation


def outline(evaluation: KernelEvaluation) -> KernelAnswer:
    """Return the part of an evaluation that is stored with a rollout."""
    return KernelAnswer(
        reward=kernel_reward(evaluation),
        compiled=evaluation.compiled,
        correct=evaluation.correct,
        fault="" if evaluation.correct else evaluation.outcome,
        speedup=evaluation.speedup,
        repeated=evaluation.repeated,
        evaluation_s=evaluation.seconds,
        text=(evaluation.cheat or evaluation.text)[:_KEPT_CHARACTERS],
    )
