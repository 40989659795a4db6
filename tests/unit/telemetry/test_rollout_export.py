"""Exports of a record: JSON lines, Parquet and a data set say what the record says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from headway.config.schema import LedgerConfig
from headway.records.errors import ConfigurationError
from headway.report.recorded_samples import RecordedSamples, SampleSelection
from headway.runtime.clock import VirtualClock
from headway.telemetry.rollouts import export as export_module
from headway.telemetry.rollouts.columns import TRAINED, list_array, trained_batch
from headway.telemetry.rollouts.export import export
from headway.telemetry.rollouts.joined import JOINED
from headway.telemetry.rollouts.recorder import RolloutRecorder
from headway.telemetry.rollouts.segments import SegmentWriter, list_segments
from tests.support.recorded import random_group, rollout_from, rollouts_in

GROUPS = [random_group(index, 4) for index in range(12)]


def decode(ids: Any) -> str:
    return " ".join(map(str, ids))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Twelve groups: even ones trained at step group // 4, of which the trainer saw log-probabilities 0.5 lower."""
    recorder = RolloutRecorder(tmp_path, LedgerConfig(), VirtualClock(), lambda *a, **k: None)
    recorder.begin(lambda share: 0)
    for group in GROUPS:
        recorder.finished(group)
        recorder.flush()
    writer = SegmentWriter(tmp_path / "rollouts" / "trained", TRAINED)
    for step in range(3):
        indices = range(4 * step, 4 * step + 4, 2)
        recorder.ended(indices, "trained", f"step {step}", step)
        members = [r for index in indices for r in GROUPS[index].rollouts if r.valid]
        lengths = [len(r.response_ids) for r in members]
        logprobs = [np.array(r.response_logprobs, np.float32) - 0.5 for r in members]
        alike = np.ones(sum(lengths), np.bool_)
        sampled = np.concatenate([np.array(r.response_mask, np.bool_) for r in members])
        lists = {"clipped": ~alike, "trained": alike, "advantages": np.where(sampled, np.float32(0.25), np.float32(0))}
        columns = {name: list_array(values, lengths) for name, values in lists.items()}
        columns["logprobs"] = list_array(np.concatenate(logprobs), lengths)
        ones = {"step": [step] * len(members), "sequence": [0] * len(members), "weight": [1.0] * len(members)}
        keys = {"group": [r.group for r in members], "member": [r.member for r in members]}
        writer.append(trained_batch(**columns, **ones, **keys), step)
    recorder.close()
    writer.close()
    return tmp_path


def require_equal(rows: list[dict[str, Any]], run: Path) -> None:
    rollouts = [rollout for group in GROUPS for rollout in group.rollouts]
    assert rollouts_in(run) == rollouts
    assert [rollout_from(row) for row in rows] == rollouts
    for row, rollout in zip(rows, rollouts, strict=True):
        assert (row["prompt"], row["response"]) == (decode(rollout.prompt_ids), decode(rollout.response_ids))
        own = rollout.ended
        ending = own[0] if own else ("open" if rollout.group % 2 else "trained")
        assert row["ending"] == ending
        assert row["step"] == (rollout.group // 4 if ending == "trained" else None)
        if ending == "trained":
            expected = np.array(rollout.response_logprobs, np.float32) - np.float32(0.5)
            assert np.allclose(row["trainer_logprobs"], expected)
            assert np.allclose(row["trainer_ratios"], np.exp(-0.5))
            assert row["trainer_trained"] == [True] * len(expected)
        else:
            assert row["trainer_logprobs"] is None


def test_jsonl(run: Path) -> None:
    told: list[tuple[float, float]] = []
    report = export(run, "jsonl", decode=decode, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(4 * number, 48) for number in range(12)]
    rows = [json.loads(line) for line in Path(report.path).read_text().splitlines()]
    for row in rows:  # JSON inside JSON isn't text
        for name in ("verdict", "failure", "pruned"):
            row[name] = None if row[name] is None else json.dumps(row[name])
    require_equal(rows, run)
    assert (report.path, report.rollouts, report.problems) == (str(run / "export.jsonl"), 48, [])


def test_parquet_and_ending(run: Path) -> None:
    report = export(run, "parquet", run / "all.parquet", decode=decode)
    require_equal(pq.read_table(report.path).to_pylist(), run)
    some = export(run, "parquet", run / "all.parquet", decode=decode, ending="trained")
    table = pq.read_table(some.path)
    assert table.schema.names == JOINED.names
    assert set(table["ending"].to_pylist()) == {"trained"}
    assert 0 < some.rollouts == len(table) < 48


def test_data_set_is_loaded_by_datasets(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(export_module, "SHARD_BYTES", 20_000)
    report = export(run, "hf", decode=decode)
    names = sorted(path.name for path in (run / "export" / "data").iterdir())
    assert len(names) > 1
    assert names[0] == f"train-00000-of-{len(names):05d}.parquet"
    loaded = datasets.load_dataset(report.path, split="train", cache_dir=str(run / "cache"))
    require_equal(list(loaded), run)
    assert export(run, "hf", decode=decode).rollouts == 48, "an earlier export is replaced"


def test_bad_input(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="valid: jsonl, parquet, hf"):
        export(run, "csv")
    with pytest.raises(ConfigurationError, match="no record of rollouts"):
        export(tmp_path / "nothing", "jsonl")
    (other := tmp_path / "mine").mkdir()
    (other / "notes").write_text("x")
    for to, why in (("hf", "other than an export"), ("jsonl", "is a folder")):
        with pytest.raises(ConfigurationError, match=why):
            export(run, to, other)
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
    assert (other / "notes").read_text() == "x"


def test_damaged_segment_is_left_out_and_said(run: Path) -> None:
    (segment,) = list_segments(run / "rollouts" / "finished")
    data = segment.path.read_bytes()
    segment.path.write_bytes(data[: len(data) // 2])
    report = export(run, "jsonl")
    assert 0 < report.rollouts < 48
    assert len(report.problems) == 1
    assert str(segment.path) in report.problems[0]


def test_show_reads_the_record(run: Path) -> None:
    kept = RecordedSamples(run, decode)
    chosen, steps = kept.select(SampleSelection(ending="trained", limit=3))
    assert steps == [0, 1, 2]
    newest = [r for group in GROUPS[::2] for r in group.rollouts if r.valid][-3:]
    for sample, rollout in zip(kept.read(chosen), newest, strict=True):
        assert (sample.group, sample.member, sample.reward) == (rollout.group, rollout.member, rollout.reward)
        assert sample.response == decode(rollout.response_ids)
        assert sample.advantage == (0.25 if any(rollout.response_mask) else None), "of the sampled tokens"
        assert sample.value is None, "there was no critic"
        assert sample.step == rollout.group // 4
    unread = RecordedSamples(run)
    assert "tokens: the run's tokenizer can't be read" in next(unread.read([5])).response
