"""What the trainer records of each token: equal to what it computed, for parts, branches, copies and shares."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tiny_trainer import Context, make_batch, make_experiment, make_model

from headway.algorithms.samples import build_arrays, lay_out
from headway.records.generation import VersionSpan
from headway.records.rollout import Branch
from headway.records.training import TrainBatch
from headway.telemetry.rollouts import segments
from headway.telemetry.rollouts.reader import RolloutRecord
from headway.trainer.service import TrainerService
from headway.trainer.step_statistics import Progress

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def service(model: str, folder: Path, **sections) -> TrainerService:
    return TrainerService(Context, experiment=make_experiment(model, folder, **sections), run_id="test")


def kept_progress(trainer: TrainerService, monkeypatch: pytest.MonkeyPatch) -> list[Progress]:
    found: list[Progress] = []
    run = trainer.policy.run
    monkeypatch.setattr(trainer.policy, "run", lambda *a: found.append(run(*a)) or found[-1])
    return found


def with_branch_and_copies(batch: TrainBatch) -> TrainBatch:
    first, second, *rest = batch.samples
    branch = Branch(prompt_ids=(1, 2, 3), response_ids=(4, 5), response_logprobs=(-1.0, -2.0),
                    response_mask=(True, True), versions=(VersionSpan(version=0, tokens=2),))  # fmt: skip
    first = msgspec.structs.replace(first, rollout=msgspec.structs.replace(first.rollout, branches=(branch,)))
    second = msgspec.structs.replace(second, weight=0.5)
    return TrainBatch(step=batch.step, samples=(first, second, second, *rest))


def test_record_has_what_was_computed(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = service(model, tmp_path, queue={"max_token_staleness": 0, "budget": 4})
    (done := kept_progress(trainer, monkeypatch)).clear()
    batch = with_branch_and_copies(make_batch(5))
    trainer.train_step(lay_out(batch))
    trainer.close()
    found = RolloutRecord(tmp_path).trained(0)
    sequences = [(s.rollout.group, s.rollout.member, n, one) for s in batch.samples
                 for n, one in enumerate(s.rollout.sequences)]  # fmt: skip
    assert found.keys() == {key[:3] for key in sequences}
    progress, arrays, start, lost = done[0], build_arrays(batch), 0, 0
    assert progress.prepared is not None
    for group, member, number, one in sequences:
        start += len(one.prompt_ids)
        at = slice(start, start := start + len(one.response_ids))
        values = found[group, member, number]
        seen = progress.seen_n[at] > 0
        assert seen.tolist() == arrays.loss_mask_n[at].tolist()
        assert np.isnan(values.logprobs).tolist() == (~seen).tolist()
        assert values.logprobs[seen].tolist() == progress.logprobs_n[at][seen].astype(np.float32).tolist()
        assert values.trained.tolist() == (seen & progress.prepared.keep_n[at]).tolist()
        assert values.clipped.tolist() == (progress.clipped_n[at] > 0).tolist()
        assert values.advantages.tolist() == arrays.advantages_n[at].tolist()
        lost += int((~seen).sum())
    assert start == arrays.tokens
    assert lost, "some tokens carry no loss"


def test_parts_and_replays_are_recorded(model: str, tmp_path: Path) -> None:
    batch = make_batch(6)
    parts = [TrainBatch(step=0, samples=batch.samples[at : at + 6]) for at in (0, 6)]
    read = []
    for weights in (model, make_model(tmp_path / "other", seed=1)):  # the second process replays the step
        trainer = service(weights, tmp_path, trainer={"learning_rate": 0.1})
        for part in parts:
            trainer.forward_backward(lay_out(part))
        trainer.optim_step()
        read.append(RolloutRecord(tmp_path).trained(0))
    first, last = read
    assert all((first[key].logprobs != last[key].logprobs).any() for key in last), "of a replay the last rows count"
    assert [segment.number for segment in segments.list_segments(tmp_path / "rollouts" / "trained")] == [1, 2]
    assert last.keys() == {(s.rollout.group, s.rollout.member, 0) for s in batch.samples}
    moved = trainer.train_step(lay_out(make_batch(6, step=1)))
    assert moved.unrecorded == ""
    after = RolloutRecord(tmp_path).trained(1)
    assert after.keys() == last.keys()
    assert any((after[key].logprobs != last[key].logprobs).any() for key in after)


def test_share_and_none(model: str, tmp_path: Path) -> None:
    for keys, groups in (({"rollouts": 0.5}, {0, 2}), ({"rollouts": "none"}, set())):
        run = tmp_path / str(len(groups))
        run.mkdir()
        service(model, run, ledger=keys).train_step(lay_out(make_batch(7)))
        assert {group for group, _, _ in RolloutRecord(run).trained(0)} == groups


def test_full_disk_ends_it_and_the_step_says_so(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = service(model, tmp_path)
    monkeypatch.setattr(segments, "RESERVE_BYTES", 0)

    def full(fd: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segments.os, "write", full)
    report = trainer.train_step(lay_out(make_batch(8)))
    assert "No space left on device" in report.unrecorded
    assert report.version == 1
    assert trainer.train_step(lay_out(make_batch(8, step=1))).unrecorded == ""
