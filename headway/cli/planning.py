"""`headway simulate`."""

from __future__ import annotations

import typer

from headway.cli import experiment_options as experiments

SCENARIO = typer.Argument(..., metavar="SCENARIO", help="The scenario file (TOML).", show_default=False)


def add_commands(app: typer.Typer) -> None:
    app.command(
        "simulate",
        context_settings=experiments.OVERRIDES,
        epilog="Example: headway simulate examples/scenarios/long_tail.toml --queue.budget=8 --run.seed=3",
    )(simulate)


def simulate(
    context: typer.Context,
    scenario: str = SCENARIO,
    as_json: bool = typer.Option(False, "--json", help="Print the figures as one JSON object."),
) -> None:
    """Run the real orchestrator in virtual time over described hardware, workload and sandboxes.

    Writes the ledger, summary and buffer that a live run would. Any key of the scenario file can be given as
    --section.key=value.
    """
    from pathlib import Path

    from headway.planner.scenario import load_scenario

    described = load_scenario(scenario, experiments.given_overrides(context))
    from headway.planner.simulate import simulate as run
    from headway.planner.table import print_outcome

    outcome = run(described, name=Path(scenario).stem)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(outcome).decode())
    else:
        print_outcome(outcome, described.run.directory)
