"""Rollouts in an environment: the policy answers and the environment replies, turn by turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from headway.records.conversations import (
    ChatAnswer,
    Conversations,
    OnTokens,
    OpenConversation,
    RequestRefused,
    SampleTurn,
    TurnRequest,
)
from headway.records.environment import NextTurn, PartialRollout, Reply, SavedEpisode, TurnRecord
from headway.records.errors import WorkerDied
from headway.records.generation import GenerationResult, PartialResponse
from headway.records.rollout import Failure, Group, Rollout, Verdict
from headway.rollout.hosting.client import EnvironmentDied, EnvironmentPool, WorkerLease
from headway.rollout.makers.attempts import RetryingRollouts, RolloutFailed
from headway.rollout.makers.conversation import ConversationAttempt
from headway.rollout.makers.turn_sampler import Resumption, TurnSampler
from headway.rollout.seeds import rollout_seed
from headway.rollout.verification.verdicts import apply_verdict

_LIMIT_CODES = ("context_length_exceeded", "rollout_limit_exceeded")


@dataclass(frozen=True, kw_only=True)
class Environments:
    """The orchestrator's resources for environments: the recorder of their conversations, and their workers."""

    conversations: Conversations  # where answers are recorded
    pool: EnvironmentPool


class ResumePoint(NamedTuple):
    """A rollout that was parked when its worker, or a former orchestrator, died."""

    saved: SavedEpisode
    response: PartialResponse  # of the turn it was parked in
    resumes: int
    again: bool = False  # its worker died before it resumed: another worker is tried, then the rollout restarts


class EnvironmentRollouts(RetryingRollouts):
    """Makes rollouts in environments (`RolloutMaker`). A parked rollout resumes with its environment's state and files,
    in another process too; after an infrastructure failure one that wasn't parked restarts."""

    def __init__(self, environments: Environments, sampler: TurnSampler, *, evaluates: bool = False) -> None:
        """``evaluates``: the rollouts belong to an evaluation, which no other process resumes."""
        super().__init__(sampler)
        self.environments = environments
        self.evaluates = evaluates
        self._resumed: dict[tuple[int, int], ResumePoint] = {}

    def for_evaluation(self, request_prefix: str, temperature: float | None = None) -> EnvironmentRollouts:
        sampler = self.sampler.for_evaluation(request_prefix, temperature)
        return EnvironmentRollouts(self.environments, sampler, evaluates=True)

    async def generate_member(self, group: Group, member: int, parked: PartialRollout | None = None) -> Rollout:
        if parked is not None and parked.episode is not None:
            self.resume_at(group, member, ResumePoint(parked.episode, parked.response, parked.resumes + 1))
        try:
            return await super().generate_member(group, member)
        finally:
            self._resumed.pop((group.index, member), None)

    def resume_at(self, group: Group, member: int, resumed: ResumePoint) -> None:
        """Start the member's next attempt at the point where it was parked."""
        self._resumed[group.index, member] = resumed

    def begin(self, group: Group, member: int) -> EnvironmentAttempt:
        return EnvironmentAttempt(self, group, member, self._resumed.pop((group.index, member), None))

    def failure_of(self, error: Exception) -> Failure | None:
        if isinstance(error, WorkerDied):  # the last worker: no further rollout is possible
            raise error
        return super().failure_of(error)


