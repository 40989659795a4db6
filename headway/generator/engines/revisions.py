"""Registered revisions of adapters, by name and by the update that made each, for the engines of this package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from headway.generator.engines.requests import EngineRequest
from headway.records.generation import BASE_MODEL, POLICY_ADAPTER


@dataclass(frozen=True)
class Revision:
    """An adapter as one update made it. ``update``: the number of that update in the engine, which never repeats."""

    name: str
    version: int
    update: int


R = TypeVar("R", bound=Revision)


class Revisions(Generic[R]):
    """The adapters that an engine serves: of each name the newest revision, and older ones that requests hold."""

    def __init__(self) -> None:
        self._newest: dict[str, R] = {}
        self._by_update: dict[int, R] = {}

    def __len__(self) -> int:
        return len(self._by_update)

    def add(self, revision: R) -> None:
        """Make ``revision`` the newest of its name."""
        self._newest[revision.name] = self._by_update[revision.update] = revision

    def remove(self, name: str) -> None:
        """Forget a name: its revisions are dropped when no request holds them any more."""
        self._newest.pop(name, None)

    def newest(self, name: str) -> R | None:
        """Return the revision for a new request; None: the model alone. ``name`` as in `GenerationRequest.adapter`."""
        return self._newest.get(name or POLICY_ADAPTER)

    def held(self, name: str, version: int) -> R | None:
        """Return the newest registered revision of this adapter and version; None if there is none."""
        identity = (name or POLICY_ADAPTER, version)
        matches = [revision for revision in self._by_update.values() if (revision.name, revision.version) == identity]
        return matches[-1] if matches else None

    def of(self, update: int) -> R | None:
        """Return the adapter revision that update number ``update`` made; None if that update changed the model, or the
        revision is unloaded."""
        return self._by_update.get(update)

    def unknown(self, name: str) -> str:
        """Return why no request can use this adapter; "" if it is registered."""
        return "" if name in ("", BASE_MODEL, *self._newest) else f"there is no adapter {name!r}; {self.known}"

    def unload(self, requests: Iterable[EngineRequest]) -> None:
        """Drop the revisions that are neither newest nor held by one of the open ``requests``."""
        if len(self._by_update) == len(self._newest):
            return
        in_use = {revision.update for revision in self._newest.values()} | {request.update for request in requests}
        for update in [update for update in self._by_update if update not in in_use]:
            del self._by_update[update]

    @property
    def known(self) -> str:
        """The registered names, for errors."""
        return f"registered: {', '.join(sorted(self._newest)) or 'none'}"
