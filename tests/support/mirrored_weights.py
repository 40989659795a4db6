"""Weights that change a little at each version, for tests of mirrors."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from headway.records.generation import PublishedWeights
from headway.weights.shared_memory import Subscriber


class Context:
    """What a mirror uses of a worker's context."""

    def __init__(self) -> None:
        self.log = logging.getLogger("mirror")


class Weights:
    """Weights of which a share changes at each version, in bf16."""

    def __init__(self, kilobytes: int) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.tensors = {
            "a": torch.randn(kilobytes << 9, generator=self._generator).to(torch.bfloat16),
            "b": torch.zeros(5, 3),
        }

    def step(self) -> dict[str, Tensor]:
        is_changed = torch.rand(self.tensors["a"].shape, generator=self._generator) < 0.02
        self.tensors["a"][is_changed] *= 1.01
        self.tensors["b"] += 1
        return self.tensors

    def are(self, published: PublishedWeights) -> bool:
        """Whether a reader of a slot gets these weights."""
        fetched = Subscriber().fetch(published)
        return all(torch.equal(fetched[name], tensor) for name, tensor in self.tensors.items())
