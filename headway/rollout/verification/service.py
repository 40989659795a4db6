"""The verifier worker: scores one task's responses inside its own process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from headway.config import schema
from headway.config.sources import VerifierSettings
from headway.records.rollout import Verdict
from headway.records.task import Task
from headway.rollout.verification.reference_checks import ReferenceProver
from headway.rollout.verification.scorers import ManyScorer, score_guarded
from headway.rollout.verification.verdicts import failed_verdict
from headway.rollout.verification.verifiers import resolve_named, resolve_verifier
from headway.runtime.stalls.watchdog import Watchdog

Piece = TypeVar("Piece")


class VerifierService:
    """Worker class. One call scores a task's whole group; each response has ``timeout_s`` of its own (up to a
    tenth more: see Watchdog).

    The limit is enforced here by a watchdog thread in C that needs no interpreter lock: a response that hangs, even
    inside a regular expression that holds the lock, ends this *process*. ``client.py`` sees a dead worker, starts
    another and finds the responsible response.
    """

    def __init__(
        self, context: Any, *, verifier: dict[str, Any], named: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """``verifier``: a `VerifierConfig` as plain types; ``named``: verifiers that tasks choose by ``Task.verifier``.

        Each verifier is made once. Raises ConfigurationError, naming the verifier, when one can't be imported or
        refuses a parameter.
        """
        settings: dict[str, VerifierSettings] = {"": schema.VerifierConfig.model_validate(verifier)}
        settings |= {name: VerifierSettings.model_validate(raw) for name, raw in (named or {}).items()}
        self._settings, self._provers = settings, dict[str, ReferenceProver]()
        self._verifiers = {name: (resolve_named(name, config), config.timeout_s) for name, config in settings.items()}

    def score(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """Return one verdict per response, in order. An exception or an unusable return value fails its response
        alone."""
        if task.verifier not in self._verifiers:
            known_names = ", ".join(name for name in self._verifiers if name) or "none"
            cause = f"task {task.task_id} names the verifier {task.verifier!r}; valid: {known_names}"
            return [failed_verdict(cause)] * len(responses)
        scorer, timeout_s = self._verifiers[task.verifier]
        if isinstance(scorer, ManyScorer):
            return score_many(scorer, timeout_s, task, responses)
        return score_watched(partial(score_guarded, scorer, task), timeout_s, responses)

    def prove(self, tasks: Sequence[Task]) -> list[Verdict]:
        """Score the reference answers of ``tasks``, all with one verifier (`ReferenceProver`); verdicts in order."""
        key = tasks[0].verifier
        if key not in self._provers:
            self._provers[key] = ReferenceProver(self._settings[key], resolve_verifier)
        return score_watched(self._provers[key].prove, self._settings[key].timeout_s, tasks)


def score_watched(score: Callable[[Piece], Verdict], timeout_s: float, pieces: Sequence[Piece]) -> list[Verdict]:
    """Score pieces one after another, each with ``timeout_s`` of its own."""
    verdicts: list[Verdict] = []
    with Watchdog(timeout_s) as watchdog:
        for piece in pieces:
            watchdog.restart()
            verdicts.append(score(piece))
    return verdicts


def score_many(score: ManyScorer, timeout_s: float, task: Task, responses: Sequence[str]) -> list[Verdict]:
    """Score several responses concurrently; the watchdog's limit is ``timeout_s`` for each response that one thread
    scores in sequence. Each verify_s is an equal share of the total time."""
    started_s = time.monotonic()
    with Watchdog(timeout_s * -(-len(responses) // score.concurrency)):
        verdicts = score.score_all(task, responses)
    share_s = (time.monotonic() - started_s) / max(1, len(verdicts))
    return [msgspec.structs.replace(verdict, verify_s=share_s) for verdict in verdicts]
