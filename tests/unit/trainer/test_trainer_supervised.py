"""Supervised fine-tuning: what is kept, what carries loss, that it learns."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_trainer import Context, make_experiment, make_model

from headway.records.errors import ConfigurationError, NoProgress, StorageFailed
from headway.records.training import MAX_CONSECUTIVE_SKIPS
from headway.tasks.sft_data import read_sft_tokens
from headway.tokens.tokenizer_training import train_byte_fallback_tokenizer
from headway.trainer.checkpoints import verify
from headway.trainer.supervised import (
    SupervisedService,
    _endless_permutations,
)

torch.set_num_threads(1)
PAIRS = [(f"{a}+{b}=", str(a + b)) for a in range(6) for b in range(6)]


def make(
    folder: Path, pairs: list[tuple[str, str]], micro_batch_tokens: int = 40, optimizer: str = "adamw", **sft
) -> SupervisedService:
    model = folder / "model"
    make_model(model, vocabulary=300)
    train_byte_fallback_tokenizer([p + s for p, s in PAIRS], 300, model)
    lines = [json.dumps({"prompt": p, "solution": s, "note": 1}) for p, s in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    section = {"data": str(folder / "pairs.jsonl"), "batch_sequences": 12, "steps": 60, "warmup_steps": 5,
               "learning_rate": 1e-2, **sft}  # fmt: skip
    trainer = {"micro_batch_tokens": micro_batch_tokens, "optimizer": optimizer}
    experiment = make_experiment(str(model), folder, sft=section, trainer=trainer)
    return SupervisedService(Context, experiment=experiment, run_id="sft-test")


def prepare(service: SupervisedService) -> dict[str, float]:
    data = read_sft_tokens(service.experiment)
    service.prepare(data.token_ids_n, data.learned_n, data.lengths_s)
    return data.counts


def test_counts_of_what_is_dropped(tmp_path: Path) -> None:
    service = make(tmp_path, [*PAIRS, ("", "5"), ("1+1=", ""), ("1+1=", "2 " * 200)], max_tokens=64)
    counts = prepare(service)
    assert (counts["kept"], counts["dropped_empty"], counts["dropped_too_long"]) == (36, 2, 1)
    assert counts["too_long_share"] == pytest.approx(1 / 39)
    assert counts["longest"] > 200
    assert 3 < counts["mean"] < 10


def test_a_batch_is_cut_out_of_all_sequences(tmp_path: Path) -> None:
    service = make(tmp_path, PAIRS)
    learned = np.array([0, 0, 1, 1, 0, 1, 1, 0, 1], bool)
    service.prepare(np.array([5, 6, 7, 1, 8, 9, 1, 4, 1], np.int32), learned, np.array([4, 3, 2]))
    arrays = service._arrays([2, 0])
    assert arrays.token_ids_n.tolist() == [4, 1, 5, 6, 7, 1]
    assert arrays.loss_mask_n.tolist() == [False, True, False, False, True, True]
    assert arrays.lengths_s.tolist() == [2, 4]


def test_epochs_visit_everything_once_in_an_order_of_the_seed() -> None:
    order = _endless_permutations(7, seed=3)
    first, second = [next(order) for _ in range(7)], [next(order) for _ in range(7)]
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    again = _endless_permutations(7, seed=3)
    assert [next(again) for _ in range(14)] == first + second


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_learns_and_saves(tmp_path: Path, optimizer: str) -> None:
    service = make(tmp_path, PAIRS, optimizer=optimizer)
    with pytest.raises(ConfigurationError, match="prepare"):
        service.steps(1)
    prepare(service)
    first = service.steps(1)
    last = service.steps(59)
    assert last["version"] == 60
    assert last["loss"] < 0.5 * first["loss"]
    assert 0.2 < last["effective_token_share"] < 0.8
    assert last["tokens_per_s"] > 0
    assert last["epochs"] == pytest.approx(20)
    service.save(str(tmp_path / "out"))
    assert verify(tmp_path / "out").version == 60
    weights = [p.detach().clone() for p in service.learner.parameters]
    service.steps(1)
    service.load_weights(str(tmp_path / "out"))
    assert all(torch.equal(a, b) for a, b in zip(weights, service.learner.parameters, strict=True))
    published = service.publish(60)
    service.close()
    assert published.version == 60
    assert not Path(published.path).exists()


def test_micro_batches_that_do_not_fit_are_halved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainers = [make(tmp_path, PAIRS, micro_batch_tokens=tokens) for tokens in (64, 32)]
    short, backward = trainers[0], trainers[0].learner.backward

    def checked(loss: torch.Tensor) -> None:
        backward(loss)
        if not caplog.text:
            raise torch.OutOfMemoryError("CUDA out of memory")

    short.learner.backward = checked  # type: ignore[method-assign]
    for trainer in trainers:
        prepare(trainer)
        trainer.steps(2)
    assert "trainer.micro_batch_tokens = 64 don't fit" in caplog.text
    for mine, its in zip(*(trainer.learner.parameters for trainer in trainers), strict=True):
        assert torch.equal(mine, its)


def test_loss_is_the_mean_cross_entropy_of_solution_tokens(tmp_path: Path) -> None:
    service = make(tmp_path, PAIRS[:12], micro_batch_tokens=7)
    prepare(service)
    total, count = 0.0, 0
    with torch.no_grad():
        for chosen in range(12):
            sequence = service._arrays([chosen])
            ids = sequence.token_ids_n.tolist()
            logits = service.learner.model(torch.tensor(ids), [len(ids)])
            logprobs = torch.log_softmax(logits, -1)
            targets = np.flatnonzero(sequence.loss_mask_n)
            total -= sum(float(logprobs[i - 1, ids[i]]) for i in targets)
            count += len(targets)
    assert service.steps(1)["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no rows"),
        ('{"prompt": "a"}\n', ":1: it has the columns prompt; needed: .prompt. and .solution., or .messages."),
        ('{"prompt": "a", "solution": 3}\n', ":1: .solution. = 3: must be a string"),
        ("\n{broken\n", ":2:"),
        ('{"prompt": "a", "solution": ""}', "no row is left"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', ":1: a conversation.*set model.template = 'chat'"),
        ('{"messages": []}', ":1: .messages. = .*: must be a list"),
        ('{"messages": [{"from": "human", "value": "a"}]}', ":1: .*role = None; it has: from, value; valid: system"),
        ('{"messages": [{"role": "user", "content": [1]}]}', r":1: .messages..0.: content = \[1\]: must be a string"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, content: str, message: str) -> None:
    service = make(tmp_path, PAIRS)
    (tmp_path / "pairs.jsonl").write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        prepare(service)
    (tmp_path / "pairs.jsonl").unlink()
    with pytest.raises(ConfigurationError, match="no such file"):
        prepare(service)


def test_skipped_steps_make_no_version_and_too_many_end_it(tmp_path: Path) -> None:
    service = make(tmp_path, PAIRS)
    prepare(service)
    service.steps(2)
    update, poison = service.learner.update, [math.nan] * 3
    service.learner.update = lambda rate, loss: update(rate, poison.pop() if poison else loss)  # type: ignore[method-assign]
    report = service.steps(5)
    assert (report["version"], report["skipped"]) == (4, 3)
    assert report["epochs"] == pytest.approx(7 / 3)
    assert report["learning_rate"] == pytest.approx(1e-2 * 4 / 5)  # the warm-up counts versions
    poison += [math.nan] * (MAX_CONSECUTIVE_SKIPS - 1)
    assert service.steps(MAX_CONSECUTIVE_SKIPS)["version"] == 5
    poison += [math.nan] * MAX_CONSECUTIVE_SKIPS
    with pytest.raises(NoProgress, match=f"{MAX_CONSECUTIVE_SKIPS} steps in a row were skipped.*loss nan"):
        service.steps(MAX_CONSECUTIVE_SKIPS)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make(tmp_path, PAIRS)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headway.trainer.saving.write_model_files", full)
    with pytest.raises(StorageFailed, match=f"{tmp_path}/out can't be written: .*No space"):
        service.save(str(tmp_path / "out"))


def test_what_is_held_out_is_not_trained_on_and_its_loss_is_the_mean_over_its_tokens(tmp_path: Path) -> None:
    service = make(tmp_path, PAIRS, batch_sequences=10)
    data = read_sft_tokens(service.experiment)
    service.prepare(data.token_ids_n, data.learned_n, data.lengths_s, 6)
    order = [next(service._order) for _ in range(30)]
    assert len(set(order)) == 30
    held_out = sorted(set(range(36)) - set(order))
    total, count = 0.0, 0
    with torch.no_grad():
        for one in held_out:
            sequence = service._arrays([one])
            ids = sequence.token_ids_n.tolist()
            logprobs = torch.log_softmax(service.learner.model(torch.tensor(ids), [len(ids)]), -1)
            targets = np.flatnonzero(sequence.loss_mask_n)
            total -= sum(float(logprobs[i - 1, ids[i]]) for i in targets)
            count += len(targets)
    assert service.held_out_loss() == pytest.approx(total / count, rel=1e-5)
    assert service.steps(3)["epochs"] == pytest.approx(1.0)
