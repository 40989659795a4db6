"""The keys of early pruning: which rollouts are stopped early, and what happens to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field

from headway.config.section import Positive, Probability, Section

Mode = Literal["score", "drop"]

PRUNERS = ("length", "relative_length", "budget", "repetition", "value", "verifier", "group")

EVERY_TOKENS = 16  # new tokens between two checks of a rollout: a check costs little more than a token does
JUDGED_EVERY_TOKENS = 64  # new tokens between two calls of a verifier for a rollout: a call costs what a reward does
LEAST_TOKENS = 64  # no shorter response is pruned for its length or its time: there is little to save
LEAST_OWN_ENDS = 2  # members that came to their own end, before their median makes a cap
SLACK_STEPS = 1.0  # a group is due this long after the last step that may train it: step times vary by that much
LONGEST_PERIOD = 64  # tokens in one turn of an exact loop at the response's end: a sentence or two
LOOP_TOKENS = 64  # of all turns together: shorter repetitions are lists, tables, rows of digits
NGRAM = 4  # tokens: shorter runs repeat in any text
WINDOW_TOKENS = 256  # last tokens of the response in which runs are compared
PRIOR = 0.5  # of Beta(prior, prior) for a group's solve rate (Jeffreys): expects it near 0 or 1
LEAST_AGREEING = 3  # members that must have been verified before they decide their group


class LengthCap(Section):
    """A cap on the response, below ``rollout.max_response_tokens``: unlike that limit, audited."""

    kind: Literal["length"] = "length"
    tokens: Positive  # a response of this length is pruned
    mode: Mode = "score"  # score: verified as it stands, and trained; drop: it leaves its group


class RelativeLengthCap(Section):
    """A cap that follows the group: its members answer the same prompt."""

    kind: Literal["relative_length"] = "relative_length"
    times_median: Annotated[float, Field(gt=1)] = 4.0  # the cap: a multiple of the finished members' median length
    mode: Mode = "score"  # score: verified as it stands, and trained; drop: it leaves its group


class BudgetCap(Section):
    """A cap by time: rollouts that can't end before their group is due are pruned."""

    kind: Literal["budget"] = "budget"
    least_chance: Probability = 0.05  # pruned below this probability of ending in time, by the lengths seen so far
    mode: Mode = "score"  # score: verified as it stands, and trained; drop: it leaves its group


class RepetitionCap(Section):
    """A cap on repetition: responses that loop are pruned."""

    kind: Literal["repetition"] = "repetition"
    repeats: Annotated[int, Field(ge=2)] = 4  # least turns of an exact loop at the response's end
    repeated_share: Annotated[float, Field(gt=0, le=1)] = 0.9  # of the last n-grams, repeated ones; 1: only loops count
    mode: Mode = "score"  # score: verified as it stands, and trained; drop: it leaves its group


class ValueBound(Section):
    """A bound on the estimated value: rollouts that are unlikely to solve their task are pruned."""

    kind: Literal["value"] = "value"
    verifier: str = ""  # asked about the response so far: NAME of [verifiers.NAME]; "": the group's own solve rate
    below: Probability = 0.02  # pruned when the estimated probability is below this
    mode: Mode = "drop"  # score: verified as it stands, and trained; drop: it leaves its group


class PartialVerifier(Section):
    """A verifier of partial responses: rollouts that are already wrong are pruned."""

    kind: Literal["verifier"] = "verifier"
    verifier: str  # asked about the response so far: NAME of [verifiers.NAME]
    below: float = 0.5  # pruned when the reward is below this
    mode: Mode = "drop"  # score: verified as it stands, and trained; drop: it leaves its group


class GroupBound(Section):
    """A bound on the group's outcome: once it is decided, the rest of the group is dropped. Half a response would be
    scored as none, and look like a difference."""

    kind: Literal["group"] = "group"
    confidence: Probability = 0.9  # that the rest would get the same reward as all finished members


Pruner = Annotated[
    LengthCap | RelativeLengthCap | BudgetCap | RepetitionCap | ValueBound | PartialVerifier | GroupBound,
    Field(discriminator="kind"),
]
Kind = TypeVar("Kind", bound=Section)


def _once(pruners: tuple[Pruner, ...]) -> tuple[Pruner, ...]:
    kinds = [pruner.kind for pruner in pruners]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"two pruners are of kind {max(kinds, key=kinds.count)!r}")
    return pruners


