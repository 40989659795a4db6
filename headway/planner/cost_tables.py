"""Tables of `headway cost`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from headway.planner.costs import OwnedCost, PricedRun, ServiceComparison


def owned_rows(owned: OwnedCost) -> dict[str, str]:
    """Label -> text, in the order they are printed."""
    lines, cost = owned.lines, owned.cost
    cost_names = ("server", "service", "networking", "storage", "software", "installation")
    per_kw = cost.electricity_usd_per_kw_month + lines.colocation_usd_per_kw_month
    return {
        "capital": f"${cost.capital_usd:,.0f} for {lines.devices} devices, ${cost.capital_usd_per_device:,.0f} each",
        "of which": ", ".join(f"{name} {getattr(lines, f'{name}_usd'):,.0f}" for name in cost_names),
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
        **_notes(owned),
    }


def print_steps(priced: PricedRun, console: Console | None = None) -> None:
    """Print a row for each step: dollars on owned devices and at the service, in all and for a million tokens."""
    table = Table(title=f"{priced.name}: {priced.run.description}", title_justify="left")
    for name in ("step", "s", "M tok", "$", "$/M"):
        table.add_column(name, justify="right")
    if priced.service is not None:
        for name in ("prefill $", "sample", "train", "service", "$/M"):
            table.add_column(name, justify="right")
    for index, (step, usd, usd_per_mtok) in enumerate(
        zip(priced.run.steps, priced.owned.usd, priced.owned.usd_per_mtok, strict=True)
    ):
        million_tokens = priced.run.batch * step.sequence_tokens / 1e6
        cells = [str(index), f"{step.seconds:g}", f"{million_tokens:.3f}", f"{usd:.2f}", f"{usd_per_mtok:.2f}"]
        if priced.service is not None:
            part = priced.service_parts[index]
            dollars = (part.prefill_usd, part.sample_usd, part.train_usd, part.usd, priced.service.usd_per_mtok[index])
            cells += [f"{value:.2f}" for value in dollars]
        table.add_row(*cells)
    (console or Console(highlight=False)).print(table)


def run_rows(priced: PricedRun) -> dict[str, str]:
    """Label -> text, in the order they are printed."""
    owned, service, steps = priced.owned, priced.service, len(priced.owned.usd)
    rows = {
        "own": f"{priced.devices} devices at ${priced.usd_per_device_hour:g}: "
        f"${priced.devices * priced.usd_per_device_hour:,.2f} an hour",
        "a step": f"${owned.total_usd / steps:,.2f}, ${owned.total_usd:,.2f} for {steps} steps",
        "a million tokens": f"${owned.mean_of_ratios:.2f} mean of ratios, ${owned.ratio_of_means:.2f} ratio of means",
    }
    if service is not None and priced.owned_over_service is not None:
        rows[priced.service_name] = (
            f"${service.total_usd / steps:,.2f} a step; a million tokens ${service.mean_of_ratios:.2f} mean of ratios, "
            f"${service.ratio_of_means:.2f} ratio of means"
        )
        rows["own / service"] = (
            f"{priced.owned_over_service[0]:.2f} x by means of ratios, "
            f"{priced.owned_over_service[1]:.2f} x by ratios of means"
        )
    return rows | _notes(priced)


def service_rows(costs: ServiceComparison) -> dict[str, str]:
    """Label -> text, in the order they are printed."""
    rows = {
        "service": f"${costs.service_usd_per_mtok:.2f} a million trained tokens, for the mix of {costs.run_name}",
        "own": (
            f"${costs.own_usd_per_mtok:.2f}: {costs.devices} devices at ${costs.usd_per_device_hour:.4g}, "
            f"{costs.tokens_per_s:,.0f} tokens/s"
        ),
        "break-even": f"{costs.break_even_tokens_per_s:,.0f} tokens/s over all hours that are paid",
        "utilisation": (
            f"{costs.utilization:.0%} of the paid time at this rate costs as much as the service"
            if costs.utilization <= 1
            else f"none is enough: the rate would have to be {costs.utilization:.2f} x as high"
        ),
    }
    if costs.replay_factor > 1:
        rows["done again"] = f"{1 - 1 / costs.replay_factor:.1%} of the time: x {costs.replay_factor:.3f} on the price"
    for pool in costs.pools:
        rows[f"{pool.tenants} tenant" + "s" * (pool.tenants > 1)] = (
            f"slots busy {pool.busy_share:.0%}, a sample costs {pool.saving:.0%} less, "
            f"a tenant's steps take {pool.slowdown:.2f} x as long"
        )
    return rows | _notes(costs)


def _notes(costs: OwnedCost | PricedRun | ServiceComparison) -> dict[str, str]:
    """Rows of the contradictions in the source, and of the source."""
    contradictions = [] if isinstance(costs, ServiceComparison) else costs.contradictions
    rows = {"in the source" + f" {number}" * (number > 1): text for number, text in enumerate(contradictions, 1)}
    return rows | {"source": f"{costs.source.source} ({costs.source.date})"}
