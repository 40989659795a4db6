"""Rollouts made by a user's function (``hooks.rollout``): token-exact turns through the injected generator."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import cast

import msgspec

from headway.records.clients import Stop
from headway.records.environment import PartialRollout
from headway.records.errors import ConfigurationError, HookFailed
from headway.records.generation import FinishReason
from headway.records.rollout import Failure, Group, Pruned, Rollout
from headway.records.task import Task
from headway.records.token_block import TokenBlock
from headway.records.tokens import TokenIds
from headway.rollout.makers.attempts import RetryingRollouts
from headway.rollout.makers.turn_sampler import MemberProgress, ModelCall, TurnSampler
from headway.runtime.hooks import Hook, finite_number, is_infrastructure, load_hook, quoted, storable
from headway.tokens.tokenizer import Tokenizer

KEY = "hooks.rollout"


class RolloutOver(Exception):
    """Raised by `Attempt.generate` and `Attempt.observe` when the token limit is reached or the rollout was stopped.
    A function may let it pass, or catch it to clean up; the rollout ends with the tokens so far."""


class Attempt:
    """An attempt at a rollout, the argument of a user's ``async def function(attempt)``.

    ``await attempt.generate()`` samples a turn, ``attempt.observe(text)`` appends the environment's reply to it.
    Tokens are kept as sampled; observed tokens carry no loss. ``attempt.reward(x)`` rewards the last sampled turn; the
    verifier's reward is added to that of the last turn. The function must return None.

    Example, a second try after a hint:

        async def rollout(attempt):
            if attempt.task.answer not in await attempt.generate():
                attempt.observe("\\nThat is wrong. Again: ")
                await attempt.generate()
    """

    def __init__(self, hook: Hook, sampler: TurnSampler, group: Group, member: int) -> None:
        self._hook = hook
        self._sampler = sampler
        self.group = group
        self.member = member
        self._turns: list[Rollout] = []  # as the sampler returned them
        self._block = TokenBlock()  # all tokens after the prompt
        self._ends: list[int] = []  # end of each turn, with the tokens observed after it
        self._rewards: list[float | None] = []
        self._environment_s = 0.0  # between turns
        self._cut = False  # truncated at the token limit
        self.stopped: Failure | Pruned | None = None  # why it was stopped between turns

    @property
    def task(self) -> Task:
        return self.group.task

    @property
    def response_ids(self) -> TokenIds:
        """All tokens after the prompt so far, sampled and observed."""
        return self._block.ids

    @property
    def tokens_left(self) -> int:
        """Tokens left until ``rollout.max_response_tokens``; observed tokens count too."""
        return self._sampler.settings.max_response_tokens - len(self._block)

    async def run(self) -> None:
        """Call the function."""
        output = await self._hook.function(self)
        if output is not None:
            raise self._hook.failed(f"returned {quoted(output)}: the attempt keeps what was sampled, so None is needed")

    async def generate(self, max_tokens: int | None = None) -> str:
        """Sample a turn of at most ``max_tokens``; return its text without special tokens. Raises RolloutOver."""
        if max_tokens is not None and (isinstance(max_tokens, bool) or max_tokens < 1):
            raise ValueError(f"max_tokens = {max_tokens!r}: 1 or more are needed")
        if self.over:
            raise RolloutOver("the rollout was stopped")
        if self.tokens_left < 1:
            self._cut = True
            raise RolloutOver("no token is left")
        turn_tokens = min(self.tokens_left, max_tokens or self.tokens_left)
        turn_index, sampler = len(self._turns), self._sampler
        if turn_index:
            self._environment_s += sampler.clock.now() - self._turns[-1].generated_s
        known_rows = self._block.rows
        turn = await sampler.sample(
            ModelCall(
                group=self.group,
                member=self.member,
                prompt_ids=TokenIds.joined((self.group.prompt_ids, self.response_ids)),
                purpose=f"turn{turn_index}-" if turn_index else "",  # the first has the seed of a single turn
                session=sampler.name(self.group, self.member),
                rows_known=known_rows,
                max_tokens=turn_tokens,
                environment_version=self._turns[0].first_version if turn_index else -1,
            )
        )
        self._turns.append(turn)
        self._block.extend(turn.response_ids, turn.response_logprobs, turn.versions)
        self._block.append_rows(turn.token_rows, known_rows)
        self._ends.append(len(self._block))
        self._rewards.append(None)
        if self.over:
            raise RolloutOver("the rollout was stopped" if turn.failure is None else turn.failure.cause)
        return sampler.text(turn)

    def observe(self, text: str) -> None:
        """Append the environment's reply as tokens without loss, tokenized as in the joint text. Raises RolloutOver
        where they don't fit."""
        prefix = self.response_ids or self.group.prompt_ids
        ids = cast("Tokenizer", self._sampler.tokenizer).encode_after(prefix[-1] if prefix else None, storable(text))
        self.observe_ids(ids)

    def observe_ids(self, ids: Sequence[int]) -> None:
        """Append the environment's reply as token ids, like `observe`."""
        if not self._turns:
            raise ValueError("nothing was generated yet: what comes before the first turn belongs in the prompt")
        if len(ids) > self.tokens_left:
            self._cut = True
            raise RolloutOver(f"{len(ids)} tokens were observed where {self.tokens_left} are left")
        self._block.append_reply(ids)
        self._ends[-1] = len(self._block)

    def reward(self, value: float) -> None:
        """Reward the last sampled turn; ``algorithm.turn_discount`` sets how earlier turns share in it."""
        number = finite_number(value)
        if number is None or not self._turns:
            raise ValueError(f"reward({value!r}): a finite number is needed, and a turn that it is for")
        self._rewards[-1] = number

    @property
    def over(self) -> bool:
        """Whether the rollout failed or was stopped."""
        return self.stopped is not None or (
            bool(self._turns) and (self._turns[-1].failure is not None or self._turns[-1].finish_reason == "abort")
        )

    def rollout(self, now: float, failure: Failure | None = None) -> Rollout:
        """Return the rollout of all turns so far (`RolloutAttempt.rollout`)."""
        if not self._turns:
            cause = f"{KEY} = {self._hook.name!r} sampled nothing"
            failure = failure or Failure(boundary="environment", cause=cause, infrastructure=False)
            empty_rollout = MemberProgress(ModelCall.first(self.group, self.member)).rollout(now, failure)
            return msgspec.structs.replace(empty_rollout, turns=0)
        last_turn, token_block = self._turns[-1], self._block
        has_reward = any(reward is not None for reward in self._rewards)
        return msgspec.structs.replace(
            last_turn,
            group=self.group.index,
            prompt_ids=self.group.prompt_ids,
            response_ids=token_block.ids,
            response_logprobs=token_block.logprobs,
            response_mask=token_block.mask,
            versions=token_block.versions,
            token_rows=token_block.token_rows,
            failure=failure or last_turn.failure,
            finish_reason="error" if failure is not None else self._finish_reason(last_turn),
            pruned=self.stopped if isinstance(self.stopped, Pruned) else last_turn.pruned,
            turn_ends=tuple(self._ends),
            turn_rewards=tuple(reward or 0.0 for reward in self._rewards) if has_reward else (),
            turns=len(self._turns),
            environment_s=self._environment_s + max(0.0, now - last_turn.generated_s),
            opened_s=self.group.admitted_s,
            first_token_s=self._turns[0].first_token_s,
            generated_s=now,
            finished_s=now if failure is not None or last_turn.failure is not None else 0.0,
            resumes=sum(turn.resumes for turn in self._turns),
            environment_version=self._turns[0].first_version if any(t.resumes for t in self._turns[1:]) else -1,
            reprefills=sum(turn.reprefills for turn in self._turns),
            call_times=tuple(times for turn in self._turns for times in turn.call_times),
        )

    def _finish_reason(self, last: Rollout) -> FinishReason:
        if self.stopped is not None:
            return "abort"
        if last.finish_reason in ("stop", "length"):  # a turn's own limit isn't the response's
            return "length" if self._cut or (self.tokens_left < 1 and last.finish_reason == "length") else "stop"
        return last.finish_reason


