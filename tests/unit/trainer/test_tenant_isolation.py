"""Eight tenants with wild settings on one trainer: each has, bit for bit, what it would have alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pytest
import torch
from tenant_passes import RL_LOSSES, adam, equal, gradients, perturb, random_pass, service, tensors
from tiers import first
from tiny_trainer import make_model

from headway.models.loading import save_model
from headway.records.errors import HeadwayError
from headway.records.tenants.protocols import AdapterNotLoaded, PassOutcome, TenantAdapter, TenantRefused, TrainingPass
from headway.records.training import OptimiserSettings
from headway.trainer.tenants.service import TenantTrainerService
from tests.conformance.reference import random_model

torch.set_num_threads(1)
STEPS = 20


class Call(NamedTuple):
    """A call of one tenant: a pass, or an optimiser step."""

    sequence: int
    training_pass: TrainingPass | None = None
    optimiser: OptimiserSettings | None = None


class Tenant(NamedTuple):
    """A tenant's recorded calls; ``model_id`` is its model's."""

    model_id: str
    adapter: TenantAdapter
    loss: str
    settings: dict[str, float]
    odd: str = ""  # what is wrong with some of its data

    def calls(self) -> Iterator[Call]:
        sequence = 0
        for step in range(STEPS):
            for part in range(1 + step % 2):
                seed = crc32(f"{self.model_id} {step} {part}".encode())
                computed = random_pass(seed, self.loss, rows=2 + (step + part) % 3)
                if self.odd == "empty" and step % 3 == 0:
                    computed = TrainingPass(data=(), loss=self.loss)
                if self.odd == "nan" and step % 4 == 1:
                    computed.data[0].inputs["advantages"][-1] = math.nan
                if self.odd == "only" and part == 1:
                    computed = TrainingPass(data=computed.data, loss=self.loss, forward_only=True)
                yield Call(sequence := sequence + 1, computed)
            yield Call(sequence := sequence + 1, None, adam(**self.settings))


def tenants() -> list[Tenant]:
    wild: list[tuple[int, str, dict[str, float], str]] = [
        (1, "cross_entropy", {"learning_rate": 0.3, "weight_decay": 0.5}, ""),
        (64, "ppo", {"learning_rate": 1e-4, "beta1": 0.0, "beta2": 0.5}, ""),
        (8, "importance_sampling", {"max_grad_norm": 1e-3, "weight_decay": 10.0}, "nan"),
        (16, "gspo", {"learning_rate": 0.05, "epsilon": 1e-2}, "empty"),
        (3, "dro", {"learning_rate": 1e38}, ""),  # its weights overflow
        (32, "cispo", {"max_grad_norm": 0.5, "beta1": 0.99}, "only"),
        (2, "ppo", {"learning_rate": 0.02, "weight_decay": 0.1}, "nan"),
        (5, "cross_entropy", {"learning_rate": 0.0}, "empty"),
    ]
    adapters = [{}, {"train_mlp": False}, {"train_attention": False}]
    return [
        Tenant(f"s{i % 3}:train:{i}", TenantAdapter(rank=rank, seed=i, **adapters[i % 3]), loss, settings, odd)
        for i, (rank, loss, settings, odd) in enumerate(wild)
    ]


Recorded = list[Any]


def record(outcome: PassOutcome) -> Any:
    return [lp.tobytes() for lp in outcome.logprobs], np.float64(outcome.metrics["loss:sum"]).tobytes()


def make(trainer: TenantTrainerService, call: Call, model_id: str) -> Any:
    """Make a call; returns its outcome in a form that can be compared, its bits."""
    if call.training_pass is not None:
        return record(trainer.forward_backward(model_id, call.training_pass))
    assert call.optimiser is not None
    try:
        return trainer.optim_step(model_id, call.sequence, call.optimiser)
    except TenantRefused as error:
        return str(error)


def alone(tenant: Tenant, folder: str, store: Path) -> tuple[Recorded, dict[str, torch.Tensor]]:
    trainer = service(folder, store)
    trainer.create(tenant.model_id, 0, tenant.adapter)
    return [make(trainer, call, tenant.model_id) for call in tenant.calls()], tensors(trainer, tenant.model_id)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(
    folder: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Recorded, dict[str, torch.Tensor]]]:
    """Outcomes and the last state of each tenant alone."""
    return {tenant.model_id: alone(tenant, folder, tmp_path_factory.mktemp("alone")) for tenant in tenants()}


@pytest.mark.parametrize("resident", first(1, [2, 1, 8]))
def test_eight_tenants_with_wild_settings_have_the_bits_of_each_alone(
    resident: int, folder: str, tmp_path: Path, expected: dict[str, tuple[Recorded, dict[str, torch.Tensor]]]
) -> None:
    all_tenants, store, random = tenants(), tmp_path / "shared", np.random.default_rng(0)
    trainer = service(folder, store, resident_adapters=resident)
    for tenant in all_tenants:
        trainer.create(tenant.model_id, 0, tenant.adapter)
    open_calls = {tenant.model_id: list(tenant.calls()) for tenant in all_tenants}
    found: dict[str, Recorded] = {tenant.model_id: [] for tenant in all_tenants}
    since_step: dict[str, list[Call]] = {tenant.model_id: [] for tenant in all_tenants}
    total = sum(map(len, open_calls.values()))
    for number in range(total):
        model_id = str(random.choice([model_id for model_id, calls in open_calls.items() if calls]))
        if number in (total // 3, total // 2):  # a dead process: the slots are all that is left of its memory
            trainer = service(folder, store, resident_adapters=resident)
        elif number % 9 == 0:  # a session's end
            trainer.evict(model_id)
        call = open_calls[model_id].pop(0)
        try:
            outcome = make(trainer, call, model_id)
        except AdapterNotLoaded:  # as the service does it
            trainer.restore(model_id)
            for earlier in since_step[model_id]:
                make(trainer, earlier, model_id)
            outcome = make(trainer, call, model_id)
        found[model_id].append(outcome)
        since_step[model_id] = [*since_step[model_id], call] if call.optimiser is None else []
    for model_id, (outcomes, state) in expected.items():
        assert found[model_id] == outcomes, model_id
        restored = tensors(trainer, model_id)
        assert restored.keys() == state.keys()
        for name, tensor in state.items():
            assert restored[name].numpy().tobytes() == tensor.numpy().tobytes(), (model_id, name)
    steps = {id: [o for o in outcomes if isinstance(o, dict)] for id, (outcomes, _) in expected.items()}
    skipped = {id: int(sum(o["skipped_steps:sum"] for o in outcomes)) for id, outcomes in steps.items()}
    assert skipped["s2:train:2"] == skipped["s0:train:6"] == 5  # the steps with NaN advantages, of twenty
    assert skipped["s1:train:4"] > 10  # whose weights overflowed
    assert skipped["s0:train:0"] == skipped["s1:train:1"] == 0
    assert any("no gradients" in str(o) for o in expected["s0:train:3"][0])


def two(folder: str, store: Path) -> TenantTrainerService:
    trainer = service(folder, store)
    for model_id in ("a", "b"):
        trainer.create(model_id, 0, TenantAdapter(rank=4, seed=1))
        perturb(trainer, model_id)
    return trainer


def test_another_tenants_weight_decay_moves_no_weight(folder: str, tmp_path: Path) -> None:
    """As in SkyRL 0.3, whose one optimiser decayed the adapters of all tenants: NLL 6.3744 became 6.5065."""
    trainer, probe = two(folder, tmp_path), random_pass(1, forward_only=True)
    before, weights = trainer.forward_backward("a", probe), trainer.adapter("a").lora.weights()
    copies = {name: weight.clone() for name, weight in weights.items()}
    for step in range(3):
        trainer.forward_backward("b", random_pass(step))
        trainer.optim_step("b", step + 1, adam(learning_rate=0.1, weight_decay=5.0))
    assert record(trainer.forward_backward("a", probe)) == record(before)
    assert equal(copies, trainer.adapter("a").lora.weights())


def test_another_tenants_parameters_are_in_no_step(folder: str, tmp_path: Path) -> None:
    """As in open-rl #80: an optimiser that stepped the parameters of whichever adapter was set last, and their
    gradients."""
    trainer = two(folder, tmp_path)
    trainer.forward_backward("a", random_pass(1))
    accumulated = gradients(trainer, "a")
    trainer.forward_backward("b", random_pass(2))
    copies = {name: weight.clone() for name, weight in trainer.adapter("a").lora.weights().items()}
    trainer.optim_step("b", 1, adam())
    assert equal(accumulated, gradients(trainer, "a"))
    assert equal(copies, trainer.adapter("a").lora.weights())
    assert gradients(trainer, "b") == {}
    trainer.optim_step("a", 1, adam())
    moved = trainer.adapter("a").lora.weights()
    assert all(not torch.equal(moved[name], copies[name]) for name in copies)


# --- passes that tenants share ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with experts, which adapters adapt too."""
    path = tmp_path_factory.mktemp("mixture")
    save_model(random_model(0, family="qwen3_moe"), path)
    return str(path)


