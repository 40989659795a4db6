"""Describes a run's plan as rows and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from headway.records.check_report import Calibration
from headway.records.plan import RunPlan
from headway.report.formats import duration, percent, quantity

_GENERATES, _TRAINS = "#d6730f", "#2166ac"
_DEVICES = 16  # drawn at most; half of them are the plan's first devices, half its last


def plan_rows(plan: RunPlan) -> dict[str, str]:
    """Describe the plan as rows of a table."""
    low, high = plan.samples_per_s_range
    unit = "samples/s" if plan.objective == "time" else "$ for a million samples"
    rows = {"plan": f"{plan.mode}, on {plan.pool}"}
    for stage in plan.stages:
        memory_text = "" if stage.bytes_per_device is None else f", {stage.bytes_per_device / 1e9:.3g} GB each"
        slots_text = f", {stage.slots} slots" if stage.slots else ""
        end_names = list(dict.fromkeys((*stage.names[:1], *stage.names[-1:])))
        rows[stage.name] = (
            f"{len(stage.names)} {stage.device} ({' to '.join(end_names)}): {stage.copies} x {stage.spread}{slots_text}"
            f"{memory_text}; alone {quantity(stage.samples_per_s) if stage.samples_per_s else 'unknown'} samples/s"
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
    for mode, alternative in plan.others.items():
        rows[f"else, {mode}"] = f"{quantity(alternative.value or 0.0)} {unit}: {alternative.name}"
    rows |= {f"change {number + 1}": change for number, change in enumerate(plan.changes)} | dict(plan.settings)
    for number, reason in enumerate(plan.refused):
        rows["can't be run" if number == 0 else f"can't be run ({number + 1})"] = reason
    return rows


def profile_rows(points: Sequence[tuple[int, int, Calibration]], missed: Mapping[str, float]) -> dict[str, str]:
    """Make a row for each measured placement. ``points``: (devices that generate, devices that train, measurements);
    ``missed``: relative errors of the fit on the held-out half, by name."""
    rows: dict[str, str] = {}
    for generators, trainers, measured in points:
        rows[f"{generators} generate, {trainers} train"] = (
            f"decoding {quantity(measured.decode_tokens_per_s)} tokens/s with {measured.decode_running:.0f} "
            f"requests: a step {duration(measured.decode_fixed_s)} + {quantity(measured.decode_request_s * 1e6)} µs a "
            f"request; training {quantity(measured.train_tokens_per_s)} tokens/s: {duration(measured.train_fixed_s)} + "
            f"{quantity(measured.train_token_s * 1e6)} µs a token"
        )
    rows["held out"] = "half of everything, missed by " + ", ".join(f"{k} {percent(v)}" for k, v in missed.items())
    return rows


def draw_plan(plan: RunPlan) -> str:
    """Draw a steady step as SVG: a row for each device, with the times at which it generates, trains or waits."""
    step_s = plan.items_per_chunk / plan.samples_per_s
    stage_by_name = {stage.name: stage for stage in plan.stages}
    trained_s = step_s * (1 - plan.trainer_wait)
    bars_by_device: dict[str, list[tuple[float, float, str]]] = {}
    train_stage, generate_stage = stage_by_name["train"], stage_by_name["generate"]
    for name in generate_stage.names:
        begin_s = trained_s if name in train_stage.names else 0.0
        bars_by_device[name] = [(begin_s, step_s * (1 - plan.generator_wait) if not begin_s else step_s, _GENERATES)]
    for name in train_stage.names:
        bars_by_device.setdefault(name, []).append((0.0, trained_s, _TRAINS))
    displayed_names = list(bars_by_device)
    if len(displayed_names) > _DEVICES:
        displayed_names = displayed_names[: _DEVICES // 2] + displayed_names[-_DEVICES // 2 :]
    width, names_width, row_height = 740, 130, 20
    pixels_per_s, height = (width - names_width - 10) / step_s, row_height * len(displayed_names) + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="{width}" height="{height}" fill="#fff"/>'
    ]
    for column, (label, colour) in enumerate((("generates", _GENERATES), ("trains", _TRAINS))):
        x = names_width + 90 * column
        parts.append(
            f'<rect x="{x}" y="6" width="12" height="12" fill="{colour}"/><text x="{x + 17}" y="16">{label}</text>'
        )
    if len(bars_by_device) > _DEVICES:
        label_text = f"{len(displayed_names)} of {len(bars_by_device)} devices; those left out do as their neighbours"
        parts.append(f'<text x="{width - 10}" y="16" text-anchor="end">{label_text}</text>')
    for row, name in enumerate(displayed_names):
        y = 26 + row_height * row
        parts.append(f'<text x="{names_width - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        for begin_s, end_s, colour in bars_by_device[name]:
            x, bar_width = names_width + pixels_per_s * begin_s, pixels_per_s * (end_s - begin_s)
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{bar_width:.1f}" height="{row_height - 5}" fill="{colour}"/>'
            )
    bottom = 26 + row_height * len(displayed_names)
    parts.append(f'<path d="M{names_width} {bottom}H{width - 10}" stroke="#555"/>')
    for quarter in range(5):
        x, label_text = names_width + pixels_per_s * step_s * quarter / 4, f"{step_s * quarter / 4:.3g}"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{label_text}</text>')
    caption = "seconds of a steady step; blank: waits"
    parts.append(f'<text x="{(names_width + width) / 2}" y="{bottom + 31}" text-anchor="middle">{caption}</text></svg>')
    return "\n".join(parts) + "\n"
