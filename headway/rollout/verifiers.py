"""Verifiers: named functions that score a response to a task, and a user's own by ``module:function``.

A user's function is called as ``function(task, response, **parameters)`` and returns a number, a ``Verdict`` or
``{"reward": number, "solved": bool, ...}`` (further keys become the verdict's detail).

What it raises never becomes a reward. An OSError (ConnectionError, TimeoutError, ...) is infrastructure, as is a
Verdict whose failure says so: the response is scored again, ``rollout.retries`` times, and then fails. Anything else
is the verifier's own defect and fails the response at once.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, SupportsFloat, cast

import msgspec

from headway.config.sources import VerifierSettings
from headway.records.errors import ConfigurationError
from headway.records.rollout import Failure, Verdict
from headway.records.task import Task
from headway.rollout.extraction import EXTRACTS, Extract, close, extract_answer, last_match, last_number
from headway.rollout.math_answers import math_scorer
from headway.runtime.imports import import_function
from headway.tasks.entries import unpack_entry
from headway.tasks.sources import build_generator

PRUNER_KEY = "pruning."  # and a pruner: the verifier of half a response that it asks
Scorer = Callable[[Task, str], object]  # what a verifier is once its parameters are bound

VERIFIERS: dict[str, Callable[..., Scorer]] = {}  # name -> builder: parameters in, scorer out; checks parameters


def register(name: str) -> Callable[[Callable[..., Scorer]], Callable[..., Scorer]]:
    """Register a builder (keyword parameters -> scorer) under ``name``."""

    def add(builder: Callable[..., Scorer]) -> Callable[..., Scorer]:
        if name in VERIFIERS:
            raise ValueError(f"verifier {name!r} is already registered")
        VERIFIERS[name] = builder
        return builder

    return add


def resolve_verifier(verifier: VerifierSettings) -> Scorer:
    """The scorer that ``verifier`` names, with its parameters bound.

    Raises ConfigurationError: an unknown name (with the nearest), a module or function that can't be imported
    (with the reason), an unknown or invalid parameter.
    """
    name, parameters = verifier.name, verifier.parameters
    builder = VERIFIERS.get(name)
    if builder is None:
        function = import_function(name, "verifier.name", VERIFIERS)
        _require_parameters(name, function, (None, ""), parameters)
        return functools.partial(function, **parameters)
    _require_parameters(name, builder, (), parameters)
    return builder(**parameters)


def resolve_named(key: str, verifier: VerifierSettings) -> Scorer:
    """``resolve_verifier`` of what tasks choose by ``key`` (``Task.verifier``; "": the experiment's own), which errors
    say instead of [verifier]."""
    try:
        return resolve_verifier(verifier)
    except ConfigurationError as error:
        if not key:
            raise
        own = key.startswith("{") or ":" in key
        section = "a task source's or row's verifier." if own else f"verifiers.{key}."
        if key.startswith(PRUNER_KEY):
            section = f"{key}."
        raise ConfigurationError(section + str(error).removeprefix("verifier.")) from error


def _require_parameters(
    name: str, function: Callable[..., object], given: tuple[object, ...], parameters: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a built-in without a signature: the first call will tell
    try:
        signature.bind(*given, **parameters)
    except TypeError as error:
        names = list(signature.parameters)[len(given) :]
        valid = ", ".join(names) or "none"
        raise ConfigurationError(
            f"verifier.parameters = {dict(parameters)} don't fit {name!r}: {error}; valid: {valid}"
        ) from None


# --- the built-in verifiers ------------------------------------------------------------------------------


@register("exact")
def exact(*, extract: Extract = "all", strip: bool = True) -> Scorer:
    """1 when the extracted answer equals ``task.answer`` (both stripped of outer blanks with ``strip``), else 0."""
    _require_extract(extract)

    def score(task: Task, response: str) -> float:
        found = extract_answer(response, extract)
        if found is None:
            return 0.0
        return float(found.strip() == task.answer.strip() if strip else found == task.answer)

    return score


@register("numeric")
def numeric(*, extract: Extract = "all", marker: str = "", tolerance: float = 0.0) -> Scorer:
    """1 when the last number of the extracted answer is within ``tolerance`` of ``task.answer``, else 0.

    With ``marker`` (for example "####" or "=") the first number after the marker's last occurrence counts.
    """
    _require_extract(extract)
    _require_number("tolerance", tolerance)

    def score(task: Task, response: str) -> float:
        reference = _reference_number(task)
        found = extract_answer(response, extract)
        number = None if found is None else last_number(found, marker)
        return float(number is not None and close(number, reference, tolerance))

    return score


@register("regex")
def regex(*, pattern: str, group: int | str | None = None, extract: Extract = "all") -> Scorer:
    """1 when ``group`` of the last match of ``pattern`` equals ``task.answer`` (outer blanks stripped), else 0.

    ``group`` defaults to the first group, or to the whole match when the pattern has none. Where the task has no
    answer, a match is enough. Flags go into the pattern: ``(?s)``, ``(?i)``.
    """
    _require_extract(extract)
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigurationError(f"verifier.parameters.pattern = {pattern!r}: {error}") from None
    chosen = group if group is not None else min(1, compiled.groups)
    names: list[int | str] = [*range(compiled.groups + 1), *compiled.groupindex]
    if chosen not in names:
        raise ConfigurationError(f"verifier.parameters.group = {chosen!r}: the pattern has {names}")

    def score(task: Task, response: str) -> float:
        text = extract_answer(response, extract)
        last = None if text is None else last_match(compiled, text)
        if last is None:
            return 0.0
        return float(not task.answer or (last.group(chosen) or "").strip() == task.answer.strip())

    return score


@register("math")
def mathematics(*, extract: Extract = "all", float_rounding: int = 6, strict: bool = True) -> Scorer:
    """1 when the answer equals ``task.answer`` as mathematics (the package math-verify), else 0 and the reason.

    Both may be LaTeX ("\\frac{1}{2}", in dollars or \\boxed or bare) or plain ("1/2", "0.5", "50%"); of a response the
    last boxed expression counts, or else what math-verify takes for the final answer in its last 4,000 characters.
    ``float_rounding``: decimals that must agree where a side is no exact number. ``strict``: variables must have the
    same names, and sets and tuples differ. A reference that can't be parsed fails the response, naming the task.
    """
    _require_extract(extract)
    if isinstance(float_rounding, bool) or not isinstance(float_rounding, int) or float_rounding < 0:
        raise ConfigurationError(f"verifier.parameters.float_rounding = {float_rounding!r}: must be an integer >= 0")
    if not isinstance(strict, bool):
        raise ConfigurationError(f"verifier.parameters.strict = {strict!r}: must be true or false")
    return math_scorer(extract, float_rounding, strict)


@register("reasoning-gym")
def reasoning_gym(*, extract: Extract = "all") -> Scorer:
    """The reward of the task's own generator (0 to 1, its partial credit included) for the stripped answer.

    Needs tasks of ``source = "reasoning-gym"``; their metadata carries the generator's name and the whole entry.
    """
    _require_extract(extract)
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigurationError("verifier.name = 'reasoning-gym': the package reasoning-gym is not installed")
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
        stripped = None if answer is None else answer.strip()
        return float(datasets[key].score_answer(answer=stripped, entry=unpack_entry(task.metadata["entry"])))

    return score


def _require_extract(extract: str) -> None:
    if extract not in EXTRACTS:
        raise ConfigurationError(f"verifier.parameters.extract = {extract!r}: valid: {', '.join(EXTRACTS)}")


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigurationError(f"verifier.parameters.{name} = {value!r}: must be a finite number >= 0")


def _reference_number(task: Task) -> Decimal:
    number = last_number(task.answer)
    if number is None:
        raise ValueError(f"task {task.task_id}: its answer {task.answer!r} is not a number")
    return number


# --- what a verifier may return --------------------------------------------------------------------------


def to_verdict(result: object) -> Verdict:
    """A verifier's return value as a Verdict; one that can't be used becomes a Verdict with ``failure``.

    A number counts as solved from 1 upwards; a mapping or a Verdict may say otherwise.
    """
    solved: object = None
    detail: object = {}
    if isinstance(result, Verdict):
        if result.failure is not None:
            return msgspec.structs.replace(result, reward=0.0, solved=False)
        value, solved, detail = result.reward, result.solved, result.detail
    elif isinstance(result, Mapping):
        fields = {str(key): field for key, field in cast("Mapping[Any, Any]", result).items()}
        value, solved, detail = fields.pop("reward", None), fields.pop("solved", None), fields
    else:
        value = result
    reward = _number(value)
    if reward is None:
        return failed_verdict(
            f"the verifier returned {_short(result)}: expected a number, a Verdict or a dictionary with 'reward'"
        )
    if not math.isfinite(reward):
        return failed_verdict(f"the reward is {reward}, not a finite number")
    try:
        plain = msgspec.to_builtins(detail, str_keys=True, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError) as error:
        return failed_verdict(f"the verdict's detail can't be stored: {error}")
    return Verdict(reward=reward, solved=reward >= 1 if solved is None else bool(solved), detail=plain)


def failed_verdict(cause: str, *, infrastructure: bool = False, detail: str = "", verify_s: float = 0.0) -> Verdict:
    """A Verdict whose reward is not valid, failed at the boundary "reward"."""
    failure = Failure(boundary="reward", cause=cause, infrastructure=infrastructure, detail=detail)
    return Verdict(reward=0.0, solved=False, verify_s=verify_s, failure=failure)


def _number(value: object) -> float | None:
    # anything with a float form counts (NumPy scalars, 0-d tensors); text doesn't have one
    if not hasattr(value, "__float__"):
        return None
    try:
        return float(cast("SupportsFloat", value))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several, a huge integer
        return None


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as plain numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
