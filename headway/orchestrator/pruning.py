"""Early pruning while members generate: inspects their tokens as they come, decides, and stops them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from headway.config import pruning as rules
from headway.config.pruning import PruningConfig
from headway.control.lengths import LengthDistribution, length_distribution
from headway.control.pruning.repetition import NgramWindow, loop_period
from headway.control.pruning.rules import (
    agreement,
    chance_to_end,
    due_in_s,
    expected_saving_tokens,
    is_audited,
    relative_cap_tokens,
    rewards_agree,
    solve_probability,
)
from headway.orchestrator.context import RunContext
from headway.records.clients import Watch
from headway.records.errors import HeadwayError
from headway.records.generation import PartialResponse
from headway.records.rollout import Group, Pruned, Rollout, Verdict
from headway.rollout.verification.scored_text import ScoredText
from headway.rollout.verification.verdicts import apply_verdict

_LENGTHS = 2048  # newest lengths that estimates are made of
_REFRESH_AFTER = 32  # new lengths after which the estimates are computed again
_AUDITS = 64  # newest audits of a pruner that its saving is estimated from
_NO_RESPONSE = PartialResponse()
_RATE_READINGS = 8  # newest readings of a member, over which its tokens/s are measured


@dataclass
class _Member:
    """A member that is generating."""

    group: Group
    number: int
    response: PartialResponse = _NO_RESPONSE  # as last seen
    readings: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_READINGS))  # (clock, tokens)
    window: NgramWindow | None = None
    judged_tokens: dict[str, int] = field(default_factory=dict)  # pruner -> tokens at its last call
    judge: asyncio.Task[None] | None = None
    hit: Pruned | None = None  # being stopped, or audited

    @property
    def tokens(self) -> int:
        return len(self.response.ids)


@dataclass
class _Siblings:
    """The members of a group while some are generating."""

    members: dict[int, _Member] = field(default_factory=dict)  # not finished
    own_ends: list[int] = field(default_factory=list)  # tokens of members whose generation ended by itself
    rewards: list[float] = field(default_factory=list)  # of the valid ones, where members are verified as they finish
    solved: int = 0
    removed: int = 0  # members that failed or were dropped: they neither agree nor differ
    decided: bool = False


class Pruner:
    """Prunes a run's members by the rules of ``[pruning]``. Evaluations are never pruned.

    A member is checked (``watch_of``) about every ``EVERY_TOKENS``; the first pruner that hits it decides, in the order
    of ``PruningConfig.kinds``. Verifiers of half a response run in the verifier's processes, one call at a time for a
    member, and block neither it nor the event loop: it generates until the answer arrives. Their failures are recorded
    once for each pruner, and the member continues.

    ``finished`` takes every member as it comes back from the generator: it enters the lengths, leaves its group where
    its pruner drops, and is verified at once where siblings' rewards decide on the others. State is kept in memory
    alone: after a restart, members that are generated again are checked again, and the audit's draws are the same.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._settings: PruningConfig = run.experiment.pruning
        self._groups: dict[int, _Siblings] = {}
        self._observed: deque[tuple[int, bool]] = deque(maxlen=_LENGTHS)
        self._new_lengths = 0
        self._scored = ScoredText.of(run.experiment, run.tokenizer)
        self._lengths = self._distribution()
        self._saved_tokens: dict[str, deque[int]] = {kind: deque(maxlen=_AUDITS) for kind in self._settings.kinds}
        self._failed: set[str] = set()
        rule_by_name: dict[str, Callable[[_Member], str]] = {
            "length": self._too_long,
            "relative_length": self._too_long_for_its_group,
            "budget": self._over_deadline,
            "repetition": self._repetitive,
            "value": self._low_value,
        }
        self._rules = [(kind, rule_by_name[kind]) for kind in self._settings.kinds if kind in rule_by_name]

    # --- called by the rollouts ---------------------------------------------------------------------------

    def watch_of(self, group: Group, member: int) -> Watch:
        """The watch that observes this member's tokens while they are sampled."""
        rule = self._settings.pruner(rules.RepetitionCap)
        ngram_window = None
        if rule is not None and rule.repeated_share < 1:
            ngram_window = NgramWindow(rules.WINDOW_TOKENS, rules.NGRAM)
        member_state = _Member(group, member, window=ngram_window)
        self._groups.setdefault(group.index, _Siblings()).members[member] = member_state
        return Watch(rules.EVERY_TOKENS, lambda response: self._inspect(member_state, response))

    async def finished(self, group: Group, rollout: Rollout) -> Rollout:
        """Return a rollout that came back from the generator, with its pruning, audit or verdict."""
        siblings = self._groups.setdefault(group.index, _Siblings())
        member_state = siblings.members.pop(rollout.member, None)
        if member_state is not None and member_state.judge is not None:
            member_state.judge.cancel()
        is_complete = rollout.finish_reason in ("stop", "length")
        if is_complete:
            siblings.own_ends.append(len(rollout.response_ids))
        if rollout.failure is None:
            self._observe(len(rollout.response_ids), is_complete)
        if rollout.pruned is not None:
            rollout = self._pruned(rollout, rollout.pruned)
        elif member_state is not None and member_state.hit is not None and member_state.hit.audited:
            rollout = await self._audited(member_state, member_state.hit, rollout)
        if self._settings.needs_rewards and rollout.valid:
            rollout = apply_verdict(rollout, await self._verify(group, rollout.response_ids), self._run.clock.now())
        elif rollout.valid:
            return rollout
        siblings.removed += not rollout.valid
        if rollout.valid:
            siblings.rewards.append(rollout.reward)
            siblings.solved += rollout.solved
            self._decide(group, siblings)
        return rollout

    def forget(self, group: int) -> None:
        """Forget a group that left the generator or was cancelled there."""
        siblings = self._groups.pop(group, None)
        for member_state in siblings.members.values() if siblings is not None else ():
            if member_state.judge is not None:
                member_state.judge.cancel()

    # --- rules ------------------------------------------------------------------------------------------

    def _inspect(self, entry: _Member, response: PartialResponse) -> None:
        entry.response = response
        if entry.hit is not None:
            return
        entry.readings.append((self._run.clock.now(), entry.tokens))
        if entry.window is not None:
            entry.window.extend(response.ids)
        for pruner, rule in self._rules:
            if reason := rule(entry):
                self._hit(entry, pruner, reason)
                return
        self._start_verifiers(entry)

    def _hit(self, entry: _Member, pruner: str, why: str) -> None:
        group, member = entry.group.index, entry.number
        seed, share = self._run.experiment.run.seed, self._settings.audit_share
        tokens = max(entry.tokens, self._run.rollouts.reached(group, member))
        is_audit = is_audited(seed, group, member, share)
        saved_tokens = 0.0 if is_audit else self._saving(pruner, tokens)
        entry.hit = Pruned(pruner=pruner, reason=why, at_tokens=tokens, saved_tokens=saved_tokens, audited=is_audit)
        if not is_audit:
            self._run.rollouts.stop(group, member, entry.hit)

    def _too_long(self, entry: _Member) -> str:
        rule = self._settings.pruner(rules.LengthCap)
        is_hit = rule is not None and entry.tokens >= rule.tokens
        return f"{entry.tokens} tokens, capped at {rule.tokens}" if is_hit and rule is not None else ""

    def _too_long_for_its_group(self, entry: _Member) -> str:
        rule = self._settings.pruner(rules.RelativeLengthCap)
        assert rule is not None
        own_ends = self._groups[entry.group.index].own_ends
        cap = relative_cap_tokens(
            own_ends,
            times_median=rule.times_median,
            least_finished=rules.LEAST_OWN_ENDS,
            least_tokens=rules.LEAST_TOKENS,
        )
        if cap is None or entry.tokens < cap:
            return ""
        return f"{entry.tokens} tokens, capped at {cap}: {rule.times_median:g} x the median of {len(own_ends)} siblings"

    def _over_deadline(self, entry: _Member) -> str:
        rule, run = self._settings.pruner(rules.BudgetCap), self._run
        assert rule is not None
        (began_s, began_tokens), (now_s, tokens) = entry.readings[0], entry.readings[-1]
        step_s = run.meter.typical_step_s
        if not step_s or tokens < rules.LEAST_TOKENS or tokens <= began_tokens or now_s <= began_s:
            return ""
        due_s = due_in_s(
            first_version=entry.response.versions[0].version,
            budget=run.experiment.queue.budget,
            version=run.state.version,
            since_step_s=now_s - run.meter.last_step_s,
            step_s=step_s,
            slack_steps=rules.SLACK_STEPS,
        )
        speed = (tokens - began_tokens) / (now_s - began_s)
        end_chance = chance_to_end(self._lengths, tokens, due_s * speed)
        if end_chance >= rule.least_chance:
            return ""
        due = f"in {due_s:.1f} s" if due_s >= 0 else f"for {-due_s:.1f} s"
        return f"its group is due {due}; at {speed:.1f} tokens/s it would end in time with probability {end_chance:.2g}"

    def _repetitive(self, entry: _Member) -> str:
        rule = self._settings.pruner(rules.RepetitionCap)
        assert rule is not None
        period_tokens = loop_period(
            entry.response.ids, longest_period=rules.LONGEST_PERIOD, repeats=rule.repeats, loop_tokens=rules.LOOP_TOKENS
        )
        if period_tokens is not None:
            return f"a loop of {period_tokens} token" + ("s" if period_tokens > 1 else "")
        share = entry.window.repeated_share if entry.window is not None else 0.0
        if share < rule.repeated_share:
            return ""
        return f"{share:.0%} of the {rules.NGRAM}-token runs in the last {rules.WINDOW_TOKENS} tokens are repeated"

    def _low_value(self, entry: _Member) -> str:
        rule = self._settings.pruner(rules.ValueBound)
        assert rule is not None
        siblings = self._groups[entry.group.index]
        if rule.verifier or not siblings.rewards:
            return ""
        solve_rate = solve_probability(siblings.solved, len(siblings.rewards), rules.PRIOR)
        if solve_rate >= rule.below:
            return ""
        return f"solve rate estimated as {solve_rate:.2g}: {siblings.solved} of {len(siblings.rewards)} siblings"

    # --- verifiers of half a response -------------------------------------------------------------------

    def _start_verifiers(self, entry: _Member) -> None:
        for pruner_kind in self._settings.verifier_pruners:
            new_tokens = entry.tokens - entry.judged_tokens.get(pruner_kind, 0)
            if entry.judge is None and new_tokens >= rules.VERIFIED_EVERY_TOKENS:
                entry.judged_tokens[pruner_kind] = entry.tokens
                name = f"prune-{entry.group.index}-{entry.number}"
                judging = self._judge_partial(entry, pruner_kind, entry.response.ids)
                entry.judge = asyncio.create_task(judging, name=name)

    async def _judge_partial(self, entry: _Member, pruner_kind: str, ids: Sequence[int]) -> None:
        judge = self._settings.verifier_pruners[pruner_kind]
        task = msgspec.structs.replace(entry.group.task, verifier=judge.verifier)
        try:
            [verdict] = await self._run.verifier.verify(task, [self._run.tokenizer.decode(ids)])
        except HeadwayError as error:  # the pool is stopped, or lost its processes: then it fails the run by itself
            self._record_failure(pruner_kind, str(error))
            return
        finally:
            entry.judge = None
        if verdict.failure is not None:
            self._record_failure(pruner_kind, verdict.failure.cause)
        elif pruner_kind == "value" and not 0 <= verdict.reward <= 1:
            self._record_failure(pruner_kind, f"it returned {verdict.reward:g}, not a probability")
        elif verdict.reward < judge.below and entry.hit is None:
            quantity = "probability of solving" if pruner_kind == "value" else "reward"
            self._hit(entry, pruner_kind, f"{quantity} {verdict.reward:.3g} below {judge.below:g} at {len(ids)} tokens")

    def _record_failure(self, pruner: str, cause: str) -> None:
        if pruner not in self._failed:
            self._failed.add(pruner)
            self._run.event("pruner_failed", f"pruning.pruners: {pruner}: {cause}; reported once; its rollouts go on")

    # --- decided groups ---------------------------------------------------------------------------------

    def _decide(self, group: Group, siblings: _Siblings) -> None:
        """Stop the rest of a group whose outcome the finished members decide; or audit the whole decision."""
        rule = self._settings.pruner(rules.GroupBound)
        unhit_members = [member_state for member_state in siblings.members.values() if member_state.hit is None]
        finished_count = len(siblings.rewards)
        if rule is None or siblings.decided or not unhit_members or finished_count < rules.LEAST_AGREEING:
            return
        if not rewards_agree(siblings.rewards):
            return
        # members being verified may differ as well as those that generate
        confidence = agreement(finished_count, group.size - finished_count - siblings.removed, rules.PRIOR)
        if confidence < rule.confidence:
            return
        siblings.decided = True
        run = self._run
        audited = is_audited(run.experiment.run.seed, group.index, None, self._settings.audit_share)
        reward = siblings.rewards[0]
        reason = f"all {finished_count} finished ones got {reward:g}: the rest will with probability {confidence:.3g}"
        for member_state in unhit_members:
            tokens = run.rollouts.reached(group.index, member_state.number)
            member_state.hit = Pruned(
                pruner="group",
                reason=reason,
                at_tokens=tokens,
                saved_tokens=0.0 if audited else self._saving("group", tokens),
                audited=audited,
                cut_reward=reward if audited else None,
            )
            if not audited:
                run.rollouts.stop(group.index, member_state.number, member_state.hit)

    # --- outcomes ---------------------------------------------------------------------------------------

    def _pruned(self, rollout: Rollout, pruned: Pruned) -> Rollout:
        """A stopped rollout: kept as it is to be scored, or dropped from its group; without a token it is dropped."""
        if rollout.response_ids and self._settings.mode_of(pruned.pruner) == "score":
            return rollout
        now_s = self._run.clock.now()
        return msgspec.structs.replace(rollout, removal="pruned", removal_reason=pruned.pruner, finished_s=now_s)

    async def _audited(self, entry: _Member, hit: Pruned, rollout: Rollout) -> Rollout:
        """Return an audited rollout, which was hit but not stopped, with the audit's result. That is the reward of its
        response at the hit, where pruning would have scored that. If the rollout fails, or its cut response can't be
        scored, it is no audit."""
        if rollout.failure is not None:
            return rollout
        self._saved_tokens[hit.pruner].append(len(rollout.response_ids) - hit.at_tokens)
        if hit.pruner != "group" and self._settings.mode_of(hit.pruner) == "score":
            verdict = await self._verify(entry.group, rollout.response_ids[: hit.at_tokens])
            if verdict.failure is not None:
                return rollout
            hit = msgspec.structs.replace(hit, cut_reward=float(verdict.reward))
        return msgspec.structs.replace(rollout, pruned=hit)

    async def _verify(self, group: Group, ids: Sequence[int]) -> Verdict:
        [verdict] = await self._run.verifier.verify(group.task, [self._scored(group.prompt_ids, ids)])
        return verdict

    # --- lengths ----------------------------------------------------------------------------------------

    def _observe(self, tokens: int, own_end: bool) -> None:
        self._observed.append((tokens, own_end))
        self._new_lengths += 1
        if self._new_lengths >= min(_REFRESH_AFTER, len(self._observed)):
            self._lengths, self._new_lengths = self._distribution(), 0

    def _saving(self, pruner: str, tokens: int) -> float:
        return expected_saving_tokens(self._lengths, tokens, self._saved_tokens[pruner])

    def _distribution(self) -> LengthDistribution:
        return length_distribution(self._observed, self._run.experiment.rollout.max_response_tokens)
