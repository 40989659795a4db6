"""Conditions of machines: what nvidia-smi prints, and what this machine says."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.records.node import GpuConditions
from headway.runtime.nodes.conditions import ConditionsReader, parse_gpus


def test_gpus_are_read_row_by_row_and_missing_values_are_zero():
    text = "0, 87, 1024, 81559, 0\n1, [N/A], 12, 81559, [N/A]\nUnable to determine the device handle\n"
    assert parse_gpus(text) == (
        GpuConditions(index=0, busy_ratio=0.87, memory_used_bytes=1 << 30, memory_bytes=81559 << 20, ecc_errors=0),
        GpuConditions(index=1, busy_ratio=0.0, memory_used_bytes=12 << 20, memory_bytes=81559 << 20, ecc_errors=0),
    )
    assert parse_gpus("") == ()


def test_this_machine_has_conditions(tmp_path: Path):
    reader = ConditionsReader(tmp_path, "b")
    found = reader.read(processes=3)
    assert (found.name, found.processes) == ("b", 3)
    assert 0.0 <= found.cpu_ratio <= 1.0
    assert found.memory_free_bytes > 0
    assert found.disk_free_bytes > 0
    assert ConditionsReader(tmp_path / "missing").read().disk_free_bytes == 0


def test_conditions_are_read_on_when_no_descriptor_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reader = ConditionsReader(tmp_path)

    def refuse(*_: object, **__: object) -> str:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as before:
        before.setattr(Path, "read_text", refuse)
        assert (reader.read().cpu_ratio, reader.read().memory_free_bytes) == (0.0, 0)
    found = reader.read()
    assert 0.0 <= found.cpu_ratio <= 1.0
    assert found.memory_free_bytes > 0
