"""The keys of early pruning: which rollouts are stopped early, and what happens to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headway.config.section import Positive, Probability, Seconds, Section
from headway.config.sources import VerifierSettings

Mode = Literal["score", "drop"]

PRUNERS = ("length", "relative_length", "budget", "repetition", "value", "verifier", "group")


class LengthCap(Section):
    """A cap on the response, below ``rollout.max_response_tokens``: unlike that limit, audited."""

    tokens: Positive  # a response of this length is pruned
    mode: Mode = "score"  # score: verified as it stands, and trained; drop: it leaves its group


class RelativeLengthCap(Section):
    """A cap that follows the group: its members answer the same prompt."""

    times_median: Annotated[float, Field(gt=1)] = 4.0  # the cap: a multiple of the finished members' median length
    least_finished: Positive = 2  # finished members needed before there is a cap
    least_tokens: Positive = 64  # no shorter response is pruned
    mode: Mode = "score"  # score: verified as it stands, and trained; drop: it leaves its group


class BudgetCap(Section):
    """A cap by time: rollouts that can't end before their group is due are pruned."""

    least_chance: Probability = 0.05  # pruned below this probability of ending in time, by the lengths seen so far
    slack_steps: Annotated[float, Field(ge=0)] = 1.0  # a group is due this long after the last step that may train it
    least_tokens: Positive = 64  # no shorter response is pruned
    mode: Mode = "score"  # score: verified as it stands, and trained; drop: it leaves its group


class RepetitionCap(Section):
    """A cap on repetition: responses that loop are pruned."""

    longest_period: Positive = 64  # most tokens in one turn of an exact loop at the response's end
    repeats: Annotated[int, Field(ge=2)] = 4  # least turns of the loop ...
    loop_tokens: Positive = 64  # ... and least tokens of all turns together
    ngram: Positive = 4  # tokens of an n-gram
    window_tokens: Positive = 256  # last tokens of the response in which n-grams are compared
    repeated_share: Annotated[float, Field(gt=0, le=1)] = 0.9  # repeated n-grams there, as a share; 1: only loops count
    mode: Mode = "score"  # score: verified as it stands, and trained; drop: it leaves its group

    @model_validator(mode="after")
    def _window(self) -> RepetitionCap:
        if self.ngram >= self.window_tokens:
            raise ValueError(f"ngram = {self.ngram} must be smaller than window_tokens = {self.window_tokens}")
        return self


class ValueBound(Section):
    """A bound on the estimated value: rollouts that are unlikely to solve their task are pruned."""

    name: str = ""  # a verifier of the response so far, as in [verifier]; "": the group's own solve rate so far
    parameters: dict[str, Any] = {}  # its keyword arguments
    timeout_s: Seconds = 10.0  # hard limit per call; the rollout continues when a call is given up
    every_tokens: Positive = 64  # new tokens between two calls for a rollout
    below: Probability = 0.02  # pruned when the estimated probability is below this
    prior: Annotated[float, Field(gt=0)] = 0.5  # pseudo-counts, of solved and of unsolved, in the group's solve rate
    mode: Mode = "drop"  # score: verified as it stands, and trained; drop: it leaves its group

    @model_validator(mode="after")
    def _own_keys(self) -> ValueBound:
        for key, meant in (("parameters", bool(self.name)), ("timeout_s", bool(self.name)), ("prior", not self.name)):
            if not meant and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key!r} has no effect with name = {self.name!r}")
        return self


class PartialVerifier(Section):
    """A verifier of partial responses: rollouts that are already wrong are pruned."""

    name: str  # a verifier of the response so far, as in [verifier]: exact | numeric | ... | module:function
    parameters: dict[str, Any] = {}  # its keyword arguments
    timeout_s: Seconds = 10.0  # hard limit per call; the rollout continues when a call is given up
    every_tokens: Positive = 64  # new tokens between two calls for a rollout
    below: float = 0.5  # pruned when the reward is below this
    mode: Mode = "drop"  # score: verified as it stands, and trained; drop: it leaves its group


class GroupBound(Section):
    """A bound on the group's outcome: once it is decided, the rest of the group is dropped."""

    confidence: Probability = 0.9  # that the rest would get the same reward as all finished members
    prior: Annotated[float, Field(gt=0)] = 0.5  # of Beta(prior, prior) for the solve rate: small expects unanimity
    least_finished: Annotated[int, Field(ge=2)] = 3  # members that must have been verified
    mode: Literal["drop"] = "drop"  # half a response would be scored as none, and look like a difference


