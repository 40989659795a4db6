"""Environments that run commands, a rollout at a time, in a sandbox that is a dictionary and does what a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from headway.config.endpoint import EnvironmentConfig
from headway.records.sandbox import ExecResult, FileInfo, SandboxError, environment_failure, model_failure
from headway.records.task import Task
from headway.rollout.environment import Answer, Call, Episode
from headway.rollout.external_models import ExternalModels
from headway.rollout.hosting.service import load_environment

Does = Callable[["Box", Sequence[str], dict[str, Any]], ExecResult | None]  # a command; None: it was well
Commands = Sequence[tuple[str, dict[str, Any]]]  # tools and their arguments


class Box:
    """``room``: bytes of files. An interpreter works unless ``does`` says otherwise."""

    def __init__(self, does: Does | None = None, room: int = 1 << 20) -> None:
        self.files: dict[str, tuple[bytes, int]] = {}
        self.commands: list[tuple[list[str], dict[str, Any]]] = []
        self.full = False
        self._does = does
        self._room = room

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        self.commands.append((list(argv), options))
        done = self._does(self, argv, options) if self._does is not None else None
        return done or ExecResult(exit_code=0, stdout=b"42\n" if "print(6 * 7)" in argv else b"")

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        content = data.encode() if isinstance(data, str) else data
        if sum(len(there) for there, _ in self.files.values()) + len(content) > self._room:
            raise SandboxError(model_failure(f"{path}: No space left on device"))
        self.files[path] = (content, mode)

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        if path not in self.files:
            raise SandboxError(environment_failure(f"{path}: No such file or directory"))
        return self.files[path][0]

    async def list(self, path: str, *, max_entries: int = 10_000) -> list[FileInfo]:
        found: dict[str, FileInfo] = {}
        for name in self.files:
            if name.startswith(f"{path}/"):
                first, rest, _ = name.removeprefix(f"{path}/").partition("/")
                found[first] = FileInfo(name=first, kind="directory" if rest else "file")
        if len(found) > max_entries:
            raise SandboxError(model_failure(f"{path}: more than {max_entries} entries"))
        return list(found.values())


class Boxed:
    """One rollout of an environment of ours."""

    def __init__(
        self, name: str, metadata: dict[str, Any], box: Box, limit_s: float = 300.0, **parameters: Any
    ) -> None:
        settings = EnvironmentConfig(name=name, parameters=parameters, timeout_s=limit_s)
        self.environment = load_environment(settings)
        self.box = box
        self.task = Task(task_id="t", prompt="Do it.", metadata=metadata)
        self.new()

    def new(self) -> None:
        """Another one."""
        sandbox: Any = self.box
        self.episode = Episode("7-0", self.task, sandbox, 0, 9, ExternalModels({}))

    def begin(self) -> None:
        asyncio.run(self.environment.begin(self.episode))

    def call(self, *commands: tuple[str, dict[str, Any]]) -> list[str]:
        """What is told of each of an answer's calls."""
        calls = tuple(
            Call(name=name, arguments=json.dumps(arguments), call_id=str(index))
            for index, (name, arguments) in enumerate(commands)
        )
        answer = Answer(text="", message={}, calls=calls)
        self.episode.receive(answer)
        asyncio.run(self.environment.reply(self.episode, answer))
        return [said["content"] for said in self.episode.take_next().messages if said["role"] == "tool"]

    def score(self) -> Any:
        return asyncio.run(self.environment.score(self.episode))
