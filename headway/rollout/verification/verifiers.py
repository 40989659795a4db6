"""Verifiers: named functions that score a response to a task, and users' functions by ``module:function``.

A user's function is called as ``function(task, response, **parameters)`` and returns a number, a ``Verdict`` or
``{"reward": number, "solved": bool, ...}`` (further keys become the verdict's detail).

Its exceptions never become a reward. After an infrastructure failure, an exception (`is_infrastructure`) or a Verdict
with such a failure, the response is scored again, ``rollout.retries`` times, and then fails. Any other exception is a
defect of the verifier and fails the response at once.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from headway.config.section import Section
from headway.config.sources import VerifierSettings
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.rollout.parameters import NonNegativeNumber, call_checked, explained
from headway.rollout.verification.extraction import Extract, close, extract_answer, last_match, last_number, only_number
from headway.rollout.verification.judge import Judge
from headway.rollout.verification.math_answers import math_scorer
from headway.rollout.verification.scorers import Scorer, longest_s
from headway.rollout.verification.weighted import Part, WeightedScorer
from headway.runtime.imports import import_function
from headway.tasks.entry_encoding import unpack_entry
from headway.tasks.sources import build_generator


def resolve_verifier(verifier: VerifierSettings) -> Scorer:
    """Return the scorer that ``verifier`` names, with its parameters bound.

    Raises ConfigurationError for an unknown name (with the nearest), a module or function that can't be imported
    (with the reason), and an unknown or invalid parameter.
    """
    name, parameters = verifier.name, verifier.parameters
    builder = VERIFIERS.get(name)
    if builder is None:
        function = import_function(name, "verifier.name", VERIFIERS)
        _require_parameters(name, function, (None, ""), parameters)
        return functools.partial(function, **parameters)
    _require_parameters(name, builder, (), parameters)
    scorer = call_checked(builder, parameters, "verifier.parameters")
    if longest_s(scorer) > verifier.timeout_s:
        raise ConfigurationError(
            f"verifier.timeout_s = {verifier.timeout_s:g} would kill {name!r} at work: by its timeouts, retries and "
            f"waits it may take {longest_s(scorer):g} s over a response"
        )
    return scorer


def resolve_named(key: str, verifier: VerifierSettings) -> Scorer:
    """Return the scorer of a verifier that tasks or pruners choose by ``key`` (``Task.verifier``; "": the experiment's
    own). Raises as `resolve_verifier`, with the key of that verifier in the place of [verifier]."""
    try:
        return resolve_verifier(verifier)
    except ConfigurationError as error:
        if not key:
            raise
        section = "a task source's, row's or pruner's verifier." if ":" in key else f"verifiers.{key}."
        raise ConfigurationError(section + str(error).removeprefix("verifier.")) from error


def _require_parameters(
    name: str, function: Callable[..., object], leading_arguments: tuple[object, ...], parameters: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a built-in without a signature: the first call checks it
    try:
        signature.bind(*leading_arguments, **parameters)
    except TypeError as error:
        names = list(signature.parameters)[len(leading_arguments) :]
        valid_text = ", ".join(names) or "none"
        raise ConfigurationError(
            f"verifier.parameters = {dict(parameters)} don't fit {name!r}: {error}; valid: {valid_text}"
        ) from None


# --- the built-in verifiers ------------------------------------------------------------------------------


def exact(*, extract: Extract = "all", strip: bool = True) -> Scorer:
    """Score 1 when the extracted answer equals ``task.answer`` (both stripped of outer blanks with ``strip``, accents
    composed or not), else 0. A task without an answer fails the response: an empty response would be right."""

    def compose(text: str) -> str:
        return unicodedata.normalize("NFC", text.strip() if strip else text)

    def score(task: Task, response: str) -> float:
        reference = compose(task.answer)
        if not reference:
            raise ValueError(f"task {task.task_id} has no answer to compare with")
        answer = extract_answer(response, extract)
        return float(answer is not None and compose(answer) == reference)

    return score


def numeric(*, extract: Extract = "all", marker: str = "", tolerance: NonNegativeNumber = 0.0) -> Scorer:
    """Score 1 when the last number of the extracted answer is within ``tolerance`` of ``task.answer``, else 0.

    With ``marker`` (for example "####" or "=") the first number after the marker's last occurrence counts.
    """

    def score(task: Task, response: str) -> float:
        reference = only_number(task.answer)
        if reference is None:
            raise ValueError(f"task {task.task_id}: its answer {task.answer!r} is not a number (exactly one is needed)")
        answer = extract_answer(response, extract)
        number = None if answer is None else last_number(answer, marker)
        return float(number is not None and close(number, reference, tolerance))

    return score


def regex(*, pattern: str, group: int | str | None = None, extract: Extract = "all") -> Scorer:
    """Score 1 when ``group`` of the last match of ``pattern`` equals ``task.answer`` (outer blanks stripped), else 0.

    ``group`` defaults to the first group, or to the whole match when the pattern has none. Where the task has no
    answer, a match is enough. Flags go into the pattern: ``(?s)``, ``(?i)``. A pattern with ``think>`` checks the
    layout, and is matched against the reasoning too.
    """
    compiled_pattern = _compiled(pattern)
    chosen_group = group if group is not None else min(1, compiled_pattern.groups)
    group_names: list[int | str] = [*range(compiled_pattern.groups + 1), *compiled_pattern.groupindex]
    if chosen_group not in group_names:
        raise ConfigurationError(f"verifier.parameters.group = {chosen_group!r}: the pattern has {group_names}")

    def score(task: Task, response: str) -> float:
        text = extract_answer(response, extract, reasoning="think>" in pattern)
        final_match = None if text is None else last_match(compiled_pattern, text)
        if final_match is None:
            return 0.0
        return float(not task.answer or (final_match.group(chosen_group) or "").strip() == task.answer.strip())

    return score


def reasoning_gym(*, extract: Extract = "all") -> Scorer:
    """Score the stripped answer by the task's own generator (0 to 1, with partial credit).

    The tasks must be of ``source = "reasoning-gym"``; their metadata has the generator's name and the whole entry.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        requirement = "verifier.name = 'reasoning-gym' needs the package reasoning-gym"
        raise ConfigurationError(f"{requirement}: pip install 'headway[reasoning-gym]'")
    datasets: dict[str, Any] = {}  # by generator and parameters: building one can read data files

    def score(task: Task, response: str) -> float:
        if "generator" not in task.metadata or "entry" not in task.metadata:
            raise ValueError(
                f"task {task.task_id} carries no reasoning-gym entry: this verifier scores only "
                "tasks of source = 'reasoning-gym'"
            )
        name, parameters = task.metadata["generator"], task.metadata.get("parameters", {})
        key = name + json.dumps(parameters, sort_keys=True)
        if key not in datasets:
            datasets[key] = build_generator(name, {**parameters, "seed": 0, "size": 1})
        answer = extract_answer(response, extract)
        stripped_answer = None if answer is None else answer.strip()
        return float(datasets[key].score_answer(answer=stripped_answer, entry=unpack_entry(task.metadata["entry"])))

    return score


