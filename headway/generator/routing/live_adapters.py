"""Adapters that come and go while the replicas of a pool sample."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headway.generator.routing.replica import Replica, raise_but_deaths
from headway.records.errors import ConfigurationError


class LiveAdapters:
    """The adapters that all replicas of a pool serve, beside those of its start: they come and go while it samples, and
    a restarted replica has all of them before its first request."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._folders: dict[str, str] = {}

    async def add(self, name: str, folder: str) -> None:
        """Register an adapter by its folder in PEFT's format, or its next revision, from which running requests go on.
        Raises ConfigurationError for a folder that isn't an adapter of the model."""
        former_folder = self._folders.get(name, "")
        self._folders[name] = folder
        try:
            await self._change(name)
        except BaseException:
            self._folders[name] = former_folder
            raise

    async def remove(self, name: str) -> None:
        """Free an adapter that no open request names."""
        self._folders[name] = ""
        await self._change(name)
        self._folders = {known: folder for known, folder in self._folders.items() if folder}

    async def restore(self, replica: Replica) -> None:
        """Register all adapters, those too that come meanwhile, on a replica that was just started."""
        restored: dict[str, str] = {}
        while changes := {name: path for name, path in self._folders.items() if path != restored.get(name, "")}:
            for name, folder in changes.items():
                try:
                    await replica.change_adapter(name, folder)
                except ConfigurationError:  # its folder is gone: its requests are refused
                    self._folders.pop(name, None)
            restored |= changes

    async def _change(self, name: str) -> None:
        changes = (replica.change_adapter(name, self._folders[name]) for replica in self._replicas if replica.live)
        raise_but_deaths(await asyncio.gather(*changes, return_exceptions=True))
