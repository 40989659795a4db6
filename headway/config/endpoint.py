"""The keys of environments and of the endpoint: how rollouts are made, and where agents call the model."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from headway.config.fixed_models import FixedModelConfig
from headway.config.section import Positive, Rate, Seconds, Section, host_port
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
    """How an attempt at a task is made. "single_turn": one response to the prompt. "agent": a program of yours calls
    the model through an OpenAI-compatible endpoint, and the recorded answers are the rollout: docs/agents.md.
    "verifiers": an environment of the package verifiers calls it likewise, and gives the reward. "remote": workers of
    yours, anywhere, lease the attempts over HTTP: docs/buffer-service.md. Any other name is an environment that
    replies to the policy turn by turn: docs/environments.md."""

    name: str = "single_turn"  # one of the above, one of docs/environments.md, or your own module:Class
    parameters: dict[str, Any] = {}  # keyword arguments of an environment that is a class
    # Tune: raise it when one core can't keep up with the environments' own work (report: environment-bound)
    workers: Positive = 1  # processes that run environments
    nodes: tuple[str, ...] = ()  # of cluster.nodes, assigned in turn; "": this machine; (): all here
    # Tune: lower it when environments exhaust memory or a service that they call
    concurrency: Positive | None = None  # rollouts in environments at once; unset: all that the generator has
    starts_per_s: Rate | None = None  # rollouts started per second, all workers together; unset: no limit
    # Tune: as many as the longest good solution needs: more makes failures dear
    max_turns: Positive = 16  # most answers in a rollout; then it ends
    max_calls: Positive = 16  # most tool calls in one answer; further ones get an error as their result
    timeout_s: Seconds = 300.0  # of an environment's reply to one answer, its score, a call of a plain function
    tool_result_characters: Annotated[int, Field(ge=100)] = 8000  # of a tool's result; a longer one loses its middle
    mcp: tuple[ToolServerConfig, ...] = ()  # tool servers, in addition to the tools of an environment that is a class
    models: dict[str, FixedModelConfig] = {}  # by name: models that such an environment calls and that aren't trained
    agent: str = ""  # agent: your module:function, called with each task in a process of its own
    command: tuple[
        str, ...
    ] = ()  # agent: or a program and its arguments; {prompt}, {task_file}, {scratch} and {rollout} are filled
    verifiers: dict[str, Any] = {}  # verifiers: the environment, as its package writes it: taskset = { id = ... }, ...
    variables: dict[str, str] = {}  # agent: further environment variables of its process
    shows: tuple[str, ...] = ()  # agent, remote: fields of the task beside the prompt: "answer", names of others
    posts_reward: bool = False  # agent: it posts its own reward; the key is in its environment, for its children too
    failed_exit: Literal["fail", "verify"] = "fail"  # agent: rollouts whose process ends with an error fail, or count
    log_bytes: Positive = 1_000_000  # agent: first bytes of its output that are kept; the last 65,536 always are
    stop_grace_s: Seconds = 2.0  # agent: between asking its processes to end and killing them

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        known = (*BUILT_IN, *ENVIRONMENTS)
        module, colon, path = value.partition(":")
        if value not in known and not (colon and module and path):
            near = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{hint}valid: {', '.join(known)} or module:Class")
        return value

    @field_validator("agent")
    @classmethod
    def _named(cls, value: str) -> str:
        if value and not all(value.partition(":")[::2]):
            raise ValueError("valid: module:function")
        return value

    @model_validator(mode="after")
    def _one_agent(self) -> EnvironmentConfig:
        given = [key for key in ("agent", "command", "verifiers") if getattr(self, key)]
        for key in given:
            if self.name != (wanted := "verifiers" if key == "verifiers" else "agent"):
                raise ValueError(f"{key} has no effect with name = {self.name!r}: valid: name = {wanted!r}")
        if self.parameters and self.name in BUILT_IN:
            raise ValueError(f"parameters have no effect with name = {self.name!r}: they are a class's")
        for key in ("mcp", "models"):
            if getattr(self, key) and self.name in BUILT_IN:
                raise ValueError(f"{key} has no effect with name = {self.name!r}: it is for a class")
        names = [server.name for server in self.mcp]
        if len(set(names)) < len(names):
            raise ValueError(f"mcp: two servers are called {max(names, key=names.count)!r}")
        if self.name == "agent" and len(given) != 1:
            raise ValueError("name = 'agent' needs either agent = 'module:function' or command = ['program', ...]")
        if self.name == "verifiers" and not _taskset(self.verifiers):
            raise ValueError("name = 'verifiers' needs verifiers = { taskset = { id = '...' } }")
        if any("{prompt}" in argument and argument != "{prompt}" for argument in self.command):
            raise ValueError("command: '{prompt}' must be an argument of its own: no shell may read it")
        return self

    @property
    def replies(self) -> bool:
        """Whether the environment is a class that replies to the policy, in workers of its own."""
        return self.name not in BUILT_IN

    @property
    def calls(self) -> bool:
        """Whether a program of the environment calls the model, over HTTP."""
        return self.name in ("agent", "verifiers", "remote")


def _taskset(verifiers: dict[str, Any]) -> Any:
    taskset = verifiers.get("taskset")
    return cast("dict[str, Any]", taskset).get("id") if isinstance(taskset, dict) else None


class EndpointConfig(Section):
    """The OpenAI-compatible server that agents call, and what one rollout may ask of it."""

    address: Address = "127.0.0.1:0"  # HOST:PORT it listens at; port 0: any free one
    model: str = "headway"  # the model's name in requests; its folder's name is valid as well
    aliases: tuple[str, ...] = ()  # further names of the model; "*": any
    tools: ToolFormat = "auto"  # how it writes tool calls; auto: by chat template
    history_reasoning: HistoryReasoning = "as_sent"  # of answers sent back without: docs/recording.md
    max_body_bytes: Positive = 32_000_000  # of a request; a larger one is refused (413)
    max_messages: Positive = 4096  # messages in a request
    max_tools: Positive = 256  # tools in a request
    choices: Positive = 16  # largest n of a call
    calls: Positive = 1000  # calls of a rollout
    open_calls: Positive = 64  # calls of a rollout at the same time
    sampled_tokens: Positive = 1_000_000  # tokens sampled for a rollout, those without loss included
    kept_tokens: Positive = 10_000_000  # serve: of all sessions, about 100 bytes each; the longest unused ends first
    call_timeout_s: Seconds = 600.0  # serve: a call that takes longer ends without an answer (504); in a run: timeout_s
    body_timeout_s: Seconds = 60.0  # a request whose head, or then body, isn't whole by then is refused (408)
    keep_alive_s: Annotated[float, Field(ge=5)] = 75.0  # idle connections are closed after this; clients close earlier
    stream_ping_s: Seconds = 15.0  # between keep-alive comments in a stream without tokens
    connections: Positive = 4096  # open at the same time; further ones are closed

    @field_validator("model")
    @classmethod
    def _called(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("a name is needed")
        return value
