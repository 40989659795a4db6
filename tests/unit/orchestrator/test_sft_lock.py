"""`headway sft` is the only one that writes to its output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.config.load import validate_experiment
from headway.orchestrator.jobs import sft
from headway.records.errors import RunLocked
from headway.runtime.file_lock import FileLock


def test_one_process_at_a_time_trains_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would unlink what the first has published, and overwrite its model."""
    raw = {
        "run": {"directory": str(tmp_path / "run")},
        "model": {"path": str(tmp_path / "model")},
        "tasks": {"train": {"path": "t.jsonl"}},
        "sft": {"data": "pairs.jsonl", "output": str(tmp_path / "out")},
    }
    experiment = validate_experiment(raw, "test")
    reaped: list[str] = []
    monkeypatch.setattr(sft, "reap", reaped.append)
    with (
        FileLock(tmp_path / ".out.lock", "sft.output", "out"),
        pytest.raises(RunLocked, match=f"out is in use by process {os.getpid()}: .*another sft.output"),
    ):
        sft.run_sft(experiment)
    assert reaped == []
    assert os.listdir(tmp_path) == [".out.lock"]
