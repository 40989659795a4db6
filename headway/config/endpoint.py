"""The keys of environments and of the endpoint, where agents call the model."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from headway.config.external_models import ExternalModelConfig
from headway.config.section import Positive, Seconds, Section, host_port
from headway.config.tool_servers import ToolServerConfig
from headway.records.conversations import HistoryReasoning, ToolFormat

Address = Annotated[str, host_port("127.0.0.1:8000")]

BUILT_IN = ("single_turn", "agent", "verifiers", "remote")  # names that aren't classes
ENVIRONMENTS = {  # name of a built-in environment -> module:Class
    "code": "headway.rollout.environments.code:Code",
    "dialogue": "headway.rollout.environments.dialogue:Dialogue",
    "gym": "headway.rollout.environments.gym:Gym",
    "kernel": "headway.rollout.environments.kernel:Kernel",
    "harbor": "headway.rollout.environments.harbor:Harbor",
    "openenv": "headway.rollout.environments.openenv:OpenEnv",
    "python_tool": "headway.rollout.environments.python_tool:PythonTool",
    "repair": "headway.rollout.environments.repair:Repair",
}


class EnvironmentConfig(Section):
    """The environment in which tasks are attempted. "single_turn": one response to the prompt. "agent": a program of
    yours calls the model through an OpenAI-compatible endpoint, and the recorded answers are the rollout:
    docs/agents.md. "verifiers": an environment of the package verifiers calls it likewise, and gives the reward.
    "remote": your own workers, on any machine, lease the attempts over HTTP: docs/buffer-service.md. Any other name is
    an environment that replies to the policy turn by turn: docs/environments.md."""

    name: str = "single_turn"  # one of the above, one of docs/environments.md, or your own module:Class
    parameters: dict[str, Any] = {}  # a class's keyword arguments; verifiers: its EnvConfig, taskset = { id = ... }
    # Tune: raise it when one core can't keep up with the environments' own work (report: environment-bound)
    workers: Positive = 1  # processes that run environments
    nodes: tuple[str, ...] = ()  # names of cluster.nodes, assigned in turn; "": this machine; (): all here
    # Tune: lower it when environments exhaust memory or a service that they call
    concurrency: Positive | None = None  # rollouts in environments at once; unset: all that the generator has
    # Tune: as many as the longest good solution needs: more makes failures expensive
    max_turns: Positive = 16  # most answers in a rollout; then it ends
    timeout_s: Seconds = 300.0  # time limit of an environment's reply or score, and of a call of a plain function
    tool_result_characters: Annotated[int, Field(ge=100)] = 8000  # longer results of tools lose their middle
    mcp: tuple[ToolServerConfig, ...] = ()  # tool servers, in addition to the tools of an environment that is a class
    models: dict[str, ExternalModelConfig] = {}  # name -> model that isn't trained, for such an environment to call
    agent: str | tuple[str, ...] = ""  # agent: your module:function, or a program and its arguments: docs/agents.md
    variables: dict[str, str] = {}  # agent: further environment variables of its process
    shows: tuple[str, ...] = ()  # agent, remote: fields of the task it gets beside the prompt: "answer", other names
    posts_reward: bool = False  # agent: it posts its own reward; the key is in its environment, for its children too
    failed_exit: Literal["fail", "verify"] = "fail"  # agent: rollouts whose process ends with an error fail, or count

    @field_validator("name")
    @classmethod
    def _require_known_name(cls, value: str) -> str:
        known_names = (*BUILT_IN, *ENVIRONMENTS)
        module, colon, path = value.partition(":")
        if value not in known_names and not (colon and module and path):
            nearest = difflib.get_close_matches(value, known_names, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise ValueError(f"{hint}valid: {', '.join(known_names)} or module:Class")
        return value

    @field_validator("agent")
    @classmethod
    def _require_agent_form(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(value, str):
            if value and not all(value.partition(":")[::2]):
                raise ValueError("valid: module:function, or a list: a program and its arguments")
        elif any("{prompt}" in argument and argument != "{prompt}" for argument in value):
            raise ValueError("'{prompt}' must be a separate argument, which no shell parses")
        return value

    @model_validator(mode="after")
    def _require_matching_name(self) -> EnvironmentConfig:
        if self.agent and self.name != "agent":
            raise ValueError(f"agent has no effect with name = {self.name!r}: valid: name = 'agent'")
        if self.parameters and self.name in BUILT_IN and self.name != "verifiers":
            raise ValueError(f"parameters have no effect with name = {self.name!r}: they are a class's")
        for key in ("mcp", "models"):
            if getattr(self, key) and self.name in BUILT_IN:
                raise ValueError(f"{key} has no effect with name = {self.name!r}: it is for a class")
        names = [server.name for server in self.mcp]
        if len(set(names)) < len(names):
            raise ValueError(f"mcp: two servers are called {max(names, key=names.count)!r}")
        if self.name == "agent" and not self.agent:
            raise ValueError("name = 'agent' needs agent = 'module:function' or agent = ['program', ...]")
        if self.name == "verifiers" and not _taskset(self.parameters):
            raise ValueError("name = 'verifiers' needs parameters = { taskset = { id = '...' } }")
        return self

    @property
    def function(self) -> str:
        """The agent where it is a module:function; "" where it is a program, or there is none."""
        return self.agent if isinstance(self.agent, str) else ""

    @property
    def command(self) -> tuple[str, ...]:
        """The agent's program with its arguments; () where the agent is a function, or there is none."""
        return () if isinstance(self.agent, str) else self.agent

    @property
    def is_class(self) -> bool:
        """Whether the environment is a class that replies to the policy; separate workers run it."""
        return self.name not in BUILT_IN

    @property
    def calls(self) -> bool:
        """Whether a program of the environment calls the model, over HTTP."""
        return self.name in ("agent", "verifiers", "remote")


