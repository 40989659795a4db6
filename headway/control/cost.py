"""Computes costs: an hour of an owned device, a step of a run, tokens of a service, repeated work.

Pure: prices come as arguments (`planner/catalogue` holds them, each with its source). The model and its numbers are
those of SemiAnalysis, "RL Systems Mind the Gap" (2026), section "RL Training Run TCO". US dollars throughout.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated

import msgspec

HOURS_PER_MONTH = 730.0
_MILLION = 1e6

Usd = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Tokens = Annotated[float, msgspec.Meta(ge=0)]


class ServerCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Price lines and running costs of one owned server."""

    devices: Count
    server_usd: Usd
    service_usd: Usd  # of the vendor, over its life
    networking_usd: Usd  # its share of the cluster's
    storage_usd: Usd
    software_usd: Usd
    installation_usd: Usd
    capital_cost_per_year: Annotated[float, msgspec.Meta(ge=0)]  # weighted: interest and the owners' return
    life_years: Annotated[float, msgspec.Meta(gt=0)]
    kilowatts: Annotated[float, msgspec.Meta(ge=0)]  # of the server at full load
    electricity_usd_per_kwh: Usd
    utilization: Annotated[float, msgspec.Meta(ge=0, le=1)]  # mean load
    power_usage_effectiveness: Annotated[float, msgspec.Meta(ge=1)]  # whole site's power over the machines'
    colocation_usd_per_kw_month: Usd
    remote_hands_usd_per_month: Usd
    internet_usd_per_month: Usd
    published: dict[str, float] = {}  # results that their source printed: field of `DeviceHourCost` -> value


class DeviceHourCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one hour of an owned device, and the intermediate sums."""

    capital_usd: float  # of a server
    capital_usd_per_device: float
    capital_usd_per_month: float  # an annuity
    capital_usd_per_device_hour: float
    electricity_usd_per_kw_month: float
    power_and_colocation_usd_per_month: float
    operating_usd_per_month: float
    operating_usd_per_device_hour: float
    usd_per_device_hour: float
    capital_percent: float  # of the hour


def annuity_per_month(principal: float, rate_per_year: float, years: float) -> float:
    """Return the payment at the end of each month that pays ``principal`` back over ``years``.

    It is P·i / (1 - (1 + i)^-n) with i = rate / 12 and n = 12 · years."""
    month_count, per_month = 12 * years, rate_per_year / 12
    return principal / month_count if per_month == 0 else principal * per_month / (1 - (1 + per_month) ** -month_count)


def device_hour_cost(server: ServerCosts) -> DeviceHourCost:
    """Compute the cost of an hour of one of the server's devices.

    Example, the published H200 server: 6,738.18 a month of capital and 2,559.20 to run it, over 8 x 730 device-hours:
    $1.59."""
    capital_usd = server.server_usd + server.service_usd + server.networking_usd
    capital_usd += server.storage_usd + server.software_usd + server.installation_usd
    monthly_usd = annuity_per_month(capital_usd, server.capital_cost_per_year, server.life_years)
    kw_usd = server.electricity_usd_per_kwh * server.utilization * server.power_usage_effectiveness * HOURS_PER_MONTH
    housing_usd = (kw_usd + server.colocation_usd_per_kw_month) * server.kilowatts
    operating_usd = housing_usd + server.remote_hands_usd_per_month + server.internet_usd_per_month
    device_hours = server.devices * HOURS_PER_MONTH
    return DeviceHourCost(
        capital_usd=capital_usd,
        capital_usd_per_device=capital_usd / server.devices,
        capital_usd_per_month=monthly_usd,
        capital_usd_per_device_hour=monthly_usd / device_hours,
        electricity_usd_per_kw_month=kw_usd,
        power_and_colocation_usd_per_month=housing_usd,
        operating_usd_per_month=operating_usd,
        operating_usd_per_device_hour=operating_usd / device_hours,
        usd_per_device_hour=(monthly_usd + operating_usd) / device_hours,
        capital_percent=100 * monthly_usd / (monthly_usd + operating_usd),
    )


# --- a run -----------------------------------------------------------------------------------------------


class TokenPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Price list of a service, dollars a million tokens; None: it has no such price, or none is known."""

    prefill_usd_per_mtok: Usd
    sample_usd_per_mtok: Usd
    train_usd_per_mtok: Usd | None = None
    context_tokens: Count | None = None  # longest sequence at these prices


class StepLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one training step: seconds from one batch to the next, and the mean lengths of its samples."""

    samples: Count
    seconds: Annotated[float, msgspec.Meta(gt=0)]
    response_tokens: Tokens
    sequence_tokens: Tokens  # prompt and response, what tools returned among it

    @property
    def tokens(self) -> float:
        return self.samples * self.sequence_tokens


class ServiceCost(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars that a service takes for a step's tokens."""

    prefill_usd: float
    sample_usd: float
    train_usd: float

    @property
    def usd(self) -> float:
        return self.prefill_usd + self.sample_usd + self.train_usd


def step_usd(seconds: float, devices: int, usd_per_device_hour: float) -> float:
    """Return the dollars of ``seconds`` of all ``devices``, which are paid for the whole step, idle or not."""
    return seconds / 3600 * devices * usd_per_device_hour


def service_cost(load: StepLoad, prices: TokenPrices) -> ServiceCost:
    """Compute the dollars of a step at a service: prompts prefilled, responses sampled, sequences trained, each once.

    Raises ValueError where the list has no price of training."""
    if prices.train_usd_per_mtok is None:
        raise ValueError("train_usd_per_mtok is not known")
    sample_millions = load.samples / _MILLION
    return ServiceCost(
        prefill_usd=sample_millions * (load.sequence_tokens - load.response_tokens) * prices.prefill_usd_per_mtok,
        sample_usd=sample_millions * load.response_tokens * prices.sample_usd_per_mtok,
        train_usd=sample_millions * load.sequence_tokens * prices.train_usd_per_mtok,
    )


class RunCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a run's steps. Means of ratios give each step the same weight, ratios of means each token."""

    usd: tuple[float, ...]  # of each step
    usd_per_mtok: tuple[float, ...]
    total_usd: float
    mean_of_ratios: float  # dollars a million tokens
    ratio_of_means: float


def run_cost(dollars: Sequence[float], loads: Sequence[StepLoad]) -> RunCost:
    """Summarise steps that cost ``dollars`` each."""
    usd_per_mtok = tuple(_MILLION * usd / load.tokens for usd, load in zip(dollars, loads, strict=True))
    return RunCost(
        usd=tuple(dollars),
        usd_per_mtok=usd_per_mtok,
        total_usd=sum(dollars),
        mean_of_ratios=statistics.fmean(usd_per_mtok),
        ratio_of_means=_MILLION * sum(dollars) / sum(load.tokens for load in loads),
    )


# --- against a service -----------------------------------------------------------------------------------


def break_even_tokens_per_s(devices: int, usd_per_device_hour: float, service_usd_per_mtok: float) -> float:
    """Return the tokens/s, over all paid hours, at which own ``devices`` cost as much as the service.

    Above it they are cheaper. Infinite for a free service."""
    if service_usd_per_mtok == 0:
        return float("inf")
    return _MILLION * devices * usd_per_device_hour / 3600 / service_usd_per_mtok


def replay_factor(failures_per_hour: float, lost_hours: float) -> float:
    """Return the factor on a price for repeated work.

    Every failure or preemption costs ``lost_hours`` of all devices (back to the last checkpoint or batch, and the
    start), so an hour of work takes 1 / (1 - rate · lost) hours. Raises ValueError where no work would be done."""
    lost_share = failures_per_hour * lost_hours
    if not 0 <= lost_share < 1:
        raise ValueError(
            f"{failures_per_hour:g} failures an hour that cost {lost_hours:g} h each leave no time for work"
        )
    return 1 / (1 - lost_share)
