"""Computes the cost of a run so far, and of its waits, from its ledger; the run may be live."""

from __future__ import annotations

import dataclasses

import msgspec

from headway.control.cost import step_usd
from headway.report.doctor import DeviceCosts, device_costs, stored_experiment
from headway.report.formats import duration
from headway.report.run_view import RunView
from headway.runtime.run_directory import RunDirectory


class LiveCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a run up to the last line of its ledger; all its devices are paid for the whole time."""

    devices: int
    duration_s: float  # wall-clock: starts, evaluations and waits included
    usd_per_device_hour: float
    usd: float
    trainer_waits_usd: float  # of devices on which the trainer waits and no replica generates meanwhile
    generator_waits_usd: float  # of replicas with nothing to do
    steps: int
    usd_per_step: float | None  # None: no step yet
    trained_tokens: int  # prompts included
    usd_per_mtok: float | None  # of a million trained tokens


def live_cost(costs: DeviceCosts, price: float, *, duration_s: float, steps: int, trained_tokens: int) -> LiveCost:
    """Price a run's devices and waits. ``costs``: of all steps; ``duration_s``: of the whole run."""
    usd = step_usd(duration_s, costs.devices, price)
    trainer_h = sum(hours for cause, hours in costs.lost_h.items() if cause.startswith("trainer: waits"))
    return LiveCost(
        devices=costs.devices,
        duration_s=duration_s,
        usd_per_device_hour=price,
        usd=usd,
        trainer_waits_usd=trainer_h * price,
        generator_waits_usd=costs.lost_h.get("generator: has nothing to do", 0.0) * price,
        steps=steps,
        usd_per_step=usd / steps if steps else None,
        trained_tokens=trained_tokens,
        usd_per_mtok=1e6 * usd / trained_tokens if trained_tokens else None,
    )


def cost_of_run(view: RunView, price: float) -> LiveCost:
    """Compute the cost of a run. Raises ConfigurationError when its stored configuration, which names the devices,
    can't be read."""
    totals = {"steps": view.summary.steps, "trained_tokens": sum(step.flow.trained_tokens for step in view.steps)}
    is_simulated = "simulator" in view.configuration
    experiment = RunDirectory(view.path).read_any_experiment() if is_simulated else stored_experiment(view)
    costs = device_costs(view, experiment, price)
    return live_cost(costs, price, duration_s=view.summary.duration_s, **totals)


def with_cost(view: RunView, price: float | None) -> RunView:
    """Add the run's cost to the verdict of ``view``. ``price``: dollars of a device-hour; None: no change."""
    if price is None:
        return view
    cost_text = cost_sentence(cost_of_run(view, price))
    return dataclasses.replace(view, verdict=msgspec.structs.replace(view.verdict, cost_text=cost_text))


def cost_rows(cost: LiveCost) -> dict[str, str]:
    """Describe the cost as a text by label, in printing order."""
    waits_usd = cost.trainer_waits_usd + cost.generator_waits_usd
    share_text = f", {waits_usd / cost.usd:.0%} of it" if cost.usd else ""
    rows = {
        "so far": f"${cost.usd:,.2f}: {cost.devices} devices for {duration(cost.duration_s)} at "
        f"${cost.usd_per_device_hour:g} an hour each",
        "waits": f"${waits_usd:,.2f}{share_text}: trainer ${cost.trainer_waits_usd:,.2f}, generator "
        f"${cost.generator_waits_usd:,.2f}",
    }
    if cost.usd_per_step is not None:
        rows["a step"] = f"${cost.usd_per_step:,.4g}, mean of {cost.steps:,}"
    if cost.usd_per_mtok is not None:
        rows["a million tokens"] = f"${cost.usd_per_mtok:,.4g} of {cost.trained_tokens:,} trained, prompts included"
    return rows


def cost_sentence(cost: LiveCost) -> str:
    """Join `cost_rows` into one sentence."""
    first_row, *other_rows = cost_rows(cost).items()
    return "; ".join([first_row[1], *(f"{label} {text}" for label, text in other_rows)])
