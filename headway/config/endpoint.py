"""The environment's keys and the endpoint's: how rollouts are made, and where agents call the model."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from headway.config.fixed_models import FixedModelConfig
from headway.config.section import Positive, Seconds, Section
from headway.config.tool_servers import ToolServerConfig

Rate = Annotated[float, Field(gt=0)]


BUILT_IN = ("single_turn", "agent", "verifiers")  # that are no classes
ENVIRONMENTS = {  # of our own: module:Class
    "code": "headway.rollout.environments.code:Code",
    "dialogue": "headway.rollout.environments.dialogue:Dialogue",
    "gym": "headway.rollout.environments.gym:Gym",
    "harbor": "headway.rollout.environments.harbor:Harbor",
    "openenv": "headway.rollout.environments.openenv:OpenEnv",
    "python_tool": "headway.rollout.environments.python_tool:PythonTool",
    "repair": "headway.rollout.environments.repair:Repair",
}


class EnvironmentConfig(Section):
    """How an attempt at a task is made. "single_turn": one response to the prompt. "agent": a program of yours calls
    the model through an OpenAI-compatible endpoint; what it was answered is the rollout: docs/agents.md. "verifiers":
    so does an environment of the package verifiers, which also says the reward. Any other name is an environment that
    replies to the policy turn by turn: docs/environments.md."""

    name: str = "single_turn"  # one of those, one of docs/environments.md, or module:Class of yours
    parameters: dict[str, Any] = {}  # of an environment that is a class
    workers: Positive = 1  # processes that environments live in
    concurrency: Positive | None = None  # rollouts in environments at once; unset: all that the generator has
    starts_per_s: Rate | None = None  # rollouts that begin, together; unset: no limit
    max_turns: Positive = 16  # answers of a rollout; then it is over
    max_calls: Positive = 16  # calls of tools in one answer; further ones are told that there are too many
    timeout_s: Seconds = 300.0  # of an environment's reply to one answer, or of its score
    tool_result_characters: Annotated[int, Field(ge=100)] = 8000  # of a tool's result; a longer one loses its middle
    mcp: tuple[ToolServerConfig, ...] = ()  # servers of tools, beside those of an environment that is a class
    models: dict[str, FixedModelConfig] = {}  # by name: models that such an environment asks, and that aren't trained
    agent: str = ""  # agent: module:function of yours, called with each task in a process of its own
    command: tuple[
        str, ...
    ] = ()  # agent: or a program and its arguments; {prompt}, {task_file} and {rollout} are filled
    verifiers: dict[str, Any] = {}  # verifiers: the environment, as its package writes it: taskset = { id = ... }, ...
    variables: dict[str, str] = {}  # agent: further environment variables of its process
    shows: tuple[str, ...] = ()  # agent: what it gets of a task beside the prompt: "answer", names of further fields
    posts_reward: bool = False  # agent: it posts its reward, with a key that is in its environment; so can what it runs
    failed_exit: Literal["fail", "verify"] = "fail"  # agent: whose process ends with an error: it fails, or counts
    log_bytes: Positive = 1_000_000  # agent: of what one prints are kept: the first ones; and always the last 65,536
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
        """Whether it is a class that replies to the policy, in workers of its own."""
        return self.name not in BUILT_IN

    @property
    def calls(self) -> bool:
        """Whether a program of its own calls the model, over HTTP."""
        return self.name in ("agent", "verifiers")


def _taskset(verifiers: dict[str, Any]) -> Any:
    taskset = verifiers.get("taskset")
    return cast("dict[str, Any]", taskset).get("id") if isinstance(taskset, dict) else None


class EndpointConfig(Section):
    """The OpenAI-compatible server that agents call, and what one rollout may ask of it."""

    address: str = "127.0.0.1:0"  # HOST:PORT it listens at; port 0: any free one
    model: str = "headway"  # what requests call the model; the name of its folder will do as well
    aliases: tuple[str, ...] = ()  # further names of it; "*": any
    tools: Literal["auto", "hermes", "llama_json", "none"] = "auto"  # how it writes tool calls; auto: by chat template
    history_reasoning: Literal["as_sent", "restore"] = "as_sent"  # of answers sent back without: docs/recording.md
    max_body_bytes: Positive = 32_000_000  # of a request; a larger one is refused (413)
    max_messages: Positive = 4096  # of a request
    max_tools: Positive = 256  # of a request
    choices: Positive = 16  # of a call: the largest n
    calls: Positive = 1000  # of a rollout
    open_calls: Positive = 64  # of a rollout, at once
    sampled_tokens: Positive = 1_000_000  # of a rollout, those without loss included
    kept_tokens: Positive = 10_000_000  # serve: of all sessions, about 100 bytes each; the longest unused ends first
    call_timeout_s: Seconds = 600.0  # serve: a call that takes longer ends without an answer (504); in a run: timeout_s
    body_timeout_s: Seconds = 60.0  # a request whose head, or then body, isn't whole by then is refused (408)
    keep_alive_s: Annotated[float, Field(ge=5)] = 75.0  # idle connections live so long; clients drop theirs before
    stream_ping_s: Seconds = 15.0  # a stream without news says so often that it lives
    connections: Positive = 4096  # at once; further ones are closed

    @field_validator("address", mode="before")
    @classmethod
    def _address(cls, value: Any) -> Any:
        host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        if not (host and port.isdecimal() and int(port) < 1 << 16):
            raise ValueError("valid: HOST:PORT, say 127.0.0.1:8000")
        return value

    @field_validator("model")
    @classmethod
    def _called(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("a name is needed")
        return value