def shared_passes(odd: bool = False) -> list[tuple[str, TenantAdapter, TrainingPass]]:
    parts = [{}, {"train_mlp": False}, {"train_attention": False}, {}]
    passes = []
    for i, loss in enumerate(("cross_entropy", *RL_LOSSES, "cross_entropy")):
        computed = random_pass(i, loss, rows=1 + i % 4, forward_only=i == 4)
        if odd and i == 1:
            computed.data[0].inputs["advantages"][:] = math.nan
        passes.append((f"m{i}", TenantAdapter(rank=(1, 8, 64)[i % 3], seed=i, **parts[i % 4]), computed))
    return passes


def compare_together(folder: str, tmp_path: Path, odd: bool = False, **settings: Any) -> None:
    passes, trainers = shared_passes(odd), [service(folder, tmp_path / "alone", **settings)]
    trainers.append(service(folder, tmp_path / "together", co_batch=True, **settings))
    for trainer in trainers:
        for model_id, adapter, _ in passes:
            trainer.create(model_id, 0, adapter)
            perturb(trainer, model_id)
    expected = [trainers[0].forward_backward(model_id, computed) for model_id, _, computed in passes]
    outcomes = trainers[1].forward_backward_together([(model_id, computed) for model_id, _, computed in passes])
    for number, ((model_id, _, computed), a, b) in enumerate(zip(passes, expected, outcomes, strict=True)):
        assert isinstance(b, PassOutcome)
        assert all(np.allclose(x, y, atol=1e-5) for x, y in zip(a.logprobs, b.logprobs, strict=True))
        alone_gradients, shared_gradients = (gradients(trainer, model_id) for trainer in trainers)
        assert alone_gradients.keys() == shared_gradients.keys()
        assert bool(alone_gradients) != computed.forward_only
        if odd and number == 1:
            assert not all(gradient.isfinite().all() for gradient in shared_gradients.values())
            continue
        assert a.metrics["loss:sum"] == pytest.approx(b.metrics["loss:sum"], rel=1e-5, abs=1e-5)
        largest = max((float(g.abs().max()) for g in alone_gradients.values()), default=0.0)
        for name, gradient in alone_gradients.items():
            assert float((shared_gradients[name] - gradient).abs().max()) <= 1e-5 * largest, (model_id, name)