class PruningConfig(Section):
    """Pruners, which stop rollouts early: docs/pruning.md."""

    audit_share: Annotated[float, Field(ge=0, lt=1)] = 0.05  # share of prunable rollouts left to finish, as an audit
    # Tune: repetition first, where truncated responses loop; read its audits before the next
    pruners: Annotated[tuple[Pruner, ...], AfterValidator(_once)] = ()  # tables { kind = "repetition", ... }, each once

    def _of(self, kind: type[Kind]) -> Kind | None:
        return next((pruner for pruner in self.pruners if isinstance(pruner, kind)), None)

    @property
    def length(self) -> LengthCap | None:
        return self._of(LengthCap)

    @property
    def relative_length(self) -> RelativeLengthCap | None:
        return self._of(RelativeLengthCap)

    @property
    def budget(self) -> BudgetCap | None:
        return self._of(BudgetCap)

    @property
    def repetition(self) -> RepetitionCap | None:
        return self._of(RepetitionCap)

    @property
    def value(self) -> ValueBound | None:
        return self._of(ValueBound)

    @property
    def verifier(self) -> PartialVerifier | None:
        return self._of(PartialVerifier)

    @property
    def group(self) -> GroupBound | None:
        return self._of(GroupBound)

    @property
    def on(self) -> tuple[str, ...]:
        """Kinds of the configured pruners, in the order they are asked."""
        return tuple(sorted((pruner.kind for pruner in self.pruners), key=PRUNERS.index))

    def mode_of(self, kind: str) -> Mode:
        pruner = next(pruner for pruner in self.pruners if pruner.kind == kind)
        return "drop" if isinstance(pruner, GroupBound) else pruner.mode

    @property
    def needs_rewards(self) -> bool:
        """Whether members are verified as they finish, not with their group: siblings' rewards decide on the others."""
        return self.group is not None or (self.value is not None and not self.value.verifier)

    @property
    def judges(self) -> dict[str, str]:
        """Kind of a pruner -> the name of the verifier that it calls with partial responses."""
        chosen = {"value": self.value, "verifier": self.verifier}
        return {kind: judge.verifier for kind, judge in chosen.items() if judge is not None and judge.verifier}

    def require_possible(self, *, longest_tokens: int, group_size: int, deterministic: bool) -> None:
        """Raise ValueError for pruners that could never prune in an experiment with these limits, or must not."""
        if deterministic and self.on:
            raise ValueError(
                f"run.deterministic = true excludes pruning.{self.on[0]}: when a rollout is stopped depends on when "
                "its tokens arrive"
            )
        tokens = {
            "length": self.length and self.length.tokens,
            "relative_length": self.relative_length and LEAST_TOKENS,
            "budget": self.budget and LEAST_TOKENS,
            "repetition": self.repetition and min(LOOP_TOKENS, WINDOW_TOKENS),
            **dict.fromkeys(self.judges, JUDGED_EVERY_TOKENS),
        }
        what = "looks at responses of that many tokens"
        _require_below("rollout.max_response_tokens", longest_tokens, tokens, what)
        self._require_reachable(group_size)
        finished = {
            "group": self.group and LEAST_AGREEING,
            "relative_length": self.relative_length and LEAST_OWN_ENDS,
        }
        _require_below("rollout.group_size", group_size, finished, "wants that many finished members")

    def _require_reachable(self, group_size: int) -> None:
        """Raise ValueError for bounds that no group reaches, not even with a single member left to finish."""
        value, group, others = self.value, self.group, group_size - 1
        if value is not None and not value.verifier:
            least = PRIOR / (2 * PRIOR + others)
            if least >= value.below:
                raise ValueError(
                    f"pruning.pruners: value with below = {value.below:g} never prunes anything: when {others} of a "
                    f"group have failed, all but one, its solve rate is estimated as {least:.3g}"
                )
        if group is not None:
            most = (PRIOR + others) / (2 * PRIOR + others)
            if most < group.confidence:
                raise ValueError(
                    f"pruning.pruners: group with confidence = {group.confidence:g} never prunes anything: when "
                    f"{others} of a group agree, all but one, the last one does with probability {most:.3g}"
                )


def _require_below(limit_key: str, limit: int, given: Mapping[str, int | None], what: str) -> None:
    """Raise ValueError for a pruner whose number isn't below the limit; None: it is off. ``what`` it does with it."""
    for kind, value in given.items():
        if value is not None and value >= limit:
            raise ValueError(
                f"pruning.pruners: {kind} {what}, {value}, and never prunes anything: it must be below {limit_key} = "
                f"{limit}"
            )
