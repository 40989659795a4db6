"""The tenants' trainer: what a tenant's settings change, checkpoints, paging, refusals, a worker that is killed."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tenant_passes import SMALL, adam, equal, gradients, perturb, random_pass, service, tensors
from tiny_trainer import make_model

from headway.generator.engines.torch.engine import TorchEngine
from headway.models.adapter_files import load_adapter
from headway.models.cpu import native
from headway.models.loading import load_model
from headway.models.lora import use
from headway.records.errors import ConfigurationError, StorageFailed, WorkerDied
from headway.records.tenants.protocols import (
    AdapterNotLoaded,
    AppliedState,
    TenantAdapter,
    TenantRefused,
    TrainingDatum,
    TrainingPass,
)
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher, ProcessWorker, WorkerSpec
from headway.trainer.checkpoints import verify
from headway.trainer.streams.token_logprobs import token_logprobs
from headway.trainer.tenants.service import TenantTrainerService
from tests.conformance.engine import Session, request

MODEL = "s:train:0"
PROMPT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trainer(folder: str, tmp_path: Path) -> TenantTrainerService:
    trainer = service(folder, tmp_path / "store")
    trainer.create(MODEL, 0, SMALL)
    return trainer


def train(trainer: TenantTrainerService, model_id: str = MODEL, first: int = 1, steps: int = 3) -> int:
    """Take steps on data that their numbers give; returns the next one's."""
    for step in range(first, first + steps):
        trainer.forward_backward(model_id, random_pass(step))
        trainer.optim_step(model_id, 2 * step, adam())
    return first + steps


# --- settings ---------------------------------------------------------------------------------------------------------


def test_the_seed_gives_the_weights(folder: str, tmp_path: Path) -> None:
    trainer, weights = service(folder, tmp_path), []
    for number, seed in enumerate((7, 7, 8, -1, 1 << 80)):
        trainer.create(f"m{number}", 0, TenantAdapter(rank=4, seed=seed))
        weights.append({name: w.clone() for name, w in trainer.adapter(f"m{number}").lora.weights().items()})
    assert equal(weights[0], weights[1])
    assert not equal(weights[0], weights[2])
    name = next(iter(weights[0]))
    assert name.endswith("lora_A")
    assert len({float(own[name][0, 0]) for own in weights}) == 4


