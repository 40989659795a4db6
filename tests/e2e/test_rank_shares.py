"""What several ranks do with their shares of a batch: parts, records, masks over the whole batch, batches of fewer
samples than ranks, hooks that never see an empty micro-batch, calls that contradict one another."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_trainer import make_batch

from headway.algorithms.samples import lay_out
from headway.algorithms.step_plan import divide
from headway.records.errors import RanksDiffer
from headway.records.training import PartReport, StepReport, TrainBatch
from headway.telemetry.rollouts.reader import RolloutRecord
from headway.trainer.client import TrainerClient
from headway.trainer.losses import LossSettings, TokenLoss, TokenTerms
from tests.e2e.test_trainer_ranks import client, compare_weights

pytestmark = pytest.mark.real
HERE = str(Path(__file__).parent)


def nonempty_loss(terms: TokenTerms, settings: LossSettings) -> TokenLoss:
    """A user's loss that can't be computed of nothing."""
    assert len(terms.logprobs_m), "an empty micro-batch"
    loss_m = -terms.logprobs_m * terms.advantages_m
    return TokenLoss(loss_m=loss_m, clipped_m=loss_m > 1e9)


def trained(folder: Path, ranks: int, batches: list[TrainBatch], *, parts: bool = False, **sections: Any) -> list[Any]:
    """The reports of a trainer that saves its weights in ``folder/RANKS``."""

    async def main() -> list[Any]:
        trainer = client(folder, ranks, f"{folder.name}-{ranks}", **sections)
        await trainer.start()
        reports: list[Any] = []
        try:
            for batch in batches:
                if not parts:
                    reports.append(await trainer.train_step(batch))
                    continue
                for chosen in (batch.samples[:5], batch.samples[5:6], batch.samples[6:]):
                    reports.append(await trainer.forward_backward(TrainBatch(step=batch.step, samples=chosen)))
                reports.append(await trainer.optim_step())
            await trainer.save_weights(str(folder / str(ranks)))
            return reports
        finally:
            await trainer.stop()

    return asyncio.run(main())


def require_equal(alone: list[Any], shared: list[Any]) -> None:
    for one, other in zip(alone, shared, strict=True):
        assert one.metrics == pytest.approx(other.metrics, abs=1e-4, rel=1e-4)
        assert (one.tokens, one.loss_tokens, one.samples) == (other.tokens, other.loss_tokens, other.samples)
        if isinstance(one, PartReport):
            assert one.loss == pytest.approx(other.loss, abs=1e-4)
            assert np.allclose(one.logprobs.array, other.logprobs.array, atol=1e-4)
        elif isinstance(one, StepReport) and one.tokens == one.computed_tokens:  # no prefix is shared
            assert one.flops == pytest.approx(other.flops)


def require_same_record(folder: Path, step: int, before: Any) -> Any:
    """Return the record of a step; it equals ``before``, if that is given."""
    values_by_key = RolloutRecord(folder).trained(step)
    for key, values in (before or values_by_key).items():
        for name in values._fields:
            own, other = (np.array(getattr(one, name), float) for one in (values, values_by_key[key]))  # no values: NaN
            assert np.allclose(own, other, atol=1e-4, equal_nan=True), (key, name)
    return values_by_key


CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "parts": (True, {}),
    "second moment": (False, {"algorithm": {"second_moment_limit": 0.02}, "optimizer_steps_per_batch": 2}),
    "masks": (False, {"algorithm": {"token_mask": [0.7, 1.4], "sequence_mask": [0.8, 1.2]}}),
    "fixed": (False, {"packing": "fixed", "micro_batch_samples": 2, "shared_prefix": False}),
    "adapted kl": (False, {"model": {"adapter": {"rank": 4, "alpha": 8.0}},
                           "algorithm": {"kl_coefficient": 0.1, "kl_target": 0.01}}),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [name if name in ("parts", "second moment") else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_two_ranks_with_their_shares_equal_one(case: str, tmp_path: Path) -> None:
    parts, sections = CASES[case]
    batches, record = [make_batch(step, step=step) for step in range(2)], None
    reports: list[list[Any]] = []
    for ranks in (1, 2):
        run = {"algorithm": dict(sections.get("algorithm", {}))}
        reports.append(trained(tmp_path, ranks, batches, parts=parts, **{**sections, **run}))
        record = require_same_record(tmp_path, 1, record)
        assert len(record) == len(batches[1].samples)
    require_equal(*reports)
    file = "adapter_model.safetensors" if "model" in sections else "model*.safetensors"
    compare_weights(tmp_path / "1", tmp_path / "2", file)


@pytest.mark.parametrize(
    ("case", "ranks", "context"),
    [
        ("parts", 2, 2),
        pytest.param("parts", 4, 2, marks=pytest.mark.slow),
        *[pytest.param(name, 2, 2, marks=pytest.mark.long) for name in CASES if name != "parts"],
    ],
)
def test_ranks_of_the_same_samples_report_and_record_them_once(
    case: str, ranks: int, context: int, tmp_path: Path
) -> None:
    parts, sections = CASES[case]
    batches, record, reports = [make_batch(step, step=step) for step in range(2)], None, list[list[Any]]()
    for count, divided in ((1, {}), (ranks, {"context_parallel": context})):
        run = {"algorithm": dict(sections.get("algorithm", {})), **divided}
        reports.append(trained(tmp_path, count, batches, parts=parts, **{**sections, **run}))
        record = require_same_record(tmp_path, 1, record)
        assert len(record) == len(batches[1].samples)
    require_equal(*reports)
    file = "adapter_model.safetensors" if "model" in sections else "model*.safetensors"
    compare_weights(tmp_path / "1", tmp_path / str(ranks), file)


def test_ranks_without_samples_compute_empty_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]))
    batches = [make_batch(1, groups=1, members=2), make_batch(2, groups=1, members=1, step=1, longest=12)]
    sections = {"algorithm": {"loss": "test_rank_shares:nonempty_loss", "proximal": "recompute"}}
    alone, shared = (
        trained(tmp_path, ranks, batches, shared_prefix=False, **{k: dict(v) for k, v in sections.items()})
        for ranks in (1, 3)
    )
    assert [report.version for report in shared] == [1, 2]
    require_equal(alone, shared)
    assert [report.micro_batches for report in alone] == [1, 1]
    assert [report.micro_batches for report in shared] == [2, 1], "empty ones aren't counted"
    compare_weights(tmp_path / "1", tmp_path / "3")


@pytest.mark.parametrize("difference", ["step", "tokens", "call"])
def test_contradicting_calls_are_refused_on_all_ranks(difference: str, tmp_path: Path) -> None:
    batch, other = make_batch(0), make_batch(0, step=1) if difference == "step" else make_batch(5)

    async def main(trainer: TrainerClient) -> None:
        await trainer.start()
        try:
            shares = [lay_out(given) for given in (batch, other if difference != "call" else batch)]
            methods = ["train_step", "forward_backward" if difference == "call" else "train_step"]
            calls = [
                worker.call(method, share)
                for worker, method, share in zip(trainer.workers, methods, shares, strict=True)
            ]
            errors = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(error.__cause__, RanksDiffer) for error in errors)  # type: ignore[union-attr]
            expected = {"step": "step = 0 on rank 0, 1 on rank 1", "tokens": "tokens = ", "call": "call = 'train_step'"}
            assert all(expected[difference] in str(error) for error in errors)
            assert (await trainer.train_step(batch)).version == 1, "nothing was changed"
        finally:
            await trainer.stop()

    asyncio.run(main(client(tmp_path, 2, f"differ-{difference}")))


def test_each_rank_is_sent_its_share_alone(tmp_path: Path) -> None:
    batch = lay_out(make_batch(3, groups=8, members=4))
    sequences_by_rank = divide(batch, client(tmp_path, 2, "shares")._experiment.trainer, 2)
    tokens = [len(batch.take(sequences).token_ids_n) for sequences in sequences_by_rank]
    assert sum(tokens) == batch.tokens
    assert max(tokens) < 0.6 * batch.tokens