def weighted(*, parts: list[dict[str, Any]], solved_by: str = "") -> Scorer:
    """Score by the weighted sum of other verifiers' rewards.

    ``parts``: tables of ``name``, ``parameters``, ``weight`` (default 1, may be negative) and ``label`` (default: the
    name). ``solved_by``: the label of the part that decides whether the task is solved; default: the first.
    """
    if not parts:
        raise ConfigurationError(f"verifier.parameters.parts = {parts!r}: a list of tables is needed")
    built_parts = tuple(_part(raw_part, f"verifier.parameters.parts[{index}]") for index, raw_part in enumerate(parts))
    labels = [part.label for part in built_parts]
    if len(set(labels)) < len(labels):
        raise ConfigurationError(f"verifier.parameters.parts: {labels}: give those of equal name a 'label' each")
    if solved_by and solved_by not in labels:
        valid_text = ", ".join(labels)
        raise ConfigurationError(f"verifier.parameters.solved_by = {solved_by!r}: valid: {valid_text}")
    return WeightedScorer(parts=built_parts, solved_by=solved_by or labels[0])


class _PartSettings(Section):
    model_config = ConfigDict(strict=True)

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    weight: float = 1.0
    label: str = ""


def _part(raw_part: object, key_path: str) -> Part:
    try:
        part_settings = _PartSettings.model_validate(raw_part)
        settings = VerifierSettings(name=part_settings.name, parameters=part_settings.parameters)
        scorer = resolve_verifier(settings.model_copy(update={"timeout_s": math.inf}))
    except ValidationError as error:
        valid_text = ", ".join(_PartSettings.model_fields)
        raise ConfigurationError(f"{explained(error, key_path)}; valid: {valid_text}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{key_path}.{str(error).removeprefix('verifier.')}") from None
    return Part(label=part_settings.label or part_settings.name, scorer=scorer, weight=part_settings.weight)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigurationError(f"verifier.parameters.pattern = {pattern!r}: {error}") from None


VERIFIERS: dict[str, Callable[..., Scorer]] = {  # name -> builder: parameters in, scorer out; it declares their types
    "exact": exact,
    "numeric": numeric,
    "regex": regex,
    "math": math_scorer,
    "reasoning-gym": reasoning_gym,
    "weighted": weighted,
    "judge": Judge,
}
