"""Ranks in processes of their own, divided by FSDP2 over gloo: memory, bytes read, files for any ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import shard_process
import torch

from headway.models.initialise import initialise_model
from headway.models.loading import load_model, weights_of

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of 100 MB, whose experts, heads and vocabulary three ranks don't divide."""
    target = tmp_path_factory.mktemp("model") / "m"
    sizes = dict(layers=2, width=512, heads=10, kv_heads=5, head_dim=64, intermediate=640, experts=11)
    initialise_model(target, ["12+34=46"], character_level=True, family="qwen3_moe", tied=False, **sizes)
    return target


def run_ranks(folder: Path, output: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank printed."""
    output.mkdir()
    command = [sys.executable, shard_process.__file__, str(folder), str(output)]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks)], stdout=subprocess.PIPE, text=True) for rank in range(ranks)
    ]
    try:
        return [json.loads(process.communicate(timeout=100)[0].splitlines()[-1]) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.long
def test_ranks_hold_and_read_their_share_alone(folder: Path, tmp_path: Path) -> None:
    total_bytes = sum(tensor.nbytes for tensor in weights_of(load_model(folder)).values())
    digests = {}
    for ranks in (1, 3):
        figures = run_ranks(folder, tmp_path / str(ranks), ranks)
        assert sum(rank["shard_bytes"] for rank in figures) == total_bytes
        share_bytes = max(rank["shard_bytes"] for rank in figures)  # FSDP2 allots as much to a rank with fewer rows
        assert share_bytes <= total_bytes / ranks * 1.1
        for rank in figures if ranks > 1 else ():  # one alone maps the files
            assert rank["load"]["peak_bytes"] <= 1.3 * share_bytes
            assert rank["save"]["peak_bytes"] <= 0.2 * share_bytes
            assert rank["resume"]["peak_bytes"] <= 0.2 * share_bytes
            for block in ("load", "resume"):
                assert rank[block]["read_bytes"] == pytest.approx(rank["shard_bytes"], rel=0.02)
        digests[ranks] = figures[0]["digests"]
        again = weights_of(load_model(tmp_path / str(ranks) / "model"))
        assert all(torch.equal(again[name], tensor) for name, tensor in weights_of(load_model(folder)).items())
    assert digests[1] == digests[3] != {}
