"""The machine's GPUs, as a program that stands for nvidia-smi lists them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.runtime.nodes import gpus
from headway.runtime.nodes.gpus import installed_cuda, read_machine

CARDS = """\
0, GPU-a, NVIDIA H100 80GB HBM3, 81559, 81000, 9.0, 580.65.06
1, GPU-b, Tesla T4, 15360, 15000, 7.5, 580.65.06
2, GPU-c, NVIDIA H100 80GB HBM3, 81559, 40000, 9.0, 580.65.06
3, GPU-d, NVIDIA H100 80GB HBM3, [Unknown Error], [Unknown Error], 9.0, 580.65.06
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called nvidia-smi: the cards, and this test's parent as a process that computes on the first."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in *compute-apps*) echo "GPU-a, {os.getppid()}";; *) cat <<E\n{CARDS}E\nesac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return program


def test_cards_with_their_users(driver: Path) -> None:
    machine = read_machine(environment={"CUDA_VISIBLE_DEVICES": "2,0", "SLURM_JOB_GPUS": "0,2"}, torch_cuda="13.0")
    assert [gpu.index for gpu in machine.gpus] == [0, 1, 2]  # a card that fell off the bus isn't one
    assert [gpu.bfloat16 for gpu in machine.gpus] == [True, False, True]
    assert machine.gpus[0].memory_bytes == 81559 << 20
    assert machine.gpus[0].users.startswith(f"process {os.getppid()} of ")
    assert machine.gpus[1].users == ""
    assert machine.gpus[2].users == "processes that hold 40.6 GiB"  # of another container: they can't be listed
    assert (machine.driver, machine.visible, machine.slurm) == ("580.65.06", "2,0", "0,2")
    assert [gpu.index for gpu in machine.cuda] == [2, 0]


@pytest.mark.parametrize("answer", [None, "", "NVIDIA-SMI has failed because it couldn't communicate with the driver"])
def test_a_driver_that_does_not_answer_lists_nothing(answer: str | None) -> None:
    assert read_machine(ask=lambda *command: answer, environment={}).gpus == ()


def test_versions_are_read_without_importing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text, version in (
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"),
        ("cuda: str = None", ""),
    ):
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch" / "__init__.py").write_text("raise ImportError\n")
        (tmp_path / "torch" / "version.py").write_text(text)
        code = "from headway.runtime.nodes.gpus import installed_cuda; print(installed_cuda())"
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(gpus.__file__).parents[3]}"}
        printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert printed.stdout.strip() == version, printed.stderr
    assert installed_cuda() == ""  # the tests' torch is a build for CPUs