class PruningConfig(Section):
    """Pruners, which stop rollouts early (docs/pruning.md). Each table below is a pruner, off unless it is present."""

    every_tokens: Positive = 16  # new tokens between two checks of a rollout
    audit_share: Annotated[float, Field(ge=0, lt=1)] = 0.05  # share of prunable rollouts left to finish, as an audit
    length: LengthCap | None = None  # a cap on the response
    relative_length: RelativeLengthCap | None = None  # a cap that follows the lengths of its group
    budget: BudgetCap | None = None  # rollouts that can't end before their group is due
    repetition: RepetitionCap | None = None  # responses that loop
    value: ValueBound | None = None  # rollouts that are unlikely to solve their task
    verifier: PartialVerifier | None = None  # rollouts that are already wrong
    group: GroupBound | None = None  # the rest of a group whose outcome is decided

    @property
    def on(self) -> tuple[str, ...]:
        """Names of the configured pruners, in the order they are asked."""
        return tuple(name for name in PRUNERS if getattr(self, name) is not None)

    def mode_of(self, pruner: str) -> Mode:
        return getattr(self, pruner).mode

    @property
    def needs_rewards(self) -> bool:
        """Whether members are verified as they finish, not with their group: siblings' rewards decide on the others."""
        return self.group is not None or (self.value is not None and not self.value.name)

    @property
    def judges(self) -> dict[str, VerifierSettings]:
        """Pruner -> the verifier that it calls with partial responses."""
        chosen = {"value": self.value, "verifier": self.verifier}
        return {
            pruner: VerifierSettings(name=judge.name, parameters=judge.parameters, timeout_s=judge.timeout_s)
            for pruner, judge in chosen.items()
            if judge is not None and judge.name
        }

    def require_possible(self, *, longest_tokens: int, group_size: int, deterministic: bool) -> None:
        """Raise ValueError for pruners that could never prune in an experiment with these limits, or must not."""
        if deterministic and self.on:
            raise ValueError(
                f"run.deterministic = true excludes pruning.{self.on[0]}: when a rollout is stopped depends on when "
                "its tokens arrive"
            )
        relative, loop = self.relative_length, self.repetition
        tokens = {
            "length.tokens": self.length and self.length.tokens,
            "relative_length.least_tokens": relative and relative.least_tokens,
            "budget.least_tokens": self.budget and self.budget.least_tokens,
            "repetition.loop_tokens and window_tokens": loop and min(loop.loop_tokens, loop.window_tokens),
            **{f"{pruner}.every_tokens": getattr(self, pruner).every_tokens for pruner in self.judges},
            "every_tokens": self.every_tokens if self.on else None,
        }
        _require_below("rollout.max_response_tokens", longest_tokens, tokens)
        self._require_reachable(group_size)
        finished = {
            "group.least_finished": self.group and self.group.least_finished,
            "relative_length.least_finished": relative and relative.least_finished,
        }
        _require_below("rollout.group_size", group_size, finished)

    def _require_reachable(self, group_size: int) -> None:
        """Raise ValueError for bounds that no group reaches, not even with a single member left to finish."""
        value, group, others = self.value, self.group, group_size - 1
        if value is not None and not value.name:
            least = value.prior / (2 * value.prior + others)
            if least >= value.below:
                raise ValueError(
                    f"pruning.value.below = {value.below:g} never prunes anything: with pruning.value.prior = "
                    f"{value.prior:g}, when {others} of a group have failed, all but one, its solve rate is estimated "
                    f"as {least:.3g}"
                )
        if group is not None:
            most = (group.prior + others) / (2 * group.prior + others)
            if most < group.confidence:
                raise ValueError(
                    f"pruning.group.confidence = {group.confidence:g} never prunes anything: with pruning.group.prior "
                    f"= {group.prior:g}, when {others} of a group agree, all but one, the last one does with "
                    f"probability {most:.3g}"
                )


def _require_below(limit_key: str, limit: int, given: Mapping[str, int | None]) -> None:
    """Raise ValueError for a key of [pruning] that isn't below the limit; None: its pruner is off."""
    for key, value in given.items():
        if value is not None and value >= limit:
            raise ValueError(f"pruning.{key} = {value} never prunes anything: it must be below {limit_key} = {limit}")
