"""Kernels that the policy writes for a task's reference, judged by kernel services: compiled, checked, timed."""

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
    """Environment of several turns in which an answer is a module that defines ``ModelNew`` (its last code block with
    one). A kernel service evaluates it, and the policy gets the result as feedback, until ``turns`` answers were
    evaluated or one has a reward of ``stop_at``.

    Each turn has its own reward on TritonForge's ladder (`kernels.reward`): 0.1 compiled, 0.3 correct and up to 2 for
    the speed-up. The rollout's is its best turn's; with ``algorithm.turn_discount`` (0.4 there) each turn learns from
    its own and those that follow. A task's metadata has a `KernelTask` under ``kernel``.
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
        """``addresses``: http://HOST:PORT of kernel services. ``key_file``: with their key. ``system``: what every
        conversation begins with. ``backend``: instead of the tasks' own. ``turns``: answers that are judged.
        ``stop_at``: reward of a turn that ends the rollout. ``timed``: False: correctness alone. ``correct_trials``,
        ``timed_trials``, ``seed``: of an evaluation; ``timeout_s``: of it, less than environment.timeout_s.
        ``source_characters``: a longer program isn't evaluated."""
        if backend:
            require_choice("environment.parameters.backend", backend, KernelBackend)
        if turns < 1:
            raise ConfigurationError(f"environment.parameters.turns = {turns}: at least 1")
        self.system = system
        self.longest_s = {"timeout_s": timeout_s}
        self._backend = backend
        self._turns, self._stop_at = turns, stop_at
        trials = {"correct_trials": correct_trials, "timed_trials": timed_trials}
        self._submission = partial(KernelSubmission, timed=timed, seed=seed, timeout_s=timeout_s, **trials)
        self._source_characters = source_characters
        key = next(iter(read_keys(key_file, "environment.parameters.key_file =")), "")
        self._client = KernelClient(addresses, RealClock(), key=key)

    async def require_services(self, tasks: Iterable[Task]) -> None:
        """Raise ConfigurationError unless the tasks are kernel tasks, and a service answers for each of their back
        ends."""
        needed = {kernel_task(task, self._backend).backend for task in tasks}
        async with self._client as client:
            await client.require_backends(needed)

    async def stop(self) -> None:
        await self._client.close()

    async def begin(self, episode: Episode) -> None:
        kernel_task(episode.task, self._backend)  # or it fails before anything is sampled
        await super().begin(episode)

    async def reply(self, episode: Episode, answer: Answer) -> None:
        judged = episode.state.setdefault("judged", [])
        source = source_in(answer.text)
        if not source:
            evaluation, said = KernelEvaluation(fault="syntax_error", text="no ModelNew"), _NO_SOURCE
        elif len(source) > self._source_characters:
            evaluation = KernelEvaluation(fault="syntax_error", text="too long")
            said = f"This source has {len(source):,} characters; {self._source_characters:,} at most are evaluated."
        else:
            evaluation = await self._evaluation(episode.task, source)
            said = feedback(evaluation)
        kept = outline(evaluation)
        judged.append(msgspec.to_builtins(kept))
        if kept.reward >= self._stop_at:
            episode.end("fast enough")
        elif len(judged) >= self._turns:
            episode.end("turns")
        else:
            episode.say(self.shortened(said))

    async def score(self, episode: Episode) -> dict[str, Any]:
        judged: list[dict[str, Any]] = episode.state.get("judged", [])
        if not judged:
            return {"reward": 0.0, "solved": False, KERNEL_ANSWERS: []}
        best = max(judged, key=lambda one: one["reward"])
        rewards = [one["reward"] for one in judged] + [0.0] * (episode.turns - len(judged))  # an answer that was cut
        return {"reward": best["reward"], "solved": best["correct"], "turn_rewards": rewards, KERNEL_ANSWERS: judged}

    async def _evaluation(self, task: Task, source: str) -> KernelEvaluation:
        """Have a source judged. Raises InfrastructureError where that says nothing of it."""
        submission = self._submission(task=kernel_task(task, self._backend), source=source)
        try:
            evaluation = await self._client.evaluate(submission)
        except KernelServiceFailed as error:
            raise InfrastructureError(str(error)) from error
        if evaluation.infrastructure:
            raise InfrastructureError(evaluation.infrastructure)
        return evaluation


def outline(evaluation: KernelEvaluation) -> KernelAnswer:
    """The part of an evaluation that a rollout keeps."""
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
