"""The exporters against the real packages, offline: what they store can be read back."""

from __future__ import annotations

import io
import json
import math
import shutil
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from simulated_run import experiment_of
from synthetic_run import evaluation, step_record, synthetic_lines
from test_ledger import ManualClock

from headway.config.schema import Experiment
from headway.records.errors import ConfigurationError
from headway.records.ledger import EventRecord, SourceScore, StepRecord
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.exporters.exporters import start_exports
from headway.telemetry.ledger import Ledger, read_ledger

SAMPLE = {
    "step": 1, "group": 7, "member": 0, "prompt": "1+2=", "response": "3 | `x`\n", "reward": 1.0, "solved": True,
    "advantage": 0.5, "versions": [[0, 1], [1, 1]], "finish_reason": "stop", "ending": "trained",
}  # fmt: skip


def run_with(tmp_path: Path, *, resume: bool = False, first_step: int = 0, **ledger: Any) -> dict[str, str]:
    """Export two steps, an evaluation and a table to ``ledger.trackers``; returns their ids."""
    experiment: Experiment = experiment_of(tmp_path / "run", ledger={"table_every_steps": 1, **ledger})
    directory = RunDirectory(tmp_path / "run")
    if resume:
        directory.buffer.touch()  # a run that trained has one
    directory.begin(experiment, resume=resume)
    with directory, Ledger(directory.path, ManualClock()) as ledger_file:
        with start_exports(experiment, directory, ledger_file, resume=resume) as exports:
            ledger_file.record(EventRecord(event="resume" if resume else "start", step=first_step))
            for step in (first_step, first_step + 1):
                exports.sample(SAMPLE)
                lengths = {"8": 60, "16": 4}
                ledger_file.record(step_record(step, time_s=1.0 * step, lengths__histogram=lengths))
            ledger_file.record(evaluation("during", first_step + 2, 0.75, split="validation"))
        lost = [line for line in directory.ledger.read_text().splitlines() if "exporter_" in line]
        assert lost == []
    ids = directory.path / "trackers.json"
    return json.loads(ids.read_text()) if ids.exists() else {}


# --- TensorBoard -----------------------------------------------------------------------------------------


def test_tensorboard_gets_grouped_scalars_histograms_and_texts(tmp_path: Path) -> None:
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import masked_crc32c

    experiment = experiment_of(tmp_path / "run", ledger={"trackers": ["tensorboard"], "table_every_steps": 1})
    directory = RunDirectory(tmp_path / "run")
    directory.begin(experiment, resume=False)
    with (
        directory,
        Ledger(directory.path, ManualClock()) as ledger,
        start_exports(experiment, directory, ledger, resume=False) as exports,
    ):
        exports.sample(SAMPLE)
        for line in synthetic_lines(steps=3):
            ledger.record(line)
        ledger.record(StepRecord(step=3, version=3, skipped=True, metrics={"loss": math.nan}))
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    data, tags = file.read_bytes(), {}
    position = 0
    while position < len(data):
        length = int.from_bytes(data[position : position + 8], "little")
        header = data[position : position + 8]
        assert int.from_bytes(data[position + 8 : position + 12], "little") == masked_crc32c(header)
        event = event_pb2.Event.FromString(data[position + 12 : position + 12 + length])
        tags |= {value.tag: value for value in event.summary.value}
        position += length + 16
    assert {"rates/consumption_samples_per_s", "wait/trainer_ratio", "queue/buffered_groups"} <= tags.keys()
    assert {"length/p99_tokens", "loss/loss", "loss/entropy", "ratio/ratio_p99", "mismatch/mismatch_k3"} <= tags.keys()
    assert {"staleness/trajectory_max_steps", "reward/solve_rate", "endings/filtered_rollouts"} <= tags.keys()
    assert list(tags["staleness/trajectory_steps"].histo.bucket) == [10, 30, 20, 4]
    assert tags["evaluation/test_solve_rate"].simple_value == pytest.approx(0.93)
    (text,) = tags["samples/text_summary"].tensor.string_val
    assert "`3 \\| 'x' ⏎ `" in text.decode()


# --- Weights & Biases ------------------------------------------------------------------------------------


def wandb_records(file: Path) -> Iterator[Any]:
    """Records of an offline run: protobuf in LevelDB's log format (blocks of 32 KiB; a header is crc, length, type)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, whole = file.read_bytes(), b""
    position = 7  # the file's own header
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, last
            yield Record.FromString(whole)
            whole = b""


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("*.wandb")
    return [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(file)
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.mark.slow
def test_wandb_offline_holds_what_the_ledger_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = {"trackers": ["wandb"], "project": "p", "name": "n", "tags": ["a", "b"]}
    ids = run_with(tmp_path, **settings)
    again = run_with(tmp_path, resume=True, first_step=2, **settings)
    assert ids == again
    wandb.teardown()  # its own process writes the files, a moment after the run's end: wait for it
    first, second = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"), key=lambda p: p.stat().st_mtime_ns)
    assert first.name.endswith(ids["wandb"])
    assert second.name.endswith((ids["wandb"], ids["wandb"] + "-1"))  # so it is called within the first one's second
    (file,) = first.glob("*.wandb")
    (run,) = [r.run for r in wandb_records(file) if r.WhichOneof("record_type") == "run"][:1]
    assert (run.project, run.display_name, list(run.tags)) == ("p", "n", ["a", "b"])
    rows = wandb_rows(first)
    steps = [row for row in rows if "rates/consumption_samples_per_s" in row]
    assert [row["step"] for row in steps] == [0, 1]
    assert steps[1]["staleness/trajectory_steps/values"] == [10, 30, 20, 4]
    assert [row["step"] for row in rows if "samples/_type" in row] == [0, 1]
    assert [row["evaluation/validation_solve_rate"] for row in rows if row["step"] == 2] == [0.75]
    assert [row["step"] for row in wandb_rows(second) if "time/step_s" in row] == [2, 3]


def test_wandb_without_a_key_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    wandb.teardown()
    with pytest.raises(ConfigurationError, match="no API key: run `wandb login`"):
        run_with(tmp_path, trackers=["wandb"])
    wandb.teardown()


# --- MLflow ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store with its tables: making them takes seconds."""
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where MLflow keeps the runs of a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return Path(shutil.copy(empty_store, tmp_path / "mlflow.db"))


