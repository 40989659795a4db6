"""`[pruning]`: the keys of pruners, which stop rollouts early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, BeforeValidator, Field

from headway.config.section import Positive, Probability, Section

Mode = Literal["score", "drop"]

PRUNERS = ("length", "relative_length", "budget", "repetition", "value", "verifier", "group")

EVERY_TOKENS = 16  # new tokens between two checks of a rollout: a check costs little more than a token does
VERIFIED_EVERY_TOKENS = 64  # new tokens between two calls of a verifier for a rollout: a call costs as much as a reward
LEAST_TOKENS = 64  # no shorter response is pruned for its length or its time: there is little to save
LEAST_OWN_ENDS = 2  # members that must have ended by themselves before their median length makes a cap
SLACK_STEPS = 1.0  # a group is due this long after the last step that may train it: step times vary by that much
LONGEST_PERIOD = 64  # tokens in one period of an exact loop at the response's end: a sentence or two
LOOP_TOKENS = 64  # least tokens of all periods together: shorter repetitions are lists, tables, rows of digits
NGRAM = 4  # tokens: shorter runs repeat in any text
WINDOW_TOKENS = 256  # last tokens of the response in which runs are compared
PRIOR = 0.5  # of Beta(prior, prior) for a group's solve rate (Jeffreys): expects it near 0 or 1
LEAST_AGREEING = 3  # members that must have been verified before they decide their group


class LengthCap(Section):
    """A cap on the response, below ``rollout.max_response_tokens``: unlike that limit, audited."""

    kind: Literal["length"] = "length"
    tokens: Positive  # a response of this length is pruned
    mode: Mode = "score"  # score: verify and train the partial response; drop: remove it from its group


class RelativeLengthCap(Section):
    """A cap that follows the group: its members answer the same prompt."""

    kind: Literal["relative_length"] = "relative_length"
    times_median: Annotated[float, Field(gt=1)] = 4.0  # the cap: a multiple of the finished members' median length
    mode: Mode = "score"  # score: verify and train the partial response; drop: remove it from its group


class BudgetCap(Section):
    """A cap by time: rollouts that can't end before their group is due are pruned."""

    kind: Literal["budget"] = "budget"
    least_chance: Probability = 0.05  # pruned below this probability of ending in time, by the lengths seen so far
    mode: Mode = "score"  # score: verify and train the partial response; drop: remove it from its group


class RepetitionCap(Section):
    """A cap on repetition: responses that loop are pruned."""

    kind: Literal["repetition"] = "repetition"
    repeats: Annotated[int, Field(ge=2)] = 4  # least periods of an exact loop at the response's end
    repeated_share: Annotated[float, Field(gt=0, le=1)] = 0.9  # share of repeats in the last n-grams; 1: only loops
    mode: Mode = "score"  # score: verify and train the partial response; drop: remove it from its group


class ValueBound(Section):
    """A bound on the estimated value: rollouts that are unlikely to solve their task are pruned."""

    kind: Literal["value"] = "value"
    verifier: str = ""  # asked about the response so far: NAME of [verifiers.NAME]; "": the group's own solve rate
    below: Probability = 0.02  # pruned when the estimated probability is below this
    mode: Mode = "drop"  # score: verify and train the partial response; drop: remove it from its group


class PartialVerifier(Section):
    """A verifier of partial responses: rollouts that are already wrong are pruned."""

    kind: Literal["verifier"] = "verifier"
    verifier: str  # asked about the response so far: NAME of [verifiers.NAME]
    below: float = 0.5  # pruned when the reward is below this
    mode: Mode = "drop"  # score: verify and train the partial response; drop: remove it from its group


class GroupBound(Section):
    """A bound on the group's outcome: once it is decided, the rest of the group is dropped. If scored, a partial
    response would count as unsolved, and look like a difference."""

    kind: Literal["group"] = "group"
    confidence: Probability = 0.9  # probability that the rest would get the same reward as all finished members


Pruner = Annotated[
    LengthCap | RelativeLengthCap | BudgetCap | RepetitionCap | ValueBound | PartialVerifier | GroupBound,
    Field(discriminator="kind"),
]
Kind = TypeVar("Kind", bound=Section)


def _require_kinds(value: Any) -> Any:
    """Check that ``value`` is a list of tables, each with a valid kind, by which pydantic then validates it."""
    if not isinstance(value, (list, tuple)):
        raise ValueError('valid: a list of tables, [[pruning.pruners]], each with a kind, say kind = "repetition"')
    for table in cast("Sequence[Any]", value):
        if isinstance(table, dict) and (kind := cast("dict[str, Any]", table).get("kind")) not in PRUNERS:
            raise ValueError(f"kind = {kind!r}: valid: {', '.join(PRUNERS)}")
    return cast("Any", value)


