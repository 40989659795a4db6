"""Records exchanged between a rollout and its environment, and the state of both that is kept while it is parked."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.records.generation import GenerationResult, PartialResponse
from headway.records.rollout import Failure, Rollout, ToolTimes, Verdict
from headway.records.sandbox import Snapshot

LEFT_OUT = "\n[{count} characters left out]\n"
"""The note that stands for the middle of a tool's answer which is too long."""

WORKER_EVENT = -1
"""Number of an answer of an environment's worker that is an event of its own: (name, text, further fields)."""


class NextTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The next turn that the model is to answer: new messages since its last answer, tools and limits."""

    messages: tuple[dict[str, Any], ...]  # messages, as in OpenAI's chat API
    speaker: str = ""  # whose conversation it is, where the policy plays several roles
    tools: tuple[dict[str, Any], ...] = ()  # that the answer may call, as in OpenAI's chat API
    learned: bool = True  # False: the policy plays this role, and its answers carry no loss
    stop: tuple[str, ...] = ()  # strings that end the answer
    max_tokens: int | None = None  # of the answer; None: what remains of the rollout's limit


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's reply to an answer, or its opening. Exactly one of ``asked``, ``over``, ``failure`` is set."""

    asked: NextTurn | None = None  # the next turn
    over: str = ""  # why there is none
    failure: Failure | None = None  # why the rollout has failed
    reward: float | None = None  # of the turn that was answered
    tool_times: tuple[ToolTimes, ...] = ()  # what it took, on the clock of the environment's worker


class EpisodeScore(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's score of a rollout that is over."""

    verdict: Verdict | None = None  # None: its turns' rewards are its score, or else ``[verifier]`` scores it
    reward: float | None = None  # of its last turn, in addition to that of the reply


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that is over: its request, the sampled answer, and the environment's reward."""

    asked: NextTurn
    result: GenerationResult
    reward: float | None = None


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """A call that changed a sandbox, with its arguments, so that it can be repeated."""

    kind: str  # a method's name: "exec", "write"
    arguments: dict[str, Any]


class EnvironmentState(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's state of one parked rollout: enough to resume it in another process."""

    state: dict[str, Any] = {}  # JSON types
    snapshot: Snapshot | None = None  # of its sandbox; None: it had none
    operations: tuple[Operation, ...] = ()  # that rebuild the sandbox; (): repeating calls wouldn't rebuild it


class SavedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout of several turns as it was parked in the middle of one."""

    exchanges: tuple[TurnRecord, ...]  # turns that were over
    asked: NextTurn  # the turn it was in; `PartialRollout.response` has what was sampled of it
    environment: EnvironmentState
    environment_s: float = 0.0  # between its turns, so far


class PartialRollout(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a parked member: enough to resume it, in this process or in the next one."""

    group: int
    member: int
    response: PartialResponse  # tokens, log-probabilities, versions
    resumes: int  # how often it had been resumed before
    environment_version: int = -1  # of the oldest turn whose effect is in that environment; -1: none
    episode: SavedEpisode | None = None  # where its environment can be kept
    attempts: int = 0  # that outside workers have leased
    finished: Rollout | None = None  # by an outside worker: nothing is left to resume, and its group isn't finished

    @property
    def first_version(self) -> int:
        """Version of its first sampled token; -1: it has none."""
        if self.finished is not None:
            return self.finished.first_version
        responses = [exchange.result.response for exchange in self.episode.exchanges] if self.episode else []
        return next((response.versions[0].version for response in (*responses, self.response) if response.versions), -1)

    @property
    def snapshot(self) -> str:
        """The snapshot of its sandbox: a file's name in the run's folder of sandboxes, or its name at the provider as
        PROVIDER:ID; "": none."""
        snapshot = None if self.episode is None else self.episode.environment.snapshot
        return "" if snapshot is None else snapshot.path
