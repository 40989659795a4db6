"""`headway train` and `headway check` of an experiment with ``[simulator]``, which `cli/training.py` hands on."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import typer

from headway.cli import experiment_options as experiments
from headway.cli.printing import print_json, print_rows
from headway.records.errors import ConfigurationError

if TYPE_CHECKING:
    from headway.config.simulation import SimulatorExperiment
    from headway.records.check_report import Finding
    from headway.records.ledger import RunSummary


def names_simulator(config: str) -> bool:
    """Whether the experiment file has ``[simulator]``. A file that can't be read has none: its reader reports it."""
    from headway.config.load import read_toml

    try:
        return "simulator" in read_toml(config)
    except ConfigurationError:
        return False


def load(context: typer.Context, config: str, *settings: str) -> SimulatorExperiment:
    """Read the experiment, with ``settings`` below the command's overrides. Raises ConfigurationError."""
    from headway.config.load import load_file
    from headway.config.simulation import SimulatorExperiment

    return load_file(config, [*settings, *experiments.given_overrides(context)], SimulatorExperiment)


def train(
    experiment: SimulatorExperiment,
    *,
    resume: bool,
    take_over: bool,
    price: float | None,
    dry_run: bool,
    silent: bool,
) -> RunSummary | None:
    """Train the policy, in the live view unless ``silent``; None: ``dry_run`` only printed the plan."""
    from headway.embodied.preflight import findings, plan_rows

    _report(findings(experiment, resume=resume, opens=dry_run))
    if dry_run:
        print_rows(plan_rows(experiment))
        return None
    from headway.embodied.driver import train as run
    from headway.report.live_view import LiveView

    with nullcontext() if silent else LiveView(experiment, usd_per_device_hour=price) as on_line:
        return run(experiment, resume=resume, take_over=take_over, on_line=on_line)


def check(experiment: SimulatorExperiment, *, resume: bool, seconds: float | None, as_json: bool) -> None:
    """Check the experiment, run it for about ``seconds`` in a folder of its own (None: don't), and print memory, rates
    and what other placements would give. Raises ConfigurationError for what would stop the run."""
    from headway.embodied.preflight import calibrate, findings, forecast_rows, plan_rows

    errors = findings(experiment, resume=resume, opens=seconds is None)
    if not as_json:
        _report(errors)
    measured = None if seconds is None or errors else calibrate(experiment, seconds)
    if as_json:
        print_json({"findings": errors, "measured": measured})
        raise typer.Exit(2 if errors else 0)
    print_rows(plan_rows(experiment) | ({} if measured is None else forecast_rows(experiment, measured)))
    typer.echo("\nNothing found: the run can start.")


def _report(errors: list[Finding]) -> None:
    """Print the errors. Raises ConfigurationError if there are some."""
    for error in errors:
        typer.echo(f"error: {error.key}: {error.message}", err=True)
    if errors:
        raise ConfigurationError(f"check found {len(errors)} error(s); the run was not started")