def _require_distinct_kinds(pruners: tuple[Pruner, ...]) -> tuple[Pruner, ...]:
    kinds = [pruner.kind for pruner in pruners]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"two pruners are of kind {max(kinds, key=kinds.count)!r}")
    return pruners


Pruners = Annotated[tuple[Pruner, ...], BeforeValidator(_require_kinds), AfterValidator(_require_distinct_kinds)]


class PruningConfig(Section):
    """Pruners, which stop rollouts early: docs/pruning.md."""

    audit_share: Annotated[float, Field(ge=0, lt=1)] = 0.05  # share of prunable rollouts left to finish, as an audit
    # Tune: repetition first, where truncated responses loop; read its audits before the next
    pruners: Annotated[
        tuple[Pruner, ...], BeforeValidator(_require_kinds), AfterValidator(_require_distinct_kinds)
    ] = ()  # tables { kind = "repetition", ... }, each once

    def pruner(self, kind: type[Kind]) -> Kind | None:
        """Return the pruner of this kind; None where it is off."""
        return next((pruner for pruner in self.pruners if isinstance(pruner, kind)), None)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the configured pruners, in the order in which they decide."""
        return tuple(sorted((pruner.kind for pruner in self.pruners), key=PRUNERS.index))

    def mode_of(self, kind: str) -> Mode:
        pruner = next(pruner for pruner in self.pruners if pruner.kind == kind)
        return "drop" if isinstance(pruner, GroupBound) else pruner.mode

    @property
    def needs_rewards(self) -> bool:
        """Whether members are verified as they finish, not with their group: their rewards decide on the others."""
        value_bound = self.pruner(ValueBound)
        return self.pruner(GroupBound) is not None or (value_bound is not None and not value_bound.verifier)

    @property
    def verifier_pruners(self) -> dict[str, ValueBound | PartialVerifier]:
        """The pruners that call a verifier with partial responses, by kind."""
        bounds = (self.pruner(ValueBound), self.pruner(PartialVerifier))
        return {pruner.kind: pruner for pruner in bounds if pruner is not None and pruner.verifier}

    def require_possible(self, *, longest_tokens: int, group_size: int, deterministic: bool) -> None:
        """Raise ValueError for pruners that could never prune in an experiment with these limits, or must not."""
        if deterministic and self.kinds:
            raise ValueError(
                f"run.deterministic = true excludes pruning.pruners: {self.kinds[0]}: when a rollout is stopped "
                "depends on when its tokens arrive"
            )
        tokens_by_kind = {
            "relative_length": LEAST_TOKENS,
            "budget": LEAST_TOKENS,
            "repetition": min(LOOP_TOKENS, WINDOW_TOKENS),
            **dict.fromkeys(self.verifier_pruners, VERIFIED_EVERY_TOKENS),
        }
        if (length_cap := self.pruner(LengthCap)) is not None:
            tokens_by_kind["length"] = length_cap.tokens
        self._require_below(
            "rollout.max_response_tokens", longest_tokens, tokens_by_kind, "checks responses of that many tokens"
        )
        self._require_reachable(group_size)
        members_by_kind = {"group": LEAST_AGREEING, "relative_length": LEAST_OWN_ENDS}
        self._require_below("rollout.group_size", group_size, members_by_kind, "wants that many finished members")

    def _require_reachable(self, group_size: int) -> None:
        """Raise ValueError for bounds that no group reaches, not even with a single member left to finish."""
        bound, group_bound, others = self.pruner(ValueBound), self.pruner(GroupBound), group_size - 1
        if bound is not None and not bound.verifier:
            estimate = PRIOR / (2 * PRIOR + others)
            if estimate >= bound.below:
                raise ValueError(
                    f"pruning.pruners: value with below = {bound.below:g} never prunes anything: when {others} of a "
                    f"group have failed, all but one, its solve rate is estimated as {estimate:.3g}"
                )
        if group_bound is not None:
            probability = (PRIOR + others) / (2 * PRIOR + others)
            if probability < group_bound.confidence:
                raise ValueError(
                    f"pruning.pruners: group with confidence = {group_bound.confidence:g} never prunes anything: when "
                    f"{others} of a group agree, all but one, the last one does with probability {probability:.3g}"
                )

    def _require_below(self, limit_key: str, limit: int, numbers: Mapping[str, int], use: str) -> None:
        """Raise ValueError for a configured pruner whose number, of ``numbers`` by kind, isn't below ``limit``. ``use``
        is the part of the message that describes the number."""
        for kind in self.kinds:
            if kind in numbers and numbers[kind] >= limit:
                raise ValueError(
                    f"pruning.pruners: {kind} {use}, {numbers[kind]}, and never prunes anything: it must be below "
                    f"{limit_key} = {limit}"
                )
