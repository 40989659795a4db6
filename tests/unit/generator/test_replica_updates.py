"""A replica's updates: a version is fetched, verified and packed beside the steps, and applied between two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from headway.generator.service import GeneratorService
from headway.models.cpu import native
from headway.models.initialise import initialise_model
from headway.models.loading import load_model, weights_of
from headway.records.errors import WeightsCorrupt
from headway.records.generation import TokenDelta
from headway.runtime.devices import parse_device
from headway.weights.shared_memory import Publisher
from tests.conformance.engine import request

torch.set_num_threads(1)


class Replica:
    """A service, and its deltas."""

    def __init__(self, folder: Path) -> None:
        if not folder.exists():
            initialise_model(folder, ["8+3=11"], vocabulary_size=280, width=64, layers=2, heads=2, kv_heads=1)
        self.first = dict(weights_of(load_model(folder)))
        self.deltas: list[TokenDelta] = []
        context: Any = SimpleNamespace(device=parse_device("cpu:0"), emit=self._emit)
        settings = {"dtype": "float32", "slots": 2, "max_context_tokens": 64}
        self.service = GeneratorService(context, model_path=str(folder), **settings)
        self.engine: Any = self.service._engine

    def _emit(self, encoded: bytes) -> None:
        self.deltas += msgspec.msgpack.decode(encoded, type=list[TokenDelta])

    def scaled(self, scale: float) -> dict[str, torch.Tensor]:
        return {name: scale * tensor for name, tensor in self.first.items()}

    def computes_with(self, tensors: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(mine, tensors[name]) for name, mine in weights_of(self.engine._model).items())

    def fetch_when(self, gate: threading.Event) -> None:
        """Fetch only once the ``gate`` is open."""
        fetch: Callable[..., Any] = self.engine._subscriber.fetch

        def gated(*of: Any) -> Any:
            assert gate.wait(20)
            return fetch(*of)

        self.engine._subscriber.fetch = gated

    def submit(self, name: str, tokens: int = 40) -> None:
        self.engine.submit([request(name, max_tokens=tokens, seed=1)])

    def finish(self) -> list[tuple[int, tuple[int, ...]]]:
        """The versions and tokens of all requests, once they have ended."""
        while self.service.tick():
            pass
        self.deltas += self.engine.take_deltas()
        return [(delta.version, tuple(delta.ids)) for delta in self.deltas if len(delta.ids)]


@pytest.fixture
def replica(tmp_path: Path) -> Replica:
    return Replica(tmp_path / "m")


def test_steps_go_on_while_a_version_is_fetched(replica: Replica, tmp_path: Path):
    gate = threading.Event()
    replica.fetch_when(gate)
    with Publisher("run", directory=tmp_path) as publisher:
        replica.submit("a")
        replica.service.tick()
        pending = replica.service.update_weights(publisher.publish(1, replica.scaled(2.0)), "keep")
        assert isinstance(pending, Future)
        for _ in range(10):
            assert replica.service.tick()
        assert not pending.done()
        assert replica.computes_with(replica.first)
        gate.set()
        wait([replica.service._update.fetched], 20)  # a slow fetch must not outlast the request
        replica.service.tick()
        applied = pending.result(0)
        assert replica.computes_with(replica.scaled(2.0))
        assert (applied.version, applied.in_flight) == (1, 1)
        assert 0 < applied.check_s < applied.fetch_s
        assert applied.pause_s == replica.engine.statistics().paused_s < applied.fetch_s  # which is beside the steps
        tokens = [version for version, ids in replica.finish() for _ in ids]
        assert tokens == sorted(tokens)
        assert len(tokens) == 40
        assert 11 <= tokens.count(0) < 40


def test_a_corrupt_version_changes_nothing_and_its_caller_is_told(replica: Replica, tmp_path: Path):
    with Publisher("run", directory=tmp_path) as publisher:
        replica.submit("a")
        replica.service.tick()
        published = publisher.publish(1, replica.scaled(2.0))
        content = bytearray(Path(published.path).read_bytes())
        content[-100] ^= 1
        Path(published.path).write_bytes(content)
        pending = replica.service.update_weights(published, "keep")
        assert isinstance(pending, Future)
        while not pending.done():
            replica.service.tick()
        with pytest.raises(WeightsCorrupt, match="does not have checksum"):
            pending.result()
        assert replica.computes_with(replica.first)
        ids = [token for _, tokens in replica.finish() for token in tokens]
        plain = Replica(tmp_path / "m")
        plain.submit("a")
        assert ids == [token for _, tokens in plain.finish() for token in tokens]  # nor were its panels used


def test_idle_replica_applies_at_once(replica: Replica, tmp_path: Path):
    """Both without requests, and when they end while a version is fetched."""
    with Publisher("run", directory=tmp_path) as publisher:
        applied = replica.service.update_weights(publisher.publish(1, replica.scaled(2.0)), "keep")
        assert not isinstance(applied, Future)
        assert applied.pause_s >= applied.fetch_s > 0
        replica.submit("a", tokens=2)
        gate = threading.Event()
        replica.fetch_when(gate)
        pending = replica.service.update_weights(publisher.publish(2, replica.scaled(3.0)), "keep")
        assert isinstance(pending, Future)
        while replica.engine.open_requests:
            replica.service.tick()
        threading.Timer(0.05, gate.set).start()
        replica.service.tick()  # waits, instead of for the next call
        assert pending.result().version == 2
        assert replica.computes_with(replica.scaled(3.0))


def test_yielded_replica_and_a_second_version_wait_for_the_first(replica: Replica, tmp_path: Path):
    with Publisher("run", directory=tmp_path) as publisher:
        replica.submit("a")
        replica.service.tick()
        replica.service.yield_device(True)
        pending = replica.service.update_weights(publisher.publish(1, replica.scaled(2.0)), "keep")
        replica.service.tick()
        assert isinstance(pending, Future)
        assert pending.result().version == 1
        replica.service.yield_device(False)
        abandoned = replica.service.update_weights(publisher.publish(2, replica.scaled(3.0)), "keep")
        newest = replica.service.update_weights(publisher.publish(3, replica.scaled(4.0)), "keep")
        assert isinstance(abandoned, Future)
        assert isinstance(newest, Future)
        assert abandoned.result().version == 2
        while not newest.done():
            replica.service.tick()
        assert replica.computes_with(replica.scaled(4.0))


@pytest.mark.skipif(
    native.missing_reason(torch.float32, torch.device("cpu")) != "", reason="there is no compiler for the kernels"
)
@pytest.mark.parametrize("density", [0.01, 0.2])
def test_panels_that_a_delta_overwrites_are_those_of_the_new_weights(replica: Replica, tmp_path: Path, density: float):
    """Published in bfloat16, computed in float32: values and the kernels' copies are overwritten where they differ; of
    many values the copies are made anew."""
    kernels, generator = replica.engine._runner._kernels, torch.Generator().manual_seed(0)
    weights = {name: tensor.float() for name, tensor in replica.scaled(1.0).items()}
    with Publisher("run", directory=tmp_path, dtype=torch.bfloat16, whole_every=100) as publisher:
        for version in range(1, 7):
            replica.submit(f"r{version}")
            replica.service.tick()
            for tensor in weights.values():
                tensor[torch.rand(tensor.shape, generator=generator) < density] *= 1.5
            published = publisher.publish(version, weights)
            pending = replica.service.update_weights(published, "keep")
            while isinstance(pending, Future) and not pending.done():
                replica.service.tick()
            assert bool(published.deltas) == (version > 1)
            assert replica.computes_with({name: tensor.bfloat16().float() for name, tensor in weights.items()})
            fresh = native.Kernels(native._library(), torch.float32)  # type: ignore[arg-type]
            for weight, panels in kernels._panels.values():
                assert torch.equal(panels, fresh.packed(weight))


@pytest.mark.skipif(
    native.missing_reason(torch.float32, torch.device("cpu")) != "", reason="there is no compiler for the kernels"
)
def test_staged_panels_are_those_of_the_new_weights(replica: Replica, tmp_path: Path):
    """After every update, prefetched or not, the kernels' copies equal those that are packed afresh."""
    kernels = replica.engine._runner._kernels
    with Publisher("run", directory=tmp_path) as publisher:
        for version in range(1, 7):
            replica.submit(f"r{version}")
            replica.service.tick()
            tensors, published = replica.scaled(1.0 + version), None
            if version == 4:
                replica.engine.update_weights(tensors, version, "keep")  # what was staged before is void
            else:
                published = publisher.publish(version, tensors)
                pending = replica.service.update_weights(published, "keep")
                if version == 3:
                    Path(published.path).unlink()
                while isinstance(pending, Future) and not pending.done():
                    replica.service.tick()
            if published is None or not pending.exception():
                assert replica.computes_with(tensors)
            fresh = native.Kernels(native._library(), torch.float32)  # type: ignore[arg-type]
            for weight, panels in kernels._panels.values():
                assert torch.equal(panels, fresh.packed(weight))
            assert not kernels._staged or version == 3
        assert len(kernels._spare) == len(kernels._panels) > 4
