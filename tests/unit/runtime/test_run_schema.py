"""A run of another schema is refused by all that read or resume it, with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from recorded import record_texts

from headway.buffer.store import GroupBuffer
from headway.cli.main import main as headway
from headway.config.load import validate_experiment
from headway.records.errors import ConfigurationError
from headway.report.several.run_list import list_runs
from headway.report.watch.watched_runs import WatchedRuns
from headway.runtime.run_directory import SCHEMA, RunDirectory

RECORDED = Path(__file__).parents[2] / "fixtures" / "run_folders"
ROW = {"step": 1, "group": 1, "member": 0, "prompt": "p", "response": "r", "reward": 1.0, "solved": True,
       "advantage": 0.1, "versions": [[0, 1]], "finish_reason": "stop", "ending": "trained"}  # fmt: skip
WHAT_TO_DO = (
    "Read and resume the run with the Headway that wrote it, or start in another run.directory, from its weights if "
    "you like: --model.path="
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with all that commands read."""
    folder = tmp_path / "run"
    shutil.copytree(RECORDED / "ended", folder)
    record_texts(folder, [ROW])
    GroupBuffer(folder / "buffer.db", 4).close()
    (folder / "trace.jsonl").write_text("")
    return folder


def with_schema(run: Path, schema: object) -> Path:
    path = run / "config.json"
    raw = {name: value for name, value in json.loads(path.read_text()).items() if name != "schema"}
    path.write_text(json.dumps(raw if schema is None else {"schema": schema, **raw}))
    return run


@pytest.mark.parametrize(
    "command", ["report", "show", "doctor", "explain-task", "export --to jsonl", "trace", "simulate"]
)
@pytest.mark.parametrize("schema", [None, SCHEMA - 1, SCHEMA + 1, "5"])
def test_commands_end_with_2_and_say_what_to_do(
    run: Path, command: str, schema: object, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run.rglob("*"))
    name, *options = command.split()
    assert headway([name, str(with_schema(run, schema)), *options]) == 2
    said = " ".join(capsys.readouterr().err.split())
    found = "no schema's number" if schema is None else f"schema {schema!r}"
    assert f"its files have {found}, and this one reads schema {SCHEMA}. {WHAT_TO_DO}{run}/checkpoints" in said
    assert sorted(run.rglob("*")) == before


def test_resume_is_refused_and_leaves_the_folder_as_it_was(run: Path) -> None:
    experiment = RunDirectory(run).read_experiment()
    moved = experiment.run.model_copy(update={"directory": str(run)})
    stored = with_schema(run, SCHEMA - 1).joinpath("config.json").read_bytes()
    with RunDirectory(run) as directory, pytest.raises(ConfigurationError, match=f"its files have schema {SCHEMA - 1}"):
        directory.begin(experiment.model_copy(update={"run": moved}), resume=True)
    assert (run / "config.json").read_bytes() == stored


def test_watch_lists_it_and_opens_nothing(run: Path) -> None:
    with_schema(run, None)
    assert [WHAT_TO_DO in problem for problem in list_runs([run])[0].problems] == [True]
    watched = WatchedRuns([run])
    assert WHAT_TO_DO in watched.listing()["runs"][0]["problems"][0]
    with pytest.raises(ConfigurationError, match="another Headway"):
        watched.run("run")


def test_a_started_run_has_the_schema_of_today(tmp_path: Path) -> None:
    experiment = validate_experiment(
        {"run": {"directory": str(tmp_path)}, "model": {"path": "m"}, "tasks": {"train": {"path": "t.jsonl"}}}, "test"
    )
    with RunDirectory(tmp_path) as run:
        run.begin(experiment, resume=False)
    assert json.loads((tmp_path / "config.json").read_text())["schema"] == SCHEMA
    assert RunDirectory(tmp_path).read_experiment() == experiment
