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


HEALTHY: dict[str, dict[str, Any]] = {
    "tiny": {},
    "quickstart": {  # sizes of examples/arithmetic/experiment.toml, with its evaluations
        "rollout": {"group_size": 8, "max_prompt_tokens": 32, "max_response_tokens": 160},
        "generator": {"slots": 128},
        "queue": {"groups_per_step": 32, "budget": 2, "filter_zero_variance": False},
        "checkpoint": {"every_steps": 50},
        "evaluation": {"every_s": 15},
    },
    "slow verifier": {  # a long tail of scores behind a long tail of lengths
        "rollout": {"group_size": 4, "max_prompt_tokens": 16, "max_response_tokens": 400},
        "verifier": VERIFIER | {"name": "stall_functions:sleeps", "workers": 2},
    },
}


@pytest.mark.timeout(HEALTHY_S + 300)
@pytest.mark.parametrize("load", HEALTHY)
def test_healthy_run_raises_no_alarm(load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STALL_LIMITS", "real")
    monkeypatch.setenv("STALL_FILE", str(tmp_path / "never"))
    monkeypatch.setattr(tiny_run, "FAULTY", tiny_run.HERE / "stalled_headway.py")
    write_inputs(tmp_path)
    sections = dict(HEALTHY[load])
    if "evaluation" in sections:
        (tmp_path / "validation.jsonl").write_text(
            "".join(f'{{"prompt": "{n}+7=", "answer": "1"}}\n' for n in range(30, 94))
        )
        sections["tasks.validation"] = {"path": str(tmp_path / "validation.jsonl")}
    length = {"directory": str(tmp_path / "run"), "steps": 10**6, "time_limit_s": HEALTHY_S, "on_stall": "warn"}
    ended = tiny_run.train(write_experiment(tmp_path, run=length, **sections), limit_s=HEALTHY_S + 200)
    assert ended.process.returncode == 0, ended.output
    steps, stalls = steps_of(ended.run), events_of(ended.run, "stalled")
    longest_s = max(step.step_s for step in steps)
    print(f"{load}: {len(steps)} steps in {HEALTHY_S:g} s, the longest {longest_s:.1f} s; {len(stalls)} stalls")
    assert len(steps) > HEALTHY_S / 30
    assert not stalls, stalls
