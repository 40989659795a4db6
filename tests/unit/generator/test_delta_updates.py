"""Updates by deltas of an engine in this process: made beside the steps, and the same weights as by whole versions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from headway.generator.service import GeneratorService
from headway.models.initialise import initialise_model
from headway.models.loading import load_model, weights_of
from headway.records.generation import AppliedWeights, PublishedWeights, TokenDelta
from headway.runtime.devices import parse_device
from headway.weights.shared_memory import Publisher
from tests.conformance.engine import request

torch.set_num_threads(1)


class Replica:
    """A service of a small model in float32, and versions of it in a ``dtype``."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        if not folder.exists():
            initialise_model(folder, ["8+3=11"], vocabulary_size=280, width=64, layers=2, heads=2, kv_heads=1)
        self._generator = torch.Generator().manual_seed(0)
        self.weights = {name: weight.to(dtype) for name, weight in weights_of(load_model(folder)).items()}
        self.events: list[TokenDelta] = []
        context: Any = SimpleNamespace(device=parse_device("cpu:0"), emit=self._emit)
        settings = {"dtype": "float32", "slots": 2, "max_context_tokens": 256}
        self.service = GeneratorService(context, model_path=str(folder), **settings)
        self.engine: Any = self.service._engine
        self._requests = 0

    def _emit(self, encoded: bytes) -> None:
        self.events += msgspec.msgpack.decode(encoded, type=list[TokenDelta])

    def step(self) -> dict[str, torch.Tensor]:
        for weight in self.weights.values():
            is_changed = torch.rand(weight.shape, generator=self._generator) < 0.02
            weight[is_changed] = weight[is_changed] * 1.01
        return self.weights

    def update(self, published: PublishedWeights) -> AppliedWeights:
        """Update while a request is decoded."""
        if not self.engine.open_requests:
            self._requests += 1
            self.engine.submit([request(f"r{self._requests}", max_tokens=200, seed=1)])
            self.service.tick()
        pending = self.service.update_weights(published, "keep")
        while isinstance(pending, Future) and not pending.done():
            self.service.tick()
        return pending.result() if isinstance(pending, Future) else pending

    def computes_with_weights(self) -> bool:
        parameters = weights_of(self.engine._model)
        return all(torch.equal(parameters[name], weight.to(torch.float32)) for name, weight in self.weights.items())


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    with Publisher("run", directory=tmp_path, whole_every=1000) as publisher:
        yield publisher


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["adopted", "copies"])
def replica(request: pytest.FixtureRequest, tmp_path: Path) -> Replica:
    """float32: what is fetched becomes the parameters; bfloat16: they are copies of it."""
    return Replica(tmp_path / "m", request.param)


def came_by_delta(replica: Replica) -> bool:
    subscriber = replica.engine._subscriber
    return any(buffer.changed_from for buffer in (subscriber._buffer, subscriber._kept))


def test_updates_by_deltas_give_the_published_weights(replica: Replica, publisher: Publisher):
    for version in range(1, 9):
        applied = replica.update(publisher.publish(version, replica.step()))
        assert (applied.version, applied.damage) == (version, "")
        assert replica.computes_with_weights()
        assert came_by_delta(replica) == (version > (2 if replica.engine._subscriber._kept.checksum else 1))


def test_copies_are_overwritten_where_they_have_changed(tmp_path: Path, publisher: Publisher):
    """The rest of the parameters isn't written: a mark stays, which a copy would remove."""
    replica = Replica(tmp_path / "m", torch.bfloat16)
    replica.update(publisher.publish(1, replica.step()))
    name, weight = next((n, w) for n, w in weights_of(replica.engine._model).items() if w.numel() > 1000)
    old = replica.weights[name].clone()
    published = publisher.publish(2, replica.step())
    index = int((old == replica.weights[name]).flatten().nonzero()[-1])
    with torch.no_grad():
        weight.view(-1)[index] = 123.0
    replica.engine._damage_of_live = lambda following: ""
    replica.update(published)
    assert weight.view(-1)[index] == 123.0
    with torch.no_grad():
        weight.view(-1)[index] = replica.weights[name].view(-1)[index]
    assert replica.computes_with_weights()


def test_flips_in_memory_are_found_named_and_repaired(replica: Replica, publisher: Publisher):
    """A flip of any bit, within 20 updates; the requests that may have sampled with it end with an error."""
    for version in range(1, 4):
        replica.update(publisher.publish(version, replica.step()))
    names = list(weights_of(replica.engine._model))
    generator, voided_requests = torch.Generator().manual_seed(5), 0
    for trial in range(int(os.environ.get("FLIPS", "6"))):
        weights = weights_of(replica.engine._model)
        name = names[int(torch.randint(len(names), (), generator=generator))]
        stored = weights[name].detach().view(torch.uint8).view(-1)
        position, bit = (int(torch.randint(n, (), generator=generator)) for n in (len(stored), 8))
        stored[position] ^= 1 << bit
        replica.events.clear()
        for _ in range(20):
            version += 1
            applied = replica.update(publisher.publish(version, replica.step()))
            if applied.damage:
                break
        assert name in applied.damage, trial
        replica.service.tick()
        replica.events += replica.engine.take_deltas()
        errors = [event.error for event in replica.events if "damaged" in event.error]
        assert len(errors) == applied.in_flight
        assert all(name in error for error in errors)
        assert replica.computes_with_weights()
        voided_requests += len(errors)
    assert voided_requests


def test_a_replica_of_whole_versions_finds_flips_too(tmp_path: Path):
    replica = Replica(tmp_path / "m", torch.float32)
    with Publisher("run", directory=tmp_path) as publisher:
        replica.update(publisher.publish(1, replica.step()))
        assert not replica.update(publisher.publish(2, replica.step())).damage
        weight = next(iter(weights_of(replica.engine._model).values()))
        weight.detach().view(-1)[3] += 1
        assert "block 0 of version 2" in replica.update(publisher.publish(3, replica.step())).damage
        assert replica.computes_with_weights()
        assert not replica.update(publisher.publish(4, replica.step())).damage
