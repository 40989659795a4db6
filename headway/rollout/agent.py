"""Rollouts of agents: programs of the user's that call the model over HTTP, each in processes of its own."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headway.config.endpoint import Endpoint, Environment
from headway.records.clients import Watch
from headway.records.conversations import Conversations, RecordedConversation, Told, Wanted, rollout_of
from headway.records.generation import GenerationResult, PartialResponse
from headway.records.rollout import Failure, Group, Parked, Pruned, Rollout
from headway.records.task import Task
from headway.rollout.agent_process import Exit
from headway.rollout.attempts import Attempts
from headway.rollout.single_turn import Resumption, SingleTurn, Stop
from headway.rollout.verifiers_environment import COLUMN

_TEMPORARY = 75  # exit code that says: try anew (sysexits.h, EX_TEMPFAIL)


class Processes(Protocol):
    """What starts agents: rollout/agent_process.py."""

    def scratch(self, name: str) -> Path: ...

    async def run(
        self,
        name: str,
        argv: Sequence[str],
        task: Mapping[str, Any],
        env: Mapping[str, str],
        scratch: Path,
        reward: tuple[str, str] = ("", ""),
    ) -> Exit: ...


@dataclass(frozen=True, kw_only=True)
class Agents:
    """What agents need of the orchestrator: where they call the model, and who starts them."""

    environment: Environment
    endpoint: Endpoint
    conversations: Conversations
    processes: Processes


class AgentRollouts(Attempts):
    """Rollouts that are an agent's model calls, token-exact, however it makes them: one key for each attempt.

    An agent's process that ends with an error fails its rollout at the boundary "environment" (or counts as it stands:
    ``environment.failed_exit``). One that was killed, or ends with the exit code 75, is infrastructure.
    """

    def __init__(self, agents: Agents, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.agents = agents

    def stop(self, group: int, member: int, why: Stop) -> None:
        """`SingleTurn.stop`: parked with all the calls it has open; for good, its processes end."""
        if why == "park":
            super().stop(group, member, why)
        else:
            self.cancel(group, member, why)

    def begin(self, group: Group, member: int) -> AgentAttempt:
        return AgentAttempt(self, group, member)

    def failure_of(self, error: Exception) -> Failure | None:
        if isinstance(error, AgentFailed):
            return error.failure
        cause = f"{type(error).__name__}: {error}"  # the host of agents died, or can't be started
        return Failure(boundary="environment", cause=cause[:300], infrastructure=True)

    def name(self, group: Group, member: int) -> str:
        return f"{self._prefix}{group.index}-{member}"

    async def gate(self, parked: Parked) -> Resumption:
        """The orchestrator's."""
        return "continue" if self._resume_gate is None else await self._resume_gate(parked)

    async def sample(self, attempt: AgentAttempt, wanted: Wanted, told: Told) -> Rollout:
        """One answer, through parkings and engine errors. The run's own parameters hold, not the client's."""
        twin = copy.copy(self)  # shares who is open, so that `stop` and `reached` find it
        twin._environment_version = attempt.oldest_version
        twin._session = self.name(attempt.group, attempt.member)
        twin._prefix = f"{self._prefix}{wanted.purpose}-"
        twin._sampling = msgspec.structs.replace(self._sampling, max_tokens=wanted.max_tokens, stop=wanted.stop)
        twin._settings = self._settings.model_copy(update={"max_prompt_tokens": len(wanted.prompt_ids)})
        twin._resume_gate = attempt.gate
        twin._watch_of = lambda group, member: Watch(1, told)
        asked = msgspec.structs.replace(attempt.group, prompt_ids=wanted.prompt_ids)
        before = attempt.parkings  # ``max_resumes`` is a rollout's, whatever calls it was in
        turn = await SingleTurn.generate_member(twin, asked, attempt.member, resumes=before)
        return msgspec.structs.replace(turn, resumes=turn.resumes - before)


