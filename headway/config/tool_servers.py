"""`environment.mcp`: servers of tools that the Model Context Protocol reaches."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from headway.config.section import Seconds, Section, require_http


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
    timeout_s: Seconds = 60.0  # of a call

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
