"""The adapter of the engine of transformers' models: its revisions, and forward passes with one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from headway.generator.engines.revisions import Revision, Revisions
from headway.records.errors import ConfigurationError

if TYPE_CHECKING:  # PEFT, which a model without an adapter does without
    from headway.models.hf.adapter import HfAdapter


@dataclass(frozen=True)
class HfRevision(Revision):
    """A revision as PEFT's modules compute it."""

    weights: Mapping[str, Tensor]


class HfRevisions(Revisions[HfRevision]):
    """The adapter that an engine serves beside its model: one at most, in any number of revisions."""

    def __init__(self, adapters: Mapping[str, HfAdapter], version: int) -> None:
        """``adapters``: by name. Raises ConfigurationError for several."""
        super().__init__()
        if len(adapters) > 1:
            raise ConfigurationError(
                f"adapters {', '.join(adapters)} beside a model that runs in transformers: valid: one at a time"
            )
        self._adapter = next(iter(adapters.values()), None)
        self._updates = 0
        for name, adapter in adapters.items():
            self._add(adapter, name, adapter.weights(), version)

    def register(self, name: str, tensors: Mapping[str, Tensor], version: int) -> None:
        """Make a copy of ``tensors`` the newest revision of ``name``. Raises ConfigurationError, with nothing changed,
        when it isn't registered, or has other names or shapes."""
        if self._adapter is None or name not in self._newest:
            raise ConfigurationError(f"an update of adapter {name!r}, which isn't registered; {self.known}")
        self._add(self._adapter, name, tensors, version)

    @contextmanager
    def computing(self, update: int) -> Iterator[None]:
        """Let the model compute with the revision that this update made; 0: without one."""
        if self._adapter is None:
            yield
            return
        revision = self.of(update)
        with self._adapter.computing(None if revision is None else revision.weights):
            yield

    def tensors(self) -> Iterator[Tensor]:
        """The weights of all revisions."""
        for revision in self._by_update.values():
            yield from revision.weights.values()

    def _add(self, adapter: HfAdapter, name: str, tensors: Mapping[str, Tensor], version: int) -> None:
        weights = adapter.copied(tensors)
        self._updates += 1
        self.add(HfRevision(name, version, self._updates, weights))