def _taskset(parameters: dict[str, Any]) -> Any:
    taskset = parameters.get("taskset")
    return cast("dict[str, Any]", taskset).get("id") if isinstance(taskset, dict) else None


class EndpointSection(Section):
    """The OpenAI-compatible server that agents call, and the limits of one rollout there."""

    address: Address = "127.0.0.1:0"  # HOST:PORT at which it listens; port 0: any free one
    model: str = "headway"  # the model's name in requests; its folder's name is valid as well
    aliases: tuple[str, ...] = ()  # further names of the model; "*": any
    tools: ToolFormat = "auto"  # the model's format of tool calls; auto: by chat template
    history_reasoning: HistoryReasoning = "as_sent"  # for answers sent back without reasoning: docs/recording.md
    max_body_bytes: Positive = 32_000_000  # size of a request; a larger one is refused (413)
    calls: Positive = 1000  # limit of a rollout's calls

    @field_validator("model")
    @classmethod
    def _require_model_name(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("a name is needed")
        return value


class EndpointConfig(EndpointSection):
    """Settings of the server: the keys of the file, and limits that no file can set."""

    max_messages: Positive = 4096  # messages in a request: the longest conversations of agents have hundreds
    max_tools: Positive = 256  # tools in a request: catalogues of tool servers have dozens
    choices: Positive = 16  # largest n of a call; each choice is a request to the engine
    sampled_tokens: Positive = 1_000_000  # tokens sampled for a rollout, with loss or without: ends agents that loop
    open_calls: Positive = 64  # calls of a rollout at the same time: a fork bomb mustn't take all slots
    call_timeout_s: Seconds = 600.0  # a call that takes longer ends unanswered (504); in a run: rollout.timeout_s
    body_timeout_s: Seconds = 60.0  # a request whose head, or then body, isn't whole by then is refused (408)
    keep_alive_s: Annotated[float, Field(ge=5)] = 75.0  # idle connections are closed after this; clients close earlier
    stream_ping_s: Seconds = 15.0  # time between comments in a stream without tokens: proxies cut idle ones after 30 s
    observes: bool = False  # record which tokens a tool's answers became
    secrets: tuple[str, ...] = ()  # texts that aren't learned where a tool's answer has them
    connections: Positive = 4096  # open connections, where the process may open as many files; further ones are closed
