r"""Checks of references: a verifier must accept a task's own answer, in the form that the verifier expects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from headway.config.sources import VerifierSettings
from headway.records.rollout import Verdict
from headway.records.task import Task
from headway.rollout.verification.math_answers import reference_text
from headway.rollout.verification.scorers import Scorer, score_guarded
from headway.rollout.verification.verdicts import failed_verdict

PROVABLE = ("exact", "numeric", "math", "reasoning-gym")  # verifiers that compare with the reference alone
_FORMS = {"boxed": "\\boxed{{{}}}", "answer_tag": "<answer>{}</answer>"}  # of an answer, by ``extract``


def provable_parts(verifier: VerifierSettings) -> list[VerifierSettings]:
    """Return ``verifier`` itself or its weighted parts, as far as they can check a reference (`PROVABLE`)."""
    if verifier.name != "weighted":
        return [verifier] if verifier.name in PROVABLE else []
    part_tables = cast("list[Mapping[str, Any]]", verifier.parameters.get("parts", []))
    part_settings = [VerifierSettings(name=part["name"], parameters=part.get("parameters", {})) for part in part_tables]
    return [part for part in part_settings if part.name in PROVABLE]


class ReferenceProver:
    """Scores references as responses, by every part of a verifier that can check them."""

    def __init__(self, verifier: VerifierSettings, resolve: Callable[[VerifierSettings], Scorer]) -> None:
        self._parts = [(part, resolve(part)) for part in provable_parts(verifier)]

    def prove(self, task: Task) -> Verdict:
        """Return the first verdict that isn't solved, with the reason in its failure; a solved one where all are."""
        verdict = Verdict(reward=1.0, solved=True)
        for part, scorer in self._parts:
            if part.name == "reasoning-gym" and not task.answer:
                continue  # the generator has no reference answer, and scores any
            verdict = score_guarded(scorer, task, response_of(part, task.answer))
            if not verdict.solved:
                return _refused(part, task, verdict)
        return verdict


def response_of(verifier: VerifierSettings, answer: str) -> str:
    """Return a response that consists of ``answer`` alone, in the form that ``extract`` expects."""
    text = answer
    if verifier.name == "math":
        text = reference_text(answer)
    elif verifier.name == "numeric":
        text = f"{verifier.parameters.get('marker', '')} {answer.rpartition('####')[2].strip()}".lstrip()
    return _FORMS.get(verifier.parameters.get("extract", "all"), "{}").format(text)


def _refused(part: VerifierSettings, task: Task, verdict: Verdict) -> Verdict:
    if verdict.failure is not None:
        cause = verdict.failure.cause.partition(f"task {task.task_id}: ")[2] or verdict.failure.cause
        return msgspec.structs.replace(verdict, failure=msgspec.structs.replace(verdict.failure, cause=cause))
    reason = verdict.detail.get("reason") or f"its reward is {verdict.reward:g}"
    extract = part.parameters.get("extract", "all")
    return failed_verdict(f"{part.name} (extract = {extract!r}) doesn't solve it by its own answer: {reason}")