@pytest.mark.parametrize(("parts", "modules"), [
    ({"train_mlp": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ({"train_attention": False}, {"gate_proj", "up_proj", "down_proj"}),
    ({}, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
])  # fmt: skip
def test_only_the_chosen_parts_are_adapted(
    parts: dict[str, bool], modules: set[str], folder: str, tmp_path: Path
) -> None:
    trainer = service(folder, tmp_path)
    trainer.create("m", 0, TenantAdapter(rank=5, **parts))
    targets = trainer.adapter("m").lora.targets
    assert {target.target.name.rpartition(".")[2] for target in targets} == modules
    assert {(target.rank, target.scale) for target in targets} == {(5, 32 / 5)}


def test_a_base_in_transformers_or_without_any_chosen_part_is_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"valid: model\.implementation = 'headway'"):
        service(folder, tmp_path, implementation="transformers")
    with pytest.raises(TenantRefused, match="at least one of them"):
        service(folder, tmp_path).create("m", 0, TenantAdapter(rank=1, train_mlp=False, train_attention=False))


@pytest.mark.parametrize("clip", [math.inf, 1e-4])
def test_gradients_are_clipped_to_the_norm_and_by_inf_not_at_all(
    clip: float, trainer: TenantTrainerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.forward_backward(MODEL, random_pass(1))
    trained, norms = trainer.adapter(MODEL), list[float]()
    expected = float(torch.nn.utils.get_total_norm(list(gradients(trainer, MODEL).values())))
    step = trained.optimiser.step

    def noted(settings: Any) -> None:
        norms.append(float(torch.nn.utils.get_total_norm(list(trained.gradients().values()))))
        step(settings)

    monkeypatch.setattr(trained.optimiser, "step", noted)
    metrics = trainer.optim_step(MODEL, 1, adam(max_grad_norm=clip))
    assert metrics == {"grad_norm:mean": expected, "skipped_steps:sum": 0.0}
    assert norms == [pytest.approx(min(clip, expected), rel=1e-3)]


def test_steps_are_those_of_torchs_adamw(trainer: TenantTrainerService) -> None:
    settings = adam(learning_rate=0.02, beta1=0.8, beta2=0.9, epsilon=1e-6, weight_decay=0.3)
    copies = {n: w.clone().requires_grad_() for n, w in trainer.adapter(MODEL).lora.weights().items()}
    reference = torch.optim.AdamW(copies.values(), lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, fused=True)
    for step in range(4):
        trainer.forward_backward(MODEL, random_pass(step))
        trainer.forward_backward(MODEL, random_pass(10 + step))
        for name, gradient in gradients(trainer, MODEL).items():
            copies[name].grad = gradient
        reference.step()
        trainer.optim_step(MODEL, step + 1, settings)
    assert equal({n: w.detach() for n, w in copies.items()}, trainer.adapter(MODEL).lora.weights())


def test_a_gradient_that_isnt_finite_skips_the_step_and_says_so(trainer: TenantTrainerService) -> None:
    train(trainer)
    before, bad = tensors(trainer, MODEL), random_pass(1, "ppo")
    bad.data[0].inputs["advantages"][-1] = math.nan
    assert math.isnan(trainer.forward_backward(MODEL, bad).metrics["loss:sum"])
    assert trainer.optim_step(MODEL, 9, adam(weight_decay=1.0)) == {"skipped_steps:sum": 1.0}
    assert gradients(trainer, MODEL) == {}
    assert equal(before, tensors(trainer, MODEL))
    expected = AppliedState(sequence=9, adapter=SMALL, metrics={"skipped_steps:sum": 1.0})
    assert trainer.restore(MODEL) == expected
    assert trainer.adapter(MODEL).file.stored.version == 3


def test_a_step_without_gradients_is_refused_and_changes_nothing(trainer: TenantTrainerService) -> None:
    train(trainer)
    for prepare in (lambda: None, lambda: trainer.forward_backward(MODEL, random_pass(1, forward_only=True))):
        prepare()
        with pytest.raises(TenantRefused, match="no gradients"):
            trainer.optim_step(MODEL, 8, adam())
    assert trainer.restore(MODEL) == AppliedState(
        sequence=6, adapter=SMALL, metrics=trainer.adapter(MODEL).file.stored.applied.metrics
    )


# --- states -----------------------------------------------------------------------------------------------------------


def test_a_model_that_was_never_created_or_was_evicted_isnt_loaded(trainer: TenantTrainerService) -> None:
    assert trainer.restore("nobody") is None
    trainer.evict("nobody")
    trainer.forward_backward(MODEL, random_pass(1))
    trainer.evict(MODEL)
    for call in (
        lambda: trainer.forward_backward(MODEL, random_pass(1)),
        lambda: trainer.optim_step(MODEL, 1, adam()),
        lambda: trainer.save(MODEL, f"{MODEL}/weights/a", "weights"),
    ):
        with pytest.raises(AdapterNotLoaded):
            call()
    assert trainer.restore(MODEL) == AppliedState(sequence=0, adapter=SMALL)
    assert gradients(trainer, MODEL) == {}


def test_paged_out_adapters_keep_their_gradients(folder: str, tmp_path: Path) -> None:
    trainers = [service(folder, tmp_path / str(resident), resident_adapters=resident) for resident in (1, 9)]
    for trainer in trainers:
        for number in range(3):
            trainer.create(f"m{number}", 0, TenantAdapter(rank=number + 1, seed=number))
        for step in range(4):
            for number in (2, 0, 1, 0):
                trainer.forward_backward(f"m{number}", random_pass(10 * step + number))
            for number in range(3):
                trainer.optim_step(f"m{number}", step + 1, adam())
    for number in range(3):
        assert equal(*(tensors(trainer, f"m{number}") for trainer in trainers))


@pytest.mark.parametrize("optimiser", [True, False])
def test_a_saved_state_goes_on_in_another_model(optimiser: bool, trainer: TenantTrainerService) -> None:
    step, path = train(trainer), f"{MODEL}/weights/a"
    size_bytes = trainer.save(MODEL, path, "weights")
    trainer.load("s:train:1", 1, path, SMALL, optimiser=optimiser)
    assert equal(tensors(trainer, MODEL), tensors(trainer, "s:train:1")) is optimiser
    assert equal(*(trainer.adapter(id).lora.weights() for id in (MODEL, "s:train:1")))
    for model_id in (MODEL, "s:train:1"):
        train(trainer, model_id, step)
    assert equal(tensors(trainer, MODEL), tensors(trainer, "s:train:1")) is optimiser
    assert trainer.adapter("s:train:1").file.stored.version == (6 if optimiser else 3)
    saved = trainer._folder(path)
    assert size_bytes == sum(file.stat().st_size for file in saved.iterdir())
    assert verify(saved).version == 3
    trainer.load(MODEL, 20, path, SMALL, optimiser=optimiser)  # into itself: back to where it was
    assert trainer.restore(MODEL) == AppliedState(sequence=20, adapter=SMALL)
    trainer.delete(path)
    trainer.delete(path)
    with pytest.raises(TenantRefused, match="can't be loaded"):
        trainer.load("s:train:2", 1, path, SMALL, optimiser=optimiser)
    assert trainer.restore("s:train:2") is None


def test_a_snapshot_is_a_peft_folder_whose_logprobs_are_trainings(trainer: TenantTrainerService, folder: str) -> None:
    train(trainer)
    path, computed = f"{MODEL}/sampler_weights/-000007", random_pass(9, forward_only=True)
    trainer.save(MODEL, path, "sampler_weights")
    saved = trainer._folder(path)
    names = {"README.md", "state.json", "adapter_config.json", "adapter_model.safetensors"} - {"README.md"}
    assert {file.name for file in saved.iterdir()} == names
    assert all(name.startswith("base_model.model.") for name in load_file(saved / "adapter_model.safetensors"))
    model = load_model(folder).requires_grad_(False)
    use(model, load_adapter(saved, folder, model.config).layers)
    outcome = trainer.forward_backward(MODEL, computed)
    with torch.no_grad(), native.using(None):
        for row, logprobs in zip(computed.data, outcome.logprobs, strict=True):
            ids = torch.from_numpy(row.token_ids_n.astype("i8"))
            hidden = model.forward_packed(ids, [len(ids)])
            sampled, _ = token_logprobs(model, hidden, torch.from_numpy(row.inputs["target_tokens"]), 1.0)
            np.testing.assert_allclose(sampled, logprobs, atol=1e-5)
    trainer.load("s:train:1", 1, path, SMALL, optimiser=False)
    assert equal(*(trainer.adapter(id).lora.weights() for id in (MODEL, "s:train:1")))


def test_what_an_engine_samples_from_a_fresh_snapshot_has_trainings_logprobs(
    trainer: TenantTrainerService, folder: str
) -> None:
    train(trainer)
    path = f"{MODEL}/sampler_weights/-000007"
    trainer.save(MODEL, path, "sampler_weights")
    model = load_model(folder, "float32", "cpu")
    engine = TorchEngine(model, slots=4, max_context_tokens=64)
    engine.add_adapter("a", load_adapter(trainer._folder(path), folder, model.config))
    session = Session(engine)
    for number in range(4):
        asked = request(str(number), PROMPT, max_tokens=20, adapter="a", temperature=1.3)
        sampling = msgspec.structs.replace(asked.sampling, untempered=True, top_p=0.9)
        session.submit(msgspec.structs.replace(asked, sampling=sampling))
    for result in session.run().values():
        ids = np.array([*PROMPT, *result.response.ids])
        datum = TrainingDatum(
            token_ids_n=ids[:-1].astype("i4"), inputs={"target_tokens": ids[1:], "weights": np.ones(len(ids) - 1, "f4")}
        )
        (logprobs,) = trainer.forward_backward(MODEL, TrainingPass(data=(datum,), loss="cross_entropy")).logprobs
        np.testing.assert_allclose(logprobs[len(PROMPT) - 1 :], list(result.response.logprobs), atol=1e-5)


def test_what_doesnt_fit_is_refused_and_the_model_stays_as_it_was(
    trainer: TenantTrainerService, folder: str, tmp_path: Path
) -> None:
    train(trainer)
    path = f"{MODEL}/weights/a"
    trainer.save(MODEL, path, "weights")
    trainer.save(MODEL, f"{MODEL}/sampler_weights/b", "sampler_weights")
    before = tensors(trainer, MODEL)
    other = service(make_model(tmp_path / "other", seed=9), tmp_path / "store")
    for own, name, adapter, message in (
        (other, path, SMALL, "an adapter of another base"),
        (trainer, path, TenantAdapter(rank=8), "another adapter than one of rank 8"),
        (trainer, path, TenantAdapter(rank=4, train_mlp=False), "another adapter"),
        (trainer, f"{MODEL}/sampler_weights/b", SMALL, "missing|no such file|No such file"),
        (trainer, "../states", SMALL, "valid: MODEL/KIND/NAME"),
        (trainer, "/etc/passwd", SMALL, "valid: MODEL/KIND/NAME"),
    ):
        with pytest.raises(TenantRefused, match=message):
            own.load(MODEL, 30, name, adapter, optimiser=True)
    with pytest.raises(TenantRefused, match=r"without \.tmp or \.old"):  # a save of "a" would remove it
        trainer.save(MODEL, f"{MODEL}/weights/a.tmp", "weights")
    weights_file = trainer._folder(path) / "adapter_model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-3] + b"abc")
    with pytest.raises(TenantRefused, match=r"adapter_model\.safetensors"):
        trainer.load(MODEL, 30, path, SMALL, optimiser=True)
    assert equal(before, tensors(trainer, MODEL))


def test_a_full_disk_is_a_typed_error_and_the_state_stays(trainer: TenantTrainerService) -> None:
    path = f"{MODEL}/weights/a"
    train(trainer)
    trainer.save(MODEL, path, "weights")
    trainer.forward_backward(MODEL, random_pass(5))
    before = gradients(trainer, MODEL)
    full = OSError(28, "No space left on device")
    no_space = pytest.raises(StorageFailed, match="No space left")
    with mock.patch("headway.trainer.tenants.service.write_state", side_effect=full), no_space:
        trainer.save(MODEL, path, "weights")
    with mock.patch("os.posix_fallocate", side_effect=full):
        with pytest.raises(StorageFailed, match="No space left"):
            trainer.create("s:train:1", 0, SMALL)
        with pytest.raises(StorageFailed, match="No space left"):
            trainer.load(MODEL, 9, path, SMALL, optimiser=True)
    assert trainer.restore("s:train:1") is None
    assert equal(before, gradients(trainer, MODEL))
    assert verify(trainer._folder(path)).version == 3
    assert trainer.optim_step(MODEL, 9, adam())["skipped_steps:sum"] == 0.0


def test_the_scale_of_a_state_is_its_own_when_the_service_has_another_alpha(folder: str, tmp_path: Path) -> None:
    probe, outcomes = random_pass(1, forward_only=True), []
    for alpha in (16.0, 64.0):
        trainer = service(folder, tmp_path, alpha=alpha)
        if trainer.restore(MODEL) is None:
            trainer.create(MODEL, 0, SMALL)
            train(trainer)
        outcomes.append(trainer.forward_backward(MODEL, probe))
    assert all(np.array_equal(a, b) for a, b in zip(outcomes[0].logprobs, outcomes[1].logprobs, strict=True))


# --- the worker -------------------------------------------------------------------------------------------------------


async def start(folder: str, store: Path) -> ProcessWorker:
    arguments = {"model_path": folder, "store": str(store), "resident_adapters": 2}
    factory = "headway.trainer.tenants.service:TenantTrainerService"
    return await LocalLauncher(RealClock()).start(WorkerSpec(name="trainer", factory=factory, arguments=arguments))


@pytest.mark.real
@pytest.mark.slow
def test_a_killed_worker_takes_no_step_twice_and_loses_none(folder: str, tmp_path: Path) -> None:
    """A client repeats what the killed worker hadn't answered, after `restore`: as the service does."""
    steps, models = 12, [f"s:train:{number}" for number in range(3)]
    expected = service(folder, tmp_path / "undisturbed")
    for number, model_id in enumerate(models):
        expected.create(model_id, 0, TenantAdapter(rank=number + 2, seed=number))
        for step in range(1, steps + 1):
            expected.forward_backward(model_id, random_pass(100 * number + step))
            expected.optim_step(model_id, step, adam())

    async def disturbed() -> int:
        worker, kills, random = await start(folder, tmp_path / "store"), 0, np.random.default_rng(3)
        applied = dict.fromkeys(models, -1)
        while any(sequence < steps for sequence in applied.values()):
            if kills < 6:
                delay_s = float(random.uniform(0, 0.05))
                asyncio.get_running_loop().call_later(delay_s, os.kill, worker.pid, signal.SIGKILL)
                kills += 1
            try:
                for number, model_id in enumerate(models):
                    state = await worker.call("restore", model_id)
                    sequence = -1 if state is None else state.sequence
                    assert sequence in (applied[model_id], applied[model_id] + 1)
                    if (step := sequence + 1) == 0:
                        await worker.call("create", model_id, 0, TenantAdapter(rank=number + 2, seed=number))
                    elif step <= steps:
                        await worker.call("forward_backward", model_id, random_pass(100 * number + step))
                        await worker.call("optim_step", model_id, step, adam())
                    applied[model_id] = min(step, steps)
            except WorkerDied:
                worker = await start(folder, tmp_path / "store")
        await worker.stop()
        return kills

    assert asyncio.run(disturbed()) == 6
    for model_id in models:
        assert equal(tensors(expected, model_id), tensors(service(folder, tmp_path / "store"), model_id))


@pytest.mark.slow
def test_a_base_in_four_bits_is_trained_too(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    trainer = service(make_model(tmp_path / "wide", width=64), tmp_path / "store", quantization="4bit")
    trainer.create(MODEL, 0, SMALL)
    perturb(trainer, MODEL)
    first = trainer.forward_backward(MODEL, random_pass(1)).metrics["loss:sum"]
    for step in range(3):
        trainer.optim_step(MODEL, step + 1, adam())
        last = trainer.forward_backward(MODEL, random_pass(1)).metrics["loss:sum"]
    assert last < first
    trainer.save(MODEL, f"{MODEL}/weights/a", "weights")
    trainer.load("s:train:1", 1, f"{MODEL}/weights/a", SMALL, optimiser=True)
