"""Rollouts of agents: a user's programs that call the model over HTTP, each in processes of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config.endpoint import EndpointConfig, EnvironmentConfig
from headway.records.conversations import Conversations
from headway.records.rollout import Failure, Group
from headway.records.task import Task
from headway.rollout.hosting.agents.host import EX_TEMPFAIL
from headway.rollout.hosting.agents.processes import AgentProcesses, Exit
from headway.rollout.makers.attempts import RetryingRollouts, RolloutFailed
from headway.rollout.makers.conversation import ConversationAttempt
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.rollout.verifiers_environment import COLUMN


@dataclass(frozen=True, kw_only=True)
class Agents:
    """The orchestrator's resources for agents: the endpoint at which they call the model, and their processes."""

    environment: EnvironmentConfig
    endpoint: EndpointConfig
    conversations: Conversations
    processes: AgentProcesses


class AgentRollouts(RetryingRollouts):
    """Makes token-exact rollouts of an agent's model calls, which are attributed by an API key for each attempt.

    An agent's process that ends with an error fails its rollout at the boundary "environment", or is verified as it
    stands (``environment.failed_exit``). A killed process is an infrastructure failure, and so is one that ends with
    exit code 75, as a function does whose exception is infrastructure's.
    """

    def __init__(self, agents: Agents, sampler: TurnSampler) -> None:
        super().__init__(sampler)
        self._agents = agents

    def begin(self, group: Group, member: int) -> AgentAttempt:
        return AgentAttempt(self._agents, self.sampler, group, member)

    def for_evaluation(self, request_prefix: str, temperature: float | None = None) -> AgentRollouts:
        return AgentRollouts(self._agents, self.sampler.for_evaluation(request_prefix, temperature))


class AgentAttempt(ConversationAttempt):
    """An attempt made by an agent, whose model calls are recorded."""

    def __init__(self, agents: Agents, sampler: TurnSampler, group: Group, member: int) -> None:
        super().__init__(sampler, group, member)
        self._agents = agents
        self._exit: Exit | None = None

    async def run(self) -> None:
        await super().run()
        assert self._exit is not None
        self._judge(self._exit)

    async def _play(self) -> None:
        agents, name = self._agents, self.name
        conversation = agents.conversations.open(name, self.sampled, constraints=self._sampler.constraints)
        self._opened.append(conversation)
        scratch = agents.processes.scratch(name)
        is_verifiers = agents.environment.name == "verifiers"
        task = agent_task(self.group.task, (COLUMN,) if is_verifiers else agents.environment.shows)
        (scratch / "task.json").write_text(json.dumps(task), encoding="utf-8")
        argv = fill_command(agents.environment.command, self.group.task, name, scratch)
        reward_url = f"{agents.conversations.address}/v1/rollouts/{name}/reward"
        env = variables(agents, name, conversation.key, scratch)
        if agents.environment.posts_reward:
            env |= {"HEADWAY_REWARD_URL": reward_url, "HEADWAY_REWARD_KEY": conversation.reward_key}
        self._exit = await agents.processes.run(name, argv, task, env, scratch, (reward_url, conversation.reward_key))

    def _judge(self, exit: Exit) -> None:
        """Raise RolloutFailed for an engine's failure or a failed agent."""
        if self._engine is not None:  # not caused by the agent, however it ended
            raise RolloutFailed(self._engine)
        if exit.well:
            return
        infrastructure = exit.code == EX_TEMPFAIL or exit.signal > 0 or bool(exit.error)
        if not infrastructure and self._agents.environment.failed_exit == "verify":
            return
        exit_text = exit.error or (f"killed by signal {exit.signal}" if exit.signal else f"exit code {exit.code}")
        last_line = exit.tail.strip().rpartition("\n")[2]
        cause = f"the agent failed: {exit_text}" + (f" ({last_line})" if last_line else "")
        raise RolloutFailed(
            Failure(boundary="environment", cause=cause[:300], infrastructure=infrastructure, detail=exit.tail)
        )


def variables(agents: Agents, name: str, key: str, scratch: Path) -> dict[str, str]:
    """Return the environment variables of an agent's process: addresses and keys under the names that OpenAI's and
    Anthropic's clients read."""
    address = agents.conversations.address
    no_proxy_text = ",".join(filter(None, (os.environ.get("NO_PROXY", ""), "127.0.0.1", "localhost", "::1")))
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
        "NO_PROXY": no_proxy_text,
        "no_proxy": no_proxy_text,
        "PYTHONUNBUFFERED": "1",
        **agents.environment.variables,
    }


def agent_task(task: Task, shows: Collection[str]) -> dict[str, Any]:
    """Return a task as its agent sees it (JSON types). ``shows``: names in its metadata, and "answer"; the other
    metadata may be meant for verifiers alone."""
    fields: dict[str, Any] = {
        "task_id": task.task_id,
        "prompt": task.prompt,
        "messages": list(task.messages),
        "metadata": {name: value for name, value in task.metadata.items() if name in shows},
    }
    return {**fields, "answer": task.answer} if "answer" in shows else fields


def fill_command(command: Sequence[str], task: Task, name: str, scratch: Path) -> list[str]:
    """Return a command's arguments for one rollout; ``python`` is this interpreter. Other braces stay unchanged."""
    text_by_mark = {"{task_file}": str(scratch / "task.json"), "{rollout}": name, "{scratch}": str(scratch)}
    argv: list[str] = []
    for argument in command:
        for mark, replacement in text_by_mark.items():
            argument = argument.replace(mark, replacement)
        argv.append(task.prompt if argument == "{prompt}" else argument)
    return [sys.executable, *argv[1:]] if argv[:1] == ["python"] else argv
