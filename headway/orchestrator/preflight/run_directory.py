"""Checks a run's folder before the start, for a new run or a resume."""

from __future__ import annotations

from collections.abc import Sequence

from headway.config.load import require_resumable
from headway.config.schema import Experiment
from headway.orchestrator.task_sets import changed_data, training_data
from headway.records.check_report import Findings
from headway.records.task import Task
from headway.runtime.run_directory import RunDirectory
from headway.tasks.drawn_demonstrations import Demonstrations
from headway.telemetry.ledger import read_ledger


def directory_findings(
    experiment: Experiment,
    resume: bool,
    train: Sequence[Task],
    demonstrations: Demonstrations | None = None,
    *,
    ahead: bool = False,
) -> Findings:
    """Check the run's folder, and warn where a resume has other training tasks or ``demonstrations``. ``train``: the
    tasks that were read, none where they couldn't be. ``ahead``: a run that is there is checked as for its resume."""
    findings, directory = Findings(), RunDirectory(experiment.run.directory)
    if ahead and not resume and directory.has_run():
        resume = True
        findings.warning(
            "run.directory",
            f"{directory.path} already holds a run: headway train --resume, in a project make run, continues it; "
            "another directory, in a project make clean run, starts a new run",
        )
    holder = directory.holder()
    if holder is not None:
        findings.error("run.directory", f"{directory.path} is in use by process {holder}")
    if directory.path.exists() and not directory.path.is_dir():
        findings.error("run.directory", f"{directory.path} is a file; a folder is needed")
    elif resume != directory.has_run():
        with findings.refused("run.directory"):
            directory.require_startable(resume=resume)
    elif resume:
        with findings.refused("run.directory"):
            require_resumable(directory.read_experiment(), experiment)
            ledger_lines = read_ledger(directory.path) if directory.ledger.is_file() else []
            for key, change_text in changed_data(training_data(train, demonstrations), ledger_lines).items():
                findings.warning(key, change_text.removeprefix(f"{key} "))
    return findings
