"""Costs of a device's hour, of a run's steps and of a service's tokens, with entries of the catalogue."""

from __future__ import annotations

from decimal import Decimal

import msgspec

from headway.control import cost as arithmetic
from headway.control.cost import DeviceHourCost, RunCost, ServerCosts, ServiceCost, StepLoad, TokenPrices
from headway.control.shared_pool import SharedPool, TenantLoad, shared_pool
from headway.planner.catalogue.read import Catalogue, PublishedStep, RentedDevice, RunTable, Source
from headway.records.errors import ConfigurationError


class OwnedCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of an hour of an owned device, with the figures that its source printed."""

    name: str
    source: Source
    lines: ServerCosts
    cost: DeviceHourCost
    contradictions: list[str]  # printed figures that don't follow from the printed lines


def owned_cost(catalogue: Catalogue, name: str) -> OwnedCost:
    lines = catalogue.entry("owned", name, ServerCosts)
    cost = arithmetic.device_hour_cost(lines)
    return OwnedCost(
        name=name,
        source=catalogue.source("owned", name),
        lines=lines,
        cost=cost,
        contradictions=_contradictions(lines, cost),
    )


def _contradictions(lines: ServerCosts, cost: DeviceHourCost) -> list[str]:
    printed = lines.published
    mismatched = {key for key, value in printed.items() if not agrees(getattr(cost, key), value)}
    texts: list[str] = []
    if "power_and_colocation_usd_per_month" in mismatched:
        value = printed["power_and_colocation_usd_per_month"]
        per_kw = round(cost.electricity_usd_per_kw_month + lines.colocation_usd_per_kw_month, 2)
        text = (
            f"power and colocation: {per_kw:,.2f} x {lines.kilowatts:g} kW = {per_kw * lines.kilowatts:,.2f}, but "
            f"{value:,.2f} is printed, which is {value / per_kw:.3f} kW"
        )
        if agrees(value / per_kw, lines.kilowatts):
            text += ": the kilowatts are printed rounded"
        others = lines.remote_hands_usd_per_month + lines.internet_usd_per_month
        if "operating_usd_per_month" in mismatched and agrees(value + others, printed["operating_usd_per_month"]):
            mismatched.discard("operating_usd_per_month")
            text += f"; with it {value:,.2f} + {others:g} = {value + others:,.2f} a month to run"
        texts.append(text)
        mismatched.discard("power_and_colocation_usd_per_month")
    return texts + [f"{key}: {getattr(cost, key):,.4f}, but {printed[key]:,} is printed" for key in sorted(mismatched)]


def agrees(computed: float, printed: float) -> bool:
    """Whether ``computed`` rounds to the digits that are ``printed``."""
    exponent = Decimal(repr(printed)).as_tuple().exponent
    digits = -exponent if isinstance(exponent, int) else 0
    return abs(computed - printed) <= 0.5 * 10.0**-digits * (1 + 1e-9)


def price_of(catalogue: Catalogue, name: str) -> float:
    """Dollars of a device's hour, in whole cents: ``owned.NAME`` by its total cost, ``rented.NAME``, or a number."""
    section, _, entry_name = name.partition(".")
    if section == "owned" and entry_name:
        return round(owned_cost(catalogue, entry_name).cost.usd_per_device_hour, 2)
    if section == "rented" and entry_name:
        return catalogue.entry("rented", entry_name, RentedDevice).usd_per_device_hour
    try:
        price = float(name)
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        valid_names = [f"{kind}.{priced_name}" for kind in ("owned", "rented") for priced_name in catalogue.names(kind)]
        raise ConfigurationError(f"price {name!r}: valid: dollars of at least 0, or {', '.join(valid_names)}")
    return price


# --- runs ------------------------------------------------------------------------------------------------


class PricedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a run's steps on owned devices, and at a service."""

    name: str
    source: Source
    devices: int  # generators and trainers: both are paid for the whole step
    usd_per_device_hour: float
    owned: RunCost
    service_name: str
    service: RunCost | None
    service_parts: tuple[ServiceCost, ...]
    owned_over_service: tuple[float, float] | None  # by means of ratios, by ratios of means
    run: RunTable
    contradictions: list[str]


