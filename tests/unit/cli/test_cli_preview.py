"""What `headway check` prints, and how it ends."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from planned_run import calibration_of, lengths_of, shape_of
from rich.console import Console

from headway.cli import main as cli
from headway.config.auto import Gpu, Machine
from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.control.lengths import LengthDistribution
from headway.control.tuning.forecast import forecast
from headway.orchestrator.preflight import preview as previewing
from headway.orchestrator.preflight.experiment_file import load_experiment
from headway.orchestrator.preflight.run_directory import directory_findings
from headway.records.check_report import Calibration, CheckReport, Finding, MemoryPlace, MemoryUse
from headway.records.errors import WorkerDied
from headway.report.preview import print_preview
from headway.report.progress_bars import CalibrationProgress
from headway.runtime.run_directory import RunDirectory

GIB = 2**30


def experiment_of(**sections: dict[str, Any]) -> Experiment:
    raw: dict[str, Any] = {
        "run": {"directory": "run", "steps": 100},
        "model": {"path": "model"},
        "tasks": {"train": {"path": "tasks.jsonl"}},
        "rollout": {"group_size": 4},
        "queue": {"groups_per_step": 8, "budget": 2},
    }
    return validate_experiment({**raw, **sections}, "test")


def report_of(
    lengths: LengthDistribution | None = None, shape: dict[str, Any] | None = None, **measured: Any
) -> CheckReport:
    lengths = lengths or lengths_of()
    calibration = calibration_of(**({"lengths": lengths.summary(0.0)} | measured))
    return CheckReport(
        findings=[],
        memory=[
            MemoryUse(name="generator-0", location="cuda:0", parts={"KV cache": 6 * GIB, "weights": 2 * GIB}),
            MemoryUse(name="trainer-0", location="memory", parts={"base": GIB // 4}, measured_bytes=GIB // 8),
        ],
        places=[
            MemoryPlace(name="cuda:0", needed_bytes=8 * GIB, capacity_bytes=None, available_bytes=None),
            MemoryPlace(name="memory", needed_bytes=GIB // 4, capacity_bytes=20 * GIB, available_bytes=10 * GIB),
        ],
        calibration=calibration,
        forecast=forecast(shape_of(**(shape or {})), calibration, lengths),
    )


def printed(report: CheckReport) -> str:
    shown = io.StringIO()
    print_preview(report, experiment_of(), Console(file=shown, width=400))
    return shown.getvalue()


def row(text: str, label: str) -> str:
    return next(line[len(label) :].strip() for line in text.splitlines() if line.startswith(label + " "))


def test_memory() -> None:
    text = printed(report_of())
    assert row(text, "generator-0").split() == ["8.00", "KV", "cache", "6.00,", "weights", "2.00"]
    assert row(text, "trainer-0").split()[:2] == ["0.25", "0.12"]  # at most, and seen
    assert "size unknown" in row(text, "= cuda:0")
    assert "10.0 free of 20.0" in row(text, "= memory")


def test_measured_and_predicted() -> None:
    report = report_of(decode_beside_tokens_per_s=2400.0)
    text = printed(report)
    assert row(text, "responses").startswith("mean 20 tokens, median 20, p99 20; 100 ended, 0 cut off")
    assert row(text, "decoding") == "3,200 tokens/s with 32 requests; 2,400 beside the trainer (-25%)"
    assert "a whole step" in row(text, "training")
    assert "generator alone first, then both at once" in row(text, "measured")
    assert row(text, "verifying") == "1.00 ms a response"
    predicted = report.forecast
    assert predicted is not None
    assert row(text, "production").startswith(f"{predicted.production_per_s:.0f} samples/s; effective")
    assert f"= {predicted.balance:.2f}" in row(text, "balance")
    assert f"{predicted.outcome.staleness_mean:.1f} versions in the mean" in row(text, "staleness")
    assert "100 steps" in row(text, "time")
    assert "η = 2 reaches" in row(text, "budget")
    assert "(configured)" in row(text, "budget")


def test_what_is_unknown_is_called_unknown() -> None:
    unknown = lengths_of([], cut=[12] * 9)
    text = printed(report_of(unknown, groups=2, accepted_groups=0, train_samples=3, verify_response_s=0.0))
    assert "0 ended, 9 cut off by the calibration's end; the longest had 12 tokens: lengths are unknown" in text
    assert "filtering unknown" in row(text, "production")
    assert "3 of 32 samples of a step" in row(text, "training")
    assert "verifying" not in text
    tail = printed(report_of(lengths_of([5] * 50, limit=400, cut=[9] * 50)))
    assert "(between" in row(tail, "responses")
    assert "(extrapolated)" in row(tail, "responses")


def test_shared_devices_and_the_changes() -> None:
    text = printed(report_of(shape={"yielded_replicas": 1}, at_once=False, decode_beside_tokens_per_s=None))
    assert "take turns" in row(text, "balance")
    assert "one after the other" in row(text, "measured")
    slow = printed(report_of(train_token_s=1e-3, shape={"budget": 4}))
    assert row(slow, "binds").startswith("the trainer: ")
    assert row(slow, "change 1").startswith("trainer.devices = 2 devices: +")
    assert "needs another device" in row(slow, "change 1")


def test_progress_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    at = iter([0.0, 2.5])
    CalibrationProgress(now=lambda: next(at))("verifies")
    CalibrationProgress(silent=True)("unheard")
    captured = capsys.readouterr()
    assert captured.err.strip() == "2.5 s  verifies"
    assert captured.out == ""


# --- the command -----------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment whose static checks are stood in for by "a warning", on a model of 64 weights."""
    (tmp_path / "model").mkdir()
    sizes = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 4}
    rest = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 9, "head_dim": 2, "num_key_value_heads": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(sizes | rest))
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    file = tmp_path / "experiment.toml"
    file.write_text(
        f'[run]\ndirectory = "{tmp_path}/run"\n[model]\npath = "{tmp_path}/model"\n'
        f'[tasks.train]\npath = "{tmp_path}/tasks.jsonl"\n[rollout]\ngroup_size = 4\n[queue]\nbudget = 2\n'
    )
    warning = Finding(level="warning", key="tasks.train", message="a warning")
    monkeypatch.setattr(previewing, "check", lambda *a, **k: [warning])
    return file


