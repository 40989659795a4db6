"""`headway train`, `headway check` and `headway eval`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli import experiment_options as experiments
from headway.cli.printing import USD_PER_DEVICE_HOUR, price_from, print_json, print_result, print_rows
from headway.cli.serving import check_tinker
from headway.records.errors import ConfigurationError

if TYPE_CHECKING:
    from headway.config.schema import Experiment
    from headway.config.simulation import SimulatorExperiment
    from headway.records.check_report import Finding
    from headway.records.ledger import RunSummary


AUTO = "auto"  # for --plan
AUTO_SETTINGS = ['control.mode="act"', 'control.devices="move"']


def add_commands(app: typer.Typer) -> None:
    file_name = "experiment.toml"
    experiments.add_command(app, train, f"headway train {file_name} --queue.budget=8 --run.seed=3")
    experiments.add_command(app, serve_buffer, f"headway serve-buffer {file_name} --endpoint.address=127.0.0.1:8000")
    experiments.add_command(app, check, f"headway check {file_name} --no-calibrate")
    experiments.add_command(app, evaluate, f"headway eval {file_name} --model runs/rl/best", name="eval")


def train(
    context: typer.Context,
    config: str = experiments.CONFIG,
    plan: str = typer.Option(
        "",
        "--plan",
        metavar="FILE",
        help="Run by this plan of headway plan; auto: the run plans by its own steps and changes placement.",
    ),
    resume: bool = typer.Option(False, "--resume", help="Resume the run in run.directory."),
    take_over: bool = typer.Option(
        False, "--take-over", help="With --resume of a copied run: declare that its former process has ended."
    ),
    usd_per_device_hour: str = USD_PER_DEVICE_HOUR,
    dry_run: bool = typer.Option(False, "--dry-run", help="Check, print the plan and stop."),
    machine: str = typer.Option("", "--machine", metavar="POOL", help="Refused: see headway check.", hidden=True),
    quiet: bool = typer.Option(False, "--quiet", help="No live view; only the summary at the end."),
    as_json: bool = typer.Option(False, "--json", help="No live view; print the summary as one JSON object."),
) -> None:
    """Train by reinforcement learning, asynchronously. Ctrl-C once drains and checkpoints, twice stops at once.

    A language model on tasks, or a policy in simulators where the file has [simulator] (docs/embodied.md).

    Any key of the experiment file can be given as --section.key=value.
    """
    if machine:
        raise ConfigurationError(f"--machine {machine} describes a machine: valid with check; train runs on this one")
    run: Callable[..., RunSummary]
    if experiments.names_simulator(context, config):
        from headway.embodied.driver import train as run
        from headway.embodied.preflight import findings, plan_rows

        if plan not in ("", AUTO):
            raise ConfigurationError(f"--plan {plan} beside [simulator]: valid: auto, or devices in the file")
        experiment = experiments.load_policy(context, config, *(AUTO_SETTINGS if plan else []))
        _require_no_errors(findings(experiment, resume=resume, opens=dry_run), all_levels=True)
        rows = plan_rows(experiment) if dry_run else {}
    else:
        from headway.orchestrator.train import train as run
        from headway.report.dry_run import dry_run_rows
        from headway.rollout.hosting.service import scores_itself

        plan_overrides = _plan_settings(context, config, plan, resume)
        experiment = experiments.load(context, config, *plan_overrides, resume=resume)
        _check(experiment, resume=resume, complete=dry_run, quiet=as_json)
        rows = dry_run_rows(experiment, scores_itself(experiment.environment)) if dry_run else {}
    if dry_run:
        print_rows(rows)
        typer.echo(f"\nheadway check {config}   predicts memory, rates and staleness")
        return
    from headway.report.live_view import LiveView

    price = price_from(usd_per_device_hour)
    with nullcontext() if quiet or as_json else LiveView(experiment, usd_per_device_hour=price) as on_line:
        if plan and plan != AUTO:
            from headway.planner.plan_files import keep_plan

            on_line = keep_plan(plan, experiment.run.directory, on_line)
        summary = run(experiment, resume=resume, take_over=take_over, on_line=on_line)
    best_folder = Path(experiment.run.directory) / "best"
    if price is not None and best_folder.is_dir():
        from headway.orchestrator.jobs.model_card import write_run_card

        write_run_card(best_folder, experiment.run.directory, price)
    _finish(summary, experiment.run.directory, as_json, price)


def serve_buffer(
    context: typer.Context,
    config: str = experiments.CONFIG,
    resume: bool = typer.Option(False, "--resume", help="Resume the run in run.directory."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary at the end as one JSON object."),
) -> None:
    """Train on the rollouts of outside workers alone: headway train with environment.name = "remote", quiet.

    Prints where workers lease members (docs/buffer-service.md). Ctrl-C once drains and checkpoints.

    Any key of the experiment file can be given as --section.key=value.
    """
    from headway.records.ledger import EventRecord, LedgerLine
    from headway.telemetry.ledger import EVENT_SERVICE

    def print_service_event(line: LedgerLine) -> None:
        if isinstance(line, EventRecord) and line.event == EVENT_SERVICE:
            typer.echo(line.detail, err=as_json)

    experiment = experiments.load(context, config, 'environment.name="remote"', resume=resume)
    _check(experiment, resume=resume, complete=False, quiet=as_json)
    from headway.orchestrator.train import train as run

    _finish(run(experiment, resume=resume, on_line=print_service_event), experiment.run.directory, as_json)


def _finish(summary: RunSummary, directory: str, as_json: bool, price: float | None = None) -> None:
    """Write RUN/report.html and print the summary."""
    from headway.records.errors import HeadwayError
    from headway.report.tables import print_summary
    from headway.services.watch.page_file import write_run_page

    try:
        write_run_page(directory, price=price)
    except (HeadwayError, OSError) as error:  # doesn't make a finished run fail
        typer.echo(f"no page: {error}", err=True)
    print_result(summary, as_json, lambda: print_summary(summary, directory))


def _plan_settings(context: typer.Context, config: str, plan: str, resume: bool) -> list[str]:
    """The settings of a plan, as overrides."""
    from headway.planner.plan_files import read_plan
    from headway.planner.run_plan import planned_settings

    if plan == AUTO:
        return AUTO_SETTINGS
    if not plan:
        return []
    settings = planned_settings(experiments.load(context, config, resume=resume), read_plan(plan), plan)
    return [f"{key}={value}" for key, value in settings.items()]


def check(
    context: typer.Context,
    config: str = experiments.CONFIG,
    resume: bool = typer.Option(False, "--resume", help="Check for a resume of the run in run.directory."),
    calibrate: bool = typer.Option(
        True, "--calibrate/--no-calibrate", help="Start the run's workers, measure some seconds, predict the rates."
    ),
    calibrate_s: float = typer.Option(10.0, "--calibrate-s", metavar="SECONDS", min=1.0, help="How long to measure."),
    deep: bool = typer.Option(False, "--deep", help="Compare every byte of model files on nodes, not samples."),
    strict: bool = typer.Option(False, "--strict", help="Fail if even one task isn't solved by its own answer."),
    machine: str = experiments.MACHINE,
    as_json: bool = typer.Option(False, "--json", help="Print findings, measurements and forecast as one JSON object."),
) -> None:
    """Find what would stop or spoil the run, and predict its memory, rates and staleness.

    Leaves nothing in the run's folder. A model that headway sft will make, and a run that --resume would continue,
    are warnings. Checks the cluster's nodes when they join, as they do for a run; agents that you started then
    wait for the run.

    Exit code 2 when there is an error, 3 when a worker fails while the run is calibrated. Of a file of headway
    serve-tinker, settings and memory are checked.

    Any key of the experiment file can be given as --section.key=value.
    """
    if experiments.names_simulator(context, config):
        if machine:
            raise ConfigurationError(f"--machine {machine} beside [simulator]: valid: a check on this machine")
        _check_policy(experiments.load_policy(context, config), resume, calibrate_s if calibrate else None, as_json)
        return
    described = experiments.described_machine(machine)
    from headway.config.load import read_toml

    if "tinker" in read_toml(config):
        return check_tinker(config, experiments.given_overrides(context))
    experiment = experiments.load(context, config, resume=True, machine=described)  # a run that is there keeps values
    from headway.orchestrator.preflight.preview import preview
    from headway.report.preview import print_preview
    from headway.report.progress_bars import CalibrationProgress

    with CalibrationProgress(calibrate_s, silent=as_json) as progress:
        report = preview(
            experiment,
            resume=resume,
            deep=deep,
            strict=strict,
            machine=described,
            seconds=calibrate_s if calibrate else None,
            on_progress=progress,
            on_findings=(lambda findings: None) if as_json else _print_findings,
        )
    has_error = any(finding.level == "error" for finding in report.findings)
    if as_json:
        print_json(report)
    elif not has_error:
        print_preview(report, experiment)
        scope = f" on that machine; weights, disk and rates are checked there ({machine})" if machine else ""
        typer.echo(f"\n{'No errors' if report.findings else 'Nothing found: the run can start'}{scope}.")
    if has_error:
        raise typer.Exit(2)


def evaluate(
    context: typer.Context,
    config: str = experiments.CONFIG,
    model: str = typer.Option(
        "", "--model", metavar="PATH", help="Model folder with its tokenizer; default: model.path of CONFIG."
    ),
    adapter: str = typer.Option("", "--adapter", metavar="PATH", help="Adapter's folder, in PEFT's format."),
    split: str = typer.Option("test", "--split", metavar="NAME", help="train, validation or test."),
    as_json: bool = typer.Option(False, "--json", help="Print the score as one JSON object."),
) -> None:
    """Score a model on the tasks of one split.

    Any key of the experiment file can be given as --section.key=value.
    """
    if split not in ("train", "validation", "test"):
        raise typer.BadParameter(f"--split {split!r}: valid: train, validation and test")
    experiment = experiments.load(context, config)
    if getattr(experiment.tasks, split) is None:
        raise typer.BadParameter(f"--split {split!r}: {config} has no tasks.{split}")
    if model and (Path(model) / "adapter_config.json").is_file():
        raise typer.BadParameter(f"--model {model} is an adapter; valid: --adapter {model}, with its model")
    from headway.orchestrator.jobs.evaluate import evaluate_model
    from headway.report.live_view import evaluation_line
    from headway.report.progress_bars import ProgressBar

    model_path = model or experiment.model.path
    with ProgressBar("rollouts", silent=as_json) as bar:
        record = evaluate_model(experiment, model_path=model_path, adapter_path=adapter, split=split, on_progress=bar)
    print_result(record, as_json, lambda: typer.echo(evaluation_line(record)))


def _check(experiment: Experiment, *, resume: bool, complete: bool, quiet: bool) -> None:
    """Check before training. Raises ConfigurationError if there are errors. Without ``complete`` the verifier's smoke
    test is skipped, since the run starts the verifiers anyway."""
    from headway.orchestrator.preflight.check import check as find

    findings = find(experiment, resume=resume, smoke_test=complete)
    _require_no_errors(findings, all_levels=complete, quiet=quiet)


def _check_policy(experiment: SimulatorExperiment, resume: bool, seconds: float | None, as_json: bool) -> None:
    """Check a policy in simulators, run it for about ``seconds`` in a folder of its own (None: don't), and print its
    memory, rates and those of other placements."""
    from headway.embodied.preflight import calibrate, findings, forecast_rows, plan_rows

    errors = findings(experiment, resume=resume, opens=seconds is None)
    if not as_json:
        _require_no_errors(errors, all_levels=True)
    measured = None if seconds is None or errors else calibrate(experiment, seconds)
    if as_json:
        print_json({"findings": errors, "measured": measured})
        raise typer.Exit(2 if errors else 0)
    print_rows(plan_rows(experiment) | ({} if measured is None else forecast_rows(experiment, measured)))
    typer.echo("\nNothing found: the run can start.")


def _require_no_errors(findings: list[Finding], *, all_levels: bool, quiet: bool = False) -> None:
    """Print the findings. Raises ConfigurationError if there are errors."""
    errors = [finding for finding in findings if finding.level == "error"]
    if not quiet or errors:
        _print_findings(findings if all_levels or errors else [f for f in findings if f.level == "warning"])
    if errors:
        count_text = "1 error" if len(errors) == 1 else f"{len(errors)} errors"
        raise ConfigurationError(f"check found {count_text}; the run was not started")


def _print_findings(findings: list[Finding]) -> None:
    for finding in findings:
        message = (
            finding.message if finding.message.startswith(f"{finding.key} = ") else f"{finding.key}: {finding.message}"
        )
        typer.echo(f"{finding.level}: {message}", err=finding.level != "info")
