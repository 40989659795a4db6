"""Tables of `headway cost`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from headway.planner.costs import OwnedCost, PricedRun, ServiceComparison


def owned_rows(found: OwnedCost) -> dict[str, str]:
    """Label -> text, in the order they are printed."""
    lines, cost = found.lines, found.cost
    bought = ("server", "service", "networking", "storage", "software", "installation")
    per_kw = cost.electricity_usd_per_kw_month + lines.colocation_usd_per_kw_month
    return {
        "capital": f"${cost.capital_usd:,.0f} for {lines.devices} devices, ${cost.capital_usd_per_device:,.0f} each",
        "of which": ", ".join(f"{name} {getattr(lines, f'{name}_usd'):,.0f}" for name in bought),
        "annuity": (
            f"${cost.capital_usd_per_month:,.2f} a month over {lines.life_years:g} years at "
            f"{lines.capital_cost_per_year:.2%}; ${cost.capital_usd_per_device_hour:.4f} a device-hour"
        ),
        "electricity": (
            f"${cost.electricity_usd_per_kw_month:.2f} a kW-month: ${lines.electricity_usd_per_kwh:g}/kWh x load "
            f"{lines.utilization:g} x PUE {lines.power_usage_effectiveness:g} x 730 h"
        ),
        "power and place": (
            f"${cost.power_and_colocation_usd_per_month:,.2f} a month: {lines.kilowatts:g} kW x ${per_kw:,.2f}, "
            f"${lines.colocation_usd_per_kw_month:g} of it colocation"
        ),
        "operating": (
            f"${cost.operating_usd_per_month:,.2f} a month, with hands ${lines.remote_hands_usd_per_month:g} and "
            f"internet ${lines.internet_usd_per_month:g}; ${cost.operating_usd_per_device_hour:.4f} a device-hour"
        ),
        "device-hour": f"${cost.usd_per_device_hour:.2f}, {cost.capital_percent:.1f} % of it capital",
        **_notes(found),
    }


def print_steps(found: PricedRun, console: Console | None = None) -> None:
    """Print a row for each step: own and the service's dollars, and those of a million tokens."""
    table = Table(title=f"{found.name}: {found.run.description}", title_justify="left")
    for name in ("step", "s", "M tok", "$", "$/M"):
        table.add_column(name, justify="right")
    if found.service is not None:
        for name in ("prefill $", "sample", "train", "service", "$/M"):
            table.add_column(name, justify="right")
    for index, (step, usd, ratio) in enumerate(
        zip(found.run.steps, found.own.usd, found.own.usd_per_mtok, strict=True)
    ):
        tokens = found.run.batch * step.sequence_tokens / 1e6
        cells = [str(index), f"{step.seconds:g}", f"{tokens:.3f}", f"{usd:.2f}", f"{ratio:.2f}"]
        if found.service is not None:
            part = found.service_parts[index]
            dollars = (part.prefill_usd, part.sample_usd, part.train_usd, part.usd, found.service.usd_per_mtok[index])
            cells += [f"{value:.2f}" for value in dollars]
        table.add_row(*cells)
    (console or Console(highlight=False)).print(table)


def run_rows(found: PricedRun) -> dict[str, str]:
    """Label -> text, in the order they are printed."""
    own, theirs, steps = found.own, found.service, len(found.own.usd)
    rows = {
        "own": f"{found.devices} devices at ${found.usd_per_device_hour:g}: "
        f"${found.devices * found.usd_per_device_hour:,.2f} an hour",
        "a step": f"${own.total_usd / steps:,.2f}, ${own.total_usd:,.2f} for {steps} steps",
        "a million tokens": f"${own.mean_of_ratios:.2f} mean of ratios, ${own.ratio_of_means:.2f} ratio of means",
    }
    if theirs is not None and found.own_over_service is not None:
        rows[found.service_name] = (
            f"${theirs.total_usd / steps:,.2f} a step; a million tokens ${theirs.mean_of_ratios:.2f} mean of ratios, "
            f"${theirs.ratio_of_means:.2f} ratio of means"
        )
        rows["own / service"] = (
            f"{found.own_over_service[0]:.2f} x by means of ratios, "
            f"{found.own_over_service[1]:.2f} x by ratios of means"
        )
    return rows | _notes(found)


def service_rows(found: ServiceComparison) -> dict[str, str]:
    """Label -> text, in the order they are printed."""
    rows = {
        "service": f"${found.service_usd_per_mtok:.2f} a million trained tokens, for the mix of {found.run_name}",
        "own": (
            f"${found.own_usd_per_mtok:.2f}: {found.devices} devices at ${found.usd_per_device_hour:.4g}, "
            f"{found.tokens_per_s:,.0f} tokens/s"
        ),
        "break-even": f"{found.break_even_tokens_per_s:,.0f} tokens/s over all hours that are paid",
        "utilisation": (
            f"{found.utilization:.0%} of the paid time at this rate costs as much as the service"
            if found.utilization <= 1
            else f"none is enough: the rate would have to be {found.utilization:.2f} x as high"
        ),
    }
    if found.replay_factor > 1:
        rows["done again"] = f"{1 - 1 / found.replay_factor:.1%} of the time: x {found.replay_factor:.3f} on the price"
    for pool in found.pools:
        rows[f"{pool.tenants} tenant" + "s" * (pool.tenants > 1)] = (
            f"slots busy {pool.busy_share:.0%}, a sample costs {pool.saving:.0%} less, "
            f"a tenant's steps take {pool.slowdown:.2f} x as long"
        )
    return rows | _notes(found)


def _notes(found: OwnedCost | PricedRun | ServiceComparison) -> dict[str, str]:
    """Contradictions in the source, and the source."""
    texts = [] if isinstance(found, ServiceComparison) else found.contradictions
    rows = {"in the source" + f" {number}" * (number > 1): text for number, text in enumerate(texts, 1)}
    return rows | {"source": f"{found.source.source} ({found.source.date})"}