@pytest.mark.slow
def test_mlflow_holds_what_the_ledger_said(tmp_path: Path, store: Path) -> None:
    from mlflow import MlflowClient

    settings = {"trackers": ["mlflow"], "project": "p", "name": "n", "tags": ["a"]}
    ids = run_with(tmp_path, **settings)
    assert run_with(tmp_path, resume=True, first_step=2, **settings) == ids
    client = MlflowClient()
    run = client.get_run(ids["mlflow"])
    assert run.info.run_name == "n"
    assert run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "p"
    assert run.data.tags["a"] == "true"
    assert run.data.params["run.steps"] == "12"
    history = client.get_metric_history(ids["mlflow"], "rates/consumption_samples_per_s")
    assert [metric.step for metric in history] == [0, 1, 2, 3]
    history = client.get_metric_history(ids["mlflow"], "evaluation/validation_solve_rate")
    assert [(metric.step, metric.value) for metric in history] == [(2, 0.75), (4, 0.75)]
    tables = [file.path for file in client.list_artifacts(ids["mlflow"], "samples")]
    assert tables == [f"samples/step_0000000{step}.json" for step in range(4)]


@pytest.mark.slow
def test_mlflow_keeps_the_steps_of_a_mixture_named_by_paths(tmp_path: Path, store: Path) -> None:
    from mlflow import MlflowClient

    score = SourceScore(tasks=2, samples=4, solve_rate=0.25, standard_error=0.1)
    experiment = experiment_of(tmp_path / "run", ledger={"trackers": ["mlflow"]})
    directory = RunDirectory(tmp_path / "run")
    directory.begin(experiment, resume=False)
    with directory, Ledger(directory.path, ManualClock()) as ledger:
        with start_exports(experiment, directory, ledger, resume=False):
            ledger.record(step_record(0, rewards__by_source={"/data/a.jsonl": score, "../b.jsonl": score}))
        assert "exporter_" not in directory.ledger.read_text()
    (run_id,) = json.loads((directory.path / "trackers.json").read_text()).values()
    metrics = MlflowClient().get_run(run_id).data.metrics
    assert metrics["by_source/data_a.jsonl_solve_rate"] == metrics["by_source/b.jsonl_solve_rate"] == 0.25
    assert "time/step_s" in metrics


def test_an_mlflow_run_that_is_gone_is_refused_at_the_start(tmp_path: Path, store: Path) -> None:
    run_with(tmp_path, trackers=[])
    (tmp_path / "run" / "trackers.json").write_text('{"mlflow": "0123"}')
    with pytest.raises(ConfigurationError, match=r"'mlflow' can't be started: .*0123"):
        run_with(tmp_path, resume=True, trackers=["mlflow"])


def test_a_store_that_breaks_costs_the_run_nothing(tmp_path: Path, store: Path) -> None:
    experiment = experiment_of(tmp_path / "run", ledger={"trackers": ["mlflow"]})
    directory = RunDirectory(tmp_path / "run")
    directory.begin(experiment, resume=False)
    with directory, Ledger(directory.path, ManualClock()) as ledger:
        with start_exports(experiment, directory, ledger, resume=False):
            with sqlite3.connect(store) as database:
                database.execute("DROP TABLE metrics")
            for step in range(3):
                ledger.record(step_record(step))
        lines = read_ledger(directory.path)
    assert [line.step for line in lines if isinstance(line, StepRecord)] == [0, 1, 2]
    lost = lines[-1]
    assert isinstance(lost, EventRecord)
    assert lost.event == "exporter_lost"
    assert int(lost.data["lines"]) >= 3
    assert "no such table: metrics" in lost.detail


# --- Trackio ---------------------------------------------------------------------------------------------


def test_trackio_holds_what_the_ledger_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # before its first import
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    said = io.StringIO()
    monkeypatch.setattr(sys, "stdout", said)
    settings = {"trackers": ["trackio"], "project": "p", "name": "n", "tags": ["a"]}
    ids = run_with(tmp_path, **settings)
    assert run_with(tmp_path, resume=True, first_step=2, **settings) == ids == {"trackio": "n"}
    assert said.getvalue() == ""  # standard output is the command's
    rows = SQLiteStorage.get_logs("p", "n")
    assert [row["step"] for row in rows if "rates/consumption_samples_per_s" in row] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "evaluation/validation_solve_rate" in row] == [2, 4]
    shape = next(row["staleness/trajectory_steps"] for row in rows if "staleness/trajectory_steps" in row)
    assert shape["values"] == [10, 30, 20, 4]
    assert any("samples" in row for row in rows)