Calibrate = Callable[..., tuple[Calibration, LengthDistribution]]


@pytest.fixture
def calibrate(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stands in for the workers; the seconds it was asked for."""
    asked: list[float] = []

    def stand_in(experiment: object, tasks: object, *, seconds: float, on_progress: Callable[[str], None]) -> Any:
        on_progress("measures")
        asked.append(seconds)
        return calibration_of(resident_bytes={"generator-0": 10 * GIB}), lengths_of()

    monkeypatch.setattr(previewing, "calibrate", stand_in)
    return asked


def test_check_calibrates_unless_told_not_to(
    config: Path, calibrate: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", str(config)]) == 0
    shown = capsys.readouterr()
    assert "Predicted" in shown.out
    assert "measures" in shown.err
    assert "warning: tasks.train: a warning" in shown.err
    assert "warning: model.path: generator-0 already held 10.00 GiB" in shown.err
    assert cli.main(["check", str(config), "--no-calibrate"]) == 0
    shown = capsys.readouterr()
    assert "Memory at most" in shown.out
    assert "adapter" not in shown.out  # of what is 0 nothing is said
    assert "Predicted" not in shown.out
    assert cli.main(["check", str(config), "--calibrate-s", "3"]) == 0
    assert calibrate == [10.0, 3.0]
    assert not (config.parent / "run").exists()


def test_json_is_one_object(config: Path, calibrate: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(config), "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    report = msgspec.json.decode(shown.out, type=CheckReport)
    assert [finding.level for finding in report.findings] == ["warning", "warning", "info"]
    assert report.findings[-1].message.startswith("1 task for about 24 groups open at once")
    assert report.forecast is not None
    assert report.forecast.outcome.samples_per_s > 0
    assert {use.name for use in report.memory} >= {"generator-0", "trainer-0", "orchestrator", "checkpoints"}
    assert cli.main(["check", str(config), "--json", "--no-calibrate"]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"] is None


def test_an_error_starts_no_worker(
    config: Path, calibrate: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = Finding(level="error", key="model.path", message="broken")
    monkeypatch.setattr(previewing, "check", lambda *a, **k: [error])
    assert cli.main(["check", str(config)]) == 2
    assert "error: model.path: broken" in capsys.readouterr().err
    assert cli.main(["check", str(config), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["memory"] == []
    assert calibrate == []


def test_a_worker_that_fails_is_exit_code_3(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise WorkerDied("generator-0", "killed by signal 9")

    monkeypatch.setattr(previewing, "calibrate", fail)
    assert cli.main(["check", str(config)]) == 3
    assert "generator-0" in capsys.readouterr().err


# --- what the measurements say about the configuration ---------------------------------------------------


def findings_of(lengths: LengthDistribution, shape: dict[str, Any] | None = None, **measured: Any) -> dict[str, str]:
    report = report_of(lengths, shape, **measured)
    assert report.calibration is not None
    assert report.forecast is not None
    budget = (shape or {}).get("budget", 2)
    experiment = experiment_of(queue={"groups_per_step": 8, "budget": budget})
    found = previewing.calibration_findings(experiment, report.calibration, report.forecast)
    return {finding.key: finding.message for finding in found if finding.key != "model.path"}


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previewing, "check_resident_memory", lambda *a: None)


@pytest.mark.usefixtures("small_model")
def test_a_budget_below_what_the_tail_needs() -> None:
    tail = lengths_of([5] * 900 + [200] * 100, limit=200)
    shape = {"budget": 1, "max_response_tokens": 200}
    found = findings_of(tail, shape, train_fixed_s=0.05, train_token_s=0.0)["queue.budget"]
    assert "1 is less than the 9 that the longest responses need (200 tokens, p99, at a mean of 24)" in found
    assert "% of its ideal rate (9 would reach" in found
    assert findings_of(tail, shape | {"budget": 9}, train_fixed_s=0.05, train_token_s=0.0) == {}
    assert findings_of(lengths_of(), {"budget": 2}) == {}


@pytest.mark.usefixtures("small_model")
def test_lengths_that_are_hardly_known() -> None:
    unknown = findings_of(lengths_of([], cut=[12] * 9))["rollout.max_response_tokens"]
    assert "no response ended" in unknown
    wide = findings_of(lengths_of([5] * 50, limit=400, cut=[9] * 50))["rollout.max_response_tokens"]
    assert "50 of 100 still grew" in wide


@pytest.mark.usefixtures("small_model")
def test_rollouts_that_fail_and_groups_that_teach_nothing() -> None:
    found = findings_of(lengths_of(), failed_rollouts=3, failure_cause="the verifier raised", accepted_groups=0)
    assert found["rollout"] == "3 rollouts failed: the verifier raised"
    assert "none of 50 groups could be trained" in found["queue.filter_zero_variance"]


@pytest.mark.parametrize(("seconds", "said"), [(10.0, ["environment.name"]), (None, [])])
def test_rates_of_an_environment_are_said_to_be_left_out(
    seconds: float | None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("check", "node_findings", "memory_uses", "memory_places"):
        monkeypatch.setattr(previewing, name, lambda *given, **options: previewing.Findings())
    monkeypatch.setattr(previewing, "sizes_of", lambda path: None)
    shown: list[str] = []
    report = previewing.preview(
        experiment_of(environment={"name": "letters:Sort"}),
        seconds=seconds,
        on_findings=lambda findings: shown.extend(finding.key for finding in findings),
    )
    assert [finding.key for finding in report.findings] == shown == said
    assert report.calibration is None


def test_a_run_that_is_there_is_checked_with_its_engine_and_dtypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resolved on a machine with GPUs, and checked on one without."""
    monkeypatch.chdir(tmp_path)
    text = '[run]\ndirectory = "run"\n[model]\npath = "model"\n[tasks.train]\npath = "tasks.jsonl"\n'
    Path("experiment.toml").write_text(text)
    gpu = Gpu(index=0, name="H100", memory_bytes=80 << 30, free_bytes=80 << 30)
    begun = load_experiment("experiment.toml", machine=Machine(gpus=(gpu,), torch_cuda="13.0"))
    with RunDirectory("run") as run:
        run.begin(begun, resume=False)
    checked: list[Finding] = []

    def stand_in(experiment: Experiment, **options: Any) -> CheckReport:
        checked.extend(directory_findings(experiment, options["resume"], [], ahead=True))
        return report_of()

    monkeypatch.setattr(previewing, "preview", stand_in)
    monkeypatch.setattr("headway.orchestrator.preflight.experiment_file.read_machine", Machine)
    assert cli.main(["check", "experiment.toml", "--json"]) == 0
    assert [finding.level for finding in checked] == ["warning"], checked
