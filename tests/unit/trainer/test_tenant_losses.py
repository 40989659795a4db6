"""The SDK's losses against formulas in float64, with free targets, several targets of a token, and chunks of data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tenant_passes import RL_LOSSES, SMALL, datum, equal, gradients, perturb, random_pass, service
from tiny_trainer import VOCABULARY, make_model
from torch import Tensor

from headway.models.decoder import Decoder
from headway.models.loading import load_model
from headway.models.lora import Lora, use
from headway.records.tenants.protocols import TenantRefused, TrainingDatum, TrainingPass
from headway.trainer.tenants.adapters import tenant_targets
from headway.trainer.tenants.losses import loss_sum
from headway.trainer.tenants.passes import several_logprobs
from headway.trainer.tenants.service import TenantTrainerService

Inputs = dict[str, Tensor]
SETTINGS: dict[str, list[dict[str, float]]] = {
    "cross_entropy": [{}],
    "importance_sampling": [{}],
    "ppo": [{}, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}],
    "cispo": [{}, {"clip_low_threshold": 0.95, "clip_high_threshold": 1.1}],
    "dro": [{}, {"beta": 0.7}],
    "gspo": [{}, {"clip_low_threshold": 0.97, "clip_high_threshold": 1.02}],
}
CASES = [(loss, settings) for loss, all_settings in SETTINGS.items() for settings in all_settings]


def formula(loss: str, logprobs: Tensor, x: Inputs, settings: dict[str, float]) -> Tensor:
    """The loss of one datum, from the documentation's formulas, in the dtype of its inputs."""
    if loss == "cross_entropy":
        return -(x["weights"] * logprobs).sum()
    log_ratio, advantages = logprobs - x["logprobs"], x["advantages"]
    low, high = settings.get("clip_low_threshold"), settings.get("clip_high_threshold")
    match loss:
        case "importance_sampling":
            return -(log_ratio.exp() * advantages).sum()
        case "cispo":
            weights = torch.clip(log_ratio.exp(), low or 0.0, high or 4.0).detach()
            return -(weights * logprobs * advantages).sum()
        case "dro":
            return -(logprobs * advantages - 0.5 * settings.get("beta", 0.05) * log_ratio**2).sum()
        case "gspo":
            mask = x.get("sequence_ratio_mask", (advantages != 0).to(advantages))
            log_ratio = (mask * log_ratio).sum() / mask.sum()
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, torch.clip(ratio, low or 0.8, high or 1.2) * advantages).sum()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trainer(folder: str, tmp_path: Path) -> TenantTrainerService:
    trainer = service(folder, tmp_path)
    trainer.create("m", 0, SMALL)
    perturb(trainer, "m")
    return trainer


class Reference:
    """The same adapter on the same base in float64, without any code of a pass."""

    def __init__(self, folder: str) -> None:
        self.model: Decoder = load_model(folder).double().requires_grad_(False)
        self.lora = Lora(tenant_targets(self.model.config, SMALL, 32.0), dtype=torch.float64, seed=SMALL.seed)

    def take(self, trainer: TenantTrainerService) -> None:
        self.lora.copy_weights({name: w.double() for name, w in trainer.adapter("m").lora.weights().items()})

    def logprobs(self, row: TrainingDatum) -> Tensor:
        use(self.model, self.lora.layers)
        ids = torch.from_numpy(row.token_ids_n.astype("i8"))
        scores = self.model.head(self.model.forward_packed(ids, [len(ids)])).log_softmax(-1)
        targets = torch.from_numpy(row.inputs["target_tokens"])
        return scores.gather(1, targets.reshape(len(ids), -1)).reshape(targets.shape)

    def run(self, computed: TrainingPass) -> tuple[float, list[Tensor], dict[str, Tensor]]:
        total, all_logprobs = 0.0, list[Tensor]()
        for row in computed.data:
            logprobs = self.logprobs(row)
            inputs = {name: torch.from_numpy(np.asarray(x, "f8")) for name, x in row.inputs.items()}
            loss = formula(computed.loss, logprobs, inputs, dict(computed.settings))  # type: ignore[arg-type]
            loss.backward()
            total += float(loss.detach())
            all_logprobs.append(logprobs.detach())
        grads = {name: p.grad for name, p in self.lora.parameters.items() if p.grad is not None}
        return total, all_logprobs, grads


def compare(trainer: TenantTrainerService, folder: str, computed: TrainingPass) -> None:
    reference = Reference(folder)
    reference.take(trainer)
    loss, logprobs, expected = reference.run(computed)
    outcome, found = trainer.forward_backward("m", computed), gradients(trainer, "m")
    assert outcome.metrics["loss:sum"] == pytest.approx(loss, rel=2e-5, abs=2e-5)
    for row, a, b in zip(computed.data, outcome.logprobs, logprobs, strict=True):
        assert a.dtype == np.float32
        assert a.shape == row.inputs["target_tokens"].shape
        np.testing.assert_allclose(a, b, atol=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0.01
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) < 1e-5 * largest


@pytest.mark.parametrize(("loss", "settings"), CASES)
def test_values_and_gradients_are_those_of_the_formula(
    loss: str, settings: dict[str, float], trainer: TenantTrainerService, folder: str
) -> None:
    computed = random_pass(1, loss, rows=5, settings=settings)
    if settings and loss == "gspo":
        for row in computed.data:
            row.inputs["sequence_ratio_mask"] = (np.arange(len(row.token_ids_n)) % 2 == 0).astype("f4")
    compare(trainer, folder, computed)


