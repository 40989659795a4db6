"""`environment.mcp`: servers of tools, which speak the Model Context Protocol."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from headway.config.section import Seconds, Section, require_http


class ToolServerConfig(Section):
    """A server whose tools the policy may call, in addition to its environment's."""

    name: str  # name in errors and logs
    command: tuple[str, ...] = ()  # a program, run here as the user of Headway, that speaks over its stdin and stdout
    url: str = ""  # or the address of a running server: https://HOST/mcp
    per: Literal["worker", "episode"] = "worker"  # one for all rollouts of a worker; or for each, with its state
    tools: tuple[str, ...] = ()  # tools that may be called; (): all that the server has
    variables: dict[str, str] = {}  # environment variables of the program; of the run's own it gets only PATH
    passes: tuple[str, ...] = ()  # names of the run's own environment variables that the program gets, too
    api_key_env: str = ""  # url: the environment variable with its bearer token
    timeout_s: Seconds = 60.0  # time limit of a call

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        return value and require_http(value)

    @model_validator(mode="after")
    def _require_one_transport(self) -> ToolServerConfig:
        if bool(self.command) == bool(self.url):
            raise ValueError("either command = ['program', ...] or url = 'https://...' is needed")
        ineffective_keys = [key for key in ("variables", "passes") if getattr(self, key)] if self.url else []
        ineffective_keys += ["api_key_env"] if self.command and self.api_key_env else []
        if ineffective_keys:
            raise ValueError(f"{ineffective_keys[0]} has no effect with {'url' if self.url else 'command'}")
        return self