class CustomRollouts(RetryingRollouts):
    """Makes rollouts by a user's function (`RolloutMaker`). Watchers and `reached` see the tokens of the current turn.

    The function's exception fails the rollout at the boundary "environment", as infrastructure where
    `is_infrastructure` is true of it. A rollout that was parked when the orchestrator died restarts.
    """

    def __init__(self, hook: Hook, sampler: TurnSampler) -> None:
        super().__init__(sampler)
        self._hook = hook

    def begin(self, group: Group, member: int) -> Attempt:
        return Attempt(self._hook, self.sampler, group, member)

    def for_evaluation(self, request_prefix: str, temperature: float | None = None) -> CustomRollouts:
        return CustomRollouts(self._hook, self.sampler.for_evaluation(request_prefix, temperature))

    def stop(self, group: int, member: int, why: Stop) -> None:
        """Stop the turn that is being sampled, or cancel the function between turns, where there is nothing to park
        (`RolloutMaker.stop`)."""
        if self.sampler.generating(group, member):
            self.sampler.stop(group, member, why)
        else:
            super().stop(group, member, why)

    async def generate_member(self, group: Group, member: int, parked: PartialRollout | None = None) -> Rollout:
        refused = self.sampler.refused(ModelCall.first(group, member))
        return refused or await super().generate_member(group, member)

    def failure_of(self, error: Exception) -> Failure | None:
        if isinstance(error, RolloutOver):
            return None
        hook_error = error if isinstance(error, HookFailed) else self._hook.raised(error)
        cause = storable(str(hook_error))[:300]
        return Failure(boundary="environment", cause=cause, infrastructure=is_infrastructure(error))


def load_rollout_function(name: str) -> Hook:
    """Load the function that ``hooks.rollout`` names. Raises ConfigurationError."""
    hook = load_hook(KEY, name, {}, ("attempt",), asynchronous=True)
    if not inspect.iscoroutinefunction(hook.function):
        raise ConfigurationError(f"{KEY} = {name!r}: must be an async function: it waits for what is sampled")
    return hook