@pytest.mark.parametrize("tokens", [16384, 24])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_shared_passes_have_each_tenants_gradients_to_rounding(
    tokens: int, checkpointing: str, folder: str, tmp_path: Path
) -> None:
    compare_together(folder, tmp_path, micro_batch_tokens=tokens, gradient_checkpointing=checkpointing)


def test_shared_passes_through_experts_have_each_tenants_gradients(mixture: str, tmp_path: Path) -> None:
    compare_together(mixture, tmp_path)


def test_a_tenants_nan_in_a_shared_pass_is_its_own(folder: str, tmp_path: Path) -> None:
    compare_together(folder, tmp_path, odd=True)


def test_micro_batches_of_a_shared_pass_dont_depend_on_neighbours(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.trainer.tenants import passes as module

    computed, forward = list[list[tuple[int, list[int]]]](), module._forward

    def noted(model: Any, micro_batches: Any) -> Any:
        computed.append([(len(batch.job.training_pass.data), batch.indices) for batch in micro_batches])
        return forward(model, micro_batches)

    monkeypatch.setattr(module, "_forward", noted)
    trainer = service(folder, tmp_path, co_batch=True, micro_batch_tokens=40)
    own, plans = random_pass(1, rows=9), list[list[list[int]]]()
    for number, others in enumerate(([], [random_pass(2, rows=1)], [random_pass(3, rows=1), random_pass(4, rows=8)])):
        models = [f"m{number}{i}" for i in range(1 + len(others))]
        for model_id in models:
            trainer.create(model_id, 0, TenantAdapter(rank=2))
        computed.clear()
        trainer.forward_backward_together(list(zip(models, [own, *others], strict=True)))
        plans.append([indices for together in computed for rows, indices in together if rows == 9])
        assert all(len({rows for rows, _ in together}) == len(together) for together in computed)
        assert sorted(len(together) for together in computed)[-1] > (number > 0)
    assert plans[0] == plans[1] == plans[2]
    assert len(plans[0]) > 1


def test_a_refused_pass_among_shared_ones_is_refused_alone(folder: str, tmp_path: Path) -> None:
    trainer = two(folder, tmp_path)
    unknown = TrainingPass(data=random_pass(1).data, loss="custom")
    outcomes = trainer.forward_backward_together(
        [("a", random_pass(1)), ("b", unknown), ("nobody", random_pass(1)), ("b", random_pass(2))]
    )
    kinds: list[type[object]] = [PassOutcome, TenantRefused, AdapterNotLoaded, PassOutcome]
    assert [type(outcome) for outcome in outcomes] == kinds
    expected = two(folder, tmp_path / "other")
    assert record(expected.forward_backward("a", random_pass(1))) == record(outcomes[0])  # type: ignore[arg-type]
    assert isinstance(outcomes[2], HeadwayError)
