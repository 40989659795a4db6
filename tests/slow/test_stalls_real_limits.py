"""Planted stalls under the limits that users have: facts within 30 s, and no false alarm in a long healthy run."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from tiny_run import events_of, steps_of, write_experiment, write_inputs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from test_stalls import VERIFIER, named, running

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.real, pytest.mark.timeout(1800)]

FACT_S = 30.0
HEALTHY_S = float(os.environ.get("HEADWAY_HEALTHY_S", "600"))  # an hour before a release

PLANTED: dict[str, tuple[str, str, dict[str, Any]]] = {  # stall -> how the run is started, the worker named, sections
    "held lock": ("fakes-verifier", "verifier-0", {"verifier": VERIFIER | {"name": "stall_functions:holds_lock"}}),
    "blocked loop": ("fakes", "orchestrator", {"hooks": {"is_valid_group": "stall_functions:blocks_loop"}}),
    "deadlock": ("fakes", "orchestrator", {"hooks": {"is_valid_group": "stall_functions:first_then_second"}}),
    "generator-0": ("none", "generator-0", {}),
    "trainer-0": ("none", "trainer-0", {}),
}


@pytest.mark.parametrize("stall", PLANTED)
def test_fact_is_named_within_30_s(stall: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STALL_LIMITS", "real")
    how, worker, sections = PLANTED[stall]
    with running(tmp_path, monkeypatch, how, **sections) as command:
        planted_s = time.monotonic()
        if stall == worker:
            os.kill(command.pid_of(worker), signal.SIGSTOP)
        named(command, of=worker)
        assert time.monotonic() - planted_s < FACT_S


def test_healthy_run_raises_no_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STALL_LIMITS", "real")
    monkeypatch.setattr(tiny_run, "FAULTY", tiny_run.HERE / "stalled_headway.py")
    write_inputs(tmp_path)
    length = {"directory": str(tmp_path / "run"), "steps": 10**6, "time_limit_s": HEALTHY_S}
    ended = tiny_run.train(write_experiment(tmp_path, run=length), limit_s=HEALTHY_S + 120)
    assert ended.process.returncode == 0, ended.output
    assert len(steps_of(ended.run)) > HEALTHY_S / 10
    assert not events_of(ended.run, "stalled")