class AgentFailed(Exception):
    """An agent's process ended badly."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


class AgentAttempt:
    """One agent at work: *running*, its calls recorded -> *over*, its conversation sealed."""

    def __init__(self, rollouts: AgentRollouts, group: Group, member: int) -> None:
        self.group = group
        self.member = member
        self.stopped: Failure | Pruned | None = None
        self.oldest_version = -1  # of its answers
        self._rollouts = rollouts
        self._recorded = RecordedConversation()
        self._gate: asyncio.Future[Resumption] | None = None
        self._waiting = 0  # calls that are parked
        self.parkings = 0  # of all its open calls at once
        self._engine: Failure | None = None  # the last call's, that got no answer for it
        self._doomed: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()  # a call that ends it all
        self._sampling = 0  # calls that are sampled now
        self._idle_since_s: float | None = None  # no call is; None: one is, or none was yet
        self._environment_s = 0.0

    async def run(self) -> None:
        agents, name = self._rollouts.agents, self._rollouts.name(self.group, self.member)
        conversation = agents.conversations.open(name, self._sample)
        ends: list[asyncio.Task[Exit]] = []
        try:
            scratch = agents.processes.scratch(name)
            played = agents.environment.name == "verifiers"
            task = shown_task(self.group.task, (COLUMN,) if played else agents.environment.shows)
            (scratch / "task.json").write_text(json.dumps(task), encoding="utf-8")
            argv = filled(agents.environment.command, self.group.task, name, scratch)
            url = f"{agents.conversations.address}/v1/rollouts/{name}/reward"
            env = variables(agents, name, conversation.key, scratch)
            if agents.environment.posts_reward:
                env |= {"HEADWAY_REWARD_URL": url, "HEADWAY_REWARD_KEY": conversation.reward_key}
            process = agents.processes.run(name, argv, task, env, scratch, (url, conversation.reward_key))
            ends.append(asyncio.create_task(process, name=f"agent-{name}"))
            await asyncio.wait((*ends, self._doomed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._recorded = conversation.seal()
            self._note(0)
            for process in ends:
                process.cancel()
                await asyncio.wait((process,))
        if self._doomed.done():
            raise AgentFailed(self._doomed.result())
        self._judge(ends[0].result())

    def rollout(self, now: float, failure: Failure | None = None) -> Rollout:
        if failure is None and isinstance(self.stopped, Failure):
            failure = self.stopped
        rollout = rollout_of(self._recorded, self.group, self.member, now, failure)
        version = self.oldest_version if rollout.resumes else -1
        return msgspec.structs.replace(rollout, environment_s=self._environment_s, environment_version=version)

    async def gate(self, parked: Parked) -> Resumption:
        """For all its calls that are parked at once: a member is parked once."""
        if self._gate is None or self._gate.done():
            self._gate, self.parkings = asyncio.ensure_future(self._rollouts.gate(parked)), self.parkings + 1
        gate, self._waiting = self._gate, self._waiting + 1
        try:
            return await asyncio.shield(gate)
        finally:
            self._waiting -= 1
            if not self._waiting:  # where their clients left, the member isn't parked any more
                gate.cancel()
                self._gate = None

    async def _sample(self, wanted: Wanted, told: Told, /) -> GenerationResult:
        self._note(1)
        told(PartialResponse())
        try:
            turn = await self._rollouts.sample(self, wanted, told)
        finally:
            self._note(-1)
        refused = turn.failure is not None and turn.failure.boundary == "engine" and not turn.failure.infrastructure
        self._engine = None if refused else turn.failure
        if turn.failure is not None and turn.failure.boundary == "environment" and not self._doomed.done():
            self._doomed.set_result(turn.failure)  # it was parked for too long: it begins anew, or fails
        versions = [version for version in (self.oldest_version, turn.first_version) if version >= 0]
        self.oldest_version = min(versions, default=-1)
        return GenerationResult(
            request_id=wanted.purpose,
            response=PartialResponse(ids=turn.response_ids, logprobs=turn.response_logprobs, versions=turn.versions),
            finish_reason=turn.finish_reason,
            error="" if turn.failure is None else turn.failure.cause,
            refused=refused,
            reprefills=turn.reprefills,
            resumes=turn.resumes,
            first_token_s=turn.first_token_s,
        )

    def _note(self, change: int) -> None:
        """A call begins, ends, or (0) none will come: what passes between is the environment's time."""
        now = self._rollouts.now()
        if self._sampling == 0 and self._idle_since_s is not None:
            self._environment_s += now - self._idle_since_s
        self._sampling += change
        self._idle_since_s = now if self._sampling == 0 and change else None

    def _judge(self, exit: Exit) -> None:
        """Raises AgentFailed."""
        if self._engine is not None:  # which the agent could do nothing about, however it ended
            raise AgentFailed(self._engine)
        if exit.well:
            return
        infrastructure = exit.code == _TEMPORARY or exit.signal > 0 or bool(exit.error)
        if not infrastructure and self._rollouts.agents.environment.failed_exit == "verify":
            return
        how = exit.error or (f"killed by signal {exit.signal}" if exit.signal else f"exit code {exit.code}")
        last = exit.tail.strip().rpartition("\n")[2]
        cause = f"the agent ended badly: {how}" + (f" ({last})" if last else "")
        raise AgentFailed(
            Failure(boundary="environment", cause=cause[:300], infrastructure=infrastructure, detail=exit.tail)
        )


def variables(agents: Agents, name: str, key: str, scratch: Path) -> dict[str, str]:
    """Of its process's environment: where to call what, in the words of both clients."""
    address = agents.conversations.address
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY", ""), "127.0.0.1", "localhost", "::1")))
    return {
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_BASE": f"{address}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": key,
        "HEADWAY_MODEL": agents.endpoint.model,
        "HEADWAY_ROLLOUT": name,
        "HEADWAY_TASK": str(scratch / "task.json"),
        "HEADWAY_SCRATCH": str(scratch),
        "NO_PROXY": direct,
        "no_proxy": direct,
        "PYTHONUNBUFFERED": "1",
        **agents.environment.variables,
    }


def shown_task(task: Task, shows: Collection[str]) -> dict[str, Any]:
    """A task as its agent sees it (JSON types). ``shows``: names in its metadata, which may hold what only verifiers
    should know, and "answer"."""
    found: dict[str, Any] = {
        "task_id": task.task_id,
        "prompt": task.prompt,
        "messages": list(task.messages),
        "metadata": {name: value for name, value in task.metadata.items() if name in shows},
    }
    return {**found, "answer": task.answer} if "answer" in shows else found


def filled(command: Sequence[str], task: Task, name: str, scratch: Path) -> list[str]:
    """A command's arguments for one rollout; ``python`` is this interpreter. Other braces stay as they are."""
    short = {"{task_file}": str(scratch / "task.json"), "{rollout}": name, "{scratch}": str(scratch)}
    argv: list[str] = []
    for argument in command:
        for mark, value in short.items():
            argument = argument.replace(mark, value)
        argv.append(task.prompt if argument == "{prompt}" else argument)
    return [sys.executable, *argv[1:]] if argv[:1] == ["python"] else argv
