"""`environment.mcp`: servers of tools that the Model Context Protocol reaches."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from headway.config.section import Positive, Seconds, Section, require_http


class ToolServerConfig(Section):
    """A server whose tools the policy may call, beside its environment's own."""

    name: str  # what errors and logs call it
    command: tuple[
        str, ...
    ] = ()  # a program, started here as whoever runs Headway, that speaks over its stdin and stdout
    url: str = ""  # or the address of one that runs: https://HOST/mcp
    per: Literal["worker", "episode"] = "worker"  # one for all rollouts of a worker; or for each, with its state
    tools: tuple[str, ...] = ()  # that may be called; (): all it has
    variables: dict[str, str] = {}  # environment variables of the program; but for PATH it has nothing of the run's
    passes: tuple[str, ...] = ()  # names of the run's own environment variables that the program gets
    api_key_env: str = ""  # url: the environment variable with its bearer token
    start_timeout_s: Seconds = 30.0  # until it has told its tools
    timeout_s: Seconds = 60.0  # of a call
    starts_per_minute: Positive = 5  # of a worker's, after it died or hung; more wait, or fail beyond timeout_s
    result_bytes: Positive = 10_000_000  # of a message; a longer result is an error that is told

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        return value and require_http(value)

    @model_validator(mode="after")
    def _one_way(self) -> ToolServerConfig:
        if bool(self.command) == bool(self.url):
            raise ValueError("either command = ['program', ...] or url = 'https://...' is needed")
        given = [key for key in ("variables", "passes") if getattr(self, key)] if self.url else []
        given += ["api_key_env"] if self.command and self.api_key_env else []
        if given:
            raise ValueError(f"{given[0]} has no effect with {'url' if self.url else 'command'}")
        return self
