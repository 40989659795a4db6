"""Workers of environments that die: where none can be started, the run ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_run

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


def test_a_run_ends_when_no_worker_can_be_started(tmp_path: Path) -> None:
    tiny_run.write_inputs(tmp_path)
    name, parameters = "only_once:OnlyOnce", {"mark": str(tmp_path / "mark")}
    config = tiny_run.write_experiment(
        tmp_path,
        model={"path": str(tmp_path / "model"), "template": "chat"},
        environment={"name": name, "parameters": parameters, "workers": 2},
        rollout={"group_size": 2, "max_prompt_tokens": 100, "max_response_tokens": 200},
    )
    command = tiny_run.train(config, limit_s=200)
    assert command.process.returncode == 3, command.output
    assert "gave up after 5 starts" in command.output
    assert "there was one already" in command.output
    assert tiny_run.events_of(command.run, "environment_restart_failed")
    tiny_run.audited(command.run)
    tiny_run.require_nothing_left(command)
