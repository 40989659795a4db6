"""An engine off its device for a while: its memory is free, and every request goes on bit for bit."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_trainer import make_experiment, make_model

from headway.config.load import validate_experiment
from headway.generator.client import GeneratorPool
from headway.generator.engines.torch.engine import TorchEngine
from headway.generator.local import LocalGenerator
from headway.generator.service import GeneratorService
from headway.models.configuration import DecoderConfig
from headway.models.loading import build as build_model
from headway.models.loading import load_model, weights_of
from headway.records.errors import StorageFailed
from headway.records.tokens import encoder
from headway.runtime.clock import RealClock
from headway.runtime.devices import parse_device
from headway.runtime.workers import LocalLauncher
from headway.weights.shared_memory import Publisher
from tests.conformance.engine import Session, model_of, request

torch.set_num_threads(1)


def sampled(away_at: set[int], *, updates: bool = False, **options: Any) -> Any:
    """Results of five requests in four slots; the engine leaves before each of these steps."""
    engine = TorchEngine(copy.deepcopy(model_of(0)), slots=4, max_context_tokens=96, **options)
    session = Session(engine)
    publisher = Publisher("offload-engine")
    session.submit(*(request(f"r{index}", [1 + index, 2, 3], max_tokens=30, seed=index) for index in range(5)))
    try:
        for number in range(60):
            if number in away_at:
                assert engine.memory.offload().moved_bytes > 0
                assert engine.memory.offloaded
                assert engine.memory.offload().moved_bytes == 0
                if number == 3:
                    engine.abort(["r1"])  # requests come and go meanwhile
                assert engine.memory.onload().moved_bytes > 0
                assert engine.memory.onload().moved_bytes == 0
            elif number == 3:
                engine.abort(["r1"])
            if updates and number % 7 == 4:
                engine.apply(publisher.publish(number, weights_of(model_of(number % 2))), "keep")
            session.step()
        return session.run()
    finally:
        publisher.close()


@pytest.mark.parametrize("updates", [False, True], ids=["", "updates"])
@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True}, {"native_kernels": False}, {"kv_capacity_tokens": 80}], ids=str
)
def test_requests_in_flight_go_on_bit_for_bit(options: Any, updates: bool) -> None:
    stayed = sampled(set(), updates=updates, **options)
    left = sampled({2, 3, 9, 10, 20}, updates=updates, **options)
    assert stayed == left
    assert {result.finish_reason for result in left.values()} >= {"abort", "length"}


def test_a_full_disk_leaves_the_engine_at_work() -> None:
    engine = TorchEngine(copy.deepcopy(model_of(0)), slots=2, max_context_tokens=64)
    session = Session(engine)
    session.submit(request("r", [1, 2], max_tokens=8))
    session.step(2)
    engine.memory.directory = "/dev/full/none"
    with pytest.raises(StorageFailed, match="stays in memory"):
        engine.memory.offload()
    assert not engine.memory.offloaded
    assert session.run()["r"].finish_reason == "length"


def service(model: Path) -> GeneratorService:
    context = SimpleNamespace(
        device=parse_device("cpu:0"), emit=lambda event: None, log=SimpleNamespace(warning=lambda *args: None)
    )
    settings = {"model_path": str(model), "dtype": "float32", "slots": 2, "max_context_tokens": 64}
    return GeneratorService(context, **settings)  # type: ignore[arg-type]


def test_a_replica_that_is_asked_nothing_is_not_loaded(tmp_path: Path) -> None:
    replica = service(Path(make_model(tmp_path / "model")))
    memory = replica._engine.memory
    assert memory is not None
    replica.yield_device(True)
    (away,) = replica.offload()
    assert away.moved_bytes > 0
    for _ in range(2):  # it is resumed and paused again, with nothing to do
        replica.yield_device(False)
        assert replica.onload() == []
        assert not replica.tick()
        assert memory.offloaded
        replica.yield_device(True)
        assert all(move.moved_bytes == 0 for move in replica.offload())
    asked = request("r", [1, 2], max_tokens=4)
    replica.submit(encoder().encode([asked]))
    assert not replica.tick()
    assert memory.offloaded  # it is yielded still
    replica.yield_device(False)
    assert replica.tick()
    assert not memory.offloaded
    replica.yield_device(True)
    back, again = replica.offload()
    assert (back.onload, again.onload) == (True, False)  # the late one is reported, too


def test_weights_that_come_while_a_replica_is_away_are_applied(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    replica, publisher = service(Path(model)), Publisher("offload-service")
    try:
        replica.offload()
        other = {name: one + 1.0 for name, one in weights_of(load_model(model, "float32")).items()}
        replica.update_weights(publisher.publish(1, other), "keep")
        held = weights_of(replica._engine._model)  # type: ignore[attr-defined]
        assert all(torch.equal(held[name], other[name]) for name in other)
        replica.offload()
        replica._load()
        assert all(torch.equal(held[name], other[name]) for name in other)
    finally:
        publisher.close()


def test_a_local_generator_applies_the_newest_weights_when_it_is_back(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (tmp_path / "run").mkdir()
    experiment = validate_experiment(make_experiment(model, tmp_path / "run"), "test")
    context = SimpleNamespace(device=parse_device("cpu:0"), log=SimpleNamespace(warning=lambda *args: None))
    generator, publisher = LocalGenerator(experiment, context), Publisher("offload-local")  # type: ignore[arg-type]
    try:
        generator.offload()
        assert generator.engine.memory is not None
        assert generator.engine.memory.directory == str(tmp_path / "run")
        weights = weights_of(load_model(model, "float32"))
        for version in (1, 2):
            assert generator.update_weights(publisher.publish(version, weights)) is None
        assert generator.engine.version == 0
        generator.onload()
        assert generator.engine.version == 2
    finally:
        publisher.close()


@pytest.mark.real
def test_a_replicas_memory_falls_by_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resident memory, shared memory included, of a replica's process, as the kernel counts it."""
    model = make_model(tmp_path / "model", width=320, layers=6, vocabulary=2048)
    (tmp_path / "run").mkdir()
    experiment = validate_experiment(make_experiment(model, tmp_path / "run"), "test")
    config = DecoderConfig.from_pretrained(model)
    parameters = [one.detach().clone() for one in build_model(config).parameters()]
    weights = 4 * sum(one.numel() for one in parameters)
    cache = 8 * config.layers * config.kv_heads * config.head_dim
    cache *= experiment.generator.slots * experiment.max_sequence_tokens

    async def main() -> None:
        pool, publisher = GeneratorPool(LocalLauncher(RealClock()), experiment, RealClock()), Publisher("offload-pool")
        await pool.start()
        try:
            (pid,) = pool.pids
            for version in (1, 2):
                await pool.update_weights(publisher.publish(version, weights_of(load_model(model, "float32"))))
            await pool.pause_replicas([0])
            before = resident_bytes(pid)
            (away,) = await pool.offload(0)
            fell = before - resident_bytes(pid)
            with capsys.disabled():
                print(f"\nweights {weights / 1e6:.1f} MB, KV {cache / 1e6:.1f} MB: fell {fell / 1e6:.1f} MB, {away}")
            assert fell >= 0.8 * (2 * weights + cache)  # and the kernels' copies of the weights
            assert away.freed_bytes >= 0.8 * (2 * weights + cache)
            waiting = asyncio.create_task(
                pool.update_weights(publisher.publish(3, weights_of(load_model(model, "float32"))))
            )
            await asyncio.sleep(0.3)
            assert not waiting.done()  # until it is back
            await pool.resume_replicas([0])
            await pool.onload(0)
            assert [applied.version for applied in await waiting] == [3]
        finally:
            await pool.stop()
            publisher.close()

    asyncio.run(main())


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