@dataclass(kw_only=True)
class _Conversation:
    """A speaker's conversation."""

    recorder: OpenConversation  # several speakers may share it
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class EnvironmentAttempt(ConversationAttempt):
    """An attempt at a rollout in an environment: *begun* or *restored*, answers and replies by turns, then *scored*."""

    def __init__(self, rollouts: EnvironmentRollouts, group: Group, member: int, resumed: ResumePoint | None) -> None:
        super().__init__(rollouts.sampler, group, member)
        self._rollouts = rollouts
        self._conversations = rollouts.environments.conversations
        self._resumed = resumed
        self._exchanges: list[TurnRecord] = []
        self._asked = NextTurn(messages=())  # the turn that is being answered
        self._last: GenerationResult | None = None
        self._verdict: Verdict | None = None
        self._over = ""
        self._lease: WorkerLease | None = None
        self._excluded_s = 0.0  # time without calls that isn't transport: in its environment, or before it was resumed
        self._by_speaker: dict[str, _Conversation] = {}

    def rollout(self, now: float, failure: Failure | None = None) -> Rollout:
        rollout = super().rollout(now, failure)
        hop_s = max(0.0, self._environment_s - self._excluded_s)
        rollout = msgspec.structs.replace(rollout, environment_hop_s=hop_s)
        verdict = None if rollout.failure is not None else self._environment_verdict(rollout)
        return rollout if verdict is None else apply_verdict(rollout, verdict, now)

    def _environment_verdict(self, rollout: Rollout) -> Verdict | None:
        """Return the environment's verdict: its score, or the sum of its turns' rewards; None where there is
        neither."""
        verdict = self._verdict
        has_turn_reward = any(exchange.reward is not None for exchange in self._exchanges)
        turn_rewards = learned_turn_rewards(self._exchanges)
        if verdict is None and not has_turn_reward:
            return None
        if verdict is None:
            verdict, score = Verdict(reward=sum(turn_rewards), solved=sum(turn_rewards) >= 1), 0.0
        else:
            score = verdict.reward
        if rollout.branches:  # turns of several conversations have no one order
            verdict = msgspec.structs.replace(verdict, turn_rewards=())
        elif has_turn_reward and 0 < len(turn_rewards) == len(rollout.turn_ends) and not verdict.turn_rewards:
            verdict = msgspec.structs.replace(verdict, turn_rewards=(*turn_rewards[:-1], turn_rewards[-1] + score))
        return msgspec.structs.replace(verdict, detail={"ended": self._over, **verdict.detail})

    def _open(self, name: str, sample: SampleTurn) -> None:
        self._opened.append(self._conversations.open(name, sample, constraints=self._sampler.constraints))

    async def _play(self) -> None:
        self._open(self.name, self.sampled)
        try:
            async with self._rollouts.environments.pool.lease(self.name) as lease:
                self._lease = lease
                try:
                    await self._turns(lease)
                finally:
                    self._excluded_s += lease.working_s
                    self._lease = None
        except EnvironmentDied as error:
            if self._resumed is not None and not self._resumed.again:  # nothing has changed since it was saved
                self._rollouts.resume_at(self.group, self.member, self._resumed._replace(again=True))
            cause = str(error)[:300]
            raise RolloutFailed(Failure(boundary="environment", cause=cause, infrastructure=True)) from None

    async def _turns(self, lease: WorkerLease) -> None:
        next_turn = await self._first(lease)
        while next_turn is not None:
            answer = await self._answer(next_turn)
            if answer is None:
                break
            reply = await lease.reply(answer.message, next_turn.speaker, answer.cut)
            assert self._last is not None
            self._exchanges.append(TurnRecord(asked=next_turn, result=self._last, reward=reply.reward))
            next_turn = self._next(reply)
        episode_score = await lease.score()
        if episode_score.verdict is not None and episode_score.verdict.failure is not None:
            raise RolloutFailed(episode_score.verdict.failure)
        self._verdict = episode_score.verdict
        if episode_score.reward is not None:  # then there was a turn
            last_exchange = self._exchanges[-1]
            reward = (last_exchange.reward or 0.0) + episode_score.reward
            self._exchanges[-1] = msgspec.structs.replace(last_exchange, reward=reward)

    async def _first(self, lease: WorkerLease) -> NextTurn | None:
        """Begin or restore the rollout, and return its first turn here."""
        if self._resumed is None:
            prefix = f"{self._sampler.request_prefix}environment-"
            seed = rollout_seed(self._sampler.run_seed, self.group.index, self.member, prefix)
            return self._next(await lease.begin(self.group.task, seed))
        saved_episode = self._resumed.saved
        await self._replay(saved_episode)
        messages = {speaker: [*conversation.messages] for speaker, conversation in self._by_speaker.items()}
        messages.setdefault(saved_episode.asked.speaker, []).extend(saved_episode.asked.messages)
        failure = await lease.restore(self.group.task, saved_episode.environment, saved_episode.asked, messages)
        if failure is not None:
            raise RolloutFailed(failure)
        self._environment_s = self._excluded_s = saved_episode.environment_s
        self._held_version = self._oldest_version
        return saved_episode.asked

    async def _replay(self, saved: SavedEpisode) -> None:
        """Record the turns of a saved episode again, as they were sampled. Each turn's whole prompt is rendered and
        compared: the event loop runs in between, or hundreds of resumed rollouts would block the run for minutes."""
        for exchange in saved.exchanges:
            await asyncio.sleep(0)
            conversation = self._conversation_of(exchange.asked)
            conversation.messages.extend(exchange.asked.messages)
            turn = exchange.asked
            answer = conversation.recorder.replay(
                conversation.messages, turn.tools, exchange.result, stop=turn.stop, max_tokens=turn.max_tokens
            )
            conversation.messages.append(answer.message)
            versions = exchange.result.response.versions
            self.keep_version(versions[0].version if versions else -1)
            self._exchanges.append(exchange)
            self.parkings += exchange.result.resumes

    def _next(self, reply: Reply) -> NextTurn | None:
        self._tool_times += reply.tool_times
        if reply.failure is not None:
            raise RolloutFailed(reply.failure)
        self._over = reply.over
        return reply.asked

    def _conversation_of(self, asked: NextTurn) -> _Conversation:
        if asked.speaker not in self._by_speaker:
            if not asked.learned and len(self._opened) == 1:  # all unlearned roles share another conversation
                self._open(f"{self.name}-unlearned", self._sampled_unlearned)
            self._by_speaker[asked.speaker] = _Conversation(recorder=self._opened[0 if asked.learned else 1])
        return self._by_speaker[asked.speaker]

    async def _answer(self, asked: NextTurn) -> ChatAnswer | None:
        """Return the policy's answer; None where the context is full, so that the rollout ends here."""
        self._asked = asked
        conversation = self._conversation_of(asked)
        conversation.messages.extend(asked.messages)
        try:
            answer = await conversation.recorder.ask(
                conversation.messages, asked.tools, stop=asked.stop, max_tokens=asked.max_tokens
            )
        except RequestRefused as refusal:
            if refusal.code in _LIMIT_CODES:
                self._over = refusal.code
                return None
            cause = f"its messages can't be rendered: {refusal}"[:300]
            failure = Failure(boundary="environment", cause=cause, infrastructure=False)
            raise RolloutFailed(self._engine or failure) from None
        except Exception as error:  # no answer came, for any reason; the sampled call has recorded the cause
            cause = f"{type(error).__name__}: {error}"[:300]
            failure = self._engine or Failure(boundary="engine", cause=cause, infrastructure=True)
            raise RolloutFailed(failure) from None
        conversation.messages.append(answer.message)
        return answer

    async def sampled(self, request: TurnRequest, on_tokens: OnTokens, /) -> GenerationResult:
        self._last = await super().sampled(request, on_tokens)
        return self._last

    async def _sampled_unlearned(self, request: TurnRequest, on_tokens: OnTokens, /) -> GenerationResult:
        """Sample for a role that isn't learned, with other random numbers than a learned role's at the same prompt."""
        return await self.sampled(msgspec.structs.replace(request, purpose=f"unlearned-{request.purpose}"), on_tokens)

    def take_partial(self) -> PartialResponse:
        if self._resumed is None:
            return PartialResponse()
        resume_point, self._resumed = self._resumed, None
        self.parkings = resume_point.resumes
        return resume_point.response

    async def _park(self, parked: PartialRollout) -> Resumption:
        lease = self._lease
        if lease is None or self._rollouts.evaluates:  # an evaluation isn't resumed in another process
            return await super()._park(parked)
        try:
            parked_state = await lease.park()
            if isinstance(parked_state, Failure) and parked_state.boundary == "model":  # its environment meets it next
                return await super()._park(parked)
            if isinstance(parked_state, Failure):
                return await self._abort(parked_state)
            saved_episode = SavedEpisode(
                exchanges=tuple(self._exchanges),
                asked=self._asked,
                environment=parked_state,
                environment_s=self._environment_s,
            )
            resumption = await super()._park(msgspec.structs.replace(parked, episode=saved_episode))
            try:
                failure = await lease.unpark()
            except EnvironmentDied:
                if resumption == "continue" and not parked_state.state["held"]:
                    resume_point = ResumePoint(saved_episode, parked.response, parked.resumes + 1)
                    self._rollouts.resume_at(self.group, self.member, resume_point)
                raise
            return resumption if failure is None else await self._abort(failure)
        except EnvironmentDied as error:
            cause = str(error)[:300]
            return await self._abort(Failure(boundary="environment", cause=cause, infrastructure=True))

    async def _abort(self, failure: Failure) -> Resumption:
        """End the attempt with ``failure``; its calls stay parked until it has ended."""
        self.fail(failure)
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")


def learned_turn_rewards(exchanges: Sequence[TurnRecord]) -> list[float]:
    """Return the rewards of the learned turns; the reward of any other turn is added to the learned turn before it."""
    turn_rewards: list[float] = []
    pending_reward = 0.0  # of turns before the first learned one
    for exchange in exchanges:
        reward = exchange.reward or 0.0
        if exchange.asked.learned:
            turn_rewards.append(pending_reward + reward)
            pending_reward = 0.0
        elif turn_rewards:
            turn_rewards[-1] += reward
        else:
            pending_reward += reward
    return turn_rewards
