"""`headway check` with real workers: what it measures, how it fails, what it leaves behind (nothing)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import msgspec
import pytest
from tiny_run import headway, require_nothing_left, write_experiment, write_inputs

from headway.config.load import load_experiment
from headway.models.initialise import initialise_model
from headway.models.sizes import sizes_of
from headway.orchestrator.preflight.memory import memory_uses
from headway.orchestrator.preflight.preview import preview
from headway.records.check_report import CheckReport

pytestmark = pytest.mark.real

# A random model's responses are long or short as it happens; its groups are never all alike (verified by parity).


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibration")
    write_inputs(folder)
    return folder


def test_a_calibration_measures_both_sides(inputs: Path) -> None:
    config = write_experiment(inputs)
    with headway("check", config, "--calibrate-s=2", "--json", run=inputs / "run") as command:
        assert command.wait() == 0, command.output
        require_nothing_left(command)
    assert not (inputs / "run").exists()
    report = msgspec.json.decode(command.output.splitlines()[-1], type=CheckReport)
    assert not [finding for finding in report.findings if finding.level == "error"]
    measured, predicted = report.calibration, report.forecast
    assert measured is not None
    assert predicted is not None
    assert measured.at_once
    assert measured.lengths.finished > 50
    assert 1 <= measured.lengths.mean_tokens <= 12
    assert measured.lengths.longest_tokens <= 12
    assert measured.train_samples == 16  # a whole step: 4 groups of 4
    assert measured.groups > 10
    assert 0 < measured.accepted_groups <= measured.groups
    assert measured.failed_rollouts == 0
    for rate in (measured.decode_tokens_per_s, measured.train_tokens_per_s, measured.prefill_tokens_per_s):
        assert rate > 50
    for seconds in (measured.publish_s, measured.apply_s, measured.verify_response_s, measured.decode_request_s):
        assert 0 <= seconds < 1
    assert predicted.outcome.samples_per_s > 1
    assert predicted.outcome.staleness_max <= 2
    assert set(measured.resident_bytes) == {"generator-0", "trainer-0", "orchestrator"}


def test_a_calibration_measures_teachers_that_score(inputs: Path) -> None:
    """The run's folder stays as it is, also where the stage keeps its teachers' identities in a run."""
    teacher = {"path": str(inputs / "model"), "devices": ["cpu:1"], "top_k": 3}
    config = write_experiment(inputs, algorithm={"teacher": "big"}, teachers={"big": teacher})
    with headway("check", config, "--calibrate-s=2", "--json", run=inputs / "run") as command:
        assert command.wait() == 0, command.output
        require_nothing_left(command)
    assert not (inputs / "run").exists()
    report = msgspec.json.decode(command.output.splitlines()[-1], type=CheckReport)
    assert report.calibration is not None
    assert 0 < report.calibration.teach_response_s < 1
    assert "teacher-big-0" in {use.name for use in report.memory}


@pytest.mark.parametrize("worker", ["generator-0", pytest.param("trainer-0", marks=pytest.mark.long)])
def test_a_worker_that_dies_ends_it_with_its_cause(inputs: Path, worker: str) -> None:
    config = write_experiment(inputs)
    with headway("check", config, "--calibrate-s=30", run=inputs / "run") as command:
        assert command.process.stdout is not None
        line = ""
        for line in command.process.stdout:
            if "full concurrency" in line:
                break
        assert "full concurrency" in line
        os.kill(command.pid_of(worker), signal.SIGKILL)
        assert command.wait() == 3, command.output
        assert worker in command.output
        assert "signal 9" in command.output or "SIGKILL" in command.output, command.output
        require_nothing_left(command)


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(inputs: Path) -> None:
    config = write_experiment(inputs)
    with headway("check", config, "--calibrate-s=30", run=inputs / "run") as command:
        assert command.process.stdout is not None
        next(line for line in command.process.stdout if "decodes" in line)
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130, command.output
        assert "Traceback" not in command.output
        require_nothing_left(command)
    assert not (inputs / "run").exists()


@pytest.mark.slow
@pytest.mark.long
def test_memory_is_predicted_for_a_model_that_is_larger_than_the_interpreter(tmp_path: Path) -> None:
    """Within 30 % of the peak of the real processes, slots and micro-batches full."""
    prompts = [f"{a}+{b}=" for a in range(10, 30) for b in range(10)]
    rows = [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows) + "\n")
    sizes = {"layers": 6, "width": 640, "heads": 8, "kv_heads": 8, "intermediate": 2560}
    initialise_model(tmp_path / "model", prompts, **sizes, character_level=True)
    config = write_experiment(
        tmp_path,
        rollout={"group_size": 4, "max_prompt_tokens": 8, "max_response_tokens": 24},
        generator={"slots": 16},
        trainer={"micro_batch_tokens": 128},  # full ones
    )
    experiment = load_experiment(str(config), [])
    report = preview(experiment, seconds=6.0)
    predicted = {use.name: use for use in memory_uses(experiment, sizes_of(tmp_path / "model"))}
    assert report.calibration is not None
    for name in ("generator-0", "trainer-0"):
        use, seen = predicted[name], report.calibration.resident_bytes[name]
        assert use.total_bytes > 1.5 * use.parts["base"]
        written = use.parts.get("checkpoint", 0)  # a copy for a checkpoint, of which a preview writes none
        assert seen == pytest.approx(use.total_bytes - written, rel=0.3), (name, use.parts)
