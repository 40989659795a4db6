"""A run's plan as rows and as a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from headway.records.check_report import Calibration
from headway.records.plan import RunPlan
from headway.report.formats import duration, percent, quantity
from headway.report.plots import GENERATOR, STYLE, TRAINER

_DEVICES = 16  # that are drawn one by one; of more, as many stand for the rest


def plan_rows(plan: RunPlan) -> dict[str, str]:
    """The plan as rows of a table."""
    low, high = plan.samples_per_s_range
    unit = "samples/s" if plan.objective == "time" else "$ for a million samples"
    rows = {"plan": f"{plan.mode}, on {plan.pool}"}
    for stage in plan.stages:
        memory = "" if stage.bytes_per_device is None else f", {stage.bytes_per_device / 1e9:.3g} GB each"
        slots = f", {stage.slots} slots" if stage.slots else ""
        names = list(dict.fromkeys((*stage.names[:1], *stage.names[-1:])))
        rows[stage.name] = (
            f"{len(stage.names)} {stage.device} ({' to '.join(names)}): {stage.copies} x {stage.spread}{slots}"
            f"{memory}; alone {quantity(stage.samples_per_s)} samples/s"
        )
    rows["expected"] = (
        f"{quantity(plan.samples_per_s)} samples/s ({quantity(low)} to {quantity(high)}: {plan.error_is})"
    )
    if plan.simulated_samples_per_s is not None:
        rows["simulated"] = f"{quantity(plan.simulated_samples_per_s)} samples/s by the real orchestrator"
    rows["a step"] = f"{plan.items_per_chunk:,} samples, {duration(plan.items_per_chunk / plan.samples_per_s)}"
    rows["waits"] = f"trainer {percent(plan.trainer_wait)}, generator {percent(plan.generator_wait)}"
    rows["staleness"] = f"{plan.staleness_mean:.1f} versions in the mean"
    if plan.usd_per_hour is not None and plan.usd_per_mtok is not None:
        rows["cost"] = f"${plan.usd_per_hour:,.2f} an hour, ${plan.usd_per_mtok:.3g} a million trained tokens"
    rows["no more than"] = f"{quantity(plan.bound_samples_per_s)} samples/s by any placement, if only rates limited"
    for mode, other in plan.others.items():
        rows[f"else, {mode}"] = f"{quantity(other.value or 0.0)} {unit}: {other.name}"
    rows |= {f"change {number + 1}": change for number, change in enumerate(plan.changes)} | dict(plan.settings)
    for number, reason in enumerate(plan.refused):
        rows["can't be run" if number == 0 else f"can't be run ({number + 1})"] = reason
    return rows


def profile_rows(points: Sequence[tuple[int, int, Calibration]], missed: Mapping[str, float]) -> dict[str, str]:
    """The measurements as rows, one for each placement (devices that generate, devices that train)."""
    rows: dict[str, str] = {}
    for generators, trainers, found in points:
        rows[f"{generators} generate, {trainers} train"] = (
            f"decoding {quantity(found.decode_tokens_per_s)} tokens/s with {found.decode_running:.0f} requests: a step "
            f"{duration(found.decode_fixed_s)} + {quantity(found.decode_request_s * 1e6)} µs a request; training "
            f"{quantity(found.train_tokens_per_s)} tokens/s: {duration(found.train_fixed_s)} + "
            f"{quantity(found.train_token_s * 1e6)} µs a token"
        )
    rows["held out"] = "half of everything, missed by " + ", ".join(f"{k} {percent(v)}" for k, v in missed.items())
    return rows


def draw_plan(plan: RunPlan) -> str:
    """A steady step, a row for each device, as SVG: what it works at, and where it waits."""
    step_s = plan.items_per_chunk / plan.samples_per_s
    by_name = {stage.name: stage for stage in plan.stages}
    trained_s = step_s * (1 - plan.trainer_wait)
    rows: dict[str, list[tuple[float, float, str]]] = {}
    trains, generates = by_name["train"], by_name["generate"]
    for name in generates.names:
        begin = trained_s if name in trains.names else 0.0
        rows[name] = [(begin, step_s * (1 - plan.generator_wait) if not begin else step_s, GENERATOR)]
    for name in trains.names:
        rows.setdefault(name, []).append((0.0, trained_s, TRAINER))
    shown = list(rows)
    if len(shown) > _DEVICES:
        shown = shown[: _DEVICES // 2] + shown[-_DEVICES // 2 :]
    style: Any = {**STYLE, "svg.hashsalt": "plan"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.4, 0.9 + 0.22 * len(shown)), layout="constrained")
        axes = figure.subplots()
        for row, name in enumerate(shown):
            for begin, end, colour in rows[name]:
                axes.barh(row, end - begin, left=begin, height=0.7, color=colour)
        axes.set_yticks(range(len(shown)), shown)
        axes.invert_yaxis()
        axes.set_xlim(0, step_s)
        axes.set_xlabel("seconds of a steady step; blank: waits")
        for label, colour in (("generates", GENERATOR), ("trains", TRAINER)):
            axes.barh([0], [0], color=colour, label=label)
        axes.legend(loc="upper right", fontsize=7)
        if len(rows) > _DEVICES:
            axes.set_title(f"{len(shown)} of {len(rows)} devices; those left out do as their neighbours")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