def priced_run(catalogue: Catalogue, name: str, price: str = "", service: str = "") -> PricedRun:
    """Price the run ``name`` of the catalogue by its own price and service, or by ``price`` and ``service``."""
    run = catalogue.entry("runs", name, RunTable)
    hour, devices = price_of(catalogue, price or run.price), run.generator_devices + run.trainer_devices
    step_loads = [load_of(run, step) for step in run.steps]
    owned = arithmetic.run_cost([arithmetic.step_usd(load.seconds, devices, hour) for load in step_loads], step_loads)
    service_costs: tuple[ServiceCost, ...] = ()
    if service := service or run.service:
        prices = catalogue.entry("services", service, TokenPrices)
        catalogue.known("services", service, "train_usd_per_mtok")
        longest_tokens = max(load.sequence_tokens for load in step_loads)
        if longest_tokens > (prices.context_tokens or longest_tokens):
            raise ConfigurationError(
                f"services.{service}: its prices hold for sequences of up to {prices.context_tokens:,} tokens; "
                f"runs.{name} has a step with {longest_tokens:,.0f} in the mean"
            )
        service_costs = tuple(arithmetic.service_cost(load, prices) for load in step_loads)
    service_total = arithmetic.run_cost([part.usd for part in service_costs], step_loads) if service_costs else None
    return PricedRun(
        name=name,
        source=catalogue.source("runs", name),
        devices=devices,
        usd_per_device_hour=hour,
        owned=owned,
        service_name=service,
        service=service_total,
        service_parts=service_costs,
        owned_over_service=service_total
        and (owned.mean_of_ratios / service_total.mean_of_ratios, owned.ratio_of_means / service_total.ratio_of_means),
        run=run,
        contradictions=[] if price else _run_contradictions(run, owned),
    )


def load_of(run: RunTable, step: PublishedStep) -> StepLoad:
    mean_length_fields = {"response_tokens": step.response_tokens, "sequence_tokens": step.sequence_tokens}
    return StepLoad(samples=run.batch, seconds=step.seconds, **mean_length_fields)


def _run_contradictions(run: RunTable, owned: RunCost) -> list[str]:
    """Return contradictions in the printed figures: say a mean of ratios where the printed means have another ratio."""
    printed_usd = run.published_usd_per_mtok
    if printed_usd is None:
        return []
    if not agrees(owned.mean_of_ratios, printed_usd):
        return [f"{printed_usd:g} $/M tokens is printed; {owned.mean_of_ratios:.4f} follows from the steps"]
    text = f"{printed_usd:g} $/M tokens is a mean of ratios; all dollars over all tokens are {owned.ratio_of_means:.2f}"
    if run.mean is not None and {"usd", "tokens"} <= run.mean.printed.keys():
        usd, tokens = run.mean.printed["usd"], run.mean.printed["tokens"]
        text += f" (printed means: {usd:,.2f} / {tokens / 1e6:.3f} M = {1e6 * usd / tokens:.2f})"
    return [text]


# --- services --------------------------------------------------------------------------------------------


class ServiceComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Owned devices compared with a service, for a run's mix of tokens."""

    service_name: str
    source: Source
    run_name: str
    devices: int
    usd_per_device_hour: float  # with repeated work included
    replay_factor: float
    tokens_per_s: float  # of the run, trained, over all its time
    own_usd_per_mtok: float
    service_usd_per_mtok: float
    break_even_tokens_per_s: float
    utilization: float  # share of the paid time at tokens_per_s for equal costs; above 1: the service is cheaper always
    pools: list[SharedPool]


def service_comparison(
    catalogue: Catalogue,
    service: str,
    run: str,
    *,
    price: str = "",
    failures_per_hour: float = 0.0,
    lost_hours: float = 0.0,
    tenant: TenantLoad | None = None,
    most_tenants: int = 1,
) -> ServiceComparison:
    """Compare ``service`` with the devices of ``run``, at its price or another. ``tenant``: a load to
    simulate on a shared pool with 1, 2, 4, … ``most_tenants`` like it."""
    priced = priced_run(catalogue, run, price, service)
    assert priced.service is not None
    try:
        replay_factor = arithmetic.replay_factor(failures_per_hour, lost_hours)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    step_loads = [load_of(priced.run, step) for step in priced.run.steps]
    tokens_per_s = sum(load.tokens for load in step_loads) / sum(load.seconds for load in step_loads)
    usd_per_hour = priced.usd_per_device_hour * replay_factor
    break_even = arithmetic.break_even_tokens_per_s(priced.devices, usd_per_hour, priced.service.ratio_of_means)
    tenant_counts = sorted({*(2**power for power in range(10) if 2**power < most_tenants), most_tenants})
    return ServiceComparison(
        service_name=service,
        source=catalogue.source("services", service),
        run_name=run,
        devices=priced.devices,
        usd_per_device_hour=usd_per_hour,
        replay_factor=replay_factor,
        tokens_per_s=tokens_per_s,
        own_usd_per_mtok=priced.owned.ratio_of_means * replay_factor,
        service_usd_per_mtok=priced.service.ratio_of_means,
        break_even_tokens_per_s=break_even,
        utilization=break_even / tokens_per_s,
        pools=[] if tenant is None else [shared_pool(tenant, count) for count in tenant_counts],
    )
