"""The command line: exit codes, messages, overrides, and start-up that loads nothing heavy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from recorded import record_texts
from synthetic_run import evaluation, synthetic_lines, write_run

from headway.cli import main as cli
from headway.cli.experiment_options import overrides
from headway.records.errors import ConfigurationError, Interrupted, WorkerDied
from headway.tasks.source_rows import read_texts
from headway.telemetry.summary import summarise

COMMANDS = ("init-model", "sft", "train", "check", "eval", "report", "show", "trace")


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": "2"}) + "\n" for i in range(9))
    )
    file = tmp_path / "experiment.toml"
    file.write_text(
        f'[run]\ndirectory = "{tmp_path}/run"\n[model]\npath = "{tmp_path}/model"\n'
        f'[tasks.train]\npath = "{tmp_path}/tasks.jsonl"\n[tasks.test]\npath = "{tmp_path}/tasks.jsonl"\n'
    )
    return file


# --- overrides -------------------------------------------------------------------------------------------


def test_overrides_come_with_equals_or_a_space() -> None:
    given = ["--queue.budget=8", "--run.seed", "3", "--rollout.stop=['a=b']"]
    assert overrides(given) == ["--queue.budget=8", "--run.seed=3", "--rollout.stop=['a=b']"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--resum"], "did you mean --resume"),
        (["--budget=3"], "--section.key=value"),
        (["extra"], "unexpected argument: extra"),
        (["--queue.budget"], "needs a value"),
        (["--queue.budget", "--run.seed=1"], "needs a value"),
    ],
)
def test_what_is_no_override_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        overrides(given, ["--resume", "--dry-run"])


# --- exit codes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_one_screen_of_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    text = plain(capsys.readouterr().out)
    assert f"Example: headway {command}" in " ".join(text.split())
    assert len(text.splitlines()) <= 60


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = plain(capsys.readouterr().out)
    assert all(command in text for command in COMMANDS)
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"headway \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [["trian"], ["train"], ["report", "run", "--jso"], ["show", "run", "--step", "x"], ["init-model", "out"]],
)
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert "Usage" in plain(capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [["--run.directory=x"], ["--run.directory=x", "experiment.toml"]])
@pytest.mark.parametrize("command", ["train", "eval", "sft"])
def test_an_override_in_the_place_of_the_file(
    command: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, *arguments]) == 2
    told = " ".join(plain(capsys.readouterr().err).replace("│", " ").split())
    assert f"file is missing before --run.directory=x: headway {command} experiment.toml --run.directory=x" in told


def test_bad_input_is_one_line_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_typo_in_an_override_names_the_nearest_key(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(config), "--queue.buget=3"]) == 2
    assert "did you mean 'budget'" in capsys.readouterr().err
    assert cli.main(["train", str(config), "--dry-rum"]) == 2
    assert "did you mean --dry-run" in plain(capsys.readouterr().err)


def test_traceback_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_TRACEBACK", "1")
    with pytest.raises(ConfigurationError):
        cli.main(["report", str(tmp_path / "nothing")])


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (WorkerDied("trainer-0", "signal 9"), 3, "error: worker trainer-0 died: signal 9"),
        (Interrupted("checkpoint at version 7"), 130, "interrupted: checkpoint at version 7"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_exit_codes(
    raised: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr("headway.report.recorded_samples.show_samples", lambda *a, **k: fail())
    assert cli.main(["show", "run"]) == code
    assert message in capsys.readouterr().err


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("headway.report.recorded_samples.show_samples", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["show", "run"])


# --- commands --------------------------------------------------------------------------------------------


def test_report_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, synthetic_lines(10))
    assert cli.main(["report", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["solve_rate_after"] == 0.93
    assert not (folder / "report.html").exists()


def test_report_writes_the_page_and_says_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", synthetic_lines(10))
    assert cli.main(["report", str(folder), "--html", str(tmp_path / "a.html")]) == 0
    assert (tmp_path / "a.html").is_file()
    out = capsys.readouterr().out
    assert "Who waits for whom?" in out
    assert out.splitlines()[-1] == f"report: {tmp_path}/a.html"


def _stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **functions: object) -> None:
    """Put a module with ``functions`` where a command imports one that needs worker processes."""
    from types import ModuleType

    stand_in = ModuleType(module)
    for name, function in functions.items():
        setattr(stand_in, name, function)
    monkeypatch.setitem(sys.modules, module, stand_in)


def test_train_hands_over_experiment_resume_and_view(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[int, bool, bool]] = []

    def run(experiment: object, *, resume: bool, take_over: bool, on_line: object) -> object:
        calls.append((experiment.queue.budget, resume, on_line is not None))  # type: ignore[attr-defined]
        return summarise(synthetic_lines(10))

    _stand_in(monkeypatch, "headway.orchestrator.train", train=run)
    monkeypatch.setattr("headway.orchestrator.preflight.check.check", lambda *a, **k: [])
    assert cli.main(["train", str(config), "--queue.budget=8", "--resume"]) == 0
    assert "0.452 before → 0.930 after" in capsys.readouterr().out
    assert cli.main(["train", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accounting_balanced"] is True
    assert calls == [(8, True, True), (4, False, False)]


def test_train_does_not_start_when_check_finds_an_error(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(config)]) == 2
    error = capsys.readouterr().err
    assert "error: model.path: no such folder" in error
    assert "the run was not started" in error.splitlines()[-1]


def test_eval_prints_the_score(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str]] = []

    def evaluate_model(experiment: object, *, model_path: str, split: str, **how: object) -> object:
        asked.append((model_path, split))
        return evaluation("after", 3, 0.5)

    _stand_in(monkeypatch, "headway.orchestrator.jobs.evaluate", evaluate_model=evaluate_model)
    assert cli.main(["eval", str(config), "--model", "best/model", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["solve_rate"] == 0.5
    assert asked == [("best/model", "test")]
    assert cli.main(["eval", str(config), "--split", "validation"]) == 2
    assert "no tasks.validation" in plain(capsys.readouterr().err)
    assert cli.main(["eval", str(config), "--split", "tset"]) == 2


def test_sft_prints_what_it_returns(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_sft(experiment: object, *, on_progress: object) -> dict[str, object]:
        on_progress({"step": 1, "steps": 1, "loss": 2.5})  # type: ignore[operator]
        return {"steps": 1, "dropped_too_long": 4}

    _stand_in(monkeypatch, "headway.orchestrator.jobs.sft", run_sft=run_sft)
    assert cli.main(["sft", str(config), "--sft.steps=1"]) == 0
    out = capsys.readouterr().out
    assert "step 1/1 · loss 2.5" in out
    assert "dropped too long   4" in out
    assert cli.main(["sft", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dropped_too_long"] == 4


def test_texts_are_every_string_of_the_files(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "answer": "b", "n": 3, "metadata": {"parts": ["c", {"d": "e"}]}}\n')
    assert read_texts([str(file)]) == ["a", "b", "c", "e"]
    file.write_text('{"n": 1}\n')
    with pytest.raises(ConfigurationError, match="no text"):
        read_texts([str(file)])


# --- weight ----------------------------------------------------------------------------------------------


def test_start_loads_nothing_heavy() -> None:
    code = (
        "import sys, headway.cli.main\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'tensorboardX', 'numpy', 'pydantic', 'reasoning_gym'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_check_report_and_ledger_never_load_torch() -> None:
    code = (
        "import sys, headway.orchestrator.preflight.preview, headway.report.watch.view_report\n"
        "import headway.report.live_view\n"
        "import headway.report.tables\n"
        "import headway.report.recorded_samples, headway.report.dry_run, headway.report.preview\n"
        "import headway.report.progress_bars\n"
        "import headway.report.trace, headway.telemetry.exporters.prometheus\n"
        "import headway.telemetry.exporters.tensorboard as tracker\n"
        "import headway.telemetry.exporters.wandb, headway.telemetry.exporters.mlflow\n"
        "tracker._tensorboardx()\n"
        "assert 'tensorboardX' in sys.modules\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_a_closed_pipe_is_not_a_traceback(tmp_path: Path) -> None:
    sample = {
        "step": 1, "group": 1, "member": 0, "prompt": "p" * 500, "response": "r", "reward": 1.0, "solved": True,
        "advantage": 0.1, "versions": [[0, 1]], "finish_reason": "stop", "ending": "trained",
    }  # fmt: skip
    record_texts(tmp_path, ({**sample, "group": group} for group in range(2000)))
    command = f"'{sys.executable}' -m headway.cli.main show {tmp_path} --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith('{"step":1')
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
