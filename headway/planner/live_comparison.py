"""Comparison of a live run's figures with those of its simulation."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from headway.control.tuning.run_figures import RunFigures, figures, steady
from headway.planner.from_run import RunScenario
from headway.records.errors import HeadwayError
from headway.records.ledger import LedgerLine, StepRecord

_NO_CHANGE = ("run.steps=", "run.seed=", "run.directory=", "ledger.")  # overrides that don't change the comparison


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """A live run's figures over the steps that a scenario was estimated from, and those of its simulation."""

    run: str
    first_step: int  # first live step of the comparison
    last_step: int
    live: RunFigures
    simulated: RunFigures
    changed: list[str]  # overrides: with any, the two needn't agree
    unidentified: dict[str, str]  # parameter -> why, and what is assumed instead


def agreement(run: RunScenario, simulated: Sequence[LedgerLine], overrides: Sequence[str]) -> Agreement:
    """Compare ``run`` with the ledger of its simulation. Raises HeadwayError where the simulation trained nothing."""
    scenario = run.scenario
    steps = [line for line in simulated if isinstance(line, StepRecord)]
    steady_steps = steady(steps, scenario.queue.budget, scenario.run.steps) or steps
    simulated_figures = figures(steady_steps)
    if simulated_figures is None:
        raise HeadwayError("the simulated run trained nothing")
    return Agreement(
        run=run.run,
        first_step=run.first_step,
        last_step=run.last_step,
        live=run.live,
        simulated=simulated_figures,
        changed=[override for override in overrides if not override.lstrip("-").startswith(_NO_CHANGE)],
        unidentified=run.unidentified,
    )


def print_agreement(comparison: Agreement) -> None:
    """Print the table of live and simulated figures."""
    console = Console(highlight=False)
    live, simulated = comparison.live, comparison.simulated
    console.print()
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold underline")
    table.add_column(f"steps {comparison.first_step} to {comparison.last_step} of {comparison.run}")
    for name in ("live", "changed" if comparison.changed else "simulated", "ratio"):
        table.add_column(name, justify="right")
    for label, number_format, a, b in (
        ("trained samples/s", "{:.4g}", live.samples_per_s, simulated.samples_per_s),
        ("trainer waits", "{:.1%}", live.trainer_wait, simulated.trainer_wait),
        ("generator waits", "{:.1%}", live.generator_wait, simulated.generator_wait),
        ("mean staleness, versions", "{:.2f}", live.staleness_mean, simulated.staleness_mean),
        ("mean length, tokens", "{:.1f}", live.length_mean, simulated.length_mean),
        ("groups accepted", "{:.1%}", live.acceptance, simulated.acceptance),
    ):
        table.add_row(label, number_format.format(a), number_format.format(b), f"{b / a:.2f}" if a >= 0.05 else "")
    console.print(table)
    if comparison.changed:
        console.print(f"changed: {' '.join(comparison.changed)}", soft_wrap=True)
