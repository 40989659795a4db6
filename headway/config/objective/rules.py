"""The rules of a run: what the samples of each task source are trained by, and how much each loss counts."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from headway.config.objective.parameters import PARAMETERS
from headway.config.sources import DemonstrationsConfig, TaskSource

Algorithm = TypeVar("Algorithm", bound=BaseModel)  # the section [algorithm], which the schema defines

# Keys of [algorithm] that a source may have otherwise. The rest is common: masks, passes, the credit of turns.
RULE_KEYS = [
    "loss",
    "parameters",
    "clip_low",
    "clip_high",
    "behaviour_weight_cap",
    "advantage",
    "aggregation",
    "kl_coefficient",
    "kl_estimator",
    "kl_in",
    "policy_coefficient",
    "teacher",
    "teacher_coefficient",
    "environment_coefficient",
]


Stream = Literal["policy", "teacher", "imitate"]
STREAMS: tuple[Stream, ...] = ("policy", "teacher", "imitate")  # of the loss: algorithms/streams.py
DEMONSTRATION = -1  # number of the rule of demonstrations


@dataclass(frozen=True, kw_only=True)
class StreamRule:
    """A rule's part of a stream: its coefficient, and how its token losses are aggregated."""

    stream: Stream
    rule: int  # number of the rule; DEMONSTRATION
    coefficient: float
    aggregation: Literal["token_mean", "fixed", "seq_mean_token_sum", "seq_mean_token_mean"]


@dataclass(frozen=True, kw_only=True)
class Rules(Generic[Algorithm]):
    """The distinct rules of a run, by number: ``[algorithm]`` is 0. Sources whose keys are equal share a rule."""

    algorithms: tuple[Algorithm, ...]
    rule_by_source: Mapping[str, int]  # by `TaskSource.display_name`
    sampled_teachers: frozenset[str] = frozenset()  # names of those that are learned in the policy's advantages

    def number(self, source: str) -> int:
        """The number of the rule for the tasks of ``source``, a `Task.source`; 0 for one that isn't in the file."""
        return self.rule_by_source.get(source, 0)

    def of(self, source: str) -> Algorithm:
        """The rule for the tasks of ``source``, a `Task.source`."""
        return self.algorithms[self.number(source)]

    @property
    def used(self) -> list[int]:
        """The numbers of the rules that some source has, ascending."""
        return sorted({*self.rule_by_source.values()})


def make_rules(
    algorithm: Algorithm, sources: Sequence[TaskSource], sampled_teachers: Collection[str] = ()
) -> Rules[Algorithm]:
    """Merge ``algorithm`` with each source's own keys; ``sampled_teachers``: see `Rules`. Raises ValueError naming the
    source and key of a bad one."""
    algorithms, rule_by_source = [algorithm], dict[str, int]()
    for source in sources:
        rule = _merged(algorithm, source) if source.algorithm else algorithm
        if rule.model_copy(update={"preset": getattr(algorithm, "preset", "")}) == algorithm:
            rule = algorithm
        if rule not in algorithms:
            algorithms.append(rule)
        rule_by_source[source.display_name] = algorithms.index(rule)
    teachers = frozenset(sampled_teachers)
    return Rules(algorithms=tuple(algorithms), rule_by_source=rule_by_source, sampled_teachers=teachers)


def _merged(algorithm: Algorithm, source: TaskSource) -> Algorithm:
    origin = f"tasks.train {source.display_name!r}: algorithm"
    for key in source.algorithm:
        if key in RULE_KEYS:
            continue
        close = difflib.get_close_matches(key, RULE_KEYS, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        common = " is common to all sources" if key in type(algorithm).model_fields else ": unknown key"
        raise ValueError(f"{origin}.{key}{common}; {hint}valid: {', '.join(RULE_KEYS)}")
    merged = algorithm.model_dump(include=algorithm.model_fields_set - {"preset"}) | source.algorithm
    if "parameters" not in source.algorithm:
        merged["parameters"] = _inherited(merged.pop("parameters", {}), algorithm, source)
    try:
        return type(algorithm).model_validate(merged)
    except ValidationError as error:
        fault: Any = error.errors()[0]
        location = "".join(f".{part}" for part in fault["loc"])
        value_text = f" = {fault['input']!r}" if location else ""
        raise ValueError(f"{origin}{location}{value_text}: {fault['msg'].removeprefix('Value error, ')}") from None


def _inherited(parameters: Mapping[str, Any], algorithm: Any, source: TaskSource) -> dict[str, Any]:
    """Return the ``parameters`` of ``algorithm`` that the loss or the advantage of the source's rule takes too."""
    loss, advantage = (source.algorithm.get(key, getattr(algorithm, key)) for key in ("loss", "advantage"))
    taken_names = {*PARAMETERS.get(loss, ()), *PARAMETERS.get(advantage, ())}
    if ":" in loss and loss == algorithm.loss:  # the user's takes any
        taken_names |= {*parameters}.difference(PARAMETERS.get(algorithm.advantage, ()))
    return {name: value for name, value in parameters.items() if name in taken_names}


def stream_rules(rules: Rules[Any], demonstrations: DemonstrationsConfig) -> tuple[StreamRule, ...]:
    """The parts of a run's loss: of each rule in use the streams that it has, then that of ``demonstrations``."""
    parts = list[StreamRule]()
    for rule in rules.used:
        algorithm = rules.algorithms[rule]
        in_advantages = algorithm.teacher in rules.sampled_teachers
        coefficients: dict[Stream, float] = {
            "policy": algorithm.policy_coefficient or float(in_advantages),
            "teacher": algorithm.teacher_coefficient if algorithm.teacher and not in_advantages else 0.0,
            "imitate": algorithm.environment_coefficient,
        }
        parts += [
            StreamRule(stream=stream, rule=rule, coefficient=coefficient, aggregation=algorithm.aggregation)
            for stream, coefficient in coefficients.items()
            if coefficient > 0
        ]
    if demonstrations.data is not None:
        of_tokens: dict[str, Any] = {"coefficient": demonstrations.coefficient, "aggregation": "token_mean"}
        parts.append(StreamRule(stream="imitate", rule=DEMONSTRATION, **of_tokens))
    return tuple(parts)


def denominators_of(parts: Sequence[StreamRule]) -> list[str]:
    """Name the distinct denominators of a step."""
    return list(dict.fromkeys(f"{part.stream} ({part.aggregation})" for part in parts))
