"""A live run's figures beside those of its simulation."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from headway.control.tuning.measured import Figures, figures, steady
from headway.planner.from_run import RunScenario
from headway.records.errors import HeadwayError
from headway.records.ledger import LedgerLine, StepRecord

_NO_CHANGE = ("run.steps=", "run.seed=", "run.directory=", "ledger.")  # overrides that don't change the comparison


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """A live run's figures over the steps that a scenario was estimated from, and those of its simulation."""

    run: str
    first_step: int  # first live step of the comparison
    last_step: int
    live: Figures
    simulated: Figures
    changed: list[str]  # overrides: with any, the two needn't agree
    unidentified: dict[str, str]  # parameter -> why, and what is taken instead


def agreement(found: RunScenario, simulated: Sequence[LedgerLine], overrides: Sequence[str]) -> Agreement:
    """``found`` beside the ledger of its simulation. Raises HeadwayError where that trained nothing."""
    scenario = found.scenario
    records = [line for line in simulated if isinstance(line, StepRecord)]
    chosen = steady(records, scenario.queue.budget, scenario.run.steps) or records
    then = figures(chosen)
    if then is None:
        raise HeadwayError("the simulated run trained nothing")
    return Agreement(
        run=found.run,
        first_step=found.first_step,
        last_step=found.last_step,
        live=found.live,
        simulated=then,
        changed=[override for override in overrides if not override.lstrip("-").startswith(_NO_CHANGE)],
        unidentified=found.unidentified,
    )


def print_agreement(found: Agreement) -> None:
    """Print the table of live and simulated figures."""
    console = Console(highlight=False)
    live, simulated = found.live, found.simulated
    console.print()
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold underline")
    table.add_column(f"steps {found.first_step} to {found.last_step} of {found.run}")
    for name in ("live", "changed" if found.changed else "simulated", "ratio"):
        table.add_column(name, justify="right")
    for label, form, a, b in (
        ("trained samples/s", "{:.4g}", live.samples_per_s, simulated.samples_per_s),
        ("trainer waits", "{:.1%}", live.trainer_wait, simulated.trainer_wait),
        ("generator waits", "{:.1%}", live.generator_wait, simulated.generator_wait),
        ("mean staleness, versions", "{:.2f}", live.staleness_mean, simulated.staleness_mean),
        ("mean length, tokens", "{:.1f}", live.length_mean, simulated.length_mean),
        ("groups accepted", "{:.1%}", live.acceptance, simulated.acceptance),
    ):
        table.add_row(label, form.format(a), form.format(b), f"{b / a:.2f}" if a >= 0.05 else "")
    console.print(table)
    if found.changed:
        console.print(f"changed: {' '.join(found.changed)}", soft_wrap=True)