def test_settings_change_the_loss_of_these_data() -> None:
    """Otherwise the cases above would prove nothing of clips: some ratio lies beyond each of them."""
    for loss in ("ppo", "cispo", "dro", "gspo"):
        losses = set[float]()
        for settings in SETTINGS[loss]:
            row = random_pass(1, loss, rows=1).data[0]
            inputs = {name: torch.from_numpy(np.asarray(x, "f8")) for name, x in row.inputs.items()}
            lp = torch.full((len(row.token_ids_n),), -3.2, dtype=torch.float64)
            sequence = torch.zeros(len(lp), dtype=torch.int64)
            losses.add(float(loss_sum(loss, lp, inputs, sequence, settings)))
        assert len(losses) == len(SETTINGS[loss])


def test_a_token_may_have_several_weighted_targets_beside_others_with_one(
    trainer: TenantTrainerService, folder: str
) -> None:
    random = np.random.default_rng(4)
    rows = tuple(datum(random, "cross_entropy", tokens, k) for tokens, k in ((5, 3), (7, None), (4, 1), (6, 8), (9, 3)))
    compare(trainer, folder, TrainingPass(data=rows, loss="cross_entropy"))


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_logits_in_chunks_give_the_same_several_logprobs(rows: int, folder: str) -> None:
    model = load_model(folder).double()
    hidden = torch.randn(20, model.config.width, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCABULARY, (20, 6))
    expected = model.head(hidden).log_softmax(-1).gather(1, targets)
    found = several_logprobs(model, hidden, targets, rows)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(20, 6, dtype=torch.float64)
    grads = [torch.autograd.grad((weights * x).sum(), hidden, retain_graph=True)[0] for x in (found, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("loss", ["cross_entropy", *RL_LOSSES])
def test_data_in_chunks_or_micro_batches_give_the_sum_of_the_complete_pass(
    loss: str, folder: str, tmp_path: Path
) -> None:
    complete = random_pass(7, loss, rows=7)
    sums: list[tuple[float, list[Any], dict[str, Tensor]]] = []
    for number, (chunks, tokens) in enumerate(((1, 16384), (3, 16384), (1, 13), (7, 1))):
        trainer = service(folder, tmp_path / str(number), micro_batch_tokens=tokens)
        trainer.create("m", 0, SMALL)
        perturb(trainer, "m")
        outcomes = [
            trainer.forward_backward("m", TrainingPass(data=complete.data[first::chunks], loss=loss))
            for first in range(chunks)
        ]
        logprobs: list[Any] = [None] * 7
        for first, outcome in enumerate(outcomes):
            logprobs[first::chunks] = outcome.logprobs
        sums.append((sum(o.metrics["loss:sum"] for o in outcomes), logprobs, gradients(trainer, "m")))
    largest = max(float(gradient.abs().max()) for gradient in sums[0][2].values())
    for total, logprobs, found in sums[1:]:
        assert total == pytest.approx(sums[0][0], rel=1e-5, abs=1e-5)
        assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(logprobs, sums[0][1], strict=True))
        for name, gradient in sums[0][2].items():
            assert float((found[name] - gradient).abs().max()) < 1e-5 * largest


def test_forward_only_leaves_gradients_alone_and_has_the_same_logprobs(trainer: TenantTrainerService) -> None:
    only = random_pass(1, forward_only=True)
    first = trainer.forward_backward("m", only)
    assert gradients(trainer, "m") == {}
    outcome = trainer.forward_backward("m", random_pass(1))
    assert all(np.array_equal(a, b) for a, b in zip(first.logprobs, outcome.logprobs, strict=True))
    assert first.metrics == outcome.metrics
    before = gradients(trainer, "m")
    trainer.forward_backward("m", random_pass(2, forward_only=True))
    assert equal(before, gradients(trainer, "m"))


def test_a_custom_loss_in_two_passes_has_its_gradient(trainer: TenantTrainerService, folder: str) -> None:
    """As `forward_backward_custom`: a forward pass, then cross-entropy weighted by -dC / dlogprobs, of any sign."""
    computed = random_pass(3, rows=4)

    def custom(logprobs: list[Tensor]) -> Tensor:
        return sum((lp.exp().sum() * 3 - lp[0] ** 2 for lp in logprobs), logprobs[0].new_zeros(()))

    forward = trainer.forward_backward("m", TrainingPass(data=computed.data, loss="cross_entropy", forward_only=True))
    leaves = [torch.from_numpy(lp.copy()).requires_grad_() for lp in forward.logprobs]
    custom(leaves).backward()
    rows = tuple(
        TrainingDatum(
            token_ids_n=row.token_ids_n,
            inputs={"target_tokens": row.inputs["target_tokens"], "weights": -lp.grad.numpy()},  # type: ignore[union-attr]
        )
        for row, lp in zip(computed.data, leaves, strict=True)
    )
    trainer.forward_backward("m", TrainingPass(data=rows, loss="cross_entropy"))
    reference = Reference(folder)
    reference.take(trainer)
    custom([reference.logprobs(row) for row in computed.data]).backward()
    expected = {name: p.grad for name, p in reference.lora.parameters.items() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in gradients(trainer, "m").items():
        assert float((gradient - expected[name]).abs().max()) < 1e-5 * largest


def test_no_data_is_no_loss_and_an_unknown_loss_is_refused(trainer: TenantTrainerService) -> None:
    empty = trainer.forward_backward("m", TrainingPass(data=(), loss="ppo"))
    assert (empty.logprobs, empty.metrics) == ((), {"loss:sum": 0.0})
    assert gradients(trainer, "m") == {}
    with pytest.raises(TenantRefused, match="loss_fn = 'stable_reinforce': valid: cross_entropy, importance_sampling"):
        trainer.forward_backward("m", TrainingPass(data=random_pass(1).data, loss="stable_reinforce"))
    assert math.isfinite(trainer.forward_backward("m", random_pass(1)).metrics["loss:sum"])
